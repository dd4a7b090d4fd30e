"""The real ImageNet weights, where they are: DEEPMRF_WEIGHTS, or shared/weights in the checkout or beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from deepmrf.unary import VGG16, Fast, Strong
from deepmrf.unary.fast import Unit
from deepmrf.unary.imagenet import read

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDERS = [Path(os.environ.get("DEEPMRF_WEIGHTS", "")), CHECKOUT / "shared/weights", CHECKOUT.parent / "shared/weights"]


def weights(name):
    for folder in FOLDERS:
        if (folder / name).is_file():
            return folder / name
    pytest.skip(f"{name} is not here")


@pytest.fixture(scope="module")
def photographs():
    """A cat, an astronaut, a cup of coffee and a rocket, each 224 x 224, as ImageNet's networks like them."""
    data = pytest.importorskip("skimage.data")
    squares = []
    for picture in (data.chelsea(), data.astronaut(), data.coffee(), data.rocket()):
        height, width, _ = picture.shape
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = torch.from_numpy(picture[top : top + side, left : left + side]).permute(2, 0, 1)[None].float() / 255
        squares.append(functional.interpolate(square, size=(224, 224), mode="bilinear", antialias=True))
    return torch.cat(squares)


@pytest.fixture(scope="module")
def cat(photographs):
    return photographs[:1]


@pytest.fixture(scope="module")
def fast():
    path = weights("efficientnet_lite0_imagenet.safetensors")
    network = Fast(11).eval()
    return network, network.load_imagenet(path), read(path)


def test_efficientnet_fills_the_encoder(fast):
    network, report, _ = fast
    encoder = [n for n in network.state_dict() if n.startswith("encoder.") and not n.endswith("num_batches_tracked")]
    assert sorted(report.loaded) == sorted(encoder)
    assert {name.split(".")[0] for name in report.missing} == {"context", "decoder", "classify"}
    assert {name.split(".")[0] for name in report.unused} == {"_conv_head", "_bn1", "_fc"}


def test_efficientnet_still_knows_a_cat(fast, cat):
    """The blocks are wired as they were trained. A cat survives wrong normalisation, channel order and padding."""
    network, _, source = fast
    with torch.no_grad():
        x = network.encoder(network.normalise(cat))[-1]
        x = functional.conv2d(x, source["_conv_head.weight"].float())
        norm = (source[f"_bn1.{kind}"] for kind in ("running_mean", "running_var", "weight", "bias"))
        x = functional.relu6(functional.batch_norm(x, *norm, eps=1e-3)).mean((2, 3))
        probabilities = functional.linear(x, source["_fc.weight"].float(), source["_fc.bias"]).softmax(1)[0]
    assert probabilities.argmax() == 285  # Egyptian cat
    assert probabilities[281:286].sum() > 0.8  # tabby, tiger, Persian, Siamese, Egyptian


def test_efficientnets_activations_are_those_it_was_trained_with(fast, photographs):
    """Before each batch norm, the mean and variance of four photographs are near the running ones.

    Wrong normalisation fails this by far (1.2 and more, for 0.46), symmetric padding barely (0.81); BGR passes it.
    """
    network, _, _ = fast
    shifts, ratios = [], []

    def look(unit, inputs):
        x = unit._convolve(inputs[0], unit.convolution.weight, None)
        mean, variance = unit.norm.running_mean, unit.norm.running_var
        alive = variance > 1e-3  # ImageNet's training left some channels at zero
        shifts.append(((x.mean((0, 2, 3)) - mean).abs() / variance.sqrt())[alive].median())
        ratios.append((x.var((0, 2, 3)) / variance)[alive].log().median().abs())

    hooks = [unit.register_forward_pre_hook(look) for unit in network.encoder.modules() if isinstance(unit, Unit)]
    with torch.no_grad():
        network(photographs)
    for hook in hooks:
        hook.remove()
    assert len(shifts) == 48
    assert max(shifts) < 0.6  # standard deviations
    assert max(ratios) < 0.7  # within a factor of two, where noise is off by a thousand


@pytest.mark.parametrize("network", [VGG16(11, channels=8), Strong(11, width=8)], ids=lambda n: n.name)
def test_vgg16_sees_edges_and_more(network, cat):
    report = network.eval().load_imagenet(weights("vgg16_imagenet_features.safetensors"))
    assert len(report.loaded) == 26
    assert not report.unused
    captured = {}
    deepest = network.b8 if isinstance(network, VGG16) else network.encoder[-1]
    deepest.register_forward_hook(lambda _, __, out: captured.update(out=out))
    with torch.no_grad():
        network(cat)
        of_cat = captured["out"]
        network(torch.full_like(cat, 0.5))
        of_grey = captured["out"]
    assert of_cat.isfinite().all()
    assert 0.005 < (of_cat > 0).float().mean() < 0.5  # deep rectified features are sparse
    assert of_cat.max() > 2 * of_grey[..., 5:-5, 5:-5].max()  # and answer to a cat, not to grey
