"""The compiled Gaussian kernel on the CPU against the equation, its gradients against autograd's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from deepmrf.ops import jobs
from deepmrf.ops.gaussian import Arguments, gaussian_penalty_reference
from deepmrf.ops.gaussian.cpu import IMPLEMENTATION
from deepmrf.ops.registry import gradients
from deepmrf.ops.window import box_sum, reaches

pytest.importorskip("numba")

WEIGHTS = torch.tensor([0.7, -0.2], dtype=torch.float64)
BANDWIDTHS = torch.tensor([0.4, 3.0], dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def forward(*given, by=IMPLEMENTATION) -> tuple[Tensor, Tensor]:
    return by.forward(Arguments(*given))


def backward(grad: Tensor, ungated: Tensor, *given, by=IMPLEMENTATION) -> tuple[Tensor, ...]:
    *given, features_too = given
    return gradients(by, grad, ungated, Arguments(*given, True), (True, features_too, True, True))


def suits(q, features, weights, window) -> bool:
    return IMPLEMENTATION.suits(Arguments(q, features, weights, torch.ones(2), window, (1.0, 1.0), True, False))


CASES = [
    # size, window, spacing, labels, features
    ((1,), (1,), (1.0,), 1, 1),
    ((40,), (50,), (1.5,), 3, 2),
    ((1100,), (600,), (1.0,), 3, 1),  # several jobs in a row, several chunks in a window
    ((1, 1), (5, 5), (1.0, 1.0), 2, 3),
    ((1, 9), (2, 2), (1.0, 1.0), 2, 0),
    ((63, 5), (5, 5), (1.0, 1.0), 9, 3),
    ((13, 37), (50, 7), (1.0, 2.0), 21, 4),
    ((10, 21), (2, 5), (0.5, 1.0), 30, 7),
    ((5, 6), (1, 1), (1.0, 1.0), 2, 3),
    ((4, 5, 6), (3, 2, 5), (1.0, 1.0, 1.0), 2, 3),
    ((3, 7, 2), (50, 1, 4), (2.0, 1.0, 0.5), 2, 1),
]


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("size, window, spacing, labels, features", CASES)
def test_result_and_every_gradient_agree_with_the_equation(size, window, spacing, labels, features, gate):
    q, image = draw(2, labels, *size), draw(2, features, *size, seed=1)
    inputs = [x.clone().requires_grad_() for x in (q, image, WEIGHTS, BANDWIDTHS)]
    expected = gaussian_penalty_reference(*inputs, window, spacing, gate)
    grad = draw(*expected.shape, seed=2) - 0.5
    expected_gradients = torch.autograd.grad(expected, inputs, grad)

    given = (q, image, WEIGHTS, BANDWIDTHS, window, spacing, gate)
    out, ungated = forward(*given, True)
    assert_close(out, expected.detach(), rtol=1e-10, atol=1e-12)
    results = backward(grad, ungated, *given, True)
    names = ("q", "features", "weights", "bandwidths")
    for name, got, wanted in zip(names, results, expected_gradients, strict=True):
        assert_close(got, wanted, rtol=1e-10, atol=1e-11, msg=lambda m, name=name: f"gradient to {name}: {m}")

    alone, nothing = forward(*given, False)
    assert_close(alone, out)
    assert nothing.shape == (0,)
    without = backward(grad, ungated, *given, False)
    assert without[1].shape == (0,)
    for k in (0, 2, 3):
        assert_close(without[k], results[k])


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_float32_agrees_with_float64(scale):
    q = draw(1, 5, 20, 45).softmax(1).float()
    image = (draw(1, 3, 20, 45, seed=1) * scale).float()
    bandwidths = torch.tensor([0.25 * scale, 4.0])
    weights = torch.tensor([1.0, 0.0])
    inputs = [x.double().requires_grad_() for x in (q, image, weights, bandwidths)]
    expected = gaussian_penalty_reference(*inputs, (11, 11), (1.0, 1.0), True)
    out, ungated = forward(q, image, weights, bandwidths, (11, 11), (1.0, 1.0), True, True)
    assert out.dtype == torch.float32
    assert_close(out.double(), expected.detach(), rtol=2e-6, atol=0)
    grad = draw(*q.shape, seed=2).float()
    got = backward(grad, ungated, q, image, weights, bandwidths, (11, 11), (1.0, 1.0), True, True)
    for actual, wanted in zip(got, torch.autograd.grad(expected, inputs, grad.double()), strict=True):
        assert_close(actual.double(), wanted, rtol=2e-5, atol=2e-6 * wanted.abs().max().item())


def test_weights_too_small_for_a_float_are_zero():
    q, image = draw(1, 2, 6, 6).float(), torch.zeros(1, 1, 6, 6)
    image[..., 3:] = 1e6
    bandwidths = torch.tensor([1e-3, 100.0])
    out = forward(q, image, torch.tensor([1.0, 0.0]), bandwidths, (1, 5), (1.0, 1.0), False, False)[0]
    apart = torch.cat(
        [
            forward(part, image[..., :3] * 0, torch.tensor([1.0, 0.0]), bandwidths, (1, 5), (1.0, 1.0), False, False)[0]
            for part in (q[..., :3], q[..., 3:])
        ],
        dim=-1,
    )
    assert_close(out, apart)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_are_computed_in_float32_and_returned_as_they_came(dtype):
    q, image = draw(1, 3, 12, 13).to(dtype), draw(1, 3, 12, 13, seed=1).to(dtype)
    expected = gaussian_penalty_reference(
        q.double(), image.double(), WEIGHTS, BANDWIDTHS, (5, 5), (1.0, 1.0), True
    )  # fmt: skip
    given = (q, image, WEIGHTS.float(), BANDWIDTHS.float(), (5, 5), (1.0, 1.0), True)
    out, ungated = forward(*given, True)
    assert out.dtype == ungated.dtype == dtype
    tolerance = torch.finfo(dtype).eps
    assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    got = backward(out, ungated, *given, True)
    assert [x.dtype for x in got] == [dtype, dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_stand_for_their_255th_part(dtype):
    q, bytes_ = draw(1, 3, 12, 13).to(dtype), (draw(1, 3, 12, 13, seed=1) * 255).to(torch.uint8)
    rest = (WEIGHTS.to(dtype), BANDWIDTHS.to(dtype), (5, 5), (1.0, 1.0), True, True)
    got = forward(q, bytes_, *rest)
    assert_close(got, forward(q, bytes_.to(dtype) / 255, *rest), rtol=0, atol=0)


def test_inputs_need_not_be_contiguous():
    q, image = draw(14, 13, 2, 3).permute(2, 3, 1, 0), draw(2, 13, 28, 3, seed=1).permute(0, 3, 1, 2)[..., ::2]
    grad = draw(1, 1, 13, 1, seed=2).expand(q.shape)
    rest = (WEIGHTS, BANDWIDTHS, (5, 4), (1.0, 1.0), True)
    plain = (q.contiguous(), image.contiguous())
    out, ungated = forward(q, image, *rest, True)
    assert out.is_contiguous()
    assert_close((out, ungated), forward(*plain, *rest, True), rtol=0, atol=0)
    got = backward(grad, ungated, q, image, *rest, True)
    assert_close(got, backward(grad.contiguous(), ungated, *plain, *rest, True), rtol=0, atol=0)


def test_a_nan_reaches_the_windows_that_hold_it_and_no_others():
    q, image = draw(1, 2, 20, 30), draw(1, 3, 20, 30, seed=1)
    q[0, 1, 7, 10] = torch.nan
    rest = (image, WEIGHTS, BANDWIDTHS, (4, 4), (1.0, 1.0), True)
    out = forward(q, *rest, False)[0]
    assert_close(torch.isnan(out), box_sum(torch.isnan(q).double(), reaches((4, 4))) > 0.5)
    clean = forward(torch.nan_to_num(q), *rest, False)[0]
    assert_close(out[~torch.isnan(out)], clean[~torch.isnan(out)], rtol=0, atol=0)


def test_several_threads_may_call_it_at_once():
    q, image = draw(1, 5, 60, 40), draw(1, 3, 60, 40, seed=1)

    def call(window: int) -> Tensor:
        given = (q, image, WEIGHTS, BANDWIDTHS, (window, window), (1.0, 1.0), True)
        out: Tensor = forward(*given, False)[0]
        return out

    windows = [3, 5, 7, 9] * 6
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(call, windows))
    for window, got in zip(windows, together, strict=True):
        assert_close(got, call(window), rtol=0, atol=0)


def test_it_suits_maps_of_up_to_three_axes_on_the_cpu_where_numba_is(monkeypatch):
    q, image = torch.zeros(1, 2, 4, 4), torch.zeros(1, 3, 4, 4)
    assert suits(q, image, WEIGHTS, (3, 3))
    assert not suits(q.to("meta"), image, WEIGHTS, (3, 3))
    assert not suits(q[..., None, None], image[..., None, None], WEIGHTS, (3,) * 4)
    monkeypatch.setattr(jobs, "installed", lambda tool: False)
    assert not suits(q, image, WEIGHTS, (3, 3))
