"""The lattice on the CPU, compiled by numba: hash tables, runs of neighbours blurred in place, threads share points."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmrf.ops.jobs import run_in_parts, run_jobs
from deepmrf.ops.lattice.build import (
    Arguments,
    Lattice,
    key_extents,
    key_multipliers,
    require_finite,
    scale_factors,
    slice_scale,
)
from deepmrf.ops.registry import Implementation, Pair, forced, installed

MIN_POINTS_PER_PART = 4096
MAX_CHANNELS_AT_ONCE = 64


def can_build(features: Tensor) -> bool:
    """Float32 points on the CPU, where numba is installed and no other implementation is forced."""
    return (
        installed("numba")
        and forced() in (None, "numba")
        and features.device.type == "cpu"
        and features.dtype == torch.float32
        and features.numel() > 0
    )


def parts_of(points: int) -> list[tuple[int, int]]:
    """Ranges of points, one per thread, each large enough to be worth it."""
    count = part_count(points)
    return list(itertools.pairwise(points * k // count for k in range(count + 1)))


def part_count(points: int) -> int:
    """How many threads share some points, or other things that are worked on one by one."""
    return max(1, min(torch.get_num_threads(), points // MIN_POINTS_PER_PART))


def build(features: Tensor) -> Lattice:
    """The lattice of features (B, d, N), the same as by sorting, with runs for links."""
    from deepmrf.ops.lattice.cpu_rows import FETCH_AHEAD

    images = [_build_image(image.contiguous().numpy()) for image in features]
    first = [0, *itertools.accumulate(count for _, _, _, count in images)]
    parts, ends, end = [], [], 0
    for axis in range(features.shape[1] + 1):
        ends.append([end])
        for (vertex, _, runs, _), base in zip(images, first, strict=False):
            parts.append(runs[axis] + np.where(runs[axis] < 0, -base, base).astype(np.int32) if base else runs[axis])
            end += len(runs[axis])
            ends[-1].append(end)
            if base and axis == 0:
                vertex += base
    joined = np.concatenate([*parts, np.full(FETCH_AHEAD, -1, np.int32)])
    vertices, weights, _, _ = zip(*images, strict=True)
    vertex, weight = (torch.from_numpy(a[0][None] if len(a) == 1 else np.stack(a)) for a in (vertices, weights))
    return Lattice(vertex, weight, first[-1], torch.from_numpy(joined), torch.tensor(ends), tuple(first))


def _build_image(features: np.ndarray[Any, Any]) -> tuple[Any, Any, list[Any], int]:
    """(vertex, weight, runs of each axis, number of vertices) of one image's features (d, N)."""
    from deepmrf.ops.lattice import cpu_build as kernels

    axes, points = features.shape
    scales = np.array(scale_factors(axes, torch.float32), np.float32)
    reach = np.maximum(features.max(1), -features.min(1)).astype(np.float64) * scales
    require_finite(bool(np.isfinite(reach).all()))
    multipliers = np.array([*key_multipliers(key_extents(reach.tolist())), 0], np.int64)
    vertex, weight = np.empty((points, axes + 1), np.int32), np.empty((points, axes + 1), np.float32)
    parts = parts_of(points)
    tables: list[Any] = [None] * len(parts)

    def find(part: int) -> None:
        tables[part] = kernels.find_vertices(features, *parts[part], scales, multipliers, vertex, weight)

    run_jobs(find, len(parts))
    table, bits, keys, count = tables[0]
    numbers = [np.empty(0, np.int32)]
    for _, _, other, other_count in tables[1:]:
        table, bits, keys, count, more = kernels.merge(table, bits, keys, count, other, other_count)
        numbers.append(more)
    run_jobs(lambda part: kernels.renumber(vertex, *parts[part + 1], numbers[part + 1]), len(parts) - 1)
    steps = (axes + 1) * multipliers - multipliers.sum()
    runs: list[Any] = [None] * (axes + 1)

    def find_runs(axis: int) -> None:
        runs[axis] = kernels.find_runs(table, bits, keys, count, steps[axis])

    run_jobs(find_runs, axes + 1)
    return vertex, weight, runs, count


def _suits(a: Arguments) -> bool:
    """Float32 values and a lattice built here."""
    return a.values.device.type == "cpu" and a.values.dtype == a.weight.dtype == torch.float32 and a.links.dim() == 1


def width_of(channels: int) -> int:
    """Channels rounded up to whole vectors."""
    from deepmrf.ops.lattice.cpu_rows import LANES

    return -(-channels // LANES) * LANES


def zero_rows(count: int, width: int) -> Any:
    """Flat rows of zeros that begin at a cache line. (numpy's come from the system as zeros, when first touched.)"""
    room = np.zeros(count * width + 16, np.float32)
    skip = -(room.ctypes.data // 4) % 16
    return room[skip : skip + count * width]


def blur_rows(rows: Any, runs: Any, ends: Sequence[tuple[int, int]], base: int, width: int) -> None:
    """Blur flat rows, the vertices from row `base` on, along axes one after the other, each with its runs at `ends`."""
    from deepmrf.ops.lattice import cpu_kernels as kernels

    for first, last in ends:

        def blur(a: int, b: int, first: int = first, last: int = last) -> None:
            kernels.blur(rows, runs, first + a, first + b, last, base, width)

        run_in_parts(blur, last - first, part_count(last - first))


def _forward(a: Arguments) -> Pair:
    """Channels in chunks; threads share the pixels, and have rows of their own to splat into."""
    images, points, _ = a.vertex.shape
    shared = a.values.reshape(images, -1, points)  # images that share a lattice become channels
    out = torch.empty_like(shared)
    ends = [(axis[0], axis[-1]) for axis in a.tables[0].tolist()][:: -1 if a.transpose else 1]
    tables = a.vertex.numpy(), a.weight.numpy(), a.links.numpy(), ends, a.vertices
    for first in range(0, shared.shape[1], MAX_CHANNELS_AT_ONCE):
        chunk = slice(first, first + MAX_CHANNELS_AT_ONCE)
        _filter_chunk(shared[:, chunk].numpy(), *tables, out[:, chunk].numpy())
    return out.view(a.values.shape), a.values.new_empty(0)


def _filter_chunk(
    source: Any, vertex: Any, weight: Any, runs: Any, ends: Sequence[tuple[int, int]], vertices: int, target: Any
) -> None:
    """A few channels (B, C, N) of the filter, from source to target."""
    from deepmrf.ops.lattice import cpu_kernels as kernels

    points, sides = vertex.shape[1:]
    width, parts = width_of(source.shape[1]), parts_of(points)
    flat = [(v.reshape(-1), w.reshape(-1), sides) for v, w in zip(vertex, weight, strict=True)]
    copies = len(parts) if vertices * len(parts) <= points else 1
    rows = zero_rows(copies, vertices * width).reshape(copies, -1)
    splats = parts if copies > 1 else [(0, points)]

    def splat(part: int) -> None:
        for values, tables in zip(source, flat, strict=True):
            kernels.splat(values, *splats[part], *tables, rows[part], width)

    run_jobs(splat, len(splats))
    if copies > 1:
        run_in_parts(lambda a, b: rows[:, a:b].sum(0, out=rows[0, a:b]), rows.shape[1], part_count(rows.shape[1]))
    blur_rows(rows[0], runs, ends, 0, width)
    scale = slice_scale(sides - 1)
    for out, tables in zip(target, flat, strict=True):
        job = partial(kernels.slice_rows, rows[0], *tables, out, width, scale)
        run_in_parts(job, points, len(parts))


IMPLEMENTATION = Implementation("numba", _forward, suits=_suits)
