"""The triple penalty's window sum for the Gaussian kernel: what dense CRF, DeepLab, CRF-RNN and DSN call similarity.

    t[v, j] = g * w * sum over z in N(j), z != j, of s(j, z) q[v, z] + w_bias,     g = q[v, j] with the gate, else 1
    s(j, z) = exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2)

It has no exact O(1) form: it is evaluated inside the window, one offset at a time, weights computed once for all labels
and never stored. s is symmetric, so the adjoint is the same sum over the mirrored window.

Shapes: q (B, L, *S), features (B, F, *S) with F >= 0, weights (2,) = (w, w_bias), bandwidths (2,) = (a, b).
uint8 features stand for value / 255.
With `frame`, an index along the first axis, t is computed for the pixels j there alone: (B, L, *S[1:]).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops.registry import Implementation, Operator, Pair, needs_gradient, unobserved
from deepmrf.ops.window import (
    ALL,
    Cut,
    Reach,
    accumulator,
    at_frame,
    empty_penalty,
    of_all_frames,
    offsets,
    overlap,
    reaches,
    take_frame,
    unit_features,
)


def gaussian_penalty_reference(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
) -> Tensor:
    """The equation above with every pair of pixels written out: O(pixels^2) memory. For readers and tests only."""
    size = q.shape[2:]
    position = torch.stack(torch.meshgrid(*[torch.arange(n) for n in size], indexing="ij"), -1).flatten(0, -2)  # (P, D)
    step = position[None] - position[:, None]  # (P, P, D): z - j
    inside = (step != 0).any(-1)
    for axis, (before, after) in enumerate(reaches(window)):
        inside &= (step[..., axis] >= -before) & (step[..., axis] <= after)
    d_position = (step * torch.tensor(spacing, dtype=q.dtype)).square().sum(-1)
    colours = features.flatten(2).transpose(1, 2)  # (B, P, F)
    d_colour = (colours[:, :, None] - colours[:, None]).square().sum(-1)  # (B, P, P)
    a, b = bandwidths
    s = torch.exp(-d_colour / (2 * a**2) - d_position / (2 * b**2)) * inside
    total: Tensor = torch.einsum("bjz,bvz->bvj", s, q.flatten(2)).view(q.shape)
    return (q * total if gate else total) * weights[0] + weights[1]


class Arguments(NamedTuple):
    """The operator's arguments; see the head of this module."""

    q: Tensor
    features: Tensor
    weights: Tensor
    bandwidths: Tensor
    window: Sequence[int]
    spacing: Sequence[float]
    """The distance between pixels along each axis."""
    gate: bool
    keep: bool
    """Is the weighted window sum before the gate a second result? The gate's gradient needs it again."""
    frame: int = ALL


def _working(q: Tensor) -> torch.dtype:
    """Sums of positive terms keep float32's precision; half precisions are raised to it."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


class _Similarity:
    """s(j, z) for one offset at a time."""

    def __init__(self, a: Arguments, dtype: torch.dtype) -> None:
        self.a, self.b = a.bandwidths.to(dtype)
        self.spacing = a.spacing
        self.features = unit_features(a.features, dtype)

    def colour_step(self, j: Cut, z: Cut) -> Tensor:
        """I_j - I_z, (B, F, *S)."""
        return self.features[j] - self.features[z]

    def squared(self, offset: Sequence[int]) -> float:
        """|j - z|^2."""
        return sum((o * s) ** 2 for o, s in zip(offset, self.spacing, strict=True))

    def __call__(self, step: Tensor, squared: float) -> Tensor:
        """s, (B, 1, *S)."""
        exponent = step.square().sum(1, keepdim=True).mul_(-0.5 / self.a**2)
        return exponent.sub_(squared * 0.5 / self.b**2).exp_()


def _pairs(size: Sequence[int], window: Sequence[int], frame: int) -> Iterator[tuple[tuple[int, ...], Cut, Cut]]:
    """(z - j, the pixels j, the pixels z) for every offset of the window but 0; with `frame`, for j there alone."""
    for offset in offsets(reaches(window), size, centre=False):
        j, z = overlap(offset, size)
        if frame == ALL:
            yield offset, j, z
        elif 0 <= frame + offset[0] < size[0]:
            other = frame + offset[0]
            yield offset, (..., slice(frame, frame + 1), *j[2:]), (..., slice(other, other + 1), *z[2:])


def _forward(a: Arguments) -> Pair:
    dtype = _working(a.q)
    x, (w, w_bias), similarity = a.q.to(dtype), a.weights.to(dtype), _Similarity(a, dtype)
    total = torch.zeros_like(at_frame(x, a.frame), memory_format=torch.contiguous_format)
    for offset, j, z in _pairs(x.shape[2:], a.window, a.frame):
        s = similarity(similarity.colour_step(j, z), similarity.squared(offset))
        total[j if a.frame == ALL else (..., slice(None), *j[2:])].addcmul_(s, x[z])
    total = (total if a.frame == ALL else total.squeeze(2)).mul_(w)
    ungated = total.to(a.q.dtype, copy=True) if a.keep else a.q.new_empty(0)
    return (total.mul_(take_frame(x, a.frame)) if a.gate else total).add_(w_bias).to(a.q.dtype), ungated


def _backward(grad: Tensor, ungated: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    """One sweep: all but q's gradient needs pair(j, z) = s(j, z) * sum over labels of pulled_j q_z."""
    dtype = _working(a.q)
    x, g, w = a.q.to(dtype), grad.to(dtype), a.weights.to(dtype)[0]
    pulled = g * x if a.gate else g
    similarity = _Similarity(a, dtype)
    back = torch.zeros_like(x, memory_format=torch.contiguous_format)
    grad_features = torch.zeros_like(similarity.features) if needed[1] else None
    sums = torch.zeros(3, dtype=accumulator(x), device=x.device)
    for offset, j, z in _pairs(x.shape[2:], a.window, a.frame):
        step, squared = similarity.colour_step(j, z), similarity.squared(offset)
        s = similarity(step, squared)
        back[z].addcmul_(s, pulled[j])
        pair = (pulled[j] * x[z]).sum(1, keepdim=True).mul_(s)  # (B, 1, *S)
        total = pair.sum()
        sums += torch.stack([total, (pair * step.square().sum(1, keepdim=True)).sum(), total * squared])
        if grad_features is not None:
            pull = pair * step * (-w / similarity.a**2)
            grad_features[j] += pull
            grad_features[z] -= pull
    grad_q = back.mul_(w)
    if a.gate:
        grad_q.addcmul_(g, ungated.to(dtype))
    total, by_colour, by_position = sums.to(dtype)
    grad_bandwidths = torch.stack([w * by_colour / similarity.a**3, w * by_position / similarity.b**3])
    return grad_q, grad_features, torch.stack([total, g.sum()]), grad_bandwidths


operator = Operator(
    "gaussian_penalty",
    Arguments,
    Implementation("torch", _forward, _backward),
    lambda a: empty_penalty(a.q, a.keep, a.frame),
    kernels={"triton": "deepmrf.ops.gaussian.gpu", "numba": "deepmrf.ops.gaussian.cpu"},
    prepare=lambda grad, ungated, a: of_all_frames(grad, ungated, a.gate, a.frame, a.q.shape[2]),
)


def gaussian_penalty(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float] | None = None,
    gate: bool = True,
    frame: int | None = None,
) -> Tensor:
    """The triple penalty of the Gaussian kernel; see the head of this module. Returns t (B, L, *S)."""
    steps = list(spacing) if spacing is not None else [1.0] * len(window)
    keep = gate and needs_gradient(q, features, weights, bandwidths)
    only = ALL if frame is None else frame
    return operator(q, features, weights, bandwidths, list(window), steps, gate, keep, only)


def gaussian_blur(
    q: Tensor, bandwidth: Tensor, window: Sequence[int], spacing: Sequence[float], frame: int | None = None
) -> Tensor:
    """sum over z in N(j), z != j, of exp(-|j - z|^2 / 2 c^2) q[v, z]: dense CRF's smoothness kernel.

    The image plays no part, so it separates into one short convolution per axis. The centre is left out from the start:
    subtracted at the end, it would swallow a narrow kernel's sum. With `frame`, for that frame alone.
    """
    total = torch.zeros_like(q)
    for axis, ((before, after), step) in enumerate(zip(reaches(window), spacing, strict=True), start=2):
        offset = torch.arange(-before, after + 1, device=q.device, dtype=q.dtype) * step
        around = torch.exp(-offset.square() / (2 * bandwidth.to(q.dtype) ** 2)) * (offset != 0)
        total = total + _filter_lines(total + q, around, axis, (before, after))
        if axis == 2 and frame is not None:
            total, q = total.narrow(2, frame, 1), q.narrow(2, frame, 1)
    return total if frame is None else total.squeeze(2)


MAX_BANDED_LENGTH = 1024
"""Lines up to this length are filtered by a product with a banded matrix: several times faster than conv1d."""


TIMES_SLOWER = 6
"""On a CPU without gradients, adding all pixels times a tap takes as long as so many rows of the banded matrix."""


def _filter_lines(maps: Tensor, taps: Tensor, axis: int, reach: Reach) -> Tensor:
    """Correlation of every line along one axis with `taps`."""
    size = maps.shape[axis]
    if unobserved(maps, taps) and (TIMES_SLOWER * len(taps) <= size or size > MAX_BANDED_LENGTH):
        return _add_tap_by_tap(maps, taps.tolist(), axis, reach[0])
    lines = maps.movedim(axis, -1)
    if size <= MAX_BANDED_LENGTH:
        position = torch.arange(size, device=maps.device)
        tap = position[:, None] - position + reach[0]  # of pixel z, seen from pixel j
        band = taps[tap.clamp(0, len(taps) - 1)] * ((tap >= 0) & (tap < len(taps)))
        return (lines @ band).movedim(-1, axis)
    padded = functional.pad(lines.reshape(-1, 1, lines.shape[-1]), reach)
    return functional.conv1d(padded, taps.view(1, 1, -1)).view(lines.shape).movedim(-1, axis)


def _add_tap_by_tap(maps: Tensor, taps: Sequence[float], axis: int, before: int) -> Tensor:
    """The same by adding shifted maps in place: no gradient."""
    size, total = maps.shape[axis], torch.zeros_like(maps)
    for offset, tap in enumerate(taps, start=-before):
        length = size - abs(offset)
        if tap and length > 0:
            shifted = maps.narrow(axis, max(offset, 0), length)
            total.narrow(axis, max(-offset, 0), length).add_(shifted, alpha=tap)
    return total
