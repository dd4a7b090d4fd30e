"""Locally connected window sum: b12 in the paper's general form, where every position has a filter of its own.

    o[v, j] = sum over z in N(j) of k_j[z - j] q[v, z],     one filter k_j per position, shared by all labels

The paper learns such filters where images are homogeneous (aligned faces, people); they fix the size of the image.

Shapes: q (B, L, *S), filters (*M, *S) with M the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepmrf.ops.window import offsets, overlap, reaches


@torch.library.custom_op("deepmrf::local_sum", mutates_args=())
def _operator(q: Tensor, filters: Tensor) -> Tensor:
    window, size = filters.shape[: q.dim() - 2], q.shape[2:]
    sides = reaches(window)
    total = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for offset in offsets(sides, size, centre=True):
        j, z = overlap(offset, size)
        place = tuple(o + before for o, (before, _) in zip(offset, sides, strict=True))
        total[j].addcmul_(filters[place][j].to(q.dtype), q[z])
    return total


@torch.library.custom_op("deepmrf::local_sum_backward", mutates_args=())
def _operator_backward(grad: Tensor, q: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
    window, size = filters.shape[: q.dim() - 2], q.shape[2:]
    sides = reaches(window)
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_filters = torch.zeros_like(filters)
    for offset in offsets(sides, size, centre=True):
        j, z = overlap(offset, size)
        place = tuple(o + before for o, (before, _) in zip(offset, sides, strict=True))
        grad_q[z].addcmul_(filters[place][j].to(q.dtype), grad[j])
        grad_filters[place][j] = (grad[j] * q[z]).sum((0, 1)).to(filters.dtype)
    return grad_q, grad_filters


@_operator.register_fake
def _(q, filters):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@_operator_backward.register_fake
def _(grad, q, filters):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(filters)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad):  # type: ignore[no-untyped-def]
    return _operator_backward(grad, *ctx.saved_tensors)


_operator.register_autograd(_gradients, setup_context=_setup_context)


def local_sum(q: Tensor, filters: Tensor) -> Tensor:
    """The window sum above; see the head of this module. Returns o (B, L, *S)."""
    result: Tensor = _operator(q, filters)
    return result
