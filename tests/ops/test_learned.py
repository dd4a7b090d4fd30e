"""The locally connected sum: a filter of its own at every pixel, against loops."""

from __future__ import annotations

import pytest
import torch

from deepmrf import ops

CASES = [((7,), (4,)), ((4, 5), (3, 2)), ((3, 4), (9, 1)), ((2, 3, 4), (2, 3, 5)), ((2, 3, 2, 2), (3, 2, 1, 2))]


def make(size, window):
    q = torch.randn(2, 3, *size, dtype=torch.float64)
    return q, torch.randn(*window, *size, dtype=torch.float64)


def test_two_pixels():
    q = torch.tensor([[[2.0, 3.0]]])
    filters = torch.tensor([[10.0, 100.0], [0.5, 0.25]])  # what (previous, own) pixel weighs, at pixels 0 and 1
    torch.testing.assert_close(ops.local_sum(q, filters), torch.tensor([[[0.5 * 2, 100 * 2 + 0.25 * 3]]]))


@pytest.mark.parametrize(("size", "window"), CASES)
def test_equals_the_sum_over_pairs(size, window, pixels, neighbours, agree):
    q, filters = make(size, window)
    expected = torch.zeros_like(q)
    for j in pixels(size):
        for z in neighbours(j, window, size):
            offset = tuple(zz - jj + m // 2 for jj, zz, m in zip(j, z, window, strict=True))
            expected[(..., *j)] += filters[(*offset, *j)] * q[(..., *z)]
    agree(ops.local_sum(q, filters), expected)


@pytest.mark.parametrize(("size", "window"), CASES[:4])
def test_gradients(size, window):
    q, filters = make(size, window)
    assert torch.autograd.gradcheck(ops.local_sum, (q.requires_grad_(), filters.requires_grad_()))


def test_dtype_and_device_are_kept(device, dtype, agree):
    q, filters = make((4, 5), (3, 2))
    actual = ops.local_sum(q.to(device, dtype), filters.to(device, dtype))
    assert (actual.dtype, actual.device.type) == (dtype, device.type)
    agree(actual, ops.local_sum(q, filters))
