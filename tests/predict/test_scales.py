"""Predictors: scales, mirrors, averages, and tiles that change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from deepmrf import MeanField
from deepmrf.predict import scales as predict
from deepmrf.predict.scales import (
    averaged,
    enlarged_labels,
    grid,
    margin,
    mirrored,
    predictor,
    scaled,
    tiled,
)
from deepmrf.unary.network import check_zoom

pytestmark = pytest.mark.usefixtures("plain_torch")

LABELS = 4
FIELDS = {
    "paper": {"window": 9, "contexts": 2, "context_size": 5},
    "even windows": {"window": 6, "contexts": 2, "context_size": 4},
    "two steps": {"window": 5, "contexts": 2, "context_size": 3, "iterations": 2},
    "gaussian": {"window": 7, "contexts": 1, "context_size": 3, "kernel": "gaussian", "gate": False},
    "normalised": {
        **{"window": 5, "contexts": 1, "context_size": 1, "kernel": "gaussian", "gate": False},
        **{"normalize": True, "smoothness": True, "iterations": 2},
    },
    "stride 2": {"window": 5, "contexts": 2, "context_size": 5, "context_stride": 2},
    "stride 3": {"window": 5, "contexts": 2, "context_size": 7, "context_stride": 3},
    "no contexts": {"window": 7, "contexts": 0},
    "oblong": {"window": [3, 9], "contexts": 2, "context_size": [7, 3]},
}


def loud(settings):
    """A mean field that changes what it is given."""
    field = MeanField(LABELS, **settings)
    with torch.no_grad():
        for parameter in field.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0)
        field.triple_penalty.scale.fill_(3.0)
    return field.double()


class Small(nn.Module):
    """A network that sees one pixel around, and a mean field."""

    def __init__(self, field):
        super().__init__()
        self.convolve = nn.Conv2d(3, LABELS, 3, padding=1).double()
        self.field = field

    def forward(self, image):
        log_p = (5 * self.convolve(image.double() / 255)).log_softmax(1)
        return log_p if self.field is None else self.field(log_p, image.double() / 255)


def picture(*size):
    return torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)


@pytest.mark.parametrize("settings", FIELDS.values(), ids=FIELDS)
def test_nothing_beyond_the_reach_matters(settings):
    field = loud(settings)
    far = max(map(max, field.reach()))
    size = 2 * far + 7
    log_p, image = torch.randn(1, LABELS, size, size).double().log_softmax(1), torch.rand(1, 3, size, size).double()
    before = field(log_p, image)
    log_p[..., size // 2, size // 2] = torch.randn(LABELS).double().log_softmax(0)
    image[..., size // 2, size // 2] = torch.rand(3).double()
    changed = (field(log_p, image) - before).abs().amax((0, 1)) > 1e-11
    farthest = (changed.nonzero() - size // 2).abs().max().item()
    assert farthest <= far
    if field.label_contexts is None or field.label_contexts.stride == 1:  # strides: the worst phase is not the centre
        assert farthest >= far - settings.get("iterations", 1) * 2, "the reach is too generous"


@pytest.mark.parametrize("size, tile", [((53, 41), 17), ((31, 97), 24), ((29, 29), 28), ((20, 61), 13)])
@pytest.mark.parametrize("settings", FIELDS.values(), ids=FIELDS)
def test_tiles_change_nothing(settings, size, tile):
    model = Small(loud(settings))
    image = picture(*size)
    step = grid([model.field])
    expected = predictor(model)(image)
    parts = tiled(predictor(model), tile, margin([model.field], network=1), step)(image)
    assert parts.shape == expected.shape
    torch.testing.assert_close(parts, expected, atol=1e-5, rtol=0)


def test_too_small_a_margin_is_seen():
    model = Small(loud(FIELDS["paper"]))
    image = picture(40, 40)
    expected, parts = predictor(model)(image), tiled(predictor(model), 16, 2, 1)(image)
    assert (expected - parts).abs().max() > 1e-3


def test_an_image_of_one_tile_is_computed_at_once():
    seen = []
    tiled(lambda image: seen.append(image.shape) or image, 64, 10)(picture(64, 3))
    assert seen == [(2, 3, 64, 3)]


def test_the_reach_by_hand():
    field = MeanField(3, window=51, contexts=5, context_size=9, iterations=3)
    assert field.reach() == [(3 * (25 + 4), 3 * (25 + 4))] * 2
    even = MeanField(3, window=50, contexts=5, context_size=9, context_stride=2)
    assert even.reach() == [(25 + 2 * (2 + 2), 24 + 2 * (2 + 2))] * 2
    assert margin([None, field], [0.5, 2], network=13) == 200
    assert grid([None, MeanField(3, contexts=1, context_size=3, context_stride=3)]) == 96
    assert grid([None], [check_zoom(1), check_zoom(1.5), check_zoom(1.25)]) == 128


@pytest.mark.parametrize("scale, step", [(0.9, 320), (1.1, 320), (0.75, 128), (1.5, 64)])
def test_tiles_lie_on_the_grid_of_every_scale(scale, step):
    """A network that sees single pixels: whatever differs between tiles comes from resizing."""

    def pixelwise(image):
        values = image.float() / 255
        return torch.cat([values, 1 - values[:, :1]], 1).mul(3).log_softmax(1)

    assert grid([None], scales=[1.0, scale]) == step
    assert grid([None], [check_zoom(1.25)], [scale]) % step == 0
    image = torch.randint(0, 256, (1, 3, 1000, 700), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    predict = scaled(predictor(pixelwise), [scale])
    whole, parts = predict(image), tiled(predict, 400, 64, step)(image)
    assert (whole - parts).abs().mean() < 2e-4


def test_labels_by_tiles_are_those_of_the_whole():
    model = Small(loud(FIELDS["paper"]))
    image = picture(47, 31)[0]
    expected = predictor(model)(image[None])[0]
    probabilities = np.empty((LABELS, 47, 31), np.float32)
    array = image.permute(1, 2, 0).numpy()
    edge = margin([model.field], network=1)
    labels, confidence = predict.tiled_labels(predictor(model), array, 13, edge, step=1, probabilities=probabilities)
    assert (labels.dtype, confidence.dtype) == (np.uint8, np.float16)
    np.testing.assert_array_equal(labels, expected.argmax(0).numpy())
    np.testing.assert_allclose(confidence, expected.amax(0).numpy(), atol=1e-3)
    np.testing.assert_allclose(probabilities, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("small, large", [((5, 7), (41, 30)), ((1, 1), (3, 9)), ((6, 6), (6, 6)), ((9, 4), (10, 5))])
def test_enlarged_labels_are_those_of_enlarged_probabilities(small, large, monkeypatch):
    monkeypatch.setattr(predict, "MAX_ENLARGED_NUMBERS", 100)
    probabilities = torch.rand(3, *small).softmax(0)
    best = functional.interpolate(probabilities[None], large, mode="bilinear")[0].max(0)
    labels, confidence = enlarged_labels(probabilities, *large)
    np.testing.assert_array_equal(labels, best.indices.numpy())
    np.testing.assert_allclose(confidence, best.values.numpy(), atol=1e-3)


def test_scales_mirrors_and_averages():
    model, image = Small(None), picture(12, 15)
    single = predictor(model)
    assert single(image).shape == (2, LABELS, 12, 15)
    torch.testing.assert_close(scaled(single, [1.0])(image), single(image))
    both = scaled(single, [0.5, 1.5])(image)
    parts = []
    for size in ((6, 8), (18, 22)):
        resized = functional.interpolate(image.float(), size, mode="bilinear", antialias=size[0] < 12)
        probabilities = single(resized.round().clamp(0, 255).to(torch.uint8))
        parts.append(functional.interpolate(probabilities, (12, 15), mode="bilinear"))
    torch.testing.assert_close(both, (parts[0] + parts[1]) / 2)
    torch.testing.assert_close(mirrored(single)(image.flip(-1)), mirrored(single)(image).flip(-1))
    torch.testing.assert_close(
        averaged([single, mirrored(single)])(image), (single(image) + mirrored(single)(image)) / 2
    )
    for wrong in ([], [0.0], [9.0]):
        with pytest.raises(ValueError, match="must be factors"):
            scaled(single, wrong)


def test_nan_is_refused_not_taken_for_the_first_label():
    def model(image: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(1, LABELS, 3, 5).log_softmax(1)
        scores[0, :, 1, 2] = torch.where(image[0, 0, 0, 0] > 0, torch.nan, 0.0)
        return scores

    predict = predictor(model)
    assert predict(torch.zeros(1, 3, 3, 5, dtype=torch.uint8)).shape == (1, LABELS, 3, 5)
    with pytest.raises(ValueError, match="NaN for an image on cpu"):
        predict(torch.ones(1, 3, 3, 5, dtype=torch.uint8))
