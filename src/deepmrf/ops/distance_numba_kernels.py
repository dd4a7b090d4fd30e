"""The distance kernel's window sum over images as running sums, compiled by numba: one pass over q, labels in lanes.

    sum over z of |I_j - I_z|^2 x_z = |I_j|^2 Box(x) - 2 I_j . Box(I x) + Box(|I|^2 x)        and alike for positions

Every map under a Box becomes a row of column sums over the window's rows: the next row enters, the last one leaves.
Sums of K_m[j] * S_m[j] along the row then follow, S_m being the running sums of the column sums. Eight labels share
each of these operations, and the pixels' factors: distance_numba_lanes.py. Going forward, colour and position share
their squared lengths too, weighted; going back, the gradients to the weights want them apart.
Everything is summed in float64: after values around 255 have left a sum, what remains must still be exact.

This module imports numba: import it on first use only. Maps are (B, L, T, H, W), features (B, F, T, H, W).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.ops.distance_numba_lanes import BLOCK, gain, lose, move
from deepmrf.ops.numba_support import compiled, compiled_sums
from deepmrf.ops.numba_vectors import LANES, lanes_to_rows, products_to_lanes, rows_to_lanes

Array = NDArray[Any]

FORWARD, BACKWARD, PULL_AHEAD, PULL_BACK = 0, 1, 2, 3
"""What a job does: t; the gradients to q and weights; either half of the gradient to the features."""
NORMS: dict[int, tuple[int, ...]] = {FORWARD: (0,), BACKWARD: (0, 0), PULL_AHEAD: (), PULL_BACK: ()}
"""One number per squared length that the sums of a mode need: job is compiled for how many there are."""
NONE = -1
"""In place of a row: there is none."""


@compiled
def aligned(size: int) -> Array:
    """Zeros that begin where a cache line does: a vector is as long as one, and two lines take twice the time."""
    whole = np.zeros(size + LANES)
    skip = (-whole.ctypes.data % 64) // 8
    return whole[skip : skip + size]


@compiled
def read_lanes(product: bool, q: Array, other: Array, row: int, x: int, size: int, out: Array) -> None:
    """Some pixels of a row of q (L, R, W), or of its product with another map, into (size, LANES); zeros for no row."""
    if row == NONE:
        out[:size] = 0.0
        return
    labels, rows, width = q.shape
    whole = size // LANES * LANES
    if product:
        products_to_lanes(q, other, row * width + x, rows * width, labels, whole, out, 0)
    else:
        rows_to_lanes(q, q, row * width + x, rows * width, labels, whole, out, 0)
    for i in range(whole, size):
        for k in range(labels):
            value = np.float64(q[k, row, x + i])
            out[i, k] = value * other[k, row, x + i] if product else value


@compiled
def read_factors(
    norms: tuple[int, ...],
    features: Array,
    row: int,
    x: int,
    size: int,
    mean: Array,
    scale: float,
    weights: Array,
    places: Array,
    y: float,
    t: float,
    times: float,
    out: Array,
) -> None:
    """Some pixels of a row as factors: squared lengths, then `times` the centred features. (norms + F, BLOCK)"""
    if row == NONE:
        return
    count = len(norms)
    place = places[x : x + size]
    if count:
        out[0, :size] = 0.0
    for f in range(len(features)):
        given, middle, centred = features[f, row, x : x + size], mean[f], out[count + f]
        for i in range(size):
            value = given[i] * scale - middle
            centred[i] = times * value
            if count:
                out[0, i] += value * value
    further = y * y + t * t
    if count == 1:
        colour, position = weights[0], weights[1]
        for i in range(size):
            out[0, i] = colour * out[0, i] + position * (place[i] * place[i] + further)
    elif count == 2:
        for i in range(size):
            out[1, i] = place[i] * place[i] + further


@compiled
def finish_forward(total: Array, q: Array, gate: bool, keep: bool, bias: float, out: Array, kept: Array) -> None:
    """The gate and the bias, and the sum before them if it is kept."""
    if keep:
        for i in range(len(out)):
            kept[i] = total[i]
    if gate:
        for i in range(len(out)):
            out[i] = q[i] * total[i] + bias
    else:
        for i in range(len(out)):
            out[i] = total[i] + bias


@compiled_sums
def finish_backward(
    colour: Array, position: Array, weights: Array, grad: Array, q: Array, gate: bool, kept: Array, out: Array
) -> tuple[float, float, float]:
    """The gradient to some pixels of q; their part of the gradients to the weights is returned."""
    w_colour, w_position = weights[0], weights[1]
    if gate:
        for i in range(len(out)):
            out[i] = w_colour * colour[i] + w_position * position[i] + np.float64(grad[i]) * kept[i]
    else:
        for i in range(len(out)):
            out[i] = w_colour * colour[i] + w_position * position[i]
    by_colour, by_position, whole = 0.0, 0.0, 0.0
    for i in range(len(out)):
        by_colour += q[i] * colour[i]
        by_position += q[i] * position[i]
        whole += grad[i]
    return by_colour, by_position, whole


@compiled
def finish_pull(total: Array, factor: float, q: Array, grad: Array, product: bool, ahead: bool, out: Array) -> None:
    """out += factor * total * (what meets the window sum at its centre)"""
    if not ahead:
        for i in range(len(out)):
            out[i] += factor * total[i] * q[i]
    elif product:
        for i in range(len(out)):
            out[i] += factor * total[i] * (np.float64(grad[i]) * q[i])
    else:
        for i in range(len(out)):
            out[i] += factor * total[i] * grad[i]


@compiled
def finish(
    mode: int, total: Array, lines: Array, row: int, x: int, size: int, weights: Array, gate: bool, keep: bool,
    q: Array, grad: Array, kept: Array, out: Array, pulled: Array, sums: Array,
) -> None:  # fmt: skip
    """A block of results (results, BLOCK, LANES) of a row, by way of lines (results, LANES, BLOCK)."""
    for k in range(len(total)):
        at = k * BLOCK * LANES
        lanes_to_rows(total, at, (size + LANES - 1) // LANES * LANES, lines, at, BLOCK)
    end = x + size
    for v in range(len(q)):
        own, slope = q[v, row, x:end], grad[v, row, x:end]
        if mode == FORWARD:
            finish_forward(lines[0, v], own, gate, keep, weights[2], out[v, row, x:end], kept[v, row, x:end])
        elif mode == BACKWARD:
            by_colour, by_position, whole = finish_backward(
                lines[0, v], lines[len(lines) - 1, v], weights, slope, own, gate, kept[v, row, x:end], out[v, row, x:end]
            )
            sums[0] += by_colour
            sums[1] += by_position
            sums[2] += whole
        else:
            for f in range(len(lines)):
                target = pulled[f, row, x:end]
                finish_pull(lines[f, v], 2.0 * weights[0], own, slope, gate, mode == PULL_AHEAD, target)


@compiled
def job(
    norms: tuple[int, ...],
    channels: tuple[int, ...],
    mode: int,
    height: int,
    frame: int,
    frames: tuple[int, int],
    t_step: float,
    q: Array,
    grad: Array,
    kept: Array,
    features: Array,
    mean: Array,
    scale: float,
    weights: Array,
    spacing: tuple[float, float],
    reach: tuple[int, int, int, int],
    gate: bool,
    keep: bool,
    out: Array,
    pulled: Array,
    sums: Array,
    first: int,
    last: int,
) -> bool:
    """Rows first .. last - 1 of up to 8 labels of an image; False if a sum was not a number, which may have spread.

    norms: NORMS[mode]; channels: one number per feature.
    q, grad, kept, out (L, H, W), features, pulled (F, H, W), sums (3,). A volume has T * H rows, and the image is its
    plane `frame`, whose windows reach over planes frames[0] .. frames[1] - 1, t_step apart: their rows enter and leave
    the same column sums, at a distance along the first axis that is known beforehand.
    """
    width = q.shape[2]
    y_before, y_after, x_before, x_after = reach
    y_step, x_step = spacing
    # What is summed over windows: a map, or its product with the other one.
    ahead = mode == FORWARD or mode == PULL_AHEAD
    product = gate and not ahead
    given = q if ahead or gate else grad
    colour = 1.0 if len(norms) == 0 else -2.0 * weights[0] if mode == FORWARD else -2.0
    position = -2.0 * weights[1] if mode == FORWARD else -2.0

    left = x_before + 1
    length, factors = left + width, len(norms) + len(channels)
    maps = factors + 2 if len(norms) else factors + 1
    results = len(norms) if len(norms) else len(channels)
    columns = aligned(length * maps * LANES).reshape((length, maps, LANES))
    near = aligned(2 * BLOCK * LANES).reshape((2, BLOCK, LANES))
    total = aligned(results * BLOCK * LANES).reshape((results, BLOCK, LANES))
    lines = aligned(results * LANES * BLOCK).reshape((results, LANES, BLOCK))
    state = aligned(maps * LANES).reshape((maps, LANES))
    factors_of = aligned(3 * factors * BLOCK).reshape((3, factors, BLOCK))
    numbers, places = np.zeros(3), np.zeros((2, length))
    for i in range(width):
        places[0, left + i] = (i - 0.5 * (width - 1)) * x_step
    places[1] = position * places[0]
    along, middle = places[0, left:], 0.5 * (height - 1)

    for z in range(max(first - y_before, 0), last + y_after):
        y, gone = z - y_after, z - y_after - y_before - 1
        enters, leaves = z < height, gone >= 0 and y > first
        y_new, y_old, y_here = (z - middle) * y_step, (gone - middle) * y_step, (y - middle) * y_step
        numbers[0], numbers[1], numbers[2] = y_new, y_old, position * y_here
        row = frame * height + y
        for t in range(frames[0], frames[1]):
            away = (t - frame) * t_step
            new_row, old_row = t * height + z if enters else NONE, t * height + gone if leaves else NONE
            # The last plane's row brings the results, columns being ahead of them; other rows only change the columns.
            emits = y >= first and t == frames[1] - 1
            ahead_by = x_after if emits else width
            state[:] = 0.0
            x = -ahead_by
            while x < (width if emits else 0):
                size = min(BLOCK, width - x if x >= 0 else -x)
                column = x + ahead_by
                inside = min(size, max(width - column, 0))
                if inside:
                    read_lanes(product, given, grad, new_row, column, inside, near[0])
                    read_lanes(product, given, grad, old_row, column, inside, near[1])
                    read_factors(
                        norms, features, new_row, column, inside, mean, scale, weights, along, y_new, away, 1.0,
                        factors_of[0],
                    )  # fmt: skip
                    read_factors(
                        norms, features, old_row, column, inside, mean, scale, weights, along, y_old, away, 1.0,
                        factors_of[1],
                    )  # fmt: skip
                enter_at, leave_at, here_at = left + column, x, left + x
                if x < 0:
                    gain(
                        norms, channels, columns, enter_at, leave_at, here_at, length, places, near, factors_of,
                        numbers, state, total, 0, size,
                    )  # fmt: skip
                else:
                    read_factors(
                        norms, features, row, x, size, mean, scale, weights, along, y_here, 0.0, colour, factors_of[2]
                    )
                    move(
                        norms, channels, columns, enter_at, leave_at, here_at, length, places, near, factors_of,
                        numbers, state, total, 0, inside,
                    )  # fmt: skip
                    lose(
                        norms, channels, columns, enter_at, leave_at, here_at, length, places, near, factors_of,
                        numbers, state, total, inside, size,
                    )  # fmt: skip
                    finish(
                        mode, total, lines, row, x, size, weights, gate, keep, q, grad, kept, out, pulled, sums
                    )  # fmt: skip
                x += size
    # A running sum never recovers from a NaN, so the last sums tell.
    return bool(np.isfinite(columns.sum()))
