"""b13 and b14: the convolution L -> K L and the minimum over K, against loops, and their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepmrf import ops
from deepmrf.ops import contexts

pytestmark = pytest.mark.usefixtures("plain_torch")

LABELS, K = 2, 3
CASES = [
    ((7,), (3,)),
    ((7,), (4,)),
    ((4, 5), (3, 3)),
    ((4, 5), (1, 1)),
    ((4, 5), (2, 9)),
    ((2, 3, 4), (3, 2, 1)),
    ((2, 3, 2, 2), (3, 2, 1, 2)),
    ((3, 1, 2, 2), (4, 3, 3, 3)),
]


def make(size, window):
    t = torch.randn(2, LABELS, *size, dtype=torch.float64)
    weight = torch.randn(LABELS * K, LABELS, *window, dtype=torch.float64)
    return t, weight, torch.randn(LABELS * K, dtype=torch.float64)


@pytest.fixture
def by_hand(pixels, neighbours):
    """o13 (B, L, K, *S): sum over v and j in N(i) of mu_k(u, v, j - i) t[v, j] + bias[u, k]."""

    def penalties(t, weight, bias):
        size, window = t.shape[2:], weight.shape[2:]
        o13 = np.zeros((t.shape[0], LABELS, K, *size))
        for i in pixels(size):
            for u in range(LABELS):
                for k in range(K):
                    o13[(slice(None), u, k, *i)] = bias[u * K + k]
                    for j in neighbours(i, window, size):
                        offset = tuple(jj - ii + n // 2 for ii, jj, n in zip(i, j, window, strict=True))
                        for v in range(LABELS):
                            mu = weight[(u * K + k, v, *offset)].item()
                            o13[(slice(None), u, k, *i)] += mu * t[(slice(None), v, *j)].numpy()
        return o13

    return penalties


def test_the_cheaper_of_two_patterns():
    t = torch.tensor([[[1.0, 2.0]]])
    weight = torch.tensor([[[1.0]], [[-3.0]]])
    bias = torch.tensor([0.0, 5.5])
    # the first pattern costs 1 and 2, the second 2.5 and -0.5
    torch.testing.assert_close(ops.label_contexts(t, weight, bias, 2), torch.tensor([[[1.0, -0.5]]]))


def test_a_pattern_points_at_where_the_other_label_is():
    """mu(u, v, j - i) at j = i - 1: a pixel pays for what stands before it."""
    t = torch.tensor([[[0.0, 1.0, 0.0]]])
    weight = torch.tensor([[[7.0, 0.0, 0.0]]])
    torch.testing.assert_close(ops.label_contexts(t, weight, torch.zeros(1), 1), torch.tensor([[[0.0, 0.0, 7.0]]]))


@pytest.mark.parametrize(("size", "window"), CASES)
def test_equals_loops(size, window, by_hand, agree):
    t, weight, bias = make(size, window)
    expected = by_hand(t, weight, bias).min(2)
    agree(ops.label_contexts(t, weight, bias, K), expected)
    agree(contexts.label_contexts_reference(t, weight, bias, K), expected)


@pytest.mark.parametrize(("size", "window"), CASES)
def test_gradients(size, window, by_hand):
    t, weight, bias = make(size, window)
    cheapest = np.sort(by_hand(t, weight, bias), axis=2)
    assert (cheapest[:, :, 1] - cheapest[:, :, 0]).min() > 1e-4, "a tie: the minimum has no derivative there"
    inputs = [x.requires_grad_() for x in (t, weight, bias)]
    assert torch.autograd.gradcheck(lambda *x: ops.label_contexts(*x, K), inputs)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradient_to_one_input_alone(wanted):
    inputs = list(make((4, 5), (3, 3)))
    inputs[wanted].requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: ops.label_contexts(*x, K), inputs)


def test_only_the_active_pattern_learns():
    weight = torch.tensor([[[1.0]], [[-3.0]]], requires_grad=True)
    ops.label_contexts(torch.tensor([[[1.0, 2.0]]]), weight, torch.zeros(2), 2).sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[[0.0]], [[3.0]]]))


def test_dtype_and_device_are_kept(device, dtype, agree):
    t, weight, bias = make((4, 5), (3, 3))
    actual = ops.label_contexts(*[x.to(device, dtype) for x in (t, weight, bias)], K)
    assert (actual.dtype, actual.device.type) == (dtype, device.type)
    agree(actual, ops.label_contexts(t, weight, bias, K))


def test_non_contiguous_maps(agree):
    t, weight, bias = make((4, 5), (3, 3))
    expected = ops.label_contexts(t, weight, bias, K)
    agree(ops.label_contexts(t.transpose(1, 3).contiguous().transpose(1, 3), weight, bias, K), expected)
