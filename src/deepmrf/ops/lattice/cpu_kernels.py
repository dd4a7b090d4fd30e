"""Numba kernels that filter on a lattice: splat, blur, slice, and a mean-field step that does all of it pixel by pixel.

What is laid out where (flat arrays; cpu_rows.py has the operations on rows):

    values  (C, N)   as PyTorch has them: channel by channel
    rows    (M, R)   a vertex's channels side by side, R = C rounded up to whole vectors
    scores  (N, R)   a pixel's -unary side by side; -HUGE in the channels that only fill the last vector
    vertex  (N, D)   a pixel's vertices, of all lattices one after the other: D = sum of (d + 1)
    take, give (N, D)   their weights in slice and in splat

A mean-field step reads a pixel's scores and D rows, and adds its new probabilities to D rows of another array: they are
never stored. Threads have a range of pixels each. Vertices that an earlier range touches too get rows of their own
(private rows), added to the others' before the blur and copied back after it: no two threads write the same row.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.ops.jobs import compiled
from deepmrf.ops.lattice.cpu_rows import blur_runs, gather, scatter, softmax

Array = NDArray[Any]

PIXELS_AT_ONCE = 16
HUGE = np.float32(1e30)


@compiled
def _to_rows(
    values: Array, channels: int, first: int, size: int, width: int, fill: Any, sign: Any, out: Array, at: int
) -> None:
    """out[at + p, c] = sign * values[c, first + p] for `size` pixels; `fill` in the channels that are too many."""
    for c in range(width):
        for p in range(size):
            out[at + p * width + c] = sign * values[c, first + p] if c < channels else fill


@compiled
def _from_rows(rows: Array, channels: int, first: int, size: int, width: int, values: Array) -> None:
    """values[c, first + p] = rows[p, c] for `size` pixels."""
    for c in range(channels):
        for p in range(size):
            values[c, first + p] = rows[p * width + c]


@compiled
def splat(
    values: Array, start: int, stop: int, vertex: Array, weight: Array, corners: int, rows: Array, width: int
) -> None:
    """rows[vertex] += weight * values for the pixels start .. stop - 1."""
    block = np.empty(PIXELS_AT_ONCE * width, np.float32)
    for first in range(start, stop, PIXELS_AT_ONCE):
        size = min(PIXELS_AT_ONCE, stop - first)
        _to_rows(values, values.shape[0], first, size, width, np.float32(0), np.float32(1), block, 0)
        for p in range(size):
            scatter(rows, block, vertex, weight, p * width, (first + p) * corners, corners, width)


@compiled
def slice_rows(
    rows: Array, vertex: Array, weight: Array, corners: int, values: Array, width: int, scale: float, start: int,
    stop: int,
) -> None:  # fmt: skip
    """values = scale * sum of weight * rows[vertex] for the pixels start .. stop - 1."""
    block = np.empty(PIXELS_AT_ONCE * width, np.float32)
    zeros = np.zeros(width, np.float32)
    for first in range(start, stop, PIXELS_AT_ONCE):
        size = min(PIXELS_AT_ONCE, stop - first)
        for p in range(size):
            gather(block, zeros, rows, vertex, weight, p * width, 0, (first + p) * corners, corners, width)
        for k in range(size * width):
            block[k] *= np.float32(scale)
        _from_rows(block, values.shape[0], first, size, width, values)


@compiled
def blur(rows: Array, runs: Array, start: int, stop: int, last: int, base: int, width: int) -> None:
    """Blur along one axis, in place, the runs that begin at start .. stop - 1; the axis has runs up to last - 1."""
    while start < last and runs[start] >= 0:
        start += 1
    while stop < last and runs[stop] >= 0:
        stop += 1
    blur_runs(rows, runs, start, stop, base, width)


@compiled
def mix_rows(rows: Array, matrix: Array, width: int, start: int, stop: int) -> None:
    """rows[m] = matrix rows[m] for the vertices start .. stop - 1; matrix (labels, labels)."""
    labels = matrix.shape[0]
    mixed = np.empty(width, np.float32)
    for m in range(start, stop):
        at = m * width
        for u in range(width):
            mixed[u] = 0
        for v in range(labels):
            value = rows[at + v]
            for u in range(labels):
                mixed[u] += matrix[v, u] * value
        for u in range(width):
            rows[at + u] = mixed[u]


@compiled
def scores_of(unary: Array, width: int, scores: Array, start: int, stop: int) -> None:
    """scores = -unary, pixel by pixel, for the pixels start .. stop - 1."""
    for first in range(start, stop, PIXELS_AT_ONCE):
        size = min(PIXELS_AT_ONCE, stop - first)
        _to_rows(unary, unary.shape[0], first, size, width, -HUGE, np.float32(-1), scores, first * width)


@compiled
def join(
    vertex: Array, weight: Array, before: Array, after: Array, factor: float, before_factor: float, start: int,
    stop: int, shared: int, base: int, column: int, joined: Array, take: Array, give: Array, private: Array,
    home: Array, used: int,
) -> int:  # fmt: skip
    """Write one lattice's vertices and weights for the pixels start .. stop - 1 into columns of the joined tables.

    Vertices below `shared` belong to earlier ranges of pixels: they become private rows, -1, -2, .. after those already
    used, and home says which row each stands for. Returns their number.
    """
    corners, count = vertex.shape[1], 0
    for n in range(start, stop):
        for r in range(corners):
            m = vertex[n, r]
            if m < shared:
                if private[m] == 0:
                    home[count] = base + m
                    count += 1
                    private[m] = -used - count
                joined[n, column + r] = private[m]
            else:
                joined[n, column + r] = base + m
            take[n, column + r] = weight[n, r] * after[n] * factor
            give[n, column + r] = weight[n, r] * before[n] * before_factor
    return count


@compiled
def number_private_rows(joined: Array, start: int, stop: int, base: int) -> None:
    """Private rows -1, -2, .. become base, base + 1, .."""
    for n in range(start, stop):
        for c in range(joined.shape[1]):
            if joined[n, c] < 0:
                joined[n, c] = base - 1 - joined[n, c]


@compiled
def exchange_private(rows: Array, home: Array, base: int, width: int, collect: bool) -> None:
    """rows[home] += private rows, to `collect` them; else private rows = rows[home]."""
    for k in range(len(home)):
        to, at = np.int64(home[k]) * width, (base + k) * width
        if collect:
            for c in range(width):
                rows[to + c] += rows[at + c]
        else:
            for c in range(width):
                rows[at + c] = rows[to + c]


@compiled
def step(
    scores: Array, rows: Array, vertex: Array, take: Array, give: Array, corners: int, width: int, first_step: bool,
    last_step: bool, new_rows: Array, q: Array, start: int, stop: int,
) -> None:  # fmt: skip
    """A mean-field step for some pixels: slice, add scores, softmax, and splat; the last one writes q (L, N)."""
    block = np.empty(PIXELS_AT_ONCE * width, np.float32)
    sliced = 0 if first_step else corners
    for first in range(start, stop, PIXELS_AT_ONCE):
        size = min(PIXELS_AT_ONCE, stop - first)
        for p in range(size):  # loop by loop: each is short enough that the processor works on several pixels at once
            n = first + p
            gather(block, scores, rows, vertex, take, p * width, n * width, n * corners, sliced, width)
        for p in range(size):
            softmax(block, p * width, width)
        if last_step:
            _from_rows(block, q.shape[0], first, size, width, q)
        else:
            for p in range(size):
                scatter(new_rows, block, vertex, give, p * width, (first + p) * corners, corners, width)
