"""Windows: which pixels N(j) around a pixel j are summed over, and sums over them.

A window of size m covers the offsets -m//2 .. m - m//2 - 1: symmetric when m is odd, one pixel more on the low side
when m is even (50 covers -25 .. 24). Outside the image everything is zero, so a window may be larger than the image.
The adjoint of a sum over a window is a sum over the mirrored window, so every function takes its two reaches.

Shapes: *S any number of spatial axes, always the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor

Reach = tuple[int, int]
"""How far a window reaches along one axis: (pixels before the centre, pixels after it)."""
Cut = tuple[EllipsisType | slice, ...]
"""An index that cuts the spatial axes, which are the last ones: (..., slice, slice)."""
ALL = -1
"""Instead of a frame: compute results for every pixel, not for one frame (index along the first axis) alone."""


def reaches(window: Sequence[int], mirrored: bool = False) -> list[Reach]:
    """The reach of the window along each axis; `mirrored` swaps the two sides."""
    sides = [(m // 2, m - m // 2 - 1) for m in window]
    return [(after, before) for before, after in sides] if mirrored else sides


class ImageWindow(NamedTuple):
    """An image as frames, rows and columns, and how far the window reaches along each of them."""

    sizes: tuple[int, int, int]
    reaches: tuple[Reach, Reach, Reach]

    @property
    def flat_reaches(self) -> tuple[int, ...]:
        """(before, after) along each axis, in one tuple."""
        return tuple(pixels for reach in self.reaches for pixels in reach)


def image_window(size: Sequence[int], window: Sequence[int], mirrored: bool = False) -> ImageWindow:
    """Sizes and reaches along three axes; a window reaches no farther than the image."""
    clipped = [(min(b, n - 1), min(a, n - 1)) for (b, a), n in zip(reaches(window, mirrored), size, strict=True)]
    missing = 3 - len(clipped)
    t, y, x = [(0, 0)] * missing + clipped
    frames, height, width = [1] * missing + list(size)
    return ImageWindow((frames, height, width), (t, y, x))


def sizes(value: int | Sequence[int], dims: int, name: str) -> tuple[int, ...]:
    """One size per axis from an int or a sequence, or an error that names the argument."""
    if not isinstance(value, int | Sequence) or isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a whole number of pixels, or one per axis: pass ints.")
    given = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(given) != dims:
        raise ValueError(f"{name}={value!r} has {len(given)} sizes, but dims={dims}: pass one int or {dims} of them.")
    for size in given:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}={value!r} must hold whole numbers of pixels: pass ints.")
        if size < 1:
            raise ValueError(f"{name}={value!r} must be at least 1 pixel along every axis: 1 is the pixel alone.")
    return given


def accumulator(x: Tensor) -> torch.dtype:
    """The dtype to sum in: running sums of float32 want float64 (Apple's GPUs have none and keep float32)."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def unit_features(features: Tensor, dtype: torch.dtype) -> Tensor:
    """Features as real numbers: 8-bit ones become value / 255."""
    return features.to(dtype) / 255 if features.dtype == torch.uint8 else features.to(dtype)


def at_frame(x: Tensor, frame: int) -> Tensor:
    """The pixels to compute results for: maps (B, C, *S), or one frame of them, (B, C, 1, *S[1:])."""
    return x if frame == ALL else x.narrow(2, frame, 1)


def take_frame(x: Tensor, frame: int) -> Tensor:
    """One frame of maps, (B, C, *S[1:]); ALL keeps maps (B, C, *S) as they are."""
    return x if frame == ALL else x.select(2, frame)


def empty_penalty(q: Tensor, keep: bool, frame: int) -> tuple[Tensor, Tensor]:
    """(t, the window sum before the gate if `keep`, else nothing) of b12, without numbers."""
    out = torch.empty_like(take_frame(q, frame), memory_format=torch.contiguous_format)
    return out, torch.empty_like(out) if keep else q.new_empty(0)


def of_all_frames(grad: Tensor, ungated: Tensor, gate: bool, frame: int, frames: int) -> tuple[Tensor, Tensor]:
    """The adjoint of take_frame for what b12's backward takes: zeros in the other frames."""
    if gate and ungated.numel() == 0 and grad.numel():
        raise RuntimeError("A gradient through the gate needs keep=True.")
    if frame == ALL:
        return grad, ungated
    return _only_at_frame(grad, frame, frames), _only_at_frame(ungated, frame, frames) if gate else ungated


def _only_at_frame(x: Tensor, frame: int, frames: int) -> Tensor:
    maps = x.new_zeros(*x.shape[:2], frames, *x.shape[2:])
    maps.select(2, frame).copy_(x)
    return maps


def axis_sum(x: Tensor, axis: int, reach: Reach, frame: int = ALL) -> Tensor:
    """sum of x[j - before .. j + after] along an axis by a running sum, O(1) in the window; for j = `frame` alone."""
    before, after = reach
    size = x.shape[axis]
    if frame != ALL:
        first = max(frame - before, 0)
        return x.narrow(axis, first, min(frame + after + 1, size) - first).sum(axis, keepdim=True)
    running = x.cumsum(axis)
    if after == 0:
        total = running.clone()
    else:
        total = torch.empty_like(running)
        inside = max(size - after, 0)
        total.narrow(axis, 0, inside).copy_(running.narrow(axis, size - inside, inside))
        total.narrow(axis, inside, size - inside).copy_(running.narrow(axis, size - 1, 1))
    inside = max(size - before - 1, 0)
    total.narrow(axis, size - inside, inside).sub_(running.narrow(axis, 0, inside))
    return total


def axis_spread(x: Tensor, axis: int, reach: Reach, frame: int = ALL) -> Tensor:
    """sum of (z - j)^2 x[z] over the same z, from three running sums about the middle of the axis."""
    size = x.shape[axis]
    shape = [1] * x.dim()
    shape[axis] = size
    if frame != ALL:
        step = (torch.arange(size, device=x.device, dtype=x.dtype) - frame).view(shape)
        return axis_sum(x * step * step, axis, reach, frame)
    position = (torch.arange(size, device=x.device, dtype=x.dtype) - (size - 1) / 2).view(shape)
    moment = x * position
    total = axis_sum(moment * position, axis, reach)
    total.addcmul_(axis_sum(moment, axis, reach), position, value=-2)
    return total.addcmul_(axis_sum(x, axis, reach), position * position)


def _order(axes: int, frame: int) -> list[tuple[int, int]]:
    """(axis of the window, frame): the last axis first, unless the first one leaves a single frame."""
    rest = [(axis, ALL) for axis in reversed(range(axes))]
    return rest if frame == ALL else [(0, frame), *rest[:-1]]


def box_sum(x: Tensor, window: Sequence[Reach], frame: int = ALL) -> Tensor:
    """The sum of x over the window around every pixel, one axis at a time."""
    for axis, at in _order(len(window), frame):
        x = axis_sum(x, x.dim() - len(window) + axis, window[axis], at)
    return x


def box_sum_and_spread(
    x: Tensor, window: Sequence[Reach], spacing: Sequence[float], frame: int = ALL
) -> tuple[Tensor, Tensor]:
    """(sum of x[z], sum of |j - z|^2 x[z]) over the window; spacing is the distance between pixels along each axis."""
    total, spread = x, None
    for i, at in _order(len(window), frame):
        axis, reach, step = x.dim() - len(window) + i, window[i], spacing[i]
        along = axis_spread(total, axis, reach, at).mul_(step * step)
        spread = along if spread is None else axis_sum(spread, axis, reach, at).add_(along)
        total = axis_sum(total, axis, reach, at)
    assert spread is not None  # a window has at least one axis
    return total, spread


def touched(bad: Tensor, window: Sequence[int], mirrored: bool = False) -> Tensor:
    """Pixels whose window holds one that is bad."""
    return box_sum(bad.to(torch.float64), reaches(window, mirrored)) > 0.5


def offsets(window: Sequence[Reach], size: Sequence[int], centre: bool) -> Iterator[tuple[int, ...]]:
    """Every offset of the window that can hit a pixel of an image of this size; `centre` says whether 0 is one."""
    ranges = [
        range(-min(before, n - 1), min(after, n - 1) + 1) for (before, after), n in zip(window, size, strict=True)
    ]
    for index in range(math.prod(len(r) for r in ranges)):
        offset = []
        for r in reversed(ranges):
            index, i = divmod(index, len(r))
            offset.append(r[i])
        if centre or any(offset):
            yield tuple(reversed(offset))


def overlap(offset: Sequence[int], size: Sequence[int]) -> tuple[Cut, Cut]:
    """Two equally large cuts of the image: the pixels j, and the pixels z = j + offset, where both are inside."""
    j: Cut = (..., *[slice(max(0, -o), n - max(0, o)) for o, n in zip(offset, size, strict=True)])
    z: Cut = (..., *[slice(max(0, o), n - max(0, -o)) for o, n in zip(offset, size, strict=True)])
    return j, z
