"""The distance kernel's window sum over images as running sums: one pass over q, eight labels at a time.

    sum over z of |I_j - I_z|^2 x_z = |I_j|^2 Box(x) - 2 I_j . Box(I x) + Box(|I|^2 x)        and alike for positions

For every map under a Box, a row of column sums over the window's rows is kept: the next row of pixels enters, the last
one leaves. The window sums along the row are running sums of the column sums (cpu_sums.py). Eight labels share each of
these operations and the factors of the pixels (cpu_rows.py). Forward, colour and position also share their weighted
squared lengths; backward, the gradients to the weights need them apart.
All sums are in float64: after values around 255 have left a sum, what remains must still be exact.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.ops.distance.cpu_rows import (
    finish_backward,
    finish_forward,
    finish_pull,
    lanes_to_rows,
    products_to_lanes,
    read_factors,
    rows_to_lanes,
)
from deepmrf.ops.distance.cpu_sums import BLOCK, LANES, gain, lose, move
from deepmrf.ops.jobs import compiled
from deepmrf.ops.vectors import aligned

Array = NDArray[Any]

FORWARD, BACKWARD, PULL_AHEAD, PULL_BACK = 0, 1, 2, 3
"""What a job computes: t; the gradients to q and weights; either half of the gradient to the features."""
NORMS: dict[int, tuple[int, ...]] = {FORWARD: (0,), BACKWARD: (0, 0), PULL_AHEAD: (), PULL_BACK: ()}
"""One entry per squared length that a mode sums: `job` is compiled for their number."""


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
    ungated: Array,
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

    norms: NORMS[mode]; channels: one entry per feature.
    q, grad, ungated, out (L, H, W), features, pulled (F, H, W), weights (3,) and sums (3,) in float64. A volume has
    T * H rows, and the image is its plane `frame`, whose windows reach over planes frames[0] .. frames[1] - 1, t_step
    apart: their rows enter and leave the same column sums, at a known distance along the first axis.
    """
    labels, rows, width = q.shape
    y_before, y_after, x_before, x_after = reach
    y_step, x_step = spacing
    # What is summed over windows: a map, or its product with the other one.
    ahead = mode == FORWARD or mode == PULL_AHEAD
    product = gate and not ahead
    given = q if ahead or gate else grad
    colour = 1.0 if len(norms) == 0 else -2.0 * weights[0] if mode == FORWARD else -2.0
    position = -2.0 * weights[1] if mode == FORWARD else -2.0

    left, step = x_before + 1, rows * width
    length, factors = left + width, len(norms) + len(channels)
    maps = factors + 2 if len(norms) else factors + 1
    results = len(norms) if len(norms) else len(channels)
    columns = aligned(length * maps * LANES, weights)
    pixels, window_sums = aligned(2 * BLOCK * LANES, weights), aligned(maps * LANES, weights)
    total, lines = aligned(results * BLOCK * LANES, weights), aligned(results * LANES * BLOCK, weights)
    pixel_factors, heights, positions = aligned(3 * factors * BLOCK, weights), np.zeros(3), np.zeros(2 * length)
    lane_sums = np.zeros((3, LANES))
    for i in range(width):
        positions[left + i] = (i - 0.5 * (width - 1)) * x_step
        positions[length + left + i] = position * positions[left + i]
    middle = 0.5 * (height - 1)

    for z in range(max(first - y_before, 0), last + y_after):
        y, old = z - y_after, z - y_after - y_before - 1
        enters, leaves = z < height, old >= 0 and y > first
        y_new, y_old, y_here = (z - middle) * y_step, (old - middle) * y_step, (y - middle) * y_step
        heights[0], heights[1], heights[2] = y_new, y_old, position * y_here
        if not enters or not leaves:
            pixels[:] = 0.0
        for t in range(frames[0], frames[1]):
            away = ((t - frame) * t_step) ** 2
            # The row of the last plane gives the results, x_after columns behind; other rows only change the columns.
            emits = y >= first and t == frames[1] - 1
            ahead_by = x_after if emits else width
            window_sums[:] = 0.0
            x = -ahead_by
            while x < (width if emits else 0):
                size = min(BLOCK, width - x if x >= 0 else -x)
                column = x + ahead_by
                inside = min(size, max(width - column, 0))
                for which in range(2):
                    if inside and (leaves if which else enters):
                        at = (t * height + (old if which else z)) * width + column
                        beside = (y_old * y_old if which else y_new * y_new) + away
                        if product:
                            products_to_lanes(q, grad, at, step, labels, inside, pixels, which * BLOCK * LANES)
                        else:
                            rows_to_lanes(given, given, at, step, labels, inside, pixels, which * BLOCK * LANES)
                        read_factors(
                            norms, channels, features, at, step, inside, mean, scale, 1.0, weights, positions,
                            left + column, beside, pixel_factors, which,
                        )  # fmt: skip
                if x < 0:
                    gain(
                        norms, channels, columns, left + column, x, left + x, length, positions, pixels, pixel_factors,
                        heights, window_sums, total, 0, size,
                    )  # fmt: skip
                    x += size
                    continue
                at = (frame * height + y) * width + x
                read_factors(
                    norms, channels, features, at, step, size, mean, scale, colour, weights, positions, left + x,
                    y_here * y_here, pixel_factors, 2,
                )  # fmt: skip
                move(
                    norms, channels, columns, left + column, x, left + x, length, positions, pixels, pixel_factors,
                    heights, window_sums, total, 0, inside,
                )  # fmt: skip
                lose(
                    norms, channels, columns, left + column, x, left + x, length, positions, pixels, pixel_factors,
                    heights, window_sums, total, inside, size,
                )  # fmt: skip
                for k in range(results):
                    lanes_to_rows(total, k * BLOCK * LANES, size, lines, k * BLOCK * LANES, BLOCK)
                if len(norms) == 1:
                    finish_forward(lines, q, ungated, out, at, step, labels, size, gate, keep, weights[2])
                elif len(norms) == 2:
                    finish_backward(lines, q, grad, ungated, out, at, step, labels, size, gate, weights, lane_sums)
                else:
                    for f in range(results):
                        finish_pull(
                            lines, f, q, grad, at, step, labels, size, gate, ahead, 2.0 * weights[0],
                            pulled, f * step + at,
                        )  # fmt: skip
                x += size
    for k in range(3):
        sums[k] += lane_sums[k].sum()
    # A running sum never recovers from a NaN: the last sums show whether there was one.
    return bool(np.isfinite(columns.sum()))
