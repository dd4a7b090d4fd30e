"""Label contexts by Triton against plain PyTorch: on the GPU, or by Triton's interpreter in small sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from deepmrf.ops import contexts
from deepmrf.ops.contexts import gpu
from deepmrf.ops.registry import gradients, use
from tests.ops.test_interpreted import DEVICE, runs_here

pytestmark = runs_here


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN: what is read before it is written shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(x: Tensor) -> Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poisoned(empty_like(*a, **k)))


def _data(batch: int, labels: int, size: tuple[int, int], k: int, window: tuple[int, int]) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(labels + k)
    t = torch.rand(batch, labels, *size, generator=draw)
    weight = torch.randn(labels * k, labels, *window, generator=draw) * 0.2
    bias = torch.randn(labels * k, generator=draw)
    grad = torch.randn(batch, labels, *size, generator=draw)
    return tuple(x.to(DEVICE) for x in (t, weight, bias, grad))


def forward(t, weight, bias, patterns, by=gpu.IMPLEMENTATION):
    return by.forward(contexts.Arguments(t, weight, bias, patterns))


def backward(grad, active, t, weight, patterns, t_too, weight_too, by=gpu.IMPLEMENTATION):
    arguments = contexts.Arguments(t, weight, weight.new_zeros(len(weight)), patterns)
    return gradients(by, grad, active, arguments, (t_too, weight_too, True))


def _error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-300)).item()


CASES = [
    (1, 2, (1, 1), 1, (1, 1)),
    (2, 3, (5, 7), 3, (3, 3)),
    (1, 11, (3, 4), 8, (4, 3)),
    (1, 21, (2, 5), 5, (9, 5)),
    (1, 30, (2, 3), 5, (1, 5)),
    (3, 2, (4, 3), 16, (2, 6)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients_match_float64(case: tuple) -> None:
    k = case[3]
    t, weight, bias, grad = _data(*case)
    out, active = forward(t, weight, bias, k)
    results = backward(grad, active, t, weight, k, True, True)
    if DEVICE == "cuda":  # the interpreter runs one program after the other
        again = forward(t, weight, bias, k)
        assert torch.equal(out, again[0])
        assert torch.equal(active, again[1])
    wanted, _ = forward(t.double(), weight.double(), bias.double(), k, by=contexts.operator.plain)
    assert active.dtype == torch.uint8
    assert int(active.max()) < k
    assert _error(out, wanted) < 1e-3
    references = backward(grad.double(), active, t.double(), weight.double(), k, True, True, by=contexts.operator.plain)
    for got, reference in zip(results, references, strict=True):
        assert got.dtype == t.dtype
        assert _error(got, reference) < 1e-3


def test_three_products_are_nearly_exact_where_tf32_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    t, weight, bias, grad = _data(2, 5, (4, 6), 3, (3, 5))
    wanted, index = forward(t.double(), weight.double(), bias.double(), 3, by=contexts.operator.plain)
    out, active = forward(t, weight, bias, 3)
    grad_t, _, _ = backward(grad, active, t, weight, 3, True, True)
    assert torch.equal(active, index)
    assert _error(out, wanted) < 1e-6
    assert (
        _error(
            grad_t,
            backward(grad.double(), index, t.double(), weight.double(), 3, True, True, by=contexts.operator.plain)[0],
        )
        < 1e-6
    )


@pytest.mark.parametrize("of_t, of_weight", [(1e-20, 1.0), (1e8, 1e-9), (0.0, 1.0)])
def test_scales_far_from_one(of_t: float, of_weight: float) -> None:
    t, weight, bias, grad = _data(1, 3, (4, 5), 2, (3, 3))
    t, weight, bias = t * of_t, weight * of_weight, bias * of_t * of_weight
    out, active = forward(t, weight, bias, 2)
    assert _error(out, forward(t.double(), weight.double(), bias.double(), 2, by=contexts.operator.plain)[0]) < 1e-3
    got = backward(grad * 1e-12, active, t, weight, 2, True, True)
    wanted = backward(
        grad.double() * 1e-12, active, t.double(), weight.double(), 2, True, True, by=contexts.operator.plain
    )
    for actual, exact in zip(got, wanted, strict=True):
        assert _error(actual, exact) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_any_strides(dtype: torch.dtype) -> None:
    t, weight, bias, grad = (x.to(dtype) for x in _data(2, 3, (6, 4), 2, (3, 3)))
    t, grad = t.transpose(2, 3), grad.transpose(2, 3)
    weight = weight.transpose(2, 3)
    out, active = forward(t, weight, bias, 2)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert _error(out, forward(t.double(), weight.double(), bias.double(), 2, by=contexts.operator.plain)[0]) < 5e-3
    got = backward(grad, active, t, weight, 2, True, True)
    wanted = backward(grad.double(), active, t.double(), weight.double(), 2, True, True, by=contexts.operator.plain)
    for actual, exact in zip(got, wanted, strict=True):
        assert actual.dtype == dtype
        assert _error(actual, exact) < 5e-3


def test_through_the_operator() -> None:
    t, weight, bias, grad = _data(1, 3, (4, 5), 2, (3, 2))
    results = []
    for name in ("triton", "torch"):
        leaves = [x.clone().requires_grad_() for x in (t, weight, bias)]
        with use(name):
            contexts.label_contexts(*leaves, 2).backward(grad)
        results.append([x.grad for x in leaves])
    for first, second in zip(*results, strict=True):
        assert _error(first, second) < 1e-3


def test_only_the_gradients_asked_for() -> None:
    t, weight, bias, grad = _data(1, 3, (4, 5), 2, (3, 3))
    _, active = forward(t, weight, bias, 2)
    grad_t, grad_weight, grad_bias = backward(grad, active, t, weight, 2, False, False)
    assert grad_t.numel() == grad_weight.numel() == 0
    wanted = backward(grad, active, t, weight, 2, False, True, by=contexts.operator.plain)
    assert _error(grad_bias, wanted[2]) < 1e-5
    assert _error(backward(grad, active, t, weight, 2, False, True)[1], wanted[1]) < 1e-3


def test_when_it_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    t, weight, bias, _ = _data(1, 2, (3, 3), 2, (3, 3))

    def suits(t: Tensor, weight: Tensor, patterns: int) -> bool:
        return gpu.IMPLEMENTATION.suits(contexts.Arguments(t, weight, bias, patterns))

    assert not suits(t.double(), weight.double(), 2)
    assert not suits(t[..., 0], weight[..., 0], 2)
    assert not suits(t, weight, 17)
    if DEVICE == "cpu":
        assert suits(t, weight, 2)
        monkeypatch.delenv("TRITON_INTERPRET")
    assert not suits(t, weight, 2)
    with pytest.raises(ValueError, match="at most 32 bits"):
        forward(t.double(), weight.double(), bias.double(), 2)
