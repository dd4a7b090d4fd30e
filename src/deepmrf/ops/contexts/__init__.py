"""Mixture of local label contexts: b13, a convolution L -> K L, then b14, the minimum over each group of K.

    o13[u, k, i] = sum over v and j in N(i) of mu_k(u, v, j - i) t[v, j] + bias[u, k]
    o14[u, i]    = min over k of o13[u, k, i]

mu_k(u, v, .) is what label u pays at i when label v is paid for at j: learned, not symmetric, one n x n (x T) pattern
per pair of labels and component. The minimum activates the pattern with the smallest penalty (lambda_k in the paper).

Shapes: t (B, L, *S), weight (L * K, L, *N), bias (L * K,); the K patterns of a label stand together. There may be more
maps in t, and as many in weight, than labels that pay: several frames' worth of them, say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops.registry import Implementation, Operator, Pair
from deepmrf.ops.window import Cut, reaches


class Arguments(NamedTuple):
    """The operator's arguments; see the head of this module."""

    t: Tensor
    weight: Tensor
    bias: Tensor
    contexts: int


_CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def label_contexts_reference(t: Tensor, weight: Tensor, bias: Tensor, contexts: int) -> Tensor:
    """The equations above, one pair of pixels at a time: O(pixels^2 L^2 K). For readers and tests only."""
    size, window = t.shape[2:], weight.shape[2:]
    pixels = [tuple(p) for p in torch.cartesian_prod(*[torch.arange(n) for n in size]).view(-1, len(size)).tolist()]
    o13 = []
    for i in pixels:
        paid = bias[None].expand(t.shape[0], -1)  # (B, L * K)
        for j in pixels:
            at = [jj - ii + before for jj, ii, (before, _) in zip(j, i, reaches(window), strict=True)]
            if all(0 <= a < n for a, n in zip(at, window, strict=True)):
                paid = paid + t[(..., *j)] @ weight[(..., *at)].T
        o13.append(paid.reshape(len(t), -1, contexts))
    smallest: Tensor = torch.stack(o13, -1).min(2).values
    return smallest.view(len(t), -1, *size)


def window_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Correlation of x (B, C, *S) with weight (D, C, *N), zeros outside, for any number of axes. Returns (B, D, *S)."""
    sides = reaches(weight.shape[2:])
    if x.dim() - 2 > 3:  # PyTorch convolves three axes at most: sum over the offsets along the first
        (before, after), size = sides[0], x.shape[2]
        parts = [[] for _ in range(size)]  # type: list[list[Tensor]]
        for offset in range(-min(before, size - 1), min(after, size - 1) + 1):
            for to in range(max(0, -offset), size - max(0, offset)):
                parts[to].append(window_convolution(x[:, :, to + offset], weight[:, :, offset + before]))
        return torch.stack([torch.stack(p).sum(0) for p in parts], dim=2)
    convolve = _CONV[x.dim() - 2]
    if all(before == after for before, after in sides):
        return convolve(x, weight, padding=[before for before, _ in sides])
    border: Sequence[int] = [side for before_after in reversed(sides) for side in before_after]
    return convolve(functional.pad(x, border), weight)


def _forward(a: Arguments) -> Pair:
    """(o14, which of the K patterns is active as uint8)."""
    o13 = window_convolution(a.t, a.weight).add_(a.bias.view(-1, *[1] * (a.t.dim() - 2)))  # (B, L * K, *S)
    smallest = o13.view(len(o13), -1, a.contexts, *o13.shape[2:]).min(2)  # (B, L, *S)
    return smallest.values, smallest.indices.to(torch.uint8)


def _fake(a: Arguments) -> Pair:
    out = a.t.new_empty(a.t.shape[0], a.weight.shape[0] // a.contexts, *a.t.shape[2:])
    return out, torch.empty_like(out, dtype=torch.uint8)


def _backward(grad: Tensor, active: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    """Only the active pattern of each label and pixel gets the gradient, then the two adjoints of the convolution."""
    spread = grad.new_zeros(grad.shape[0], grad.shape[1], a.contexts, *grad.shape[2:])
    spread.scatter_(2, active.long().unsqueeze(2), grad.unsqueeze(2))
    spread = spread.flatten(1, 2)  # (B, L * K, *S)
    sides = reaches(a.weight.shape[2:])
    padded = functional.pad(a.t, [side for before_after in reversed(sides) for side in before_after])
    ones, zeros = [1] * (a.t.dim() - 2), [0] * (a.t.dim() - 2)
    grad_padded, grad_weight, _ = torch.ops.aten.convolution_backward(
        spread, padded, a.weight, None, ones, zeros, ones, False, zeros, 1, [*needed[:2], False]
    )
    cut: Cut = (..., *[slice(before, before + n) for (before, _), n in zip(sides, a.t.shape[2:], strict=True)])
    grad_t = grad_padded[cut].contiguous() if needed[0] else None
    return grad_t, grad_weight, spread.sum((0, *range(2, spread.dim())))


operator = Operator(
    "label_contexts",
    Arguments,
    Implementation("torch", _forward, _backward),
    _fake,
    kernels={"triton": "deepmrf.ops.contexts.gpu", "numba": "deepmrf.ops.contexts.cpu"},
)


def label_contexts(t: Tensor, weight: Tensor, bias: Tensor, contexts: int) -> Tensor:
    """b13 and b14; see the head of this module. Returns o14 (B, L, *S)."""
    if t.dim() - 2 <= 3:
        return operator(t, weight, bias, contexts)
    o13 = window_convolution(t, weight) + bias.view(-1, *[1] * (t.dim() - 2))
    return o13.view(len(t), -1, contexts, *t.shape[2:]).min(2).values
