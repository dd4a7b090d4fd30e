"""Operations on rows of the lattice's values, as numba can call them: a row is all channels of a vertex or a pixel.

    rows    (M, R) float32, flat: vertex m has its channels at m R .. m R + R - 1, R a multiple of LANES
    vertex  (N, D) int32,   flat: pixel n has its D vertices at n D .. n D + D - 1
    weight  (N, D) float32, flat: and their weights

A row is worked on in vectors, up to MAX_UNITS * LANES channels in registers at a time. numba leaves the
choice of vector instructions to LLVM's optimiser, which finds few of them here, so they are spelt out; LLVM turns them
into whatever the processor has.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 8
"""Rows are a multiple of this many channels."""
WIDE_LANES = 16
"""Channels in the vectors that most of a row is cut into; the last one may have LANES."""
MAX_UNITS = 4
"""How many times LANES channels of a row are in registers at a time."""
UNROLLED_CORNERS = 3
FETCH_AHEAD = 16
"""How many vertices before its turn a row is fetched from memory."""
_SMALLEST_EXPONENT = -126.0
_FIT = np.polynomial.Chebyshev.interpolate(np.exp2, 5, domain=[-0.5, 0.5])
POWER_OF_TWO = [float(c) for c in _FIT.convert(kind=np.polynomial.Polynomial).coef[::-1]]
"""Coefficients of 2^x on [-1/2, 1/2], highest first."""

_word, _long, _real = ir.IntType(32), ir.IntType(64), ir.FloatType()


def _lanes_of(units: int) -> list[int]:
    """The vectors that so many times LANES channels are cut into."""
    return [WIDE_LANES] * (units // 2) + [LANES] * (units % 2)


class Rows:
    """Vectors of a row's channels in the function being built. Indices count numbers from the start of an array."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    def data(self, array_type: Any, value: Any) -> Any:
        return self.context.make_array(array_type)(self.context, self.builder, value).data

    def pointers(self, data: Any, index: Any, units: int) -> list[Any]:
        """Where the vectors of a row are that begins at an index."""
        lanes = _lanes_of(units)
        firsts = [self.builder.add(index, _long(sum(lanes[:k]))) for k in range(len(lanes))]
        kinds = [ir.VectorType(_real, n).as_pointer() for n in lanes]
        return [
            self.builder.bitcast(self.builder.gep(data, [first]), kind)
            for first, kind in zip(firsts, kinds, strict=True)
        ]

    def load(self, data: Any, index: Any, units: int) -> list[Any]:
        return [self.builder.load(pointer, align=4) for pointer in self.pointers(data, index, units)]

    def store(self, values: list[Any], data: Any, index: Any) -> None:
        units = sum(v.type.count for v in values) // LANES
        for value, pointer in zip(values, self.pointers(data, index, units), strict=True):
            self.builder.store(value, pointer, align=4)

    def fetch(self, data: Any, index: Any, units: int) -> None:
        """Have the vectors brought near from memory."""
        for pointer in self.pointers(data, index, units):
            self.fetch_pointer(pointer)

    def fetch_pointer(self, pointer: Any) -> None:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _word, _word, _word])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        self.builder.call(function, [self.builder.bitcast(pointer, byte), _word(0), _word(3), _word(1)])

    def scalar(self, data: Any, index: Any) -> Any:
        return self.builder.load(self.builder.gep(data, [index]))

    def spread(self, scalar: Any, lanes: int) -> Any:
        """The same number in every lane."""
        nothing = ir.Constant(ir.VectorType(_real, lanes), ir.Undefined)
        first = self.builder.insert_element(nothing, scalar, _word(0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_word, lanes), [0] * lanes))

    def constant(self, number: float, like: Any) -> Any:
        return ir.Constant(like.type, [number] * like.type.count)

    def variables(self, values: list[Any]) -> list[Any]:
        """Vectors that change in a loop."""
        pointers = [cgutils.alloca_once(self.builder, v.type) for v in values]
        for pointer, value in zip(pointers, values, strict=True):
            self.builder.store(value, pointer)
        return pointers

    def loaded(self, pointers: list[Any]) -> list[Any]:
        return [self.builder.load(pointer) for pointer in pointers]

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, in one rounding where the processor can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduced(self, vectors: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
        """The lanes of all vectors combined: a scalar."""
        b, units = self.builder, []
        for vector in vectors:
            for first in range(0, vector.type.count, LANES):
                mask = ir.Constant(ir.VectorType(_word, LANES), list(range(first, first + LANES)))
                units.append(b.shuffle_vector(vector, vector, mask))
        total = units[0]
        for unit in units[1:]:
            total = combine(total, unit)
        size = LANES // 2
        while size:
            lower, upper = (ir.Constant(ir.VectorType(_word, size), list(range(k, k + size))) for k in (0, size))
            total = combine(b.shuffle_vector(total, total, lower), b.shuffle_vector(total, total, upper))
            size //= 2
        return b.extract_element(total, _word(0))

    def row_start(self, vertex: Any, index: Any, width: Any, first: Any) -> Any:
        """Where the channels, from `first` on, of the vertex at an index are."""
        b = self.builder
        return b.add(b.mul(b.sext(self.scalar(vertex, index), _long), width), first)

    def over_corners(self, corners: Any, emit: Callable[[Any], None]) -> None:
        """emit(corner) for each, several in a round."""
        b = self.builder
        unrolled = b.sub(corners, b.urem(corners, _long(UNROLLED_CORNERS)))
        with cgutils.for_range_slice(b, _long(0), unrolled, _long(UNROLLED_CORNERS)) as (corner, _):
            for k in range(UNROLLED_CORNERS):
                emit(b.add(corner, _long(k)))
        with cgutils.for_range_slice(b, unrolled, corners, _long(1)) as (corner, _):
            emit(corner)

    def in_blocks(self, width: Any, emit: Callable[[Any, int], None]) -> None:
        """emit(first channel, units) over a row of `width` channels: MAX_UNITS times LANES at a time, then the rest."""
        b, most = self.builder, MAX_UNITS * LANES
        with cgutils.for_range_slice(b, _long(0), width, _long(most)) as (first, _):
            left = b.udiv(b.sub(width, first), _long(LANES))
            end = b.append_basic_block("row_end")
            full = b.append_basic_block("row_full")
            choice = b.switch(left, full)
            for units in range(1, MAX_UNITS + 1):
                block = full if units == MAX_UNITS else b.append_basic_block(f"row_{units}")
                if units < MAX_UNITS:
                    choice.add_case(_long(units), block)
                b.position_at_end(block)
                emit(first, units)
                b.branch(end)
            b.position_at_end(end)


def _operation(arrays: int) -> Callable[[Callable[..., None]], Any]:
    """emit(rows, data .., numbers ..) as a function of so many arrays and then of whole numbers."""

    def decorate(emit: Callable[..., None]) -> Any:
        @wraps(emit)  # for its signature, in which the rows stand where numba gives the context
        def typed(typing: Any, *given: Any) -> Any:
            signature = types.void(*given[:arrays], *[types.int64] * (len(given) - arrays))

            def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                r = Rows(context, builder)
                data = [r.data(*pair) for pair in zip(signature.args[:arrays], arguments[:arrays], strict=True)]
                emit(r, *data, *arguments[arrays:])
                return context.get_dummy_value()

            return signature, build

        return intrinsic(typed)

    return decorate


@_operation(arrays=5)
def gather(
    r: Any, out: Any, start: Any, rows: Any, vertex: Any, weight: Any,
    out_at: Any, start_at: Any, at: Any, corners: Any, width: Any,
) -> None:  # fmt: skip
    """out = start + sum over a pixel's corners of weight * rows[vertex]."""
    b = r.builder

    def emit(first: Any, units: int) -> None:
        sums = r.variables(r.load(start, b.add(start_at, first), units))

        def add(corner: Any) -> None:
            index = b.add(at, corner)
            factor = r.scalar(weight, index)
            for total, value in zip(sums, r.load(rows, r.row_start(vertex, index, width, first), units), strict=True):
                spread = r.spread(factor, value.type.count)
                b.store(r.multiply_add(spread, value, b.load(total)), total)

        r.over_corners(corners, add)
        r.store(r.loaded(sums), out, b.add(out_at, first))

    r.in_blocks(width, emit)


@_operation(arrays=4)
def scatter(
    r: Any, rows: Any, values: Any, vertex: Any, weight: Any,
    values_at: Any, at: Any, corners: Any, width: Any,
) -> None:  # fmt: skip
    """rows[vertex] += weight * values, for each of a pixel's corners."""
    b = r.builder

    def emit(first: Any, units: int) -> None:
        own = r.load(values, b.add(values_at, first), units)

        def add(corner: Any) -> None:
            index = b.add(at, corner)
            factor = r.scalar(weight, index)
            to = r.row_start(vertex, index, width, first)
            pairs = zip(own, r.load(rows, to, units), strict=True)
            r.store([r.multiply_add(r.spread(factor, x.type.count), x, y) for x, y in pairs], rows, to)

        r.over_corners(corners, add)

    r.in_blocks(width, emit)


@_operation(arrays=1)
def softmax(r: Any, row: Any, at: Any, width: Any) -> None:
    """row = exp(row) / sum of exp(row), in place."""
    b = r.builder
    top, total = cgutils.alloca_once(b, _real), cgutils.alloca_once(b, _real)
    b.store(_real(float("-inf")), top)
    b.store(_real(0.0), total)

    def find_top(first: Any, units: int) -> None:
        b.store(r.larger(r.reduced(r.load(row, b.add(at, first), units), r.larger), b.load(top)), top)

    def powers(first: Any, units: int) -> None:
        values = r.load(row, b.add(at, first), units)
        values = _exp(r, [b.fsub(x, r.spread(b.load(top), x.type.count)) for x in values])
        r.store(values, row, b.add(at, first))
        b.store(b.fadd(b.load(total), r.reduced(values, b.fadd)), total)

    def scale(first: Any, units: int) -> None:
        factor = b.fdiv(_real(1.0), b.load(total))
        values = r.load(row, b.add(at, first), units)
        r.store([b.fmul(r.spread(factor, x.type.count), x) for x in values], row, b.add(at, first))

    def at_once(first: Any, units: int) -> None:
        values = r.load(row, at, units)
        highest = r.reduced(values, r.larger)
        values = _exp(r, [b.fsub(x, r.spread(highest, x.type.count)) for x in values])
        factor = b.fdiv(_real(1.0), r.reduced(values, b.fadd))
        r.store([b.fmul(r.spread(factor, x.type.count), x) for x in values], row, at)

    with b.if_else(b.icmp_signed("<=", width, _long(MAX_UNITS * LANES))) as (fits, else_):
        with fits:
            r.in_blocks(width, at_once)
        with else_:
            for emit in (find_top, powers, scale):
                r.in_blocks(width, emit)


def _exp(r: Rows, numbers: list[Any]) -> list[Any]:
    """exp(x) of each x <= 0; step by step for all of them, so that the processor has several to work on."""
    b = r.builder

    def each(function: Callable[..., Any], *lists: list[Any]) -> list[Any]:
        return [function(*values) for values in zip(*lists, strict=True)]

    scaled = each(lambda x: b.fmul(x, r.constant(float(np.log2(np.e)), x)), numbers)
    scaled = each(lambda x: r.larger(x, r.constant(_SMALLEST_EXPONENT, x)), scaled)
    # Added to a number this large, x is rounded to a whole number, found in its lowest bits: the exponent.
    large = 1.5 * 2.0**23 + 127
    shifted = each(lambda x: b.fadd(r.constant(large, x), x), scaled)
    rest = each(lambda x, s: b.fsub(x, b.fsub(s, r.constant(large, x))), scaled, shifted)

    def power(s: Any) -> Any:
        integers = ir.VectorType(_word, s.type.count)
        return b.bitcast(b.shl(b.bitcast(s, integers), ir.Constant(integers, [23] * s.type.count)), s.type)

    powers = each(power, shifted)
    values = each(lambda x: r.constant(POWER_OF_TWO[0], x), rest)
    for c in POWER_OF_TWO[1:]:
        values = each(lambda v, x: r.multiply_add(v, x, r.constant(c, x)), values, rest)  # noqa: B023
    return each(b.fmul, values, powers)


@_operation(arrays=2)
def blur_runs(r: Any, rows: Any, runs: Any, start: Any, stop: Any, base: Any, width: Any) -> None:
    """rows[m] += (rows[before m] + rows[after m]) / 2, in place, along the runs at start .. stop - 1.

    Vertices are counted from row `base` on. A run needs no second buffer: the row before the current one is kept.
    runs must go on for FETCH_AHEAD numbers behind `stop`, the first of them below 0.
    """
    b = r.builder

    def emit(first: Any, units: int) -> None:
        def row_of(entry: Any) -> Any:
            vertex = b.sext(b.xor(entry, b.ashr(entry, _word(31))), _long)  # ~entry if it is below 0
            return b.add(b.mul(b.add(vertex, base), width), first)

        nothing = [ir.Constant(ir.VectorType(_real, n), [0.0] * n) for n in _lanes_of(units)]
        previous = r.variables(nothing)
        with cgutils.for_range_slice(b, start, stop, _long(1)) as (k, _):
            here, following = r.scalar(runs, k), r.scalar(runs, b.add(k, _long(1)))
            r.fetch(rows, row_of(r.scalar(runs, b.add(k, _long(FETCH_AHEAD)))), units)
            begins = b.icmp_signed("<", here, _word(0))
            ends = b.icmp_signed("<", following, _word(0))
            own, ahead = r.load(rows, row_of(here), units), r.load(rows, row_of(following), units)
            results = []
            for none, old, x, y in zip(nothing, previous, own, ahead, strict=True):
                sides = b.fadd(b.select(begins, none, b.load(old)), b.select(ends, none, y))
                results.append(r.multiply_add(r.constant(0.5, x), sides, x))
                b.store(x, old)
            r.store(results, rows, row_of(here))

    r.in_blocks(width, emit)


@_operation(arrays=1)
def fetch_number(r: Any, numbers: Any, index: Any) -> None:
    """Have a number of an array brought near from memory."""
    r.fetch_pointer(r.builder.gep(numbers, [index]))
