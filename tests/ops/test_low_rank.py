"""Cheaper contexts: exact at full rank and stride 1, as far off as they say below."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from deepmrf.ops.contexts import label_contexts, window_convolution
from deepmrf.ops.contexts.low_rank import coarse_filters, low_rank_contexts, separate, strided_contexts


def example(image=(12, 9), window=(3, 5), labels=3, contexts=2):
    torch.manual_seed(0)
    channels = labels * contexts
    return (
        torch.randn(2, labels, *image, dtype=torch.float64),
        torch.randn(channels, labels, *window, dtype=torch.float64),
        torch.randn(channels, dtype=torch.float64),
    )


def joined(first, second):
    """The filters that two factors stand for."""
    return torch.einsum("rvy,urx->uvyx", first[..., 0], second[:, :, 0])


@pytest.mark.parametrize("window", [(3, 5), (4, 6), (1, 3)])
def test_full_rank_is_exact(window):
    t, weight, bias = example(window=window)
    first, second, error = separate(weight, 3 * window[0])
    assert error < 1e-12
    torch.testing.assert_close(joined(first, second), weight)
    torch.testing.assert_close(low_rank_contexts(t, first, second, bias, 2), label_contexts(t, weight, bias, 2))


def test_error_is_what_it_says_and_falls_with_the_rank():
    _, weight, _ = example()
    errors = []
    for rank in range(1, 10):
        first, second, error = separate(weight, rank)
        assert (first.shape, second.shape) == ((rank, 3, 3, 1), (6, rank, 1, 5))
        assert error == pytest.approx(float((joined(first, second) - weight).norm() / weight.norm()), abs=1e-12)
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors)


def test_low_rank_equals_the_contexts_of_the_joined_filters():
    t, weight, bias = example()
    first, second, _ = separate(weight, 2)
    expected = label_contexts(t, joined(first, second), bias, 2)
    torch.testing.assert_close(low_rank_contexts(t, first, second, bias, 2), expected)


@pytest.mark.parametrize("rank", [0, 10])
def test_rank_out_of_range(rank):
    with pytest.raises(ValueError, match="between 1 and 9"):
        separate(example()[1], rank)


def test_gradients_of_low_rank():
    t, weight, bias = (x.requires_grad_() for x in example(image=(3, 2), window=(2, 3), labels=2))
    first, second, _ = separate(weight, 2)
    factors = first.requires_grad_(), second.requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: low_rank_contexts(*given, 2), (t, *factors, bias), fast_mode=True)


def test_gradients_of_strided():
    t, weight, bias = (x.requires_grad_() for x in example(image=(5, 3), window=(2, 3), labels=2))
    assert torch.autograd.gradcheck(lambda *given: strided_contexts(*given, 2, 2), (t, weight, bias), fast_mode=True)


def test_stride_1_is_exact():
    t, weight, bias = example()
    first, second, _ = separate(weight, 9)
    expected = label_contexts(t, weight, bias, 2)
    torch.testing.assert_close(strided_contexts(t, weight, bias, 2, 1), expected)
    torch.testing.assert_close(strided_contexts(t, (first, second), bias, 2, 1), expected)


@pytest.mark.parametrize("stride", [2, 3, 4])
@pytest.mark.parametrize("window", [(9, 9), (4, 6), (1, 5)])
def test_coarse_filters_give_the_mean_over_blocks(window, stride):
    t, weight, _ = example(image=(12, 24), window=window)
    blocks = functional.avg_pool2d(t, stride)
    constant = blocks.repeat_interleave(stride, 2).repeat_interleave(stride, 3)
    expected = functional.avg_pool2d(window_convolution(constant, weight), stride)
    torch.testing.assert_close(window_convolution(blocks, coarse_filters(weight, stride)), expected)


@pytest.mark.parametrize("image", [(12, 9), (7, 8), (1, 1), (3, 40)])
@pytest.mark.parametrize("stride", [2, 3])
def test_factors_and_filters_agree_at_a_stride(image, stride):
    t, weight, bias = example(image=image, window=(5, 5))
    first, second, _ = separate(weight, 15)
    result = strided_contexts(t, (first, second), bias, 2, stride)
    assert result.shape == t.shape
    torch.testing.assert_close(result, strided_contexts(t, weight, bias, 2, stride))


def test_a_stride_changes_little_where_everything_is_smooth():
    _, weight, bias = example(window=(9, 9))
    coarse = torch.randn(1, 3, 6, 6, dtype=torch.float64)
    t = functional.interpolate(coarse, size=(96, 96), mode="bicubic")
    inside = (..., slice(8, -8), slice(8, -8))  # t ends abruptly at the border of the image
    exact = label_contexts(t, weight, bias, 2)[inside]
    errors = [
        float((strided_contexts(t, weight, bias, 2, s)[inside] - exact).abs().mean() / exact.std()) for s in (2, 3, 4)
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.03


def test_stride_out_of_range():
    with pytest.raises(ValueError, match="at least 1 pixel"):
        strided_contexts(*example(), 2, 0)
