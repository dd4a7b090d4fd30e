"""The Triton distance kernel against plain torch in float64: on the GPU, or in Triton's interpreter without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deepmrf.ops import distance
from deepmrf.ops.distance import gpu
from deepmrf.ops.registry import gradients
from tests.ops.test_interpreted import DEVICE, runs_here


def forward(*given, by=gpu.IMPLEMENTATION) -> tuple[Tensor, Tensor]:
    return by.forward(distance.Arguments(*given))


def backward(grad: Tensor, ungated: Tensor, *given, by=gpu.IMPLEMENTATION) -> tuple[Tensor, ...]:
    *given, features_too = given
    return gradients(by, grad, ungated, distance.Arguments(*given, True), (True, features_too, True))


def suits(*given) -> bool:
    return gpu.IMPLEMENTATION.suits(distance.Arguments(*given, (1.0, 1.0), True, False))


CASES = [  # shape of q, features, window, spacing, gate
    ((2, 3, 9, 13), 3, (4, 5), (1.0, 1.0), True),
    ((1, 2, 6, 40), 1, (3, 3), (1.0, 0.5), True),
    ((1, 1, 1, 1), 2, (3, 3), (1.0, 1.0), True),
    ((1, 3, 10, 70), 3, (7, 50), (0.5, 2.0), True),
    ((1, 2, 12, 17), 3, (100, 100), (1.0, 1.0), False),
    ((2, 3, 65), 2, (8,), (1.5,), True),
    ((1, 2, 34, 5), 4, (20, 6), (1.0, 1.0), True),
    ((1, 2, 3, 3, 9), 3, (2, 2, 5), (2.0, 1.0, 0.5), True),
    ((1, 2, 2, 5, 40), 0, (8, 3, 2), (1.0, 1.0, 1.0), False),
]


def _inputs(shape: tuple[int, ...], maps: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.rand(shape, device=DEVICE).to(dtype)
    features = torch.rand(shape[0], maps, *shape[2:], device=DEVICE) * 255
    return q, features, torch.tensor([1e-3, 0.7, -0.2], device=DEVICE)


def _close(result: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert result.shape == wanted.shape
    if wanted.numel():
        assert torch.isfinite(result).all()
        assert (result.double() - wanted).abs().max().item() <= tolerance * wanted.abs().max().item() + 1e-30


def _compare(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    window: tuple[int, ...],
    spacing: tuple[float, ...],
    gate: bool,
    tolerance: float = 2e-5,
) -> None:
    grad = torch.randn(q.shape, device=q.device).to(q.dtype)
    assert suits(q, features, weights, window)
    out, sums = forward(q, features, weights, window, spacing, gate, True)
    wide = [t.double() for t in (q, features, weights)]
    want, want_sums = forward(*wide, window, spacing, gate, True, by=distance.operator.plain)
    _close(out, want, tolerance)
    _close(sums, want_sums, tolerance)
    back = backward(grad, sums, q, features, weights, window, spacing, gate, True)
    want_back = backward(grad.double(), sums.double(), *wide, window, spacing, gate, True, by=distance.operator.plain)
    for result, wanted, tensor in zip(back, want_back, (q, features), strict=False):
        assert result.dtype == tensor.dtype
        _close(result, wanted, tolerance)
    for result, wanted in zip(back[2], want_back[2], strict=True):
        _close(result, wanted, 1e-4)


@runs_here
@pytest.mark.parametrize("shape, maps, window, spacing, gate", CASES)
def test_same_as_torch(
    shape: tuple[int, ...], maps: int, window: tuple[int, ...], spacing: tuple[float, ...], gate: bool
) -> None:
    q, features, weights = _inputs(shape, maps)
    _compare(q, features, weights, window, spacing, gate)


@runs_here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, features, weights = _inputs((1, 3, 8, 20), 3, dtype)
    _compare(q, features / 255, weights, (5, 6), (1.0, 1.0), True, tolerance=2e-2)


@runs_here
def test_strided_inputs() -> None:
    q, features, weights = _inputs((1, 3, 20, 8), 3)
    _compare(q.transpose(2, 3), features.transpose(2, 3), weights, (5, 6), (1.0, 1.0), True)


@runs_here
def test_one_frame() -> None:
    q, features, weights = _inputs((2, 3, 3, 3, 9), 2)
    for frame in (0, 2):
        given = (q, features, weights, (2, 2, 5), (2.0, 1.0, 0.5), True, True)
        for result, wanted in zip(forward(*given, frame), forward(*given, by=distance.operator.plain), strict=True):
            _close(result, wanted[:, :, frame].double(), 2e-5)


@runs_here
def test_no_features() -> None:
    q, features, weights = _inputs((1, 2, 7, 9), 0)
    out, _ = forward(q, features, weights, (5, 4), (1.0, 1.0), True, False)
    want = distance.distance_penalty_reference(
        q.double(), torch.zeros_like(q[:, :1]).double(), weights.double(), (5, 4), (1.0, 1.0), True
    )
    _close(out, want, 2e-5)


@runs_here
def test_bytes_are_fractions_of_255() -> None:
    q, features, weights = _inputs((1, 2, 7, 9), 3)
    image = features.to(torch.uint8)
    out, _ = forward(q, image, weights, (5, 4), (1.0, 1.0), True, False)
    same, _ = forward(q, image / 255, weights, (5, 4), (1.0, 1.0), True, False)
    _close(out, same.double(), 1e-6)


@runs_here
def test_repeats_bit_for_bit_with_and_without_the_gradient_to_the_features() -> None:
    q, features, weights = _inputs((1, 2, 5, 30), 3)
    runs = [
        backward(q - 0.5, q, q, features, weights, (5, 6), (1.0, 1.0), True, features_too)
        for features_too in (True, True, False)
    ]
    for first, second, third in zip(*runs, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third) or third.numel() == 0


def test_leaves_to_torch_what_it_cannot_do() -> None:
    weights = torch.ones(3)
    assert not suits(torch.ones(1, 1, 2, 2, 2, 2), torch.ones(1, 1, 2, 2, 2, 2), weights, (3, 3, 3, 3))
    assert not suits(torch.ones(1, 1, 4, 4).double(), torch.ones(1, 1, 4, 4), weights, (3, 3))
    assert not suits(torch.ones(1, 1, 1, 5000), torch.ones(1, 1, 1, 5000), weights, (3, 3))
    assert not suits(torch.ones(1, 1, 4, 4), torch.ones(1, 9, 4, 4), weights, (3, 3))


@pytest.mark.parametrize("kind", ["forward", "backward", "pull"])
@pytest.mark.parametrize("width", [1, 63, 513, 1500, 4096])
def test_plans_fit_a_processor(monkeypatch: pytest.MonkeyPatch, width: int, kind: gpu.Pass) -> None:
    monkeypatch.setattr(gpu, "processors", lambda _: 132)
    gpu.make_plan.cache_clear()
    for shape in ((10, 21, 512, width), (1, 2, 1, width), (1, 21, 8, 33, width)):
        window = (3, 50, 50)[5 - len(shape) :]
        plan = gpu.make_plan(shape, 4, window, kind, torch.device("cpu"))
        columns = plan.stretches * plan.stretch
        assert columns >= width
        assert plan.stretch >= min(50, width)
        assert 1 <= plan.strip <= shape[-2]
        assert 32 * plan.warps * (plan.registers or 1) <= 65536
        numbers = 21  # that a pixel with 4 features has on its way
        assert plan.labels * columns * 4 * numbers * (plan.rows_in_flight - 1) <= gpu.SHARED_BYTES
        assert plan.strips * plan.strip >= shape[-2]
        assert plan.chunks * plan.chunk * plan.labels >= shape[1]
    gpu.make_plan.cache_clear()
