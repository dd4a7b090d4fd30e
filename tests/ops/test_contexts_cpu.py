"""The frequency-domain contexts equal the plain ones, forward and backward, for every odd shape."""

from __future__ import annotations

import pytest
import torch

from deepmrf.ops import contexts as plain
from deepmrf.ops.contexts.cpu import IMPLEMENTATION, TILE_SIDES
from deepmrf.ops.registry import gradients

# batch, labels, K, image, filter; few different numbers of labels and K, since each compiles kernels of its own
CASES = [
    pytest.param(1, 3, 3, (5, 4), (3, 3), id="small"),
    pytest.param(1, 3, 3, (1, 1), (9, 9), id="one pixel"),
    pytest.param(2, 3, 3, (63, 41), (5, 5), id="batch of two"),
    pytest.param(1, 3, 3, (17, 30), (4, 2), id="even, rectangular"),
    pytest.param(2, 3, 3, (40, 25), (1, 5), id="one row"),
    pytest.param(1, 3, 3, (3, 2), (9, 8), id="filter larger than the image"),
    pytest.param(1, 3, 3, (30, 50), (1, 1), id="1 x 1"),
]
SINGLE = [
    pytest.param(1, 3, 3, (8, 6), (21, 30), id="filter much larger than the image"),
    pytest.param(1, 3, 3, (513, 17), (9, 9), id="long and narrow"),
    pytest.param(1, 3, 1, (33, 20), (3, 3), id="K=1"),
    pytest.param(1, 11, 3, (20, 40), (5, 3), id="labels in blocks"),
    pytest.param(1, 3, 3, (70, 90), (31, 40), id="tiles of 64"),
]
ALL = [
    pytest.param(*case.values, dtype, tolerance, id=f"{case.id}, {str(dtype)[6:]}")
    for dtype, tolerance, cases in ((torch.float32, 1e-5, CASES + SINGLE), (torch.float64, 1e-12, CASES))
    for case in cases
]


def example(batch, labels, contexts, image, window, dtype=torch.float64):
    """(t, weight, bias) of normal numbers."""
    make = torch.Generator().manual_seed(sum(image) * 31 + sum(window))

    def normal(*shape):
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    channels = labels * contexts
    return normal(batch, labels, *image), normal(channels, labels, *window), normal(channels)


def forward(t, weight, bias, patterns, by=IMPLEMENTATION):
    return by.forward(plain.Arguments(t, weight, bias, patterns))


def backward(grad, active, t, weight, patterns, t_too, weight_too, by=IMPLEMENTATION):
    arguments = plain.Arguments(t, weight, weight.new_zeros(len(weight)), patterns)
    return gradients(by, grad, active, arguments, (t_too, weight_too, True))


def suits(t, weight, patterns):
    return IMPLEMENTATION.suits(plain.Arguments(t, weight, weight.new_zeros(len(weight)), patterns))


def assert_close(name, result, expected, tolerance):
    """The largest difference, relative to the largest value."""
    assert result.shape == expected.shape, name
    error = (result.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    assert error < tolerance, f"{name}: {error:.1e}"


def test_equals_the_equations():
    t, weight, bias = example(2, 3, 3, (5, 4), (3, 4))
    expected = plain.label_contexts_reference(t, weight, bias, 3)
    assert_close("o14", forward(t, weight, bias, 3)[0], expected, 1e-12)


@pytest.mark.parametrize("batch, labels, contexts, image, window, dtype, tolerance", ALL)
def test_forward_equals_the_convolution(batch, labels, contexts, image, window, dtype, tolerance):
    t, weight, bias = example(batch, labels, contexts, image, window, dtype)
    o14, active = forward(t, weight, bias, contexts)
    exact = [x.double() for x in (t, weight, bias)]
    expected, expected_active = forward(*exact, contexts, by=plain.operator.plain)
    assert o14.dtype == dtype
    assert active.dtype == torch.uint8
    assert o14.is_contiguous()
    assert_close("o14", o14, expected, tolerance)

    o13 = plain.window_convolution(*exact[:2]) + exact[2].view(-1, 1, 1)
    smallest = o13.unflatten(1, (-1, contexts)).sort(2).values[:, :, :2]
    clear = torch.ones_like(expected, dtype=torch.bool)
    if contexts > 1:
        clear = smallest[:, :, 1] - smallest[:, :, 0] > 10 * tolerance * expected.abs().max()
    assert clear.double().mean() > 0.9
    assert torch.equal(active[clear], expected_active[clear])


@pytest.mark.parametrize("batch, labels, contexts, image, window, dtype, tolerance", ALL)
def test_backward_equals_the_convolution(batch, labels, contexts, image, window, dtype, tolerance):
    t, weight, bias = example(batch, labels, contexts, image, window, dtype)
    grad = example(batch, labels, contexts, image, window[::-1], dtype)[0]
    active = forward(t, weight, bias, contexts, by=plain.operator.plain)[1]
    result = backward(grad, active, t, weight, contexts, True, True)
    expected = backward(
        grad.double(), active, t.double(), weight.double(), contexts, True, True, by=plain.operator.plain
    )
    for name, actual, wanted in zip(("t", "weight", "bias"), result, expected, strict=True):
        assert actual.dtype == dtype
        assert_close(f"gradient to {name}", actual, wanted, tolerance)


@pytest.mark.parametrize("t_too, weight_too", [(True, False), (False, True), (False, False)])
def test_backward_computes_what_is_asked_for(t_too, weight_too):
    t, weight, bias = example(1, 3, 3, (5, 4), (3, 3))
    active = forward(t, weight, bias, 3, by=plain.operator.plain)[1]
    result = backward(torch.ones_like(t), active, t, weight, 3, t_too, weight_too)
    expected = backward(torch.ones_like(t), active, t, weight, 3, t_too, weight_too, by=plain.operator.plain)
    for name, actual, wanted in zip(("t", "weight", "bias"), result, expected, strict=True):
        assert actual.shape == wanted.shape, name
        if actual.numel():
            assert_close(f"gradient to {name}", actual, wanted, 1e-12)


def test_any_memory_layout():
    t, weight, bias = example(2, 3, 3, (12, 20), (3, 5))
    expected, active = forward(t, weight, bias, 3)
    apart = t.transpose(2, 3).contiguous().transpose(2, 3), weight.flip(0).contiguous().flip(0), bias.repeat(2)[:9]
    last = t.contiguous(memory_format=torch.channels_last), weight, bias
    for given in (apart, last):
        assert torch.equal(forward(*given, 3)[0], expected)
    grads = backward(expected, active, t, weight, 3, True, True)
    strided = expected.transpose(1, 2).contiguous().transpose(1, 2)
    others = backward(strided, active, apart[0], apart[1], 3, True, True)
    for name, actual, wanted in zip(("t", "weight", "bias"), grads, others, strict=True):
        assert torch.equal(actual, wanted), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_single(dtype):
    t, weight, bias = example(1, 3, 3, (20, 30), (3, 3), dtype)
    o14, active = forward(t, weight, bias, 3)
    expected = forward(t.float(), weight.float(), bias.float(), 3, by=plain.operator.plain)[0]
    assert o14.dtype == dtype
    assert_close("o14", o14, expected, torch.finfo(dtype).eps)
    for actual in backward(o14, active, t, weight, 3, True, True):
        assert actual.dtype == dtype


def test_the_same_result_every_time_and_with_any_number_of_threads():
    t, weight, bias = example(2, 3, 3, (63, 41), (5, 5), torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (2, 2, 1, 3):
            torch.set_num_threads(threads)
            o14, active = forward(t, weight, bias, 3)
            results.append((o14, active, *backward(o14, active, t, weight, 3, True, True)))
    finally:
        torch.set_num_threads(before)
    for first, second in zip(results[0], results[1], strict=True):
        assert torch.equal(first, second)
    for run in results[2:]:
        for name, first, second in zip(("o14", "active", "t"), run[:3], results[0][:3], strict=True):
            assert torch.equal(first, second), name
        assert_close("gradient to weight", run[3], results[0][3], 1e-6)


def test_what_does_not_suit_is_left_to_pytorch():
    t, weight, _ = example(1, 3, 3, (5, 4), (3, 3))
    assert not suits(t, weight, 3)  # too small to be worth it
    large = torch.empty(1, 21, 512, 512), torch.empty(105, 21, 9, 9), torch.empty(105)
    assert suits(*large[:2], 5)
    assert not suits(*[x.to("meta") for x in large[:2]], 5)
    assert not suits(torch.empty(1, 21, 4096), torch.empty(105, 21, 9), 5)
    too_large = TILE_SIDES[-1][0] + 1
    assert not suits(large[0], torch.empty(105, 21, too_large, 3), 5)


@pytest.mark.parametrize("image, window", [((50,), (3,)), ((4, 5, 6), (3, 3, 3)), ((60, 5), (43, 3))])
def test_asked_anyway_gives_the_plain_result(image, window):
    t, weight, bias = example(1, 3, 3, image, window)
    o14, active = forward(t, weight, bias, 3)
    expected = forward(t, weight, bias, 3, by=plain.operator.plain)
    assert_close("o14", o14, expected[0], 1e-12)
    grads = backward(o14, active, t, weight, 3, True, True)
    for actual, wanted in zip(
        grads, backward(o14, active, t, weight, 3, True, True, by=plain.operator.plain), strict=True
    ):
        assert_close("gradient", actual, wanted, 1e-12)
