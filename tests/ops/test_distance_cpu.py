"""The compiled distance kernel on the CPU against the equation, its gradients against autograd's."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from deepmrf.ops import jobs
from deepmrf.ops.distance import Arguments, distance_penalty_reference
from deepmrf.ops.distance.cpu import IMPLEMENTATION
from deepmrf.ops.registry import gradients
from deepmrf.ops.window import box_sum, reaches

pytest.importorskip("numba")

WEIGHTS = torch.tensor([0.7, 0.3, -0.2], dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def forward(*given) -> tuple[Tensor, Tensor]:
    return IMPLEMENTATION.forward(Arguments(*given))


def backward(grad: Tensor, ungated: Tensor, *given) -> tuple[Tensor, ...]:
    *given, features_too = given
    return gradients(IMPLEMENTATION, grad, ungated, Arguments(*given, True), (True, features_too, True))


def suits(*given) -> bool:
    return IMPLEMENTATION.suits(Arguments(*given, (1.0, 1.0), True, False))


CASES = [
    # size, window, spacing, labels, features: each number of features compiles kernels of its own
    ((1,), (1,), (1.0,), 1, 1),
    ((40,), (50,), (1.5,), 3, 3),
    ((1, 1), (5, 5), (1.0, 1.0), 2, 3),
    ((1, 9), (2, 2), (1.0, 1.0), 2, 0),
    ((63, 5), (5, 5), (1.0, 1.0), 9, 3),
    ((33, 31), (50, 7), (1.0, 2.0), 2, 7),
    ((40, 21), (2, 5), (0.5, 1.0), 3, 7),
    ((5, 6), (1, 1), (1.0, 1.0), 2, 3),
    ((4, 5, 6), (3, 2, 5), (1.0, 1.0, 1.0), 2, 3),
    ((3, 7, 2), (50, 1, 4), (2.0, 1.0, 0.5), 2, 3),
    ((12, 3, 4), (2, 2, 2), (1.0, 1.0, 1.0), 2, 0),
    ((4, 9, 10), (2, 4, 3), (0.7, 1.0, 2.0), 19, 3),
    ((9, 5, 6), (6, 2, 5), (2.0, 1.0, 0.5), 2, 3),
    ((4, 7, 6), (50, 3, 2), (1.0, 1.0, 1.5), 1, 0),
    ((70, 64), (9, 20), (1.0, 1.0), 8, 3),
    ((3, 130), (2, 150), (1.0, 1.0), 10, 1),
]


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("size, window, spacing, labels, features", CASES)
def test_result_and_every_gradient_agree_with_the_equation(size, window, spacing, labels, features, gate):
    q, image = draw(2, labels, *size), draw(2, features, *size, seed=1)
    inputs = [x.clone().requires_grad_() for x in (q, image, WEIGHTS)]
    expected = distance_penalty_reference(*inputs, window, spacing, gate)
    grad = draw(*expected.shape, seed=2) - 0.5
    expected_gradients = torch.autograd.grad(expected, inputs, grad, allow_unused=True)

    out, ungated = forward(q, image, WEIGHTS, window, spacing, gate, True)
    assert_close(out, expected.detach(), rtol=1e-10, atol=1e-11)
    results = backward(grad, ungated, q, image, WEIGHTS, window, spacing, gate, True)
    for name, got, wanted in zip(("q", "features", "weights"), results, expected_gradients, strict=True):
        wanted = torch.zeros_like(got) if wanted is None else wanted
        assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"gradient to {name}: {m}")

    alone, nothing = forward(q, image, WEIGHTS, window, spacing, gate, False)
    assert_close(alone, out)
    assert nothing.shape == (0,)
    without = backward(grad, ungated, q, image, WEIGHTS, window, spacing, gate, False)
    assert without[1].shape == (0,)
    assert_close(without[0], results[0])


def test_float32_stays_exact_where_the_image_jumps_from_0_to_255():
    q = draw(1, 2, 48, 120).softmax(1)
    image = draw(1, 3, 48, 120, seed=1)
    image[..., 60:] += 254
    weights = torch.tensor([1.0, 0.01, 0.0], dtype=torch.float64)
    q32, image32 = q.float(), image.float()
    expected = distance_penalty_reference(q32.double(), image32.double(), weights, (11, 11), (1.0, 1.0), True)
    out, ungated = forward(q32, image32, weights.float(), (11, 11), (1.0, 1.0), True, True)
    assert out.dtype == ungated.dtype == torch.float32
    assert_close(out.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_are_computed_in_float32_and_returned_as_they_came(dtype):
    q, image = draw(1, 3, 12, 13).to(dtype), draw(1, 3, 12, 13, seed=1).to(dtype)
    expected = distance_penalty_reference(q.double(), image.double(), WEIGHTS, (5, 5), (1.0, 1.0), True)
    out, ungated = forward(q, image, WEIGHTS.float(), (5, 5), (1.0, 1.0), True, True)
    assert out.dtype == ungated.dtype == dtype
    tolerance = torch.finfo(dtype).eps
    assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    got = backward(out, ungated, q, image, WEIGHTS.float(), (5, 5), (1.0, 1.0), True, True)
    assert [x.dtype for x in got] == [dtype, dtype, torch.float32]


def test_bytes_stand_for_their_255th_part():
    q, bytes_ = draw(1, 3, 12, 13), (draw(1, 3, 12, 13, seed=1) * 255).to(torch.uint8)
    arguments = (WEIGHTS, (5, 5), (1.0, 1.0), True, True)
    for got, wanted in zip(
        forward(q, bytes_, *arguments),
        forward(q, bytes_.double() / 255, *arguments),
        strict=True,
    ):
        assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_inputs_need_not_be_contiguous():
    q, image = draw(14, 13, 2, 3).permute(2, 3, 1, 0), draw(2, 13, 28, 3, seed=1).permute(0, 3, 1, 2)[..., ::2]
    grad = draw(1, 1, 13, 1, seed=2).expand(q.shape)
    arguments = (WEIGHTS, (5, 4), (1.0, 1.0), True)
    out, ungated = forward(q, image, *arguments, True)
    wanted, wanted_ungated = forward(q.contiguous(), image.contiguous(), *arguments, True)
    assert out.is_contiguous()
    assert_close(out, wanted, rtol=0, atol=0)
    got = backward(grad, ungated, q, image, *arguments, True)
    plain = backward(grad.contiguous(), wanted_ungated, q.contiguous(), image.contiguous(), *arguments, True)
    assert_close(got, plain, rtol=0, atol=0)


def test_every_pixel_of_every_strip_is_written(monkeypatch):
    monkeypatch.setattr(
        "deepmrf.ops.distance.cpu.empty", lambda size, dtype: torch.full(tuple(size), torch.nan, dtype=dtype)
    )
    q, image = draw(1, 17, 100, 9), draw(1, 3, 100, 9, seed=1)
    out, ungated = forward(q, image, WEIGHTS, (5, 5), (1.0, 1.0), True, True)
    got = backward(out, ungated, q, image, WEIGHTS, (5, 5), (1.0, 1.0), True, True)
    assert all(torch.isfinite(x).all() for x in (out, ungated, *got))


@pytest.mark.parametrize("where", ["q", "features"])
@pytest.mark.parametrize("size", [(40, 30), (5, 11, 12)])
def test_a_nan_reaches_the_windows_that_hold_it_and_no_others(where, size):
    window, spacing = (4,) * len(size), (1.0,) * len(size)
    q, image = draw(1, 2, *size), draw(1, 3, *size, seed=1)
    at = tuple(n // 3 for n in size)
    (q if where == "q" else image)[(0, 1, *at)] = torch.nan
    bad = torch.isnan(q) if where == "q" else torch.isnan(image).any(1, keepdim=True).expand(q.shape)

    out, ungated = forward(q, image, WEIGHTS, window, spacing, True, True)
    assert_close(torch.isnan(out), box_sum(bad.double(), reaches(window)) > 0.5)
    clean = [torch.nan_to_num(x) for x in (q, image)]
    expected = distance_penalty_reference(*clean, WEIGHTS, window, spacing, True)
    assert_close(out[~torch.isnan(out)], expected[~torch.isnan(out)], rtol=1e-10, atol=1e-10)

    grad_q, grad_features, grad_weights = backward(
        torch.ones_like(q), ungated, q, image, WEIGHTS, window, spacing, True, True
    )
    reached = box_sum(bad.double(), reaches(window, mirrored=True)) + box_sum(bad.double(), reaches(window)) > 0.5
    assert_close(torch.isnan(grad_q), reached)
    assert_close(torch.isnan(grad_features), reached.any(1, keepdim=True).expand(image.shape))
    assert torch.isnan(grad_weights[0])


def test_several_threads_may_call_it_at_once():
    q, image = draw(1, 5, 60, 40), draw(1, 3, 60, 40, seed=1)

    def call(window: int) -> Tensor:
        return forward(q, image, WEIGHTS, (window, window), (1.0, 1.0), True, False)[0]

    windows = [3, 5, 7, 9] * 6
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(call, windows))
    for window, got in zip(windows, together, strict=True):
        assert_close(got, call(window), rtol=0, atol=0)


def _in_a_child() -> None:
    q, image = draw(1, 5, 60, 40), draw(1, 3, 60, 40, seed=1)
    forward(q, image, WEIGHTS, (5, 5), (1.0, 1.0), True, False)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_it_runs_in_a_forked_child():
    _in_a_child()
    child = multiprocessing.get_context("fork").Process(target=_in_a_child)
    child.start()
    child.join(30)
    code = child.exitcode
    if code is None:
        child.kill()
    assert code == 0


def test_it_suits_maps_of_up_to_three_axes_on_the_cpu_where_numba_is(monkeypatch):
    q, image = torch.zeros(1, 2, 4, 4), torch.zeros(1, 3, 4, 4)
    assert suits(q, image, WEIGHTS, (3, 3))
    assert not suits(q.to("meta"), image, WEIGHTS, (3, 3))
    assert not suits(q[..., None, None], image[..., None, None], WEIGHTS, (3,) * 4)
    assert not suits(q[:, :0], image, WEIGHTS, (3, 3))
    monkeypatch.setattr(jobs, "installed", lambda tool: False)
    assert not suits(q, image, WEIGHTS, (3, 3))
