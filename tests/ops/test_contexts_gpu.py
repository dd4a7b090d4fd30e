"""Label contexts by Triton against plain PyTorch: on the GPU, or by Triton's interpreter in small sizes."""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch
from torch import Tensor

from deepmrf.ops import contexts
from deepmrf.ops.contexts import gpu
from deepmrf.ops.registry import use

if importlib.util.find_spec("triton") is None:  # importing it here would settle that nothing is interpreted
    pytest.skip("triton is not installed", allow_module_level=True)
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def _load() -> bool:
    """Import the kernels, interpreted without a GPU; that must be decided before anything imports triton."""
    before = os.environ.get("TRITON_INTERPRET")
    if not CUDA:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        importlib.import_module("deepmrf.ops.contexts.gpu_kernels")
        from triton.language import standard

        return CUDA or type(standard.max).__name__ == "InterpretedFunction"
    finally:
        # Left set, it would send every small CPU tensor of other tests through the interpreter.
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)


pytestmark = pytest.mark.skipif(not _load(), reason="triton was imported before its interpreter could be asked for")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


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


def _error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-300)).item()


CASES = [
    (1, 2, (1, 1), 1, (1, 1)),
    (2, 3, (5, 7), 3, (3, 3)),
    (1, 11, (3, 4), 8, (4, 3)),
    (1, 21, (2, 5), 5, (9, 9)),
    (1, 30, (2, 3), 5, (1, 5)),
    (3, 2, (4, 3), 16, (2, 6)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_gradients_match_float64(case: tuple) -> None:
    k = case[3]
    t, weight, bias, grad = _data(*case)
    out, active = gpu._forward(t, weight, bias, k)
    again = gpu._forward(t, weight, bias, k)
    gradients = gpu._backward(grad, active, t, weight, k, True, True)
    assert torch.equal(out, again[0])
    assert torch.equal(active, again[1])
    wanted, _ = contexts._forward(t.double(), weight.double(), bias.double(), k)
    assert active.dtype == torch.uint8
    assert int(active.max()) < k
    assert _error(out, wanted) < 1e-3
    references = contexts._backward(grad.double(), active, t.double(), weight.double(), k, True, True)
    for got, reference in zip(gradients, references, strict=True):
        assert got.dtype == t.dtype
        assert _error(got, reference) < 1e-3


def test_three_products_are_nearly_exact_where_tf32_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    t, weight, bias, grad = _data(2, 5, (4, 6), 3, (3, 5))
    wanted, index = contexts._forward(t.double(), weight.double(), bias.double(), 3)
    out, active = gpu._forward(t, weight, bias, 3)
    grad_t, _, _ = gpu._backward(grad, active, t, weight, 3, True, True)
    assert torch.equal(active, index)
    assert _error(out, wanted) < 1e-6
    assert (
        _error(grad_t, contexts._backward(grad.double(), index, t.double(), weight.double(), 3, True, True)[0]) < 1e-6
    )


@pytest.mark.parametrize("of_t, of_weight", [(1e-20, 1.0), (1e8, 1e-9), (0.0, 1.0)])
def test_scales_far_from_one(of_t: float, of_weight: float) -> None:
    t, weight, bias, grad = _data(1, 3, (4, 5), 2, (3, 3))
    t, weight, bias = t * of_t, weight * of_weight, bias * of_t * of_weight
    out, active = gpu._forward(t, weight, bias, 2)
    assert _error(out, contexts._forward(t.double(), weight.double(), bias.double(), 2)[0]) < 1e-3
    got = gpu._backward(grad * 1e-12, active, t, weight, 2, True, True)
    wanted = contexts._backward(grad.double() * 1e-12, active, t.double(), weight.double(), 2, True, True)
    for actual, expected in zip(got, wanted, strict=True):
        assert _error(actual, expected) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_any_strides(dtype: torch.dtype) -> None:
    t, weight, bias, grad = (x.to(dtype) for x in _data(2, 3, (6, 4), 2, (3, 3)))
    t, grad = t.transpose(2, 3), grad.transpose(2, 3)
    weight = weight.transpose(2, 3)
    out, active = gpu._forward(t, weight, bias, 2)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert _error(out, contexts._forward(t.double(), weight.double(), bias.double(), 2)[0]) < 5e-3
    got = gpu._backward(grad, active, t, weight, 2, True, True)
    wanted = contexts._backward(grad.double(), active, t.double(), weight.double(), 2, True, True)
    for actual, expected in zip(got, wanted, strict=True):
        assert actual.dtype == dtype
        assert _error(actual, expected) < 5e-3


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
    _, active = gpu._forward(t, weight, bias, 2)
    grad_t, grad_weight, grad_bias = gpu._backward(grad, active, t, weight, 2, False, False)
    assert grad_t.numel() == grad_weight.numel() == 0
    wanted = contexts._backward(grad, active, t, weight, 2, False, True)
    assert _error(grad_bias, wanted[2]) < 1e-5
    assert _error(gpu._backward(grad, active, t, weight, 2, False, True)[1], wanted[1]) < 1e-3


def test_when_it_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    t, weight, bias, _ = _data(1, 2, (3, 3), 2, (3, 3))
    suits = gpu.IMPLEMENTATION.suits
    assert not suits(t.double(), weight.double(), 2)
    assert not suits(t[..., 0], weight[..., 0], 2)
    assert not suits(t, weight, 17)
    if not CUDA:
        assert suits(t, weight, 2)
        monkeypatch.delenv("TRITON_INTERPRET")
    assert not suits(t, weight, 2)
    with pytest.raises(ValueError, match="at most 32 bits"):
        gpu._forward(t.double(), weight.double(), bias.double(), 2)
