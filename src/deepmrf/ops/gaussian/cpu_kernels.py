"""The Gaussian kernel's window sum, compiled by numba.

    total[j, v] = sum over z of s(j, z) x[z, v]        and, for the gradients,   pair(j, z) = s(j, z) x[z] . y[j]

Pixels j side by side are the lanes of a vector, and GROUP rows of them are a block: for an offset dx and a row of
neighbours z, a vector of x serves all rows of the block, and their sums stay in registers for CHUNK offsets. s is
computed once for all labels, for as many offsets, into a buffer that stays in the cache.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.ops.gaussian.cpu_sums import (
    GROUP,
    MOST,
    STEP,
    VECTOR,
    add_products,
    pull,
    similarity_3,
    similarity_3_kept,
    similarity_any,
    similarity_any_kept,
    weigh_pairs,
)
from deepmrf.ops.jobs import ANY_ORDER, compiled

Array = NDArray[Any]

CHUNK = 256
"""Offsets whose weights are computed before they are used: few enough for the second cache. A multiple of STEP."""
OVERHANG = VECTOR // 4 + STEP
"""Pixels that may be read, to no effect, after the last window of a row."""
FORWARD, BACKWARD, PAIRS = 0, 1, 2
"""What a job does: t; the gradient to q and the sums over pairs; these alone, for the gradient to the features."""
FAR = 1e30
"""In place of a squared distance: this neighbour does not count."""


@compiled
def aligned(size: int, like: Array) -> Array:
    """Zeros, from the start of a cache line on: vectors in two lines take twice as long."""
    made = np.zeros(size + VECTOR, like.dtype)
    skip = -made.ctypes.data % VECTOR // like.itemsize
    return made[skip : skip + size]


@compiled
def similarities(
    s: Array, colours: Array, to: int, features: Array, here: int, there: int, places: Array, place: int, size: int,
    keep: bool,
) -> None:  # fmt: skip
    """Weights of a block's neighbours in a row, and the colours' part if wanted."""
    count, rows, line = features.shape
    plane, row = rows * line, places.shape[2]
    if count == 3 and keep:
        similarity_3_kept(s, colours, features, places, to, here, there, line, plane, count, place, row, size)
    elif count == 3:
        similarity_3(s, colours, features, places, to, here, there, line, plane, count, place, row, size)
    elif keep:
        similarity_any_kept(s, colours, features, places, to, here, there, line, plane, count, place, row, size)
    else:
        similarity_any(s, colours, features, places, to, here, there, line, plane, count, place, row, size)


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
    mode: int, sums_of: Array, pitch: int, down: int, row: int, x: int, end: int, weights: Array, gate: bool,
    keep: bool, q: Array, grad: Array, kept: Array, out: Array, sums: Array,
) -> None:  # fmt: skip
    """`down` rows of the result, x .. end - 1, from their sums (row, label, pixel); going back, adds to `sums` too."""
    w, bias = weights[0], weights[1]
    labels, width = len(q), end - x
    for r in range(down):
        for v in range(labels):
            begin = (r * labels + v) * pitch
            totals, mine, above = sums_of[begin : begin + width], q[v, row + r, x:end], grad[v, row + r, x:end]
            held, done = kept[v, row + r, x:end], out[v, row + r, x:end]
            if mode == BACKWARD:
                sums[0] += inner(mine, totals)
                sums[3] += sum_of(above)
                for i in range(width):
                    done[i] = w * totals[i] + above[i] * held[i] if gate else w * totals[i]
            else:
                if keep:
                    for i in range(width):
                        held[i] = w * totals[i]
                for i in range(width):
                    done[i] = (mine[i] * (w * totals[i]) if gate else w * totals[i]) + bias


@compiled
def job(
    mode: int,
    height: int,
    near: Array,
    centre: Array,
    features: Array,
    places: Array,
    reach: tuple[int, int, int],
    window: tuple[int, int, int],
    weights: Array,
    gate: bool,
    keep: bool,
    features_too: bool,
    q: Array,
    grad: Array,
    kept: Array,
    out: Array,
    pulled: Array,
    sums: Array,
    first: int,
    last: int,
    start: int,
    end: int,
    only: int,
) -> None:
    """Part of an image: the window sum unless the mode is PAIRS, and pairs unless FORWARD.

    It is rows first .. last - 1 of R, and start .. end - 1 in each; start is a multiple of VECTOR.
    near (R, L, X): what is summed over windows, with borders along x.
    centre (L, R, W): what it meets at the centre of the window in a pair.
    features (F, R + GROUP - 1, X): scaled, with borders.
    places (T', H' + 2 (GROUP - 1), X' + OVERHANG): the scaled squared lengths of the offsets of a window.
    reach, window: how many pixels a window has before its centre, and how many in all.
    q, grad, kept, out (L, R, W), pulled (F, R, W).
    sums (4,): of pairs, of pairs * colours, of pairs * places, of grad.
    only: the one frame whose neighbours count, or -1 for all of them.
    """
    labels, rows, width = q.shape
    depth, count, line = rows // height, len(features), features.shape[2]
    lanes = VECTOR // q.itemsize
    backward = mode != FORWARD
    parts = (labels + MOST - 1) // MOST
    s, colours = aligned(CHUNK * GROUP * lanes, q), aligned(CHUNK * GROUP * lanes if backward else 0, q)
    # An odd number of vectors apart, or they would share few places in the first cache.
    pitch = ((end - start + lanes - 1) // lanes | 1) * lanes
    total, mine = aligned(GROUP * labels * pitch, q), aligned(GROUP * labels * pitch if backward else 0, q)
    drawn, lengths = aligned(count * GROUP * lanes, q), aligned(2 * lanes, q)
    by_colour, by_place = 0.0, 0.0
    near_row, plane, places_row = labels * line, features.shape[1] * line, places.shape[2]
    row = first
    while row < last:
        t, y = row // height, row % height
        down = min(GROUP, last - row, height - y)
        top, bottom = max(y - reach[1], 0), min(y + down - 1 - reach[1] + window[1], height)
        total[:] = 0.0
        mine[:] = 0.0
        if backward:
            for r in range(down):
                for v in range(labels):
                    to, given = (r * labels + v) * pitch, centre[v, row + r, start:end]
                    for i in range(end - start):  # numba takes seconds to compile the assignment of a slice
                        mine[to + i] = given[i]
        for x in range(start, end, lanes):
            here, mid = min(lanes, end - x), row * line + x + reach[2]
            # Offsets with a neighbour inside the image.
            left, right = max(reach[2] - x - here + 1, 0), min(reach[2] + width - x, window[2])
            drawn[:] = 0.0
            for dt in range(window[0]):
                t_other = t + dt - reach[0]
                if t_other < 0 or t_other >= depth or (only >= 0 and t_other != only):
                    continue
                for dx in range(left, right, CHUNK):
                    size = min(right - dx, CHUNK)
                    if backward:
                        size = (size + STEP - 1) // STEP * STEP
                    lines = CHUNK // size
                    s_row = size * GROUP * lanes
                    for begin in range(top, bottom, lines):
                        taken = min(lines, bottom - begin)
                        other = t_other * height + begin
                        place = (dt * places.shape[1] + begin - y + reach[1] + GROUP - 1) * places_row + dx
                        there, at = other * line + x + dx, other * near_row + x + dx
                        for n in range(taken):
                            similarities(
                                s, colours, n * s_row, features, mid, there + n * line, places, place + n * places_row,
                                size, backward,
                            )  # fmt: skip
                        if mode != PAIRS:
                            for part in range(parts):
                                v = labels * part // parts
                                add_products(
                                    total, s, near, v * pitch + x - start, labels * pitch, pitch, at + v * line, line,
                                    near_row, s_row, taken, size, labels * (part + 1) // parts - v,
                                )  # fmt: skip
                        if backward:
                            for n in range(taken):
                                weigh_pairs(
                                    s, colours, mine, near, places, lengths, n * s_row, x - start, pitch,
                                    at + n * near_row, line, labels, place + n * places_row, places_row, size,
                                )  # fmt: skip
                                if features_too:
                                    for f in range(count):
                                        pull(
                                            drawn, s, features, f * GROUP * lanes, f * plane + mid,
                                            f * plane + there + n * line, line, n * s_row, size,
                                        )  # fmt: skip
                            # Few enough terms for float32; from here on there are many.
                            for i in range(lanes):
                                by_colour += lengths[i]
                                by_place += lengths[lanes + i]
                            lengths[:] = 0.0
            if features_too:
                for f in range(count):
                    for r in range(down):
                        for i in range(here):
                            pulled[f, row + r, x + i] += drawn[(f * GROUP + r) * lanes + i]
        if mode != PAIRS:
            finish(mode, total, pitch, down, row, start, end, weights, gate, keep, q, grad, kept, out, sums)
        row += down
    sums[1] += by_colour
    sums[2] += by_place
