"""The Gaussian kernel's window sum, compiled by numba.

    total[j, v] = sum over z of s(j, z) x[z, v]        and, for the gradients,   pair(j, z) = s(j, z) x[z] . y[j]

Pixels j side by side are the lanes of a vector, and ROWS rows of them are a group: for an offset dx and a row of
neighbours z, a vector of x serves all rows of the group, and their sums stay in registers for MAX_OFFSETS offsets. s is
computed once for all labels, for as many offsets, into a buffer that stays in the cache (cpu_sums.py).

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.ops.gaussian.cpu_sums import (
    MAX_LABELS,
    OFFSETS_AT_ONCE,
    ROWS,
    VECTOR_BYTES,
    add_products,
    pull,
    similarity_3,
    similarity_3_kept,
    similarity_any,
    similarity_any_kept,
    weigh_pairs,
)
from deepmrf.ops.jobs import ANY_ORDER, compiled
from deepmrf.ops.vectors import aligned

Array = NDArray[Any]

MAX_OFFSETS = 256
"""Offsets whose similarities are computed before they are used: few enough for the second cache."""
PIXELS_READ_BEYOND = VECTOR_BYTES // 4 + OFFSETS_AT_ONCE
"""Pixels that may be read, to no effect, after the last window of a row."""
FORWARD, BACKWARD, PAIRS = 0, 1, 2
"""What a job computes: t; the gradient to q and the sums over pairs; these alone, for the gradient to the features."""
EXCLUDED = 1e30
"""In place of a squared distance: this neighbour does not count."""


@compiled
def similarities(
    s: Array, colours: Array, to: int, features: Array, here: int, there: int, distances: Array, at: int, size: int,
    keep: bool,
) -> None:  # fmt: skip
    """Similarities of a group to its neighbours in a row, and the part of the colours if `keep`."""
    count, rows, line = features.shape
    plane, row = rows * line, distances.shape[2]
    if count == 3 and keep:
        similarity_3_kept(s, colours, features, distances, to, here, there, line, plane, count, at, row, size)
    elif count == 3:
        similarity_3(s, colours, features, distances, to, here, there, line, plane, count, at, row, size)
    elif keep:
        similarity_any_kept(s, colours, features, distances, to, here, there, line, plane, count, at, row, size)
    else:
        similarity_any(s, colours, features, distances, to, here, there, line, plane, count, at, row, size)


@partial(compiled, fastmath=ANY_ORDER)
def inner(a: Array, b: Array) -> float:
    """<a, b> in double precision."""
    total = 0.0
    for i in range(len(a)):
        total += np.float64(a[i]) * np.float64(b[i])
    return total


@partial(compiled, fastmath=ANY_ORDER)
def sum_of(a: Array) -> float:
    """The sum in double precision."""
    total = 0.0
    for i in range(len(a)):
        total += np.float64(a[i])
    return total


@compiled
def finish(
    mode: int, window_sums: Array, pitch: int, down: int, row: int, x: int, end: int, weights: Array, gate: bool,
    keep: bool, q: Array, grad: Array, ungated: Array, out: Array, sums: Array,
) -> None:  # fmt: skip
    """`down` rows of the result, x .. end - 1, from their sums (row, label, pixel); going back, adds to `sums` too."""
    w, bias = weights[0], weights[1]
    labels, width = len(q), end - x
    for r in range(down):
        for v in range(labels):
            begin = (r * labels + v) * pitch
            totals, own, slope = window_sums[begin : begin + width], q[v, row + r, x:end], grad[v, row + r, x:end]
            before_gate, result = ungated[v, row + r, x:end], out[v, row + r, x:end]
            if mode == BACKWARD:
                sums[0] += inner(own, totals)
                sums[3] += sum_of(slope)
                for i in range(width):
                    result[i] = w * totals[i] + slope[i] * before_gate[i] if gate else w * totals[i]
            else:
                if keep:
                    for i in range(width):
                        before_gate[i] = w * totals[i]
                for i in range(width):
                    result[i] = (own[i] * (w * totals[i]) if gate else w * totals[i]) + bias


@compiled
def job(
    mode: int, height: int, neighbours: Array, centre: Array, features: Array, distances: Array,
    reach: tuple[int, int, int], window: tuple[int, int, int], weights: Array, gate: bool, keep: bool,
    features_too: bool, q: Array, grad: Array, ungated: Array, out: Array, pulled: Array, sums: Array, first: int,
    last: int, start: int, end: int, only_frame: int,
) -> None:  # fmt: skip
    """Part of an image: the window sum unless the mode is PAIRS, and pairs unless FORWARD.

    It is rows first .. last - 1 of R, and start .. end - 1 in each; start is a multiple of VECTOR_BYTES.
    neighbours (R, L, X): what is summed over windows, with borders along x.
    centre (L, R, W): what it meets at the centre of the window in a pair.
    features (F, R + ROWS - 1, X): scaled, with borders.
    distances (T', H' + 2 (ROWS - 1), X' + PIXELS_READ_BEYOND): scaled squared lengths of a window's offsets.
    reach, window: how many pixels a window has before its centre, and how many in all.
    q, grad, ungated, out (L, R, W), pulled (F, R, W).
    sums (4,): of pairs, of pairs * colours, of pairs * distances, of grad.
    only_frame: the frame whose neighbours count, or -1 for all of them.
    """
    labels, rows, width = q.shape
    depth, count, line = rows // height, len(features), features.shape[2]
    lanes = VECTOR_BYTES // q.itemsize
    backward = mode != FORWARD
    parts = (labels + MAX_LABELS - 1) // MAX_LABELS
    s, colours = aligned(MAX_OFFSETS * ROWS * lanes, q), aligned(MAX_OFFSETS * ROWS * lanes if backward else 0, q)
    # An odd number of vectors apart, or they would share few places in the first cache.
    pitch = ((end - start + lanes - 1) // lanes | 1) * lanes
    total, centres = aligned(ROWS * labels * pitch, q), aligned(ROWS * labels * pitch if backward else 0, q)
    pulls, length_sums = aligned(count * ROWS * lanes, q), aligned(2 * lanes, q)
    by_colour, by_distance = 0.0, 0.0
    neighbours_row, plane, distances_row = labels * line, features.shape[1] * line, distances.shape[2]
    row = first
    while row < last:
        t, y = row // height, row % height
        down = min(ROWS, last - row, height - y)
        top, bottom = max(y - reach[1], 0), min(y + down - 1 - reach[1] + window[1], height)
        total[:] = 0.0
        centres[:] = 0.0
        if backward:
            for r in range(down):
                for v in range(labels):
                    to, given = (r * labels + v) * pitch, centre[v, row + r, start:end]
                    for i in range(end - start):  # numba takes seconds to compile the assignment of a slice
                        centres[to + i] = given[i]
        for x in range(start, end, lanes):
            lanes_used, here = min(lanes, end - x), row * line + x + reach[2]
            # Offsets with a neighbour inside the image.
            left, right = max(reach[2] - x - lanes_used + 1, 0), min(reach[2] + width - x, window[2])
            pulls[:] = 0.0
            for dt in range(window[0]):
                t_other = t + dt - reach[0]
                if t_other < 0 or t_other >= depth or (only_frame >= 0 and t_other != only_frame):
                    continue
                for dx in range(left, right, MAX_OFFSETS):
                    size = min(right - dx, MAX_OFFSETS)
                    if backward:
                        size = (size + OFFSETS_AT_ONCE - 1) // OFFSETS_AT_ONCE * OFFSETS_AT_ONCE
                    lines = MAX_OFFSETS // size
                    s_row = size * ROWS * lanes
                    for begin in range(top, bottom, lines):
                        taken = min(lines, bottom - begin)
                        other = t_other * height + begin
                        distance = (dt * distances.shape[1] + begin - y + reach[1] + ROWS - 1) * distances_row + dx
                        there, at = other * line + x + dx, other * neighbours_row + x + dx
                        for n in range(taken):
                            similarities(
                                s, colours, n * s_row, features, here, there + n * line, distances,
                                distance + n * distances_row, size, backward,
                            )  # fmt: skip
                        if mode != PAIRS:
                            for part in range(parts):
                                v = labels * part // parts
                                add_products(
                                    total, s, neighbours, v * pitch + x - start, labels * pitch, pitch, at + v * line,
                                    line, neighbours_row, s_row, taken, size, labels * (part + 1) // parts - v,
                                )  # fmt: skip
                        if backward:
                            for n in range(taken):
                                weigh_pairs(
                                    s, colours, centres, neighbours, distances, length_sums, n * s_row, x - start,
                                    pitch, at + n * neighbours_row, line, labels, distance + n * distances_row,
                                    distances_row, size,
                                )  # fmt: skip
                                if features_too:
                                    for f in range(count):
                                        pull(
                                            pulls, s, features, f * ROWS * lanes, f * plane + here,
                                            f * plane + there + n * line, line, n * s_row, size,
                                        )  # fmt: skip
                            # These are few enough terms for float32; the sums of them are in float64.
                            for i in range(lanes):
                                by_colour += length_sums[i]
                                by_distance += length_sums[lanes + i]
                            length_sums[:] = 0.0
            if features_too:
                for f in range(count):
                    for r in range(down):
                        for i in range(lanes_used):
                            pulled[f, row + r, x + i] += pulls[(f * ROWS + r) * lanes + i]
        if mode != PAIRS:
            finish(mode, total, pitch, down, row, start, end, weights, gate, keep, q, grad, ungated, out, sums)
        row += down
    sums[1] += by_colour
    sums[2] += by_distance
