"""Locally connected window sum: b12 in the paper's general form, where every position has a filter of its own.

    o[v, j] = sum over z in N(j) of k_j[z - j] q[v, z],     one filter k_j per position, shared by all labels

The paper learns such filters where images are homogeneous (aligned faces, people); they fix the size of the image.

Shapes: q (B, L, *S), filters (*M, *S) with M the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmrf.ops.registry import Implementation, Operator, Pair
from deepmrf.ops.window import Cut, offsets, overlap, reaches


class Arguments(NamedTuple):
    """The operator's arguments; see the head of this module."""

    q: Tensor
    filters: Tensor


def _pairs(a: Arguments) -> Iterator[tuple[tuple[int, ...], Cut, Cut]]:
    """(index of the offset z - j in the filters, the pixels j, the pixels z) for every offset of the window."""
    size = a.q.shape[2:]
    sides = reaches(a.filters.shape[: len(size)])
    for offset in offsets(sides, size, centre=True):
        yield tuple(o + before for o, (before, _) in zip(offset, sides, strict=True)), *overlap(offset, size)


def _forward(a: Arguments) -> Pair:
    total = torch.zeros_like(a.q, memory_format=torch.contiguous_format)
    for index, j, z in _pairs(a):
        total[j].addcmul_(a.filters[index][j].to(a.q.dtype), a.q[z])
    return total, a.q.new_empty(0)


def _fake(a: Arguments) -> Pair:
    return torch.empty_like(a.q, memory_format=torch.contiguous_format), a.q.new_empty(0)


def _backward(grad: Tensor, _: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    grad_q = torch.zeros_like(a.q, memory_format=torch.contiguous_format)
    grad_filters = torch.zeros_like(a.filters, memory_format=torch.contiguous_format)
    for index, j, z in _pairs(a):
        grad_q[z].addcmul_(a.filters[index][j].to(a.q.dtype), grad[j])
        grad_filters[index][j] = (grad[j] * a.q[z]).sum((0, 1)).to(a.filters.dtype)
    return grad_q, grad_filters


operator = Operator("local_sum", Arguments, Implementation("torch", _forward, _backward), _fake)


def local_sum(q: Tensor, filters: Tensor) -> Tensor:
    """The window sum above; see the head of this module. Returns o (B, L, *S)."""
    return operator(q, filters)
