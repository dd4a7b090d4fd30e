"""Inputs in another unit get one warning, once; everything that can be meant passes in silence."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from skimage import color, data
from torch import nn
from torch.nn import functional

import deepmrf
from deepmrf import DeepParsingNetwork, InputWarning, MeanField, dense_crf

pytestmark = pytest.mark.usefixtures("plain_torch")
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
PHOTOGRAPH = torch.from_numpy(data.astronaut()[:240:4, :320:4].copy()).permute(2, 0, 1)[None]  # (1, 3, 60, 80)
RGB = PHOTOGRAPH / 255
LOGITS = torch.randn(1, 4, 60, 80, generator=torch.Generator().manual_seed(0))


def mrf(**settings):
    return MeanField(4, **({"window": 5, "contexts": 2, "context_size": 3} | settings))


def messages(layer, log_p=LOGITS, image=RGB):
    """The warnings of two calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(log_p, image)
        layer(log_p, image)
    return [str(warning.message) for warning in caught if issubclass(warning.category, InputWarning)]


CLIP_MEAN, CLIP_STD = (
    torch.tensor(values).view(3, 1, 1) for values in ([0.4815, 0.4578, 0.4082], [0.2686, 0.2613, 0.2758])
)
SMALL = functional.interpolate(
    torch.from_numpy(data.astronaut()).permute(2, 0, 1)[None] / 255, (60, 80), mode="bilinear", antialias=True
)
UNIFORM = torch.rand(1, 3, 60, 80, generator=torch.Generator().manual_seed(2))

WRONG_IMAGES = {
    "bytes": (255 * RGB, "from 0 to 249 and seems to be bytes as floats", "pass image / 255"),
    "dark bytes": ((51 * RGB).round(), "seems to be bytes as floats", "uint8"),
    "resized bytes": (functional.interpolate(255 * RGB, (60, 80), mode="bicubic").clamp(0, 255), "bytes", "/ 255"),
    "ImageNet": ((RGB - MEAN) / STD, "normalised by ImageNet's mean and std", "before its normalisation"),
    "ImageNet in half": (((RGB - MEAN) / STD).half(), "normalised by ImageNet's", "before its normalisation"),
    "noise, ImageNet": ((UNIFORM - MEAN) / STD, "normalised by ImageNet's mean and std", "in [0, 1] or as uint8"),
    "noise, ImageNet in half": (((UNIFORM - MEAN) / STD).half(), "normalised by ImageNet's", "before its"),
    "noise, CLIP": ((UNIFORM - CLIP_MEAN) / CLIP_STD, "normalised by CLIP's mean and std", "before its"),
    "noise, Caffe": (255 * UNIFORM - torch.tensor([104.0, 116.7, 122.7]).view(3, 1, 1), "bytes minus", "before its"),
    "resized, ImageNet": ((SMALL - MEAN) / STD, "normalised by ImageNet's mean and std", "before its normalisation"),
    "signed": (2 * RGB - 1, "normalised to [-1, 1]", "before its normalisation"),
    "Caffe": (255 * RGB.flip(1) - torch.tensor([104.0, 116.7, 122.7]).view(3, 1, 1), "bytes minus", "before its"),
}


@pytest.mark.parametrize("name", WRONG_IMAGES)
@pytest.mark.parametrize("layer", [mrf, lambda: dense_crf(4, iterations=1)], ids=["mean field", "dense CRF"])
def test_images_in_other_units(name, layer):
    image, *parts = WRONG_IMAGES[name]
    [message] = messages(layer(), image=image)
    for part in (*parts, "check_values = False"):
        assert part in message
    assert len(re.findall(r"[.!?](?=\s|$)", message)) == 1


WRONG_SCORES = {
    "probabilities": (LOGITS.softmax(1), "holds probabilities, which sum to 1: pass their logarithm"),
    "half probabilities": (LOGITS.softmax(1).half(), "holds probabilities"),
    "sure probabilities": ((50 * LOGITS).softmax(1), "holds probabilities"),
    "energies": (-LOGITS.log_softmax(1), "holds energies, -ln p: pass their negative"),
}


@pytest.mark.parametrize("name", WRONG_SCORES)
@pytest.mark.parametrize("layer", [mrf, lambda: dense_crf(4, iterations=1)], ids=["mean field", "dense CRF"])
def test_scores_that_are_no_logarithms(name, layer):
    log_p, part = WRONG_SCORES[name]
    [message] = messages(layer(), log_p)
    assert part in message


@pytest.mark.parametrize("log_p", [LOGITS, LOGITS.sigmoid()], ids=["logits", "probabilities"])
def test_scores_of_a_sigmoid(log_p):
    [message] = messages(mrf(unary="sigmoid"), log_p)
    assert "logarithms of probabilities are at most 0: pass torch.nn.functional.logsigmoid(logits)" in message
    assert not messages(mrf(unary="sigmoid"), functional.logsigmoid(LOGITS))


def test_both_at_once():
    assert len(messages(mrf(), LOGITS.softmax(1), 255 * RGB)) == 2


NOISE = torch.randn(1, 3, 60, 80, generator=torch.Generator().manual_seed(1))
FINE_IMAGES = {
    "RGB": RGB,
    "uint8": PHOTOGRAPH,
    "half": RGB.half(),
    "black": torch.zeros_like(RGB),
    "white": torch.ones_like(RGB),
    "grey": torch.full_like(RGB, 0.5),
    "one odd colour": torch.full_like(RGB, 7.0),
    "dark": RGB / 50,
    "brightened": RGB * 1.4,
    "noisy": RGB + 0.1 * NOISE,
    "black and white": (RGB > 0.5).float(),
    "centred": RGB - RGB.mean(),
    "features of a network": 3 * NOISE,
    "features after a ReLU": (8 * NOISE).relu(),
    "Lab": torch.from_numpy(color.rgb2lab(data.astronaut()[:240:4, :320:4])).permute(2, 0, 1)[None].float(),
    "HSV in degrees": torch.cat([360 * RGB[:, :1], RGB[:, 1:]], 1),
    "per cent": 100 * RGB + 0.01 * NOISE.abs(),
    "12 bits": (4095 * (RGB + 0.001 * NOISE)).round(),
    "16 bits in [0, 1]": (65535 * (RGB + 0.001 * NOISE)).round() / 65535,
    "resized": SMALL,
    "torch.rand": UNIFORM,
    "torch.rand, signed": 2 * UNIFORM - 1,
    "torch.rand of another range": 4 * UNIFORM - 2,
    "torch.randn": NOISE,
    "tanh": (2 * NOISE).tanh(),
    "as wide as ImageNet's": 0.55 * NOISE,
    "standardised": (RGB - RGB.mean((2, 3), keepdim=True)) / RGB.std((2, 3), keepdim=True),
    "class numbers": torch.randint(0, 20, (1, 3, 60, 80)).float(),
}


@pytest.mark.parametrize("name", FINE_IMAGES)
@pytest.mark.parametrize("layer", [mrf, lambda: mrf(kernel="gaussian")], ids=["distance", "gaussian"])
def test_images_that_can_be_meant(name, layer):
    assert not messages(layer(), image=FINE_IMAGES[name])


@pytest.mark.parametrize("picture", ["astronaut", "chelsea", "coffee", "rocket", "retina", "immunohistochemistry"])
def test_photographs(picture):
    image = torch.from_numpy(getattr(data, picture)()[::9, ::9].copy()).permute(2, 0, 1)[None]
    log_p = torch.randn(1, 4, *image.shape[2:])
    assert not messages(mrf(), log_p, image / 255)
    [message] = messages(mrf(), log_p, (image / 255 - MEAN) / STD)
    assert "ImageNet" in message
    [message] = messages(mrf(), log_p, image.float())
    assert "bytes" in message


def test_features_of_a_normal_distribution_are_no_normalised_images():
    """Of any width and size, also where their extremes lie near those of ImageNet's unit."""
    random = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (4, 8, 16, 32, 64):
            for width in (0.5, 0.6, 0.8, 1, 1.5, 40):
                for _ in range(20):
                    deepmrf.layers.inputs.warn_of_image(width * torch.randn(1, 3, size, size, generator=random), None)
    assert not caught


UNTRAINED = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
with torch.no_grad():
    FINE_SCORES = {
        "untrained": UNTRAINED(RGB),
        "untrained, after a ReLU": UNTRAINED(RGB).relu(),
        "untrained, after a sigmoid": UNTRAINED(RGB).sigmoid(),
        "zeros": torch.zeros_like(LOGITS),
        "ones": torch.ones_like(LOGITS),
        "log-probabilities": LOGITS.log_softmax(1),
        "sure": (50 * LOGITS).log_softmax(1),
        "impossible labels": LOGITS.log_softmax(1).masked_fill(LOGITS.mean(1, keepdim=True) > LOGITS, -torch.inf),
        "logits above 0": LOGITS - LOGITS.min(),
        "uniform": torch.full_like(LOGITS, 0.25).log(),
    }


@pytest.mark.parametrize("name", FINE_SCORES)
def test_scores_that_can_be_meant(name):
    assert not messages(mrf(), FINE_SCORES[name])


def test_one_label_proves_nothing():
    assert not messages(MeanField(1, window=3), torch.ones(1, 1, 60, 80))


def test_few_pixels_prove_nothing():
    image = (RGB[..., 1:4, 30:33] - MEAN) / STD
    assert not messages(mrf(), LOGITS[..., :3, :3].softmax(1), image)


@pytest.mark.parametrize("scale", [1, 255, 4095], ids=["[0, 1]", "bytes", "12 bits"])
def test_volumes_have_units_of_their_own(scale):
    volume = (scale * torch.rand(1, 1, 6, 20, 30)).round()
    assert not messages(MeanField(4, dims=3, features=1, window=3, contexts=0), torch.randn(1, 4, 6, 20, 30), volume)
    three = volume.expand(1, 3, 6, 20, 30)
    assert not messages(MeanField(4, dims=3, window=3, contexts=0), torch.randn(1, 4, 6, 20, 30), three)


@pytest.mark.parametrize("features", [1, 4])
def test_other_features_than_rgb(features):
    image = (255 * torch.rand(1, features, 60, 80)).round()
    assert not messages(mrf(features=features), image=image)


def test_frames_of_clips_are_rgb():
    clip = (255 * RGB)[:, :, None].expand(1, 3, 2, 60, 80)
    layer = MeanField(4, dims=3, temporal=True, window=(3, 3, 3), contexts=0)
    [message] = messages(layer, LOGITS[:, :, None].expand(1, 4, 2, 60, 80), clip)
    assert "bytes" in message


@pytest.mark.parametrize(("image", "width"), [(255 * RGB, 13.0), (255 * RGB, 3.0), ((RGB - MEAN) / STD, 0.23)])
def test_a_width_in_the_images_own_unit(image, width):
    assert not messages(dense_crf(4, iterations=1, colour_width=width), image=image)


def test_it_is_said_once_and_can_be_turned_off():
    layer = mrf()
    assert layer.check_values
    with pytest.warns(InputWarning) as caught:
        layer(LOGITS.softmax(1), RGB)
    assert caught[0].filename == __file__  # the line that called, not one inside the library
    assert not layer.check_values
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(LOGITS.softmax(1), RGB)
        quiet = mrf()
        quiet.check_values = False
        quiet(LOGITS.softmax(1), RGB)
        copy.deepcopy(quiet)(LOGITS.softmax(1), RGB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=deepmrf.InputWarning)
        mrf()(LOGITS.softmax(1), RGB)
    assert issubclass(InputWarning, UserWarning)
    assert "check_values" not in mrf().settings


def test_numbers_are_read_at_the_first_call_alone(monkeypatch):
    calls = []
    monkeypatch.setattr("deepmrf.layers.inputs._sample", lambda maps: calls.append(maps) or torch.ones(2, 1).numpy())
    layer = mrf()
    for _ in range(3):
        layer(LOGITS, RGB)
    assert len(calls) == 2  # log_p and image


def test_what_traces_and_compiles_sees_nothing():
    bad = LOGITS.softmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)
        for layer in (mrf(kernel="gaussian"), mrf()):
            program = torch.export.export(layer, (bad, RGB))
            assert layer.check_values
            assert not [node for node in program.graph.nodes if "scalar" in str(node.target)]
        layer = mrf()
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        compiled(bad, RGB)
        layer.check_values = False  # no reason to compile again
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled(bad, RGB)
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert not deepmrf.layers.inputs.readable(mode.from_tensor(bad))
        assert not deepmrf.layers.inputs.readable(torch.empty(1, device="meta"))


def test_networks_that_return_probabilities():
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Softmax(1))
    with pytest.warns(InputWarning, match="Sequential returns probabilities, .* let it return logits"):
        DeepParsingNetwork(network, mrf(), list("abcd"))(RGB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DeepParsingNetwork(network[0], mrf(), list("abcd"))(PHOTOGRAPH)
