"""Locally connected window sum: b12 in the paper's general form, where every position has a filter of its own.

    o[v, j] = sum over z in N(j) of k_j[z - j] q[v, z],     one filter k_j per position, shared by all labels

The paper learns such filters where images are homogeneous (aligned faces, people); they fix the size of the image.

Shapes: q (B, L, *S), filters (*M, *S) with M the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepmrf.ops.registry import Operator
from deepmrf.ops.window import Cut, offsets, overlap, reaches


def _forward(q: Tensor, filters: Tensor) -> Tensor:
    total = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for index, j, z in _pairs(q, filters):
        total[j].addcmul_(filters[index][j].to(q.dtype), q[z])
    return total


def _backward(grad: Tensor, q: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
    grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grad_filters = torch.zeros_like(filters)
    for index, j, z in _pairs(q, filters):
        grad_q[z].addcmul_(filters[index][j].to(q.dtype), grad[j])
        grad_filters[index][j] = (grad[j] * q[z]).sum((0, 1)).to(filters.dtype)
    return grad_q, grad_filters


def _pairs(q: Tensor, filters: Tensor) -> Iterator[tuple[tuple[int, ...], Cut, Cut]]:
    """(index of the offset z - j in the filters, the pixels j, the pixels z) for every offset of the window."""
    size = q.shape[2:]
    sides = reaches(filters.shape[: len(size)])
    for offset in offsets(sides, size, centre=True):
        yield tuple(o + before for o, (before, _) in zip(offset, sides, strict=True)), *overlap(offset, size)


def _fake(q: Tensor, filters: Tensor) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _fake_backward(grad: Tensor, q: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(filters)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> Any:
    return operator.backward(grad, *ctx.saved_tensors)


operator = Operator(
    "local_sum", _forward, _backward, fake=_fake, fake_backward=_fake_backward, save=_save, gradients=_gradients
)


def local_sum(q: Tensor, filters: Tensor) -> Tensor:
    """The window sum above; see the head of this module. Returns o (B, L, *S)."""
    result: Tensor = operator(q, filters)
    return result
