"""The lattice on NVIDIA GPUs: vertices by sorting keys, splat as sums over sorted entries. No atomics: results repeat.

values   (B N, S)   a pixel's channels side by side; S = channels rounded up to four
rows     (M + P, S) a vertex's channels; behind them P partial sums
entries             all (pixel, weight) pairs, one per corner of a simplex, sorted by vertex
chunks              at most ENTRIES_PER_CHUNK entries of one vertex

splat    a chunk's sum goes to its vertex's row, or, if the vertex has more chunks, to a partial sum
combine  the partial sums of a vertex are added up, in order
blur     from one array of rows to another and back, an axis at a time
slice    a pixel gathers its corners' rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepmrf.ops.lattice.build import (
    Arguments,
    Lattice,
    key_extents,
    key_multipliers,
    require_finite,
    scale_factors,
    slice_scale,
)
from deepmrf.ops.launch import interpreted, on_device, parts, power_of_two
from deepmrf.ops.registry import Implementation, Pair, forced, installed

ENTRIES_PER_CHUNK = 64
MAX_AXES = 15
"""Feature axes whose ranks a program has in registers."""
NUMBERS_PER_PROGRAM = 1024
"""Rows times channels of a program."""
MAX_CHANNELS_AT_ONCE = 256
POINTS_PER_PROGRAM = 256
PARTIAL_SUMS_AT_ONCE = 32


def can_build(features: Tensor) -> bool:
    """Float32 points on a GPU, where no other implementation is forced."""
    here = features.is_cuda or interpreted()
    return (
        here
        and features.dtype == torch.float32
        and features.numel() > 0
        and features.shape[1] <= MAX_AXES
        and forced() in (None, "triton")
        and installed("triton")
    )


@on_device
def build(features: Tensor) -> Lattice:
    """The lattice of features (B, d, N) with vertices in the order of their keys, and the tables that splat needs."""
    from deepmrf.ops.lattice import gpu_kernels as kernels

    batch, axes, points = features.shape
    features = features.contiguous()
    scales = scale_factors(axes, torch.float32)
    reach = torch.stack([features.amax((0, 2)), -features.amin((0, 2))]).amax(0).tolist()
    require_finite(all(math.isfinite(r) for r in reach))
    multipliers = key_multipliers([*key_extents([r * s for r, s in zip(reach, scales, strict=True)]), batch])
    device = features.device
    multiplier = torch.tensor(multipliers, device=device)
    scale = torch.tensor([*scales, 1 / (axes + 1)], dtype=torch.float32, device=device)
    keys = torch.empty(batch, points, axes + 1, dtype=torch.int64, device=device)
    weight = torch.empty(batch, points, axes + 1, device=device)
    kernels.simplices[(parts(batch * points, POINTS_PER_PROGRAM),)](
        features, scale, multiplier, keys, weight, points, batch * points,
        AXES=axes, BLOCK=POINTS_PER_PROGRAM, enable_fp_fusion=False,
    )  # fmt: skip
    ordered, order = torch.sort(keys.view(-1), stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    number = torch.cumsum(first, 0, dtype=torch.int32) - 1
    starts = first.nonzero()[:, 0]
    distinct = ordered[starts]
    vertex = torch.empty_like(number).scatter_(0, order, number).view(keys.shape)
    digits = torch.cat([multiplier[:axes], multiplier.new_zeros(1)])
    neighbours = torch.empty(axes + 1, 2, len(distinct), dtype=torch.int32, device=device)
    for axis, step in enumerate((axes + 1) * digits - digits.sum()):
        for side, target in enumerate((distinct + step, distinct - step)):
            index = torch.searchsorted(distinct, target, out_int32=True).clamp_(max=len(distinct) - 1)
            neighbours[axis, side] = torch.where(distinct[index] == target, index, -1)
    tables = splat_tables(order, starts, weight)
    return Lattice(vertex, weight, len(distinct), neighbours, neighbours.new_empty(0), splat_tables=tables)


def splat_tables(order: Tensor, starts: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """What `splat` and `combine` read, from the corners (point (d + 1) + remainder) by vertex and where each begins.

    (pixel, weight) of the entries; (first entry, target) of the chunks, a target below 0 being ~(partial sum);
    (vertex, first partial sum) of the vertices that have many chunks, with one more number at the end.
    """
    ends = torch.cat([starts[1:], starts.new_tensor([len(order)])])
    counts = (ends - starts + ENTRIES_PER_CHUNK - 1) // ENTRIES_PER_CHUNK
    vertex = torch.repeat_interleave(counts)
    within = torch.arange(len(vertex), device=order.device) - (counts.cumsum(0) - counts)[vertex]
    chunk_starts = starts[vertex] + within * ENTRIES_PER_CHUNK
    many = counts > 1
    partial = torch.cumsum(many[vertex], 0)  # counts from 1
    targets = torch.where(many[vertex], -partial, vertex)
    rows = many.nonzero()[:, 0]
    first_partial = torch.cat([counts.new_zeros(1), counts[rows].cumsum(0)])
    pixel = torch.div(order, weight.shape[2], rounding_mode="floor")
    tables = (pixel, weight.view(-1)[order], chunk_starts, targets, rows, first_partial)
    return tuple(t.int() if not t.is_floating_point() else t for t in tables)


def tables_of(lattice: Lattice) -> tuple[Tensor, ...]:
    """splat_tables of any lattice, cached in it."""
    if not lattice.splat_tables:
        vertex, order = torch.sort(lattice.vertex.view(-1), stable=True)
        every = torch.arange(lattice.vertices, device=vertex.device, dtype=vertex.dtype)
        object.__setattr__(
            lattice, "splat_tables", splat_tables(order, torch.searchsorted(vertex, every), lattice.weight)
        )
    return lattice.splat_tables


@dataclass(frozen=True)
class Splat:
    """The tables of `splat_tables` with targets as rows."""

    pixel: Tensor
    weight: Tensor
    starts: Tensor
    targets: Tensor
    many: Tensor
    first_partial: Tensor
    vertices: int

    @property
    def rows(self) -> int:
        """Rows for vertices and partial sums. (Only vertices with more than a chunk of entries have partial sums.)"""
        return self.vertices + 2 * len(self.pixel) // ENTRIES_PER_CHUNK + 1

    def __call__(self, values: Tensor, rows: Tensor, channels: int) -> None:
        """Fill the first rows from values (points, S)."""
        from deepmrf.ops.lattice import gpu_kernels as kernels

        block_r, block_c = block_of(channels)
        across = parts(channels, block_c)
        kernels.splat[(parts(len(self.starts), block_r), across)](
            values, self.pixel, self.weight, self.starts, self.targets, rows, len(self.starts), len(self.pixel),
            channels, rows.shape[1], BLOCK_R=block_r, BLOCK_C=block_c,
        )  # fmt: skip
        if len(self.many):
            kernels.combine[(len(self.many), across)](
                rows, self.many, self.first_partial, self.vertices, channels, rows.shape[1],
                BLOCK_R=PARTIAL_SUMS_AT_ONCE, BLOCK_C=block_c,
            )  # fmt: skip


def block_of(channels: int) -> tuple[int, int]:
    """Rows and channels of a program."""
    block_c = min(power_of_two(channels), MAX_CHANNELS_AT_ONCE)
    return max(1, NUMBERS_PER_PROGRAM // block_c), block_c


def stride_of(channels: int) -> int:
    """Channels rounded up so that every row begins at a multiple of 16 bytes."""
    return parts(channels, 4) * 4


def blur(rows: Tensor, spare: Tensor, neighbours: Tensor, axes: Sequence[int], channels: int) -> Tensor:
    """Blur rows along axes one after the other; returns the one of both arrays that holds the result."""
    from deepmrf.ops.lattice import gpu_kernels as kernels

    block_r, block_c = block_of(channels)
    vertices = neighbours.shape[2]
    for axis in axes:
        kernels.blur[(parts(vertices, block_r), parts(channels, block_c))](
            rows, neighbours[axis], spare, vertices, channels, rows.shape[1], BLOCK_R=block_r, BLOCK_C=block_c
        )
        rows, spare = spare, rows
    return rows


def slice_rows(
    rows: Tensor,
    vertex: Tensor,
    weight: Tensor,
    scores: Tensor,
    out: Tensor,
    channels: int,
    scale: float,
    softmax: bool,
) -> None:
    """out (points, S) from rows by vertex and weight (points, corners); with softmax, of the result plus scores."""
    from deepmrf.ops.lattice import gpu_kernels as kernels

    block_r, block_c = block_of(channels)
    if softmax:
        block_c = power_of_two(channels)
        block_r = max(1, NUMBERS_PER_PROGRAM // block_c)
    kernels.slice_rows[(parts(len(vertex), block_r), parts(channels, block_c))](
        rows, vertex, weight, scores, out, len(vertex), channels, out.shape[1], scale,
        CORNERS=vertex.shape[1], SOFTMAX=softmax, BLOCK_R=block_r, BLOCK_C=block_c,
    )  # fmt: skip


def _suits(a: Arguments) -> bool:
    """Float32 lattices, and values of at most that, on a GPU."""
    here = a.values.is_cuda or interpreted()
    fits = a.values.dtype != torch.float64 and a.weight.dtype == torch.float32 and a.links.dim() == 3
    return here and fits and installed("triton")


@on_device
def _forward(a: Arguments) -> Pair:
    """Images that share a lattice become channels."""
    images, points, sides = a.vertex.shape
    pixel, entry_weight, starts, targets, many, first_partial = a.tables
    rows_of = torch.where(targets < 0, a.vertices - 1 - targets, targets)
    splat = Splat(pixel, entry_weight, starts, rows_of, many, first_partial, a.vertices)
    channels = a.values.shape[0] // images * a.values.shape[1]
    pixels = a.values.new_empty(images, points, stride_of(channels), dtype=torch.float32)
    pixels[:, :, :channels] = a.values.view(images, channels, points).mT
    pixels = pixels.view(images * points, -1)
    rows, spare = (pixels.new_empty(splat.rows, pixels.shape[1]) for _ in range(2))
    splat(pixels, rows, channels)
    rows = blur(rows, spare, a.links, range(sides - 1, -1, -1) if a.transpose else range(sides), channels)
    corners = a.vertex.view(-1, sides), a.weight.view(-1, sides)
    slice_rows(rows, *corners, pixels, pixels, channels, slice_scale(sides - 1), softmax=False)
    out = pixels.view(images, points, -1)[:, :, :channels].mT.contiguous()
    return out.view(a.values.shape).to(a.values.dtype), a.values.new_empty(0)


IMPLEMENTATION = Implementation("triton", _forward, suits=_suits)
