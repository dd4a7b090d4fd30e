"""The distance kernel over volumes whose windows hold many planes, compiled by numba: running sums along every axis.

What is summed, and why in float64: see cpu_kernels.py. Here the rows that enter and leave the column
sums are themselves sums over the window's first axis, brought up to date from plane to plane. A plane of those is kept
for every map that is summed, which is why labels take turns.

This module imports numba: import it on first use only. Maps are (L, T * H, W), features (F, T * H, W).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.ops.distance.cpu_kernels import FORWARD, PULL_AHEAD, PULL_BACK
from deepmrf.ops.jobs import compiled

Array = NDArray[Any]

BOX, NORM, MOMENT, SPREAD, FEATURES = 0, 1, 2, 3, 4
"""The column sums of x, |I|^2 x, y x and (y^2 + (t - t_j)^2) x, then those of I_f x."""


@compiled
def exchange_product(total: Array, factor: Array, x: Array, old_factor: Array, old: Array) -> None:
    """total += factor * x - old_factor * old"""
    for i in range(len(total)):
        total[i] += factor[i] * x[i] - old_factor[i] * old[i]


@compiled
def exchange_scaled(total: Array, factor: float, x: Array, old_factor: float, old: Array) -> None:
    """total += factor * x - old_factor * old"""
    for i in range(len(total)):
        total[i] += factor * x[i] - old_factor * old[i]


@compiled
def add_scaled(total: Array, factor: float, x: Array) -> None:
    """total += factor * x"""
    for i in range(len(total)):
        total[i] += factor * x[i]


@compiled
def subtract(out: Array, enters: Array, leaves: Array) -> None:
    """out = enters - leaves"""
    for i in range(len(out)):
        out[i] = enters[i] - leaves[i]


@compiled
def read_row(mode: int, other: bool, gate: bool, q: Array, grad: Array, row: Array) -> None:
    """The maps summed over the window (or the `other` factor of a pull): q ahead, what reaches the sum backwards."""
    if (mode in (FORWARD, PULL_AHEAD)) != other:
        for i in range(len(row)):
            row[i] = q[i]
    elif gate:
        for i in range(len(row)):
            row[i] = np.float64(grad[i]) * q[i]
    else:
        for i in range(len(row)):
            row[i] = grad[i]


@compiled
def read_features(features: Array, y: int, mean: Array, scale: float, row: Array) -> None:
    """Centred features of row y of the pixels, then |I|^2: (F, H, W) into (F + 1, W)."""
    count = len(features)
    norm = row[count]
    norm[:] = 0.0
    for f in range(count):
        given, middle, centred = features[f, y], mean[f], row[f]
        for i in range(len(norm)):
            centred[i] = given[i] * scale - middle
        for i in range(len(norm)):
            norm[i] += centred[i] * centred[i]


@compiled
def exchange_row(
    planes: Array, x: Array, features: Array, t: float, old: Array, old_features: Array, old_t: float
) -> None:
    """A row of pixels enters the sums over the window's first axis, and an old row leaves them."""
    exchange_scaled(planes[BOX], 1.0, x, 1.0, old)
    exchange_scaled(planes[MOMENT], t, x, old_t, old)
    exchange_scaled(planes[SPREAD], t * t, x, old_t * old_t, old)
    count = len(features) - 1
    if count:
        exchange_product(planes[NORM], features[count], x, old_features[count], old)
    for f in range(count):
        exchange_product(planes[FEATURES + f], features[f], x, old_features[f], old)


@compiled
def add_plane_row(columns: Array, left: int, planes: Array, y: float, t: float, sign: float) -> None:
    """A row of those sums enters (or leaves) the column sums, whose border is `left` wide; positions count from t."""
    right = left + planes.shape[1]
    box, spread = planes[BOX], columns[SPREAD, left:right]
    add_scaled(columns[BOX, left:right], sign, box)
    add_scaled(columns[MOMENT, left:right], sign * y, box)
    add_scaled(spread, sign * (y * y + t * t), box)
    add_scaled(spread, sign * -2.0 * t, planes[MOMENT])
    add_scaled(spread, sign, planes[SPREAD])
    count = len(planes) - FEATURES
    if count:
        add_scaled(columns[NORM, left:right], sign, planes[NORM])
    for f in range(count):
        add_scaled(columns[FEATURES + f, left:right], sign, planes[FEATURES + f])


@compiled
def mix(columns: Array, y: float, x: Array, colour: float, position: float, out: Array) -> None:
    """The part of the distance that does not depend on where along the row j is; (y - y_j)^2 is opened here."""
    box, moment, spread, norm = columns[BOX], columns[MOMENT], columns[SPREAD], columns[NORM]
    if position == 0.0:
        out[:] = 0.0
    else:
        for i in range(len(out)):
            out[i] = position * (spread[i] + (y * y + x[i] * x[i]) * box[i])
        add_scaled(out, -2.0 * y * position, moment)
    add_scaled(out, colour, norm)


@compiled
def sweep(steps: Array, starts: Array, factors: Array, slope: float, total: Array) -> None:
    """total = sum of factors[m] * running sum of steps[m], the sums held in registers.

    Loads are what it costs: the factor of x Box is slope * x, that of the mixed map 1, and neither is read.
    """
    size = len(total)
    s0, s1, s2 = starts[0], starts[1], starts[2]
    d0, d1, d2 = steps[0], steps[1], steps[2]
    k0, middle = factors[0], 0.5 * (size - 1)
    if len(steps) == 3:
        for i in range(size):
            s0 += d0[i]
            s1 += d1[i]
            s2 += d2[i]
            total[i] = k0[i] * s0 + (slope * (i - middle)) * s1 + s2
        return
    s3, s4, s5 = starts[3], starts[4], starts[5]
    d3, d4, d5 = steps[3], steps[4], steps[5]
    k3, k4, k5 = factors[3], factors[4], factors[5]
    for i in range(size):
        s0 += d0[i]
        s1 += d1[i]
        s2 += d2[i]
        s3 += d3[i]
        s4 += d4[i]
        s5 += d5[i]
        total[i] = (k0[i] * s0 + (slope * (i - middle)) * s1 + s2) + (k3[i] * s3 + k4[i] * s4 + k5[i] * s5)
    for m in range(6, len(steps), 3):
        s3, s4, s5 = starts[m], starts[m + 1], starts[m + 2]
        d3, d4, d5 = steps[m], steps[m + 1], steps[m + 2]
        k3, k4, k5 = factors[m], factors[m + 1], factors[m + 2]
        for i in range(size):
            s3 += d3[i]
            s4 += d4[i]
            s5 += d5[i]
            total[i] += k3[i] * s3 + k4[i] * s4 + k5[i] * s5


@compiled
def pull_sweep(
    box: Array, boxed: Array, starts: Array, feature: Array, other: Array, factor: float, out: Array
) -> None:
    """out += factor * other_j * (I_j Box_j - Box(I .)_j) for one feature."""
    s, sf = starts[0], starts[1]
    for i in range(len(out)):
        s += box[i]
        sf += boxed[i]
        out[i] += factor * other[i] * (feature[i] * s - sf)


@compiled
def finish_forward(total: Array, q: Array, gate: bool, keep: bool, bias: float, out: Array, ungated: Array) -> None:
    """The gate and the bias, and the sum before them if it is kept."""
    if keep:
        for i in range(len(out)):
            ungated[i] = total[i]
    if gate:
        for i in range(len(out)):
            out[i] = q[i] * total[i] + bias
    else:
        for i in range(len(out)):
            out[i] = total[i] + bias


@compiled
def finish_backward(
    colour: Array, position: Array, weights: Array, grad: Array, q: Array, gate: bool, ungated: Array, out: Array
) -> tuple[float, float, float]:
    """The gradient to a row of q; its part of the gradients to the weights is returned."""
    w_colour, w_position = weights[0], weights[1]
    if gate:
        for i in range(len(out)):
            out[i] = w_colour * colour[i] + w_position * position[i] + np.float64(grad[i]) * ungated[i]
    else:
        for i in range(len(out)):
            out[i] = w_colour * colour[i] + w_position * position[i]
    by_colour, by_position, total_grad = 0.0, 0.0, 0.0
    for i in range(len(out)):
        by_colour += q[i] * colour[i]
        by_position += q[i] * position[i]
        total_grad += grad[i]
    return by_colour, by_position, total_grad


@compiled
def steps_along(columns: Array, x_before: int, x_after: int, steps: Array) -> float:
    """What a running sum along the row gains at each pixel; returns the sum just before the first one."""
    width = len(steps)
    left = x_before + 1
    subtract(steps, columns[left + x_after : left + x_after + width], columns[:width])
    return float(columns[left : left + x_after].sum())


@compiled
def workspace(width: int, count: int, x_before: int, x_after: int, x_step: float) -> tuple[Array, ...]:
    """Rows to work in: x, two with borders, steps and factors of the sweeps, two results, the other factor of a pull.

    A sweep's maps are Box, x Box, the mixed map, then Box of the features: groups of three, the last may stay zero.
    Borders of zeros stand for the outside of the image, so that nothing checks where a window ends.
    """
    left = x_before + 1
    x = np.zeros(left + width + x_after)
    for i in range(width):
        x[left + i] = (i - 0.5 * (width - 1)) * x_step
    maps = 3 * ((3 + count + 2) // 3)
    steps, factors = np.zeros((maps, width)), np.zeros((maps, width))
    place_steps, place_factors = np.zeros((3, width)), np.zeros((1, width))
    place_factors[0] = x[left : left + width] ** 2
    bordered, lines = np.zeros((2, len(x))), np.zeros((3, width))
    return x, bordered, steps, factors, place_steps, place_factors, lines


@compiled
def set_factors(mode: int, here: Array, weights: Array, rows: tuple[Array, ...]) -> None:
    """The factors K_m of the pixels j of a row: weighted going ahead, colours alone going back."""
    factors, place_factors = rows[3], rows[5]
    colour = weights[0] if mode == FORWARD else 1.0
    position = weights[1] if mode == FORWARD else 0.0
    count = len(here) - 1
    factors[0] = colour * here[count] + position * place_factors[0]
    for f in range(count):
        factors[3 + f] = -2.0 * colour * here[f]


@compiled
def emit_row(
    mode: int,
    columns: Array,
    y: float,
    here: Array,
    weights: Array,
    x_before: int,
    x_after: int,
    x_step: float,
    gate: bool,
    keep: bool,
    q: Array,
    grad: Array,
    ungated: Array,
    out: Array,
    pulled: Array,
    pulled_row: int,
    sums: Array,
    rows: tuple[Array, ...],
) -> None:
    """One row of one label, from its column sums."""
    x, bordered, steps, factors, place_steps, place_factors, lines = rows
    count = len(here) - 1
    starts = np.zeros(len(steps))
    starts[0] = steps_along(columns[BOX], x_before, x_after, steps[0])
    for f in range(count):
        starts[3 + f] = steps_along(columns[FEATURES + f], x_before, x_after, steps[3 + f])
    if mode in (PULL_AHEAD, PULL_BACK):
        read_row(mode, True, gate, q, grad, lines[2])
        for f in range(count):
            pair = np.array([starts[0], starts[3 + f]])
            pull_sweep(steps[0], steps[3 + f], pair, here[f], lines[2], 2.0 * weights[0], pulled[f, pulled_row])
        return
    mixed, moment = bordered[0], bordered[1]
    for i in range(len(x)):
        moment[i] = x[i] * columns[BOX, i]
    if mode == FORWARD:
        mix(columns, y, x, weights[0], weights[1], mixed)
        starts[1] = steps_along(moment, x_before, x_after, steps[1])
        starts[2] = steps_along(mixed, x_before, x_after, steps[2])
        sweep(steps, starts, factors, -2.0 * weights[1] * x_step, lines[0])
        finish_forward(lines[0], q, gate, keep, weights[2], out, ungated)
        return
    starts[2] = steps_along(columns[NORM], x_before, x_after, steps[2])
    sweep(steps, starts, factors, 0.0, lines[0])
    mix(columns, y, x, 0.0, 1.0, mixed)
    place_steps[0] = steps[0]
    starts[1] = steps_along(moment, x_before, x_after, place_steps[1])
    starts[2] = steps_along(mixed, x_before, x_after, place_steps[2])
    sweep(place_steps, starts[:3], place_factors, -2.0 * x_step, lines[1])
    by_colour, by_position, total_grad = finish_backward(lines[0], lines[1], weights, grad, q, gate, ungated, out)
    sums[0] += by_colour
    sums[1] += by_position
    sums[2] += total_grad


@compiled
def deep_job(
    mode: int,
    height: int,
    q: Array,
    grad: Array,
    ungated: Array,
    features: Array,
    mean: Array,
    scale: float,
    weights: Array,
    spacing: tuple[float, float, float],
    reach: tuple[int, int, int, int, int, int],
    gate: bool,
    keep: bool,
    out: Array,
    pulled: Array,
    sums: Array,
    first: int,
    last: int,
) -> bool:
    """Planes first .. last - 1 of some labels of a volume; False if a sum was not a number, which may have spread.

    Every map's first two axes are one: q, grad, ungated, out (L, T * H, W), features, pulled (F, T * H, W), sums (3,).
    """
    labels, width = q.shape[0], q.shape[2]
    depth = q.shape[1] // height
    count = len(features)
    t_before, t_after, y_before, y_after, x_before, x_after = reach
    t_step, y_step, x_step = spacing
    rows = workspace(width, count, x_before, x_after, x_step)
    left = x_before + 1
    columns = np.zeros((FEATURES + count, len(rows[0])))
    planes = np.zeros((height, FEATURES + count, width))
    here, entering, leaving = np.zeros((count + 1, width)), np.zeros((count + 1, width)), np.zeros((count + 1, width))
    new, old = np.zeros(width), np.zeros(width)
    t_middle, y_middle = 0.5 * (depth - 1), 0.5 * (height - 1)
    clean = True
    for v in range(labels):
        planes[:] = 0.0
        for t in range(first, last):
            old_plane = t - t_before - 1
            for z in range(t + t_after if t > first else max(t - t_before, 0), t + t_after + 1):
                leaves = t > first and old_plane >= 0
                enters = z < depth
                new[:] = 0.0
                old[:] = 0.0
                t_new, t_old = (z - t_middle) * t_step, (old_plane - t_middle) * t_step
                for y in range(height if enters or leaves else 0):
                    if enters:
                        row = z * height + y
                        read_features(features, row, mean, scale, entering)
                        read_row(mode, False, gate, q[v, row], grad[v, row], new)
                    if leaves:
                        row = old_plane * height + y
                        read_features(features, row, mean, scale, leaving)
                        read_row(mode, False, gate, q[v, row], grad[v, row], old)
                    exchange_row(planes[y], new, entering, t_new, old, leaving, t_old)
            columns[:] = 0.0
            t_place = (t - t_middle) * t_step
            for y in range(height):
                for z in range(y + y_after if y else 0, min(y + y_after + 1, height)):
                    add_plane_row(columns, left, planes[z], (z - y_middle) * y_step, t_place, 1.0)
                z = y - y_before - 1
                if z >= 0:
                    add_plane_row(columns, left, planes[z], (z - y_middle) * y_step, t_place, -1.0)
                row = t * height + y
                read_features(features, row, mean, scale, here)
                set_factors(mode, here, weights, rows)
                emit_row(
                    mode, columns, (y - y_middle) * y_step, here, weights, x_before, x_after, x_step, gate, keep,
                    q[v, row], grad[v, row], ungated[v, row], out[v, row], pulled, row, sums, rows,
                )  # fmt: skip
        clean = clean and np.isfinite(planes[:, BOX].sum() + planes[:, NORM].sum())
    return clean
