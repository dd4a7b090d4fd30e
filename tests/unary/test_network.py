"""What every unary network promises: any size, bytes or floats, config, state, gradients, export, clear errors."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

from deepmrf.unary import build
from deepmrf.unary.network import check_zoom, unzoomed, zoomed

SMALL = {"vgg16": {"channels": 16}, "strong": {"width": 8}, "fast": {"width": 64}}
"""Options that keep the tests quick; the encoders have one size only."""
NAMES = list(SMALL)


@pytest.fixture(scope="module", params=NAMES)
def network(request):
    torch.manual_seed(0)
    return build(request.param, 5, **SMALL[request.param]).eval()


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (33, 47), (32, 64)], ids=str)
def test_logits_have_the_images_size(network, size):
    with torch.no_grad():
        logits = network(torch.rand(2, 3, *size))
    assert logits.shape == (2, 5, *size)
    assert logits.isfinite().all()


def test_bytes_and_floats_are_the_same_image(network, agree):
    image = torch.randint(0, 256, (1, 3, 33, 47), dtype=torch.uint8)
    with torch.no_grad():
        agree(network(image), network(image.float() / 255))


def test_channels_last_changes_nothing_but_the_memory(network, agree):
    image = torch.rand(1, 3, 33, 47)
    with torch.no_grad():
        agree(network(image.contiguous(memory_format=torch.channels_last)), network(image))


def test_images_of_a_batch_do_not_mix_in_eval(network, agree):
    images = torch.rand(2, 3, 24, 40)
    with torch.no_grad():
        agree(network(images)[1:], network(images[1:]))


def test_a_network_in_half_precision_takes_any_image(network):
    model = build(network.name, **network.config).eval().to(torch.bfloat16)
    with torch.no_grad():
        assert model(torch.rand(1, 3, 17, 20)).dtype == torch.bfloat16
        assert model(torch.zeros(1, 3, 17, 20, dtype=torch.uint8)).dtype == torch.bfloat16


COARSE = [("fast", 4), ("fast", 8), ("strong", 2), ("strong", 4), ("strong", 8)]


@pytest.mark.parametrize(("name", "stride"), COARSE)
@pytest.mark.parametrize("size", [(1, 1), (33, 47), (64, 96)], ids=str)
def test_a_decoder_that_ends_early_gives_the_images_size_too(name, stride, size):
    model = build(name, 5, **SMALL[name], stride=stride).eval()
    with torch.no_grad():
        logits = model(torch.rand(1, 3, *size))
    assert logits.shape == (1, 5, *size)
    assert logits.isfinite().all()
    assert model.config["stride"] == stride
    assert build(name, **model.config).state_dict().keys() == model.state_dict().keys()
    assert len(model.state_dict()) < len(build(name, 5, **SMALL[name]).state_dict())


@pytest.mark.parametrize("name", ["fast", "strong"])
def test_an_unknown_stride_names_the_known_ones(name):
    with pytest.raises(ValueError, match="stride=3 is unknown: the decoder can end at"):
        build(name, 5, stride=3)


def resample_reference(maps, factor, size):
    """Pixel i comes from place (i + 1/2) / factor - 1/2, one axis after the other; beyond the border is the border."""
    for axis, wanted in ((2, size[0]), (3, size[1])):
        picked = []
        for i in range(wanted):
            position = (i + Fraction(1, 2)) / factor - Fraction(1, 2)
            low, last = math.floor(position), maps.shape[axis] - 1
            first, second = (maps.select(axis, min(max(at, 0), last)) for at in (low, low + 1))
            picked.append(first + float(position - low) * (second - first))
        maps = torch.stack(picked, axis)
    return maps


ZOOMS = [(1.5, (33, 47)), (1.25, (64, 95)), (1.25, (1, 1)), (4, (9, 5)), (4 / 3, (10, 22)), (1, (3, 4))]


@pytest.mark.parametrize(("zoom", "size"), ZOOMS, ids=str)
def test_zooming_is_bilinear(zoom, size, agree):
    maps, factor = torch.rand(2, 3, *size, dtype=torch.float64), Fraction(zoom).limit_denominator(8)
    larger = zoomed(maps, check_zoom(zoom))
    assert tuple(larger.shape[2:]) == tuple(math.ceil(n * factor) for n in size)
    agree(larger, resample_reference(maps, factor, larger.shape[2:]))
    agree(unzoomed(larger, size, check_zoom(zoom)), resample_reference(larger, 1 / factor, size))


@pytest.mark.parametrize("name", ["fast", "strong"])
@pytest.mark.parametrize(("zoom", "size"), ZOOMS[:3], ids=str)
def test_a_zoomed_network_is_the_network_on_a_larger_image(name, zoom, size, agree):
    model = build(name, 5, **SMALL[name], zoom=zoom).eval()
    plain = build(name, 5, **SMALL[name]).eval()
    plain.load_state_dict(model.state_dict())
    image, factor = torch.rand(1, 3, *size), Fraction(zoom)
    with torch.no_grad():
        large = plain(resample_reference(image, factor, [math.ceil(n * factor) for n in size]))
        agree(model(image), resample_reference(large, 1 / factor, size), 1e-3)
        two = torch.rand(2, 3, 64, 64)
        torch.manual_seed(0)
        learning = model.train()(two)
        torch.manual_seed(0)
        large = plain.train()(zoomed(two, check_zoom(zoom)))
        agree(learning, unzoomed(large, (64, 64), check_zoom(zoom)), 1e-3)  # in training, too
    assert model.config["zoom"] == zoom


def test_a_zoomed_network_keeps_places(agree):
    # A blob stays where it is: its centre of mass in a network that only looks at brightness.
    image = torch.zeros(1, 1, 61, 83)
    image[:, :, 20:25, 50:57] = 1
    back = unzoomed(zoomed(image, check_zoom(1.5)), (61, 83), check_zoom(1.5))[0, 0]
    rows, columns = torch.meshgrid(torch.arange(61.0), torch.arange(83.0), indexing="ij")
    agree((back * rows).sum() / back.sum(), 22.0, 1e-3)
    agree((back * columns).sum() / back.sum(), 53.0, 1e-3)


@pytest.mark.parametrize("zoom", [0.5, 5, True, "2", float("nan")])
@pytest.mark.parametrize("name", ["fast", "strong"])
def test_a_bad_zoom_says_what_it_is(name, zoom):
    with pytest.raises(ValueError, match="must be a number from 1 to 4"):
        build(name, 5, zoom=zoom)


@pytest.mark.parametrize(("name", "stride"), [*[(name, None) for name in NAMES], *COARSE])
def test_every_parameter_gets_a_gradient(name, stride):
    options = SMALL[name] if stride is None else {**SMALL[name], "stride": stride}
    model = build(name, 5, **options, dropout=0.0).train()
    # Even: a single row of cells at stride 32 would leave filters of the padding without one.
    model(torch.rand(2, 3, 96, 160)).square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", NAMES)
def test_dropout_and_batch_norm_work_in_training_only(name):
    model = build(name, 5, **SMALL[name], dropout=0.5)
    image = torch.rand(1, 3, 33, 47)
    with torch.no_grad():
        assert not torch.equal(model.train()(image), model(image))
        assert torch.equal(model.eval()(image), model(image))


def test_state_dict_and_config_make_the_same_network(network):
    twin = build(network.name, **network.config).eval()
    twin.load_state_dict(network.state_dict())
    image = torch.rand(1, 3, 33, 47)
    with torch.no_grad():
        assert torch.equal(twin(image), network(image))
    assert twin.config == network.config
    assert not any("normalise" in name for name in network.state_dict())


def test_exports_for_any_batch(network, agree):
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(network, (torch.rand(2, 3, 48, 64),), dynamic_shapes=({0: batch},)).module()
    images = torch.rand(3, 3, 48, 64)
    with torch.no_grad():
        agree(exported(images), network(images))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.rand(3, 8, 8), "add the batch axis"),
        (torch.rand(1, 8, 8, 3), r"permute\(0, 3, 1, 2\)"),
        (torch.rand(1, 4, 8, 8), r"must have shape \(B, 3, H, W\)"),
        (torch.rand(1, 3, 0, 8), "no pixels"),
        (torch.rand(1, 3, 8, 8) * 255, "divide bytes by 255"),
        (torch.full((1, 3, 8, 8), torch.nan), "values from nan"),
    ],
    ids=["no batch", "channels last", "four channels", "empty", "bytes as floats", "nan"],
)
def test_errors_say_what_to_do(network, image, message):
    with pytest.raises(ValueError, match=message):
        network(image)


def test_wrong_kinds_of_image(network):
    with pytest.raises(TypeError, match="floats in"):
        network(torch.zeros(1, 3, 8, 8, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        network([0])


def test_build_names_what_there_is():
    with pytest.raises(ValueError, match="choose 'vgg16', 'strong' or 'fast'"):
        build("resnet", 5)
    with pytest.raises(TypeError, match="'fast' does not take these options"):
        build("fast", 5, channels=3)
    with pytest.raises(ValueError, match="labels=0"):
        build("fast", 0)
    with pytest.raises(ValueError, match="dropout=1"):
        build("fast", 5, dropout=1)
    with pytest.raises(ValueError, match="multiple of 8"):
        build("fast", 5, width=20)


def test_strong_may_have_batch_norm_in_its_encoder():
    model = build("strong", 3, width=8, encoder_norm=True).eval()
    with torch.no_grad():
        assert model(torch.rand(1, 3, 33, 47)).shape == (1, 3, 33, 47)


def test_parameters():
    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in build(name, 11).parameters()) for name in NAMES}
    assert counts["fast"] * 2 < 12 * 2**20  # bytes in float16
    assert counts["strong"] < 25e6
    assert counts["vgg16"] > 130e6  # the paper's 4096 channels


def test_importing_the_networks_imports_nothing_heavy():
    heavy = "torchvision", "transformers", "torchmetrics"
    code = f"import sys, deepmrf.unary; sys.exit(', '.join(m for m in {heavy!r} if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
