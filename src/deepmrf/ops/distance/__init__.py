"""The triple penalty's window sum for the distance kernel (b12), exact and independent of the window's size.

    t[v, j] = g * sum over z in N(j) of d(j, z) q[v, z] + w_bias,     g = q[v, j] with the gate, 1 without
    d(j, z) = w_colour |I_j - I_z|^2 + w_position |j - z|^2

Opened, the colour term is |I_j|^2 Box(q)_j - 2 I_j . Box(I q)_j + Box(|I|^2 q)_j, and the position term is made of
moments of q inside the window. Box sums and moments come from running sums, so nothing grows with the window.
d is symmetric, so the adjoint is the same sum over the mirrored window.

Shapes: q (B, L, *S), features (B, F, *S) with F >= 0, weights (3,) = (w_colour, w_position, w_bias).
uint8 features stand for value / 255.
With `frame`, an index along the first axis, t is computed for the pixels j there alone: (B, L, *S[1:]).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops.registry import Implementation, Operator, Pair, needs_gradient
from deepmrf.ops.window import (
    ALL,
    Cut,
    Reach,
    accumulator,
    at_frame,
    box_sum,
    box_sum_and_spread,
    empty_penalty,
    of_all_frames,
    reaches,
    unit_features,
)


class Arguments(NamedTuple):
    """The operator's arguments; see the head of this module."""

    q: Tensor
    features: Tensor
    weights: Tensor
    window: Sequence[int]
    spacing: Sequence[float]
    """The distance between pixels along each axis."""
    gate: bool
    keep: bool
    """Is the window sum before the gate a second result? The gate's gradient needs it again."""
    frame: int = ALL


CHUNK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Temporaries a chunk of labels may take: memory then grows neither with the window nor with the labels."""


def distance_penalty_reference(
    q: Tensor, features: Tensor, weights: Tensor, window: Sequence[int], spacing: Sequence[float], gate: bool
) -> Tensor:
    """The equation above, one window offset at a time. Slow: for readers and tests only."""
    w_colour, w_position, w_bias = weights
    size, sides = q.shape[2:], reaches(window)
    border = [side for before_after in reversed(sides) for side in before_after]
    q_padded, features_padded = functional.pad(q, border), functional.pad(features, border)
    total = torch.zeros_like(q)
    for start in itertools.product(*[range(m) for m in window]):
        z: Cut = (..., *[slice(p, p + n) for p, n in zip(start, size, strict=True)])
        d_colour = (features - features_padded[z]).square().sum(1, keepdim=True)  # (B, 1, *S)
        steps = [(p - before) * s for p, (before, _), s in zip(start, sides, spacing, strict=True)]
        total = total + (w_colour * d_colour + w_position * sum(s * s for s in steps)) * q_padded[z]
    result: Tensor = (q * total if gate else total) + w_bias
    return result


def maps(features: Tensor) -> list[Tensor]:
    """The features one by one, (B, 1, *S) each; none of them if there are none."""
    return [features[:, f : f + 1] for f in range(features.shape[1])]


def _centred(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Features about their mean: distances do not change, cancellation shrinks."""
    real = unit_features(features, dtype)
    return real - real.mean(dim=tuple(range(2, real.dim())), keepdim=True)


def _label_chunks(q: Tensor, maps: int) -> Iterator[slice]:
    """Cuts of the label axis such that `maps` temporaries of each fit the budget, at least one label at a time."""
    budget = CHUNK_BYTES.get(q.device.type, CHUNK_BYTES["cpu"])
    per_label = q.shape[0] * q[0, 0].numel() * 8 * maps
    step = max(1, budget // max(per_label, 1))
    for start in range(0, q.shape[1], step):
        yield slice(start, start + step)


class _Sums:
    """Colour and position sums of one chunk of maps x (B, l, *S), and the box sums a features' gradient needs."""

    def __init__(
        self, x: Tensor, features: Tensor, window: list[Reach], spacing: Sequence[float], frame: int = ALL
    ) -> None:
        self.box, self.position = box_sum_and_spread(x, window, spacing, frame)
        self.box_features: list[Tensor] = []  # Box(I_f x), a map per feature
        norm = torch.zeros_like(x[:, :1])
        self.colour = torch.zeros_like(self.box)
        for feature in maps(features):
            norm += feature * feature
            self.box_features.append(box_sum(feature * x, window, frame))
            self.colour.addcmul_(at_frame(feature, frame), self.box_features[-1], value=-2)
        if self.box_features:
            self.colour.addcmul_(at_frame(norm, frame), self.box).add_(box_sum(norm * x, window, frame))

    def pull(self, x: Tensor, features: Tensor) -> Tensor:
        """sum over labels of x_j (I_j Box_j - Box(I .)_j): half the gradient of <x, colour> to I. (B, F, *S)"""
        parts = [
            (x * (feature * self.box - boxed)).sum(1, keepdim=True)
            for feature, boxed in zip(maps(features), self.box_features, strict=True)
        ]
        return torch.cat(parts, dim=1) if parts else torch.zeros_like(features)


def _forward(a: Arguments) -> Pair:
    dtype = accumulator(a.q)
    real = _centred(a.features, dtype)
    w_colour, w_position, w_bias = a.weights.to(dtype)
    out, ungated = empty_penalty(a.q, a.keep, a.frame)
    for chunk in _label_chunks(a.q, 8 + real.shape[1]):
        part = a.q[:, chunk].to(dtype)
        sums = _Sums(part, real, reaches(a.window), a.spacing, a.frame)
        total = sums.colour.mul_(w_colour).add_(sums.position.mul_(w_position))
        shape = out[:, chunk].shape  # without an axis for a single frame
        if a.keep:
            ungated[:, chunk] = total.view(shape)
        out[:, chunk] = (total.mul_(at_frame(part, a.frame)) if a.gate else total).add_(w_bias).view(shape)
    return out, ungated


def _backward(grad: Tensor, ungated: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    dtype = accumulator(a.q)
    real = _centred(a.features, dtype)
    w_colour, w_position, _ = a.weights.to(dtype)
    grad_q = torch.empty_like(a.q, memory_format=torch.contiguous_format)
    grad_features = torch.zeros_like(real) if needed[1] else None
    grad_weights = torch.zeros(3, dtype=dtype, device=grad.device)
    for chunk in _label_chunks(a.q, 2 * (8 + real.shape[1])):
        x, g = a.q[:, chunk].to(dtype), grad[:, chunk].to(dtype)
        pulled = g * x if a.gate else g  # what reaches the window sum
        back = _Sums(pulled, real, reaches(a.window, mirrored=True), a.spacing)
        grad_x = back.colour * w_colour + back.position * w_position
        if a.gate:
            grad_x.addcmul_(g, ungated[:, chunk].to(dtype))
        grad_q[:, chunk] = grad_x
        grad_weights += torch.stack([(back.colour * x).sum(), (back.position * x).sum(), g.sum()])
        if grad_features is not None:
            ahead = _Sums(x, real, reaches(a.window), a.spacing)
            grad_features += 2 * w_colour * (ahead.pull(pulled, real) + back.pull(x, real))
    return grad_q, grad_features, grad_weights


operator = Operator(
    "distance_penalty",
    Arguments,
    Implementation("torch", _forward, _backward),
    lambda a: empty_penalty(a.q, a.keep, a.frame),
    kernels={"triton": "deepmrf.ops.distance.gpu", "numba": "deepmrf.ops.distance.cpu"},
    prepare=lambda grad, ungated, a: of_all_frames(grad, ungated, a.gate, a.frame, a.q.shape[2]),
)


def distance_penalty(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    window: Sequence[int],
    spacing: Sequence[float] | None = None,
    gate: bool = True,
    frame: int | None = None,
) -> Tensor:
    """The triple penalty of the distance kernel; see the head of this module. Returns t (B, L, *S)."""
    steps = list(spacing) if spacing is not None else [1.0] * len(window)
    keep = gate and needs_gradient(q, features, weights)
    only = ALL if frame is None else frame
    return operator(q, features, weights, list(window), steps, gate, keep, only)
