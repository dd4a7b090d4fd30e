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
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops.distance import unit_features
from deepmrf.ops.registry import Operator, needs_gradient
from deepmrf.ops.window import (
    ALL,
    Cut,
    Reach,
    accumulator,
    at_frame,
    offsets,
    only_at_frame,
    overlap,
    reaches,
    take_frame,
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


def _working(q: Tensor) -> torch.dtype:
    """Sums of positive terms keep float32's precision; half precisions are raised to it."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


class _Similarity:
    """s(j, z) for one offset at a time."""

    def __init__(self, features: Tensor, bandwidths: Tensor, spacing: Sequence[float], dtype: torch.dtype) -> None:
        self.a, self.b = bandwidths.to(dtype)
        self.spacing = spacing
        self.features = unit_features(features, dtype)

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


def _window_sum(q: Tensor, similarity: _Similarity, window: Sequence[int], frame: int) -> Tensor:
    total = torch.zeros_like(at_frame(q, frame), memory_format=torch.contiguous_format)
    for offset, j, z in _pairs(q.shape[2:], window, frame):
        s = similarity(similarity.colour_step(j, z), similarity.squared(offset))
        to = j if frame == ALL else (..., slice(None), *j[2:])
        total[to].addcmul_(s, q[z])
    return total


def _forward(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    keep: bool,
    frame: int = ALL,
) -> tuple[Tensor, Tensor]:
    """(t, the weighted window sum before the gate if `keep`, else nothing)."""
    dtype = _working(q)
    x, (w, w_bias) = q.to(dtype), weights.to(dtype)
    total = _window_sum(x, _Similarity(features, bandwidths, spacing, dtype), window, frame).mul_(w)
    if frame != ALL:
        x, total = x.select(2, frame), total.squeeze(2)
    ungated = total.to(q.dtype, copy=True) if keep else q.new_empty(0)
    return (total.mul_(x) if gate else total).add_(w_bias).to(q.dtype), ungated


def _backward(
    grad: Tensor,
    ungated: Tensor,
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    features_too: bool,
    frame: int = ALL,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to q, features (empty unless asked for), weights and bandwidths.

    One sweep over the offsets: all but q's gradient needs pair(j, z) = s(j, z) * sum over labels of pulled_j q_z.
    With `frame`, grad is known to be zero in the other frames.
    """
    dtype = _working(q)
    x, g, w = q.to(dtype), grad.to(dtype), weights.to(dtype)[0]
    pulled = g * x if gate else g
    similarity = _Similarity(features, bandwidths, spacing, dtype)
    back = torch.zeros_like(x, memory_format=torch.contiguous_format)
    grad_features = torch.zeros_like(similarity.features) if features_too else x.new_empty(0)
    sums = torch.zeros(3, dtype=accumulator(q), device=x.device)
    for offset, j, z in _pairs(q.shape[2:], window, frame):
        step, squared = similarity.colour_step(j, z), similarity.squared(offset)
        s = similarity(step, squared)
        back[z].addcmul_(s, pulled[j])
        pair = (pulled[j] * x[z]).sum(1, keepdim=True).mul_(s)  # (B, 1, *S)
        total = pair.sum()
        sums += torch.stack([total, (pair * step.square().sum(1, keepdim=True)).sum(), total * squared])
        if features_too:
            pull = pair * step * (-w / similarity.a**2)
            grad_features[j] += pull
            grad_features[z] -= pull
    grad_q = back.mul_(w)
    if gate:
        grad_q.addcmul_(g, ungated.to(dtype))
    total, by_colour, by_position = sums.to(dtype)
    grad_weights = torch.stack([total, g.sum()])
    grad_bandwidths = torch.stack([w * by_colour / similarity.a**3, w * by_position / similarity.b**3])
    return (
        grad_q.to(q.dtype),
        grad_features.to(q.dtype if features_too else dtype),
        grad_weights.to(weights.dtype),
        grad_bandwidths.to(bandwidths.dtype),
    )


def _fake(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    keep: bool,
    frame: int = ALL,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(take_frame(q, frame), memory_format=torch.contiguous_format)
    return out, torch.empty_like(out) if keep else q.new_empty(0)


def _fake_backward(
    grad: Tensor,
    ungated: Tensor,
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    features_too: bool,
    frame: int = ALL,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_features = (
        features.new_empty(features.shape, dtype=q.dtype) if features_too else q.new_empty(0, dtype=_working(q))
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, grad_features, torch.empty_like(weights), torch.empty_like(bandwidths)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, features, weights, bandwidths, ctx.window, ctx.spacing, ctx.gate, keep, ctx.frame = inputs
    if ctx.gate and not keep:
        raise RuntimeError("deepmrf::gaussian_penalty needs keep=True for a gradient through the gate.")
    ctx.set_materialize_grads(False)  # zeros for the gradient to the ungated sum would be a tensor as large as q
    ctx.save_for_backward(output[1], q, features, weights, bandwidths)


def _gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    ungated, q, *parameters = ctx.saved_tensors
    features_too = ctx.needs_input_grad[1]
    grad, ungated = (only_at_frame(x, ctx.frame, q.shape[2]) for x in (grad, ungated))
    q_, features_, weights_, bandwidths_ = operator.backward(
        grad, ungated, q, *parameters, ctx.window, ctx.spacing, ctx.gate, features_too, ctx.frame
    )
    return q_, features_ if features_too else None, weights_, bandwidths_, None, None, None, None, None


operator = Operator(
    "gaussian_penalty",
    _forward,
    _backward,
    fake=_fake,
    fake_backward=_fake_backward,
    save=_save,
    gradients=_gradients,
    kernels={"triton": "deepmrf.ops.gaussian.gpu", "numba": "deepmrf.ops.gaussian.cpu"},
    decided_by=("q", "features", "weights", "window"),
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
    result: Tensor = operator(q, features, weights, bandwidths, list(window), steps, gate, keep, only)[0]
    return result


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


def _filter_lines(maps: Tensor, taps: Tensor, axis: int, reach: Reach) -> Tensor:
    """Correlation of every line along one axis with `taps`."""
    lines = maps.movedim(axis, -1)
    size = lines.shape[-1]
    if size <= MAX_BANDED_LENGTH:
        position = torch.arange(size, device=maps.device)
        tap = position[:, None] - position + reach[0]  # of pixel z, seen from pixel j
        band = taps[tap.clamp(0, len(taps) - 1)] * ((tap >= 0) & (tap < len(taps)))
        return (lines @ band).movedim(-1, axis)
    padded = functional.pad(lines.reshape(-1, 1, lines.shape[-1]), reach)
    return functional.conv1d(padded, taps.view(1, 1, -1)).view(lines.shape).movedim(-1, axis)
