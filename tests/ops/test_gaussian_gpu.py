"""The Triton Gaussian kernel against plain torch in float64: on the GPU, or in Triton's interpreter without one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deepmrf import ops
from deepmrf.layers import TriplePenalty, triple_penalty
from deepmrf.ops import gaussian
from deepmrf.ops.gaussian import gpu
from deepmrf.ops.registry import gradients
from tests.ops.test_interpreted import DEVICE, runs_here


def forward(*given, by=gpu.IMPLEMENTATION) -> tuple[Tensor, Tensor]:
    return by.forward(gaussian.Arguments(*given))


def backward(grad: Tensor, ungated: Tensor, *given, by=gpu.IMPLEMENTATION) -> tuple[Tensor, ...]:
    *given, features_too = given
    return gradients(by, grad, ungated, gaussian.Arguments(*given, True), (True, features_too, True, True))


def suits(q, features, weights, window) -> bool:
    return gpu.IMPLEMENTATION.suits(
        gaussian.Arguments(q, features, weights, torch.ones(2), window, (1.0, 1.0), True, False)
    )


CASES = [  # shape of q, features, window, spacing, gate
    ((2, 3, 9, 13), 3, (4, 5), (1.0, 1.0), True),
    ((1, 1, 1, 1), 2, (3, 3), (1.0, 1.0), True),
    ((1, 3, 4, 50), 1, (3, 90), (0.5, 2.0), True),
    ((1, 2, 9, 10), 3, (100, 100), (1.0, 1.0), False),
    ((2, 3, 65), 2, (8,), (1.5,), True),
    ((1, 70, 5, 9), 0, (3, 4), (1.0, 1.0), True),
    ((1, 2, 9, 7), 6, (5, 5), (1.0, 1.0), True),
    ((2, 3, 2, 3, 9), 3, (2, 2, 5), (2.0, 1.0, 0.5), True),
    ((1, 2, 2, 3, 20), 1, (8, 3, 6), (1.0, 1.0, 1.0), False),
]


def _inputs(shape: tuple[int, ...], maps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    q = torch.rand(shape, device=DEVICE).to(dtype)
    features = torch.rand(shape[0], maps, *shape[2:], device=DEVICE) * 255
    return [q, features, torch.tensor([0.3, -0.2], device=DEVICE), torch.tensor([90.0, 4.0], device=DEVICE)]


def _close(result: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert result.shape == wanted.shape
    assert torch.isfinite(result).all()
    assert (result.double() - wanted).norm().item() <= tolerance * wanted.norm().item() + 1e-30


def _compare(
    inputs: list[Tensor], window: tuple[int, ...], spacing: tuple[float, ...], gate: bool, tolerance: float
) -> None:
    q, features, weights, _ = inputs
    grad = torch.rand(q.shape, device=q.device).to(q.dtype)
    assert suits(q, features, weights, window)
    out, sums = forward(*inputs, window, spacing, gate, True)
    wide = [t.double() for t in inputs]
    want, want_sums = forward(*wide, window, spacing, gate, True, by=gaussian.operator.plain)
    _close(out, want, tolerance)
    _close(sums, want_sums, tolerance)
    back = backward(grad, sums, *inputs, window, spacing, gate, True)
    want_back = backward(grad.double(), sums.double(), *wide, window, spacing, gate, True, by=gaussian.operator.plain)
    for actual, wanted in zip(back, want_back, strict=True):
        _close(actual, wanted, tolerance)


@runs_here
@pytest.mark.parametrize("shape, maps, window, spacing, gate", CASES)
def test_same_as_torch(
    shape: tuple[int, ...], maps: int, window: tuple[int, ...], spacing: tuple[float, ...], gate: bool
) -> None:
    _compare(_inputs(shape, maps), window, spacing, gate, 1e-3)


@runs_here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    _compare(_inputs((1, 3, 8, 20), 3, dtype), (5, 6), (1.0, 1.0), True, tolerance=2e-2)


@runs_here
def test_strided_inputs() -> None:
    q, features, weights, bandwidths = _inputs((1, 3, 20, 8), 3)
    _compare([q.transpose(2, 3), features.transpose(2, 3), weights, bandwidths], (5, 6), (1.0, 1.0), True, 1e-3)


@runs_here
def test_one_frame() -> None:
    inputs = _inputs((2, 3, 3, 2, 9), 2)
    for frame in (0, 2):
        given = (*inputs, (2, 2, 5), (2.0, 1.0, 0.5), True, True)
        for result, wanted in zip(forward(*given, frame), forward(*given, by=gaussian.operator.plain), strict=True):
            _close(result, wanted[:, :, frame].double(), 1e-3)


@runs_here
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_any_magnitude(scale: float) -> None:
    q, *others = _inputs((1, 3, 8, 9), 3)
    out, _ = forward(q * scale, *others, (5, 6), (1.0, 1.0), False, False)
    same, _ = forward(q, *others, (5, 6), (1.0, 1.0), False, False)
    _close((out + 0.2) / scale if scale > 1 else out, ((same + 0.2) if scale > 1 else same * 0 - 0.2).double(), 1e-3)


@runs_here
def test_bytes_are_fractions_of_255() -> None:
    q, features, weights, _ = _inputs((1, 2, 7, 9), 3)
    image, bandwidths = features.to(torch.uint8), torch.tensor([0.5, 3.0], device=DEVICE)
    out, _ = forward(q, image, weights, bandwidths, (5, 4), (1.0, 1.0), True, False)
    same, _ = forward(q, image / 255, weights, bandwidths, (5, 4), (1.0, 1.0), True, False)
    _close(out, same.double(), 1e-6 if DEVICE == "cpu" else 1e-5)  # GPUs round the division by 255 in another way


@runs_here
@pytest.mark.parametrize("width", [0.24, 0.2, 0.1])
def test_a_pixel_unlike_all_others_leaves_them_as_they_are(width: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triple_penalty, "SMALLEST_NORM_SUM", triple_penalty.SMALLEST_NORM_SUM_ELSEWHERE)  # interpreted
    torch.manual_seed(0)
    image = 0.1 * torch.rand(2, 3, 12, 17, device=DEVICE)
    image[1, :, 5, 5] = 1  # its neighbours weigh 1e-7 and less in all: `normalize` divides by the root of that
    q, slope = torch.randn(2, 3, 12, 17, device=DEVICE).softmax(1), torch.rand(2, 3, 12, 17, device=DEVICE)
    layer = TriplePenalty(5, kernel="gaussian", gate=False, normalize=True).to(DEVICE)
    with torch.no_grad():
        layer.log_colour_width.fill_(math.log(width))
    results = []
    for implementation in ("torch", "triton"):
        given, parameters = q.clone().requires_grad_(), [layer.log_colour_width, layer.log_position_width]
        with ops.use(implementation):
            t = layer(given, image)
            results.append([t.detach(), *torch.autograd.grad((t * slope).square().sum(), [given, *parameters])])
    for wanted, result, tolerance in zip(*results, (1e-3, 1e-3, 1e-2, 1e-2), strict=True):
        _close(result, wanted.double(), tolerance)


def test_leaves_to_torch_what_it_cannot_do() -> None:
    weights = torch.ones(2)
    assert not suits(torch.ones(1, 1, 2, 2, 2, 2), torch.ones(1, 1, 2, 2, 2, 2), weights, (3, 3, 3, 3))
    assert not suits(torch.ones(1, 1, 4, 4).double(), torch.ones(1, 1, 4, 4), weights, (3, 3))
    assert not suits(torch.ones(1, 1, 4, 4), torch.ones(1, 9, 4, 4), weights, (3, 3))
