"""What the distance kernel does to blocks of pixels in rows: their factors before a pass, the results after it.

Shapes are those of cpu_sums.py; lines (results, LANES, BLOCK) are its results with lanes turned to rows.
Maps (L, R, W) are taken from the place `at` of their first label; a label lies `step` after the one before.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils, types
from numba.extending import intrinsic

from deepmrf.ops.distance.cpu_sums import BLOCK
from deepmrf.ops.vectors import AHEAD, LANES, Vectors, along

ROW = LANES * BLOCK
"""From a result to the next one in lines."""


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def read_factors(
    typing: Any, norms: Any, channels: Any, features: Any, at: Any, step: Any, size: Any, mean: Any, scale: Any,
    times: Any, weights: Any, places: Any, places_at: Any, further: Any, out: Any, which: Any,
) -> Any:  # fmt: skip
    """out[which] = the squared lengths of some pixels, then `times` their centred features.

    The first length is |I|^2, the second |place|^2 + further; a single one is their weighted sum.
    """
    i, real = types.intp, types.float64
    signature = types.void(
        norms, channels, features, i, i, i, mean, real, real, weights, places, i, real, out, i
    )  # fmt: skip

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        norms, channels = (len(signature.args[n]) for n in (0, 1))
        w = Vectors(context, builder)
        features, mean, weights, places, out = (w.data(signature.args[n], arguments[n]) for n in (2, 6, 9, 10, 13))
        at, step, size, scale, times, places_at, further, which = (arguments[n] for n in (3, 4, 5, 7, 8, 11, 12, 14))
        base = w.times(which, (norms + channels) * BLOCK)

        def one(v: Vectors, x: Any) -> None:
            def put(k: int, value: Any) -> None:
                v.store(value, out, v.plus(v.plus(base, k * BLOCK), x))

            colour = v.zero()
            for f in range(channels):
                given = v.load(features, v.plus(v.plus(at, v.times(step, f)), x))
                v.prefetch(features, v.plus(v.plus(v.plus(at, v.times(step, f)), x), AHEAD))
                middle = v.spread_from(mean, ir.Constant(at.type, f))
                value = v.subtract(v.multiply(given, v.spread(scale)), middle)
                put(norms + f, v.multiply(value, v.spread(times)))
                colour = v.multiply_add(value, value, colour)
            place = v.load(places, v.plus(places_at, x))
            position = v.multiply_add(place, place, v.spread(further))
            if norms == 1:
                w_colour, w_position = (v.spread_from(weights, ir.Constant(at.type, k)) for k in range(2))
                put(0, v.multiply_add(w_colour, colour, v.multiply(w_position, position)))
            elif norms == 2:
                put(0, colour)
                put(1, position)

        along(context, builder, size, one)
        return context.get_dummy_value()

    return signature, build


def _each(context: Any, builder: Any, labels: Any, size: Any, at: Any, step: Any, one: Any) -> None:
    """one(vectors, place in lines, place in the maps) for the pixels of every label."""
    with cgutils.for_range(builder, labels) as loop:
        w = Vectors(context, builder)
        begin, line = w.plus(at, w.times(loop.index, step)), w.times(loop.index, BLOCK)
        along(context, builder, size, lambda v, x: one(v, v.plus(line, x), v.plus(begin, x)))


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def finish_forward(
    typing: Any, lines: Any, q: Any, kept: Any, out: Any, at: Any, step: Any, labels: Any, size: Any, gate: Any,
    keep: Any, bias: Any,
) -> Any:  # fmt: skip
    """The gate and the bias, and the sum before them if it is kept."""
    i = types.intp
    signature = types.void(lines, q, kept, out, i, i, i, i, types.boolean, types.boolean, types.float64)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        w = Vectors(context, builder)
        lines, q, kept, out = (w.data(signature.args[n], arguments[n]) for n in range(4))
        at, step, labels, size, gate, keep, bias = arguments[4:]

        def one(v: Vectors, line: Any, here: Any) -> None:
            total = v.load(lines, line)
            v.prefetch(q, v.plus(here, AHEAD))
            v.prefetch(out, v.plus(here, AHEAD), write=True)
            with builder.if_then(keep):
                v.store(total, kept, here)
                v.prefetch(kept, v.plus(here, AHEAD), write=True)
            total = builder.select(gate, v.multiply(total, v.load(q, here)), total)
            v.store(v.add(total, v.spread(bias)), out, here)

        _each(context, builder, labels, size, at, step, one)
        return context.get_dummy_value()

    return signature, build


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def finish_backward(
    typing: Any, lines: Any, q: Any, grad: Any, kept: Any, out: Any, at: Any, step: Any, labels: Any, size: Any,
    gate: Any, weights: Any, sums: Any,
) -> Any:  # fmt: skip
    """The gradient to q; sums (3, LANES) gain its part of the gradients to the weights, lane by lane."""
    i = types.intp
    signature = types.void(lines, q, grad, kept, out, i, i, i, i, types.boolean, weights, sums)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        w = Vectors(context, builder)
        lines, q, grad, kept, out, weights, sums = (
            w.data(signature.args[n], arguments[n]) for n in (0, 1, 2, 3, 4, 10, 11)
        )
        at, step, labels, size, gate = arguments[5:10]
        places = [ir.Constant(at.type, k * LANES) for k in range(3)]
        totals = [cgutils.alloca_once(builder, w.vector) for _ in range(3)]
        for total, place in zip(totals, places, strict=True):
            builder.store(w.load(sums, place), total)

        def one(v: Vectors, line: Any, here: Any) -> None:
            colour, position = v.load(lines, line), v.load(lines, v.plus(line, ROW))
            own, slope = v.load(q, here), v.load(grad, here)
            for data in (q, grad, kept):
                v.prefetch(data, v.plus(here, AHEAD))
            v.prefetch(out, v.plus(here, AHEAD), write=True)
            w_colour, w_position = (v.spread_from(weights, ir.Constant(at.type, k)) for k in range(2))
            value = v.multiply_add(w_colour, colour, v.multiply(w_position, position))
            gated = v.multiply_add(slope, v.load(kept, here), value)
            v.store(builder.select(gate, gated, value), out, here)
            gains = v.multiply(own, colour), v.multiply(own, position), slope
            for total, gain in zip(totals, gains, strict=True):
                place = builder.bitcast(total, v.vector.as_pointer())
                builder.store(v.add(builder.load(place), gain), place)

        _each(context, builder, labels, size, at, step, one)
        for total, place in zip(totals, places, strict=True):
            w.store(builder.load(total), sums, place)
        return context.get_dummy_value()

    return signature, build


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def finish_pull(
    typing: Any, lines: Any, lines_at: Any, q: Any, grad: Any, at: Any, step: Any, labels: Any, size: Any, gate: Any,
    ahead: Any, factor: Any, pulled: Any, pulled_at: Any,
) -> Any:  # fmt: skip
    """pulled += factor * the sum over labels of a result times what meets the window sum at its centre."""
    i, truth = types.intp, types.boolean
    signature = types.void(lines, i, q, grad, i, i, i, i, truth, truth, types.float64, pulled, i)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        w = Vectors(context, builder)
        lines, q, grad, pulled = (w.data(signature.args[n], arguments[n]) for n in (0, 2, 3, 11))
        lines_at, at, step, labels, size, gate, ahead, factor, pulled_at = (
            arguments[n] for n in (1, 4, 5, 6, 7, 8, 9, 10, 12)
        )

        def one(v: Vectors, line: Any, here: Any) -> None:
            own, slope = v.load(q, here), v.load(grad, here)
            other = builder.select(ahead, builder.select(gate, v.multiply(own, slope), slope), own)
            gain = v.multiply(v.multiply(v.load(lines, v.plus(lines_at, line)), v.spread(factor)), other)
            place = v.plus(pulled_at, builder.srem(line, ir.Constant(line.type, BLOCK)))
            v.store(v.add(v.load(pulled, place), gain), pulled, place)

        _each(context, builder, labels, size, at, step, one)
        return context.get_dummy_value()

    return signature, build
