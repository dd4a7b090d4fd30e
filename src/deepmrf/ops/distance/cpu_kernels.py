"""The distance kernel's window sum over images and volumes as running sums: one pass over q, eight labels at a time.

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
from deepmrf.ops.distance.cpu_sums import BLOCK, LANES, exchange, gain, lose, move
from deepmrf.ops.jobs import compiled
from deepmrf.ops.vectors import aligned

Array = NDArray[Any]

FORWARD, BACKWARD, PULL_AHEAD, PULL_BACK = 0, 1, 2, 3
"""What a job computes: t; the gradients to q and weights; either half of the gradient to the features."""
NORMS: dict[int, tuple[int, ...]] = {FORWARD: (0,), BACKWARD: (0, 0), PULL_AHEAD: (), PULL_BACK: ()}
"""One entry per squared length that a mode sums: `job` is compiled for their number."""


@compiled
def read_block(  # type: ignore[no-untyped-def]
    norms, channels, which, product, given, grad, at, step, labels, size, features, mean, scale, weights, positions,
    column, beside, pixels, factors,
):  # fmt: skip
    """`size` pixels from an index on into the lanes, and their factors; see cpu_rows.py."""
    if product:
        products_to_lanes(given, grad, at, step, labels, size, pixels, which * BLOCK * LANES)
    else:
        rows_to_lanes(given, given, at, step, labels, size, pixels, which * BLOCK * LANES)
    read_factors(
        norms, channels, features, at, step, size, mean, scale, 1.0, weights, positions, column, beside, factors, which
    )


@compiled
def job(
    norms: tuple[int, ...], channels: tuple[int, ...], deep: tuple[int, ...], mode: int, height: int,
    planes: tuple[int, int], q: Array, grad: Array, ungated: Array, features: Array, mean: Array, scale: float,
    weights: Array, spacing: tuple[float, float, float], reach: tuple[int, int, int, int, int, int], gate: bool,
    keep: bool, out: Array, pulled: Array, sums: Array, first: int, last: int,
) -> bool:  # fmt: skip
    """Rows first .. last - 1 of some planes of up to 8 labels; False if a sum was not a number, which may have spread.

    norms: NORMS[mode]; channels: one entry per feature; deep: one entry if many planes are in a window.
    q, grad, ungated, out (L, T H, W), features, pulled (F, T H, W), weights (3,) and sums (3,) in float64; planes: the
    first, and the one after the last, with results. An image is a volume of one plane.

    The rows of all planes in a window enter and leave the same column sums, at a known distance along the first axis;
    or, if `deep`, the rows of sums over these planes, which are kept up to date: a plane enters, an old one leaves.
    """
    labels, rows, width = q.shape
    depth = rows // height
    t_before, t_after, y_before, y_after, x_before, x_after = reach
    t_step, y_step, x_step = spacing
    # What is summed over windows: a map, or its product with the other one.
    ahead = mode == FORWARD or mode == PULL_AHEAD
    product = gate and not ahead
    given = q if ahead or gate else grad
    colour = 1.0 if len(norms) == 0 else -2.0 * weights[0] if mode == FORWARD else -2.0
    square = weights[1] if mode == FORWARD else 1.0
    position = -2.0 * square

    left, step = x_before + 1, rows * width
    length, factors = left + width, len(norms) + len(channels)
    maps = factors + 2 if len(norms) else factors + 1
    results = len(norms) if len(norms) else len(channels)
    columns = aligned(length * maps * LANES, weights)
    pixels, window_sums = aligned(2 * BLOCK * LANES, weights), aligned(maps * LANES, weights)
    total, lines = aligned(results * BLOCK * LANES, weights), aligned(results * LANES * BLOCK, weights)
    pixel_factors, heights, positions = aligned(3 * factors * BLOCK, weights), np.zeros(7), np.zeros(2 * length)
    lane_sums = np.zeros((3, LANES))
    for i in range(width):
        positions[left + i] = (i - 0.5 * (width - 1)) * x_step
        positions[length + left + i] = position * positions[left + i]
    middle, t_middle = 0.5 * (height - 1), 0.5 * (depth - 1)
    # Sums over planes of the rows that windows reach, and a row of zeros for those outside the image.
    low, high = max(first - y_before, 0), min(last + y_after, height)
    plane_sums = aligned((high - low + 1) * width * maps * LANES if len(deep) else 0, weights)
    nowhere = np.zeros(BLOCK)
    source = plane_sums if len(deep) else pixels
    new_row, old_row = 0, 0
    clean = True

    for frame in range(planes[0], planes[1]):
        columns[:] = 0.0
        t_first, t_last = max(frame - t_before, 0), min(frame + t_after + 1, depth)
        t_here = (frame - t_middle) * t_step
        if len(deep):
            old = frame - t_before - 1
            for t in range(t_first if frame == planes[0] else frame + t_after, frame + t_after + 1):
                enters, leaves = t < depth, old >= 0 and frame > planes[0]
                heights[0], heights[1] = (t - t_middle) * t_step, (old - t_middle) * t_step
                pixels[:] = 0.0
                for y in range(low, high if enters or leaves else low):
                    for x in range(0, width, BLOCK):
                        size = min(BLOCK, width - x)
                        for which in range(2):
                            if leaves if which else enters:
                                at = ((old if which else t) * height + y) * width + x
                                read_block(
                                    norms, channels, which, product, given, grad, at, step, labels, size, features,
                                    mean, scale, weights, nowhere, 0, heights[which] ** 2, pixels, pixel_factors,
                                )  # fmt: skip
                        exchange(
                            norms, channels, plane_sums, (y - low) * width + x, pixels, pixel_factors, heights, size
                        )
            t_first, t_last = frame, frame + 1

        for z in range(low, last + y_after):
            y, old = z - y_after, z - y_after - y_before - 1
            enters, leaves = z < height, old >= 0 and y > first
            y_new, y_old, y_here = (z - middle) * y_step, (old - middle) * y_step, (y - middle) * y_step
            heights[0], heights[1], heights[2] = y_new, y_old, position * y_here
            heights[3], heights[4] = square * (y_new**2 + t_here**2), square * (y_old**2 + t_here**2)
            heights[5], heights[6] = position * t_here, square
            if not enters or not leaves:
                pixels[:] = 0.0
            for t in range(t_first, t_last):
                away = ((t - frame) * t_step) ** 2
                # The row of the last plane gives the results, x_after columns behind; other rows only change columns.
                emits = y >= first and t == t_last - 1
                ahead_by = x_after if emits else width
                window_sums[:] = 0.0
                x = -ahead_by
                while x < (width if emits else 0):
                    size = min(BLOCK, width - x if x >= 0 else -x)
                    column = x + ahead_by
                    inside = min(size, max(width - column, 0))
                    if len(deep):
                        new_row = ((z if enters else high) - low) * width + column
                        old_row = ((old if leaves else high) - low) * width + column
                    elif inside:
                        for which in range(2):
                            if leaves if which else enters:
                                at = (t * height + (old if which else z)) * width + column
                                beside = (y_old * y_old if which else y_new * y_new) + away
                                read_block(
                                    norms, channels, which, product, given, grad, at, step, labels, inside, features,
                                    mean, scale, weights, positions, left + column, beside, pixels, pixel_factors,
                                )  # fmt: skip
                    if x < 0:
                        gain(
                            norms, channels, deep, columns, left + column, x, left + x, length, positions, source,
                            new_row, old_row, pixel_factors, heights, window_sums, total, 0, size,
                        )  # fmt: skip
                        x += size
                        continue
                    at = (frame * height + y) * width + x
                    read_factors(
                        norms, channels, features, at, step, size, mean, scale, colour, weights, positions, left + x,
                        y_here * y_here, pixel_factors, 2,
                    )  # fmt: skip
                    move(
                        norms, channels, deep, columns, left + column, x, left + x, length, positions, source, new_row,
                        old_row, pixel_factors, heights, window_sums, total, 0, inside,
                    )  # fmt: skip
                    lose(
                        norms, channels, deep, columns, left + column, x, left + x, length, positions, source, new_row,
                        old_row, pixel_factors, heights, window_sums, total, inside, size,
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
        # A running sum never recovers from a NaN: the last sums show whether there was one.
        clean = clean and bool(np.isfinite(columns.sum()))
    for k in range(3):
        sums[k] += lane_sums[k].sum()
    return clean
