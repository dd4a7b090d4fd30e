"""b12's window: the weights are the layer's own, and drawn at their place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepmrf.evaluation.steps import window_kernel
from deepmrf.figures.window import WindowKernel, penalty_window, window_weights
from deepmrf.layers import TriplePenalty


@pytest.mark.parametrize("pixel", [(8, 9), (0, 0), (16, 19)])
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": "distance", "window": 5},
        {"kernel": "distance", "window": (6, 4), "gate": False, "spacing": (1.0, 2.5)},
        {"kernel": "distance", "window": 5, "features": 0, "average": False},
        {"kernel": "gaussian", "window": 7},
        {"kernel": "gaussian", "window": (4, 7), "smoothness": True, "spacing": (2.0, 1.0), "gate": False},
        {"kernel": "gaussian", "window": (3, 5, 5), "dims": 3, "temporal": True},
    ],
)
def test_weights_are_those_of_the_layer(settings, pixel, plain_torch):
    """t[j] is linear in q[z], z other than j: d(j, z) is its derivative where q[j] = 1."""
    image = np.random.default_rng(0).integers(0, 256, (20, 17, 3), dtype=np.uint8)
    layer = TriplePenalty(**settings)
    frames = [1] * (layer.dims - 2)
    pixels = torch.from_numpy(image).permute(2, 0, 1).reshape(1, 3, *frames, 20, 17)
    q = torch.ones(1, 1, *frames, 20, 17, requires_grad=True)
    t = layer(q, pixels if layer.features else None)
    (expected,) = torch.autograd.grad(t[..., pixel[1], pixel[0]].sum(), q)
    expected = expected.reshape(20, 17).numpy() / layer.pixel_share
    expected[pixel[1], pixel[0]] = 0
    weights, (left, right, top, bottom) = window_weights(image, pixel, window_kernel(layer))
    found = np.zeros((20, 17))
    found[top:bottom, left:right] = weights
    np.testing.assert_allclose(found, expected, atol=2e-5 * expected.max())


def test_the_figure_shows_weights_and_window(readable):
    pytest.importorskip("matplotlib")
    image = np.full((40, 60, 3), 200, dtype=np.uint8)
    image[:, 30:] = 0
    kernel = WindowKernel(True, 50.0, 0.001, 0.0, 1.0, (9, 11))
    figure = penalty_window(image, (27, 20), kernel)
    where, cropped, weighted = [axes for axes in figure.axes if axes.images][:3]
    weights, box = window_weights(image, (27, 20), kernel)
    assert box == (22, 33, 16, 25)
    assert np.array_equal(weighted.images[0].get_array(), weights)
    assert weights[4, 7] > 0.9 > 1e-6 > weights[4, 8]  # x = 29 and 30, where the image turns black
    assert weights[4, 5] == 0  # j itself
    assert weighted.images[0].get_extent() == [21.5, 32.5, 24.5, 15.5]
    assert cropped.images[0].get_array().shape == (9, 11, 3)
    corners = where.lines[0].get_xydata()
    assert corners.min(0).tolist() == [21.5, 15.5]
    assert corners.max(0).tolist() == [32.5, 24.5]
    readable(figure)


def test_kernels_that_are_no_formula_have_none():
    assert window_kernel(TriplePenalty(kernel="global")) is None
    assert window_kernel(TriplePenalty(5, kernel="gaussian", normalize=True)) is None
    assert window_kernel(TriplePenalty(5, kernel="learned", size=8)) is None
