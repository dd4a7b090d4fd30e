"""The rows of the distance kernel: read blocks of pixels into lanes before a pass, and write its results after it.

Shapes are those of cpu_sums.py; lines (R, LANES, BLOCK) are its results with lanes turned to rows. A map (L, rows, W)
is read from the index `at` of its first label on; `step` is the distance from a label to the next.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepmrf.ops.distance.cpu_sums import BLOCK, LANES
from deepmrf.ops.vectors import DOUBLE, INDEX, Vectors, cgutils, operation

LINE = LANES * BLOCK
"""From a result to the next one in lines."""
PIXELS_READ_AHEAD = 64
"""How many pixels before its turn a pixel is fetched from memory; after the end of a row comes the next one."""


def _along(builder: Any, size: Any, step: Callable[[Vectors, Any], None]) -> None:
    """step(vectors, x) for every eighth x below size, then with vectors of one number for the remaining x."""
    eights = builder.and_(size, INDEX(-LANES))
    with cgutils.for_range_slice(builder, INDEX(0), eights, INDEX(LANES)) as (x, _):
        step(Vectors(builder), x)
    with cgutils.for_range_slice(builder, eights, size, INDEX(1)) as (x, _):
        step(Vectors(builder, DOUBLE, 8), x)


def _to_lanes(product: bool) -> Any:
    @operation
    def to_lanes(builder: Any, a: Any, b: Any, at: Any, step: Any, rows: Any, size: Any, out: Any, out_at: Any) -> None:
        """out[i, k] = a[k * step + i] (times b's) for i < size: rows become lanes.

        There are `rows` of them, at most eight; the last row fills the other lanes too.
        """
        last = builder.sub(rows, INDEX(1))
        lanes = [builder.select(builder.icmp_signed("<", INDEX(k), last), INDEX(k), last) for k in range(LANES)]

        def move(v: Vectors, x: Any) -> None:
            values = [v.load(a, at, (lane, step), x) for lane in lanes]
            if product:
                others = [v.load(b, at, (lane, step), x) for lane in lanes]
                values = [v.multiply(value, other) for value, other in zip(values, others, strict=True)]
            if v.lanes == LANES:
                for lane in lanes:
                    for data in (a, b) if product else (a,):
                        v.prefetch(data, at, (lane, step), x, PIXELS_READ_AHEAD)
            for k, value in enumerate(v.transposed(values) if v.lanes == LANES else values):
                v.store(value, out, out_at, (x, LANES), k * v.lanes)

        _along(builder, size, move)

    return to_lanes


rows_to_lanes, products_to_lanes = _to_lanes(False), _to_lanes(True)


@operation
def lanes_to_rows(builder: Any, a: Any, at: Any, size: Any, out: Any, out_at: Any, step: Any) -> None:
    """out[k * step + i] = a[i, k] for i < size, rounded up to eights: lanes become rows."""
    v = Vectors(builder)
    with cgutils.for_range_slice(builder, INDEX(0), size, INDEX(LANES)) as (x, _):
        values = [v.load(a, at, (x, LANES), k * LANES) for k in range(LANES)]
        for k, value in enumerate(v.transposed(values)):
            v.store(value, out, out_at, (step, k), x)


@operation
def read_factors(
    builder: Any, norms: int, channels: int, features: Any, at: Any, step: Any, size: Any, mean: Any, scale: Any,
    factor: Any, weights: Any, positions: Any, column: Any, beside: Any, out: Any, which: Any,
) -> None:  # fmt: skip
    """out[which] = the squared lengths of some pixels, then `factor` times their centred features.

    The first length is |I|^2, the second |position|^2 + beside; a single length is their weighted sum.
    """

    def read(v: Vectors, x: Any) -> None:
        def put(k: int, value: Any) -> None:
            v.store(value, out, (which, (norms + channels) * BLOCK), k * BLOCK, x)

        colour = v.constant(0.0)
        for f in range(channels):
            given = v.load(features, at, (step, f), x)
            v.prefetch(features, at, (step, f), x, PIXELS_READ_AHEAD)
            value = v.subtract(v.multiply(given, v.spread(scale)), v.spread_from(mean, f))
            put(norms + f, v.multiply(value, v.spread(factor)))
            colour = v.multiply_add(value, value, colour)
        along = v.load(positions, column, x)
        position = v.multiply_add(along, along, v.spread(beside))
        if norms == 1:
            w_colour, w_position = (v.spread_from(weights, k) for k in range(2))
            put(0, v.multiply_add(w_colour, colour, v.multiply(w_position, position)))
        elif norms == 2:
            put(0, colour)
            put(1, position)

    _along(builder, size, read)


def _each(
    builder: Any, labels: Any, size: Any, finish: Callable[[Vectors, Any, Any], None], at: Any, step: Any
) -> None:
    """finish(vectors, index in lines, index in the maps) for the pixels of every label."""
    with cgutils.for_range(builder, labels) as loop:
        label = loop.index
        _along(builder, size, lambda v, x: finish(v, v.index((label, BLOCK), x), v.index(at, (label, step), x)))


@operation
def finish_forward(
    builder: Any, lines: Any, q: Any, ungated: Any, out: Any, at: Any, step: Any, labels: Any, size: Any, gate: Any,
    keep: Any, bias: Any,
) -> None:  # fmt: skip
    """The gate and the bias; `keep` stores the sum before them."""

    def finish(v: Vectors, line: Any, here: Any) -> None:
        total = v.load(lines, line)
        v.prefetch(q, here, PIXELS_READ_AHEAD)
        v.prefetch(out, here, PIXELS_READ_AHEAD, write=True)
        with builder.if_then(keep):
            v.store(total, ungated, here)
            v.prefetch(ungated, here, PIXELS_READ_AHEAD, write=True)
        total = builder.select(gate, v.multiply(total, v.load(q, here)), total)
        v.store(v.add(total, v.spread(bias)), out, here)

    _each(builder, labels, size, finish, at, step)


@operation
def finish_backward(
    builder: Any, lines: Any, q: Any, grad: Any, ungated: Any, out: Any, at: Any, step: Any, labels: Any, size: Any,
    gate: Any, weights: Any, sums: Any,
) -> None:  # fmt: skip
    """The gradient to q; sums (3, LANES) gain its part of the gradients to the weights, lane by lane."""
    w = Vectors(builder)
    totals = [w.variable(w.load(sums, k * LANES)) for k in range(3)]

    def finish(v: Vectors, line: Any, here: Any) -> None:
        colour, position = v.load(lines, line), v.load(lines, line, LINE)
        own, slope = v.load(q, here), v.load(grad, here)
        for data in (q, grad, ungated):
            v.prefetch(data, here, PIXELS_READ_AHEAD)
        v.prefetch(out, here, PIXELS_READ_AHEAD, write=True)
        w_colour, w_position = (v.spread_from(weights, k) for k in range(2))
        value = v.multiply_add(w_colour, colour, v.multiply(w_position, position))
        gated = v.multiply_add(slope, v.load(ungated, here), value)
        v.store(builder.select(gate, gated, value), out, here)
        gains = v.multiply(own, colour), v.multiply(own, position), slope
        for total, gain in zip(totals, gains, strict=True):
            pointer = builder.bitcast(total, v.vector.as_pointer())
            builder.store(v.add(builder.load(pointer), gain), pointer)

    _each(builder, labels, size, finish, at, step)
    for k, total in enumerate(totals):
        w.store(builder.load(total), sums, k * LANES)


@operation
def finish_pull(
    builder: Any, lines: Any, result: Any, q: Any, grad: Any, at: Any, step: Any, labels: Any, size: Any, gate: Any,
    ahead: Any, factor: Any, pulled: Any, pulled_at: Any,
) -> None:  # fmt: skip
    """pulled += factor * the sum over labels of a result times what meets the window sum at its centre."""

    def finish(v: Vectors, line: Any, here: Any) -> None:
        own, slope = v.load(q, here), v.load(grad, here)
        other = builder.select(ahead, builder.select(gate, v.multiply(own, slope), slope), own)
        gain = v.multiply(v.multiply(v.load(lines, (result, LINE), line), v.spread(factor)), other)
        pixel = v.index(pulled_at, builder.srem(line, INDEX(BLOCK)))
        v.store(v.add(v.load(pulled, pixel), gain), pulled, pixel)

    _each(builder, labels, size, finish, at, step)
