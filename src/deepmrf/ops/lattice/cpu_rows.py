"""Operations on rows of the lattice's values, as numba can call them: a row is all channels of a vertex or a pixel.

    rows    (M, R) float32, flat: vertex m has its channels at m R .. m R + R - 1, R a multiple of LANES
    vertex  (N, D) int32,   flat: pixel n has its D vertices at n D .. n D + D - 1
    weight  (N, D) float32, flat: and their weights

A row is worked on in vectors of LANES channels, up to MAX_VECTORS of them in registers at a time. numba leaves the
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
"""Channels in a vector."""
MAX_VECTORS = 4
"""Vectors of a row that are in registers at a time."""
FETCH_AHEAD = 16
"""How many vertices before its turn a row is fetched from memory."""
_SMALLEST_EXPONENT = -126.0
_FIT = np.polynomial.Chebyshev.interpolate(np.exp2, 6, domain=[-0.5, 0.5])
POWER_OF_TWO = [float(c) for c in _FIT.convert(kind=np.polynomial.Polynomial).coef[::-1]]
"""Coefficients of 2^x on [-1/2, 1/2], highest first."""

_word, _long, _real = ir.IntType(32), ir.IntType(64), ir.FloatType()
_vector = ir.VectorType(_real, LANES)


class Rows:
    """Vectors of a row's channels in the function being built. Indices count numbers from the start of an array."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    def data(self, array_type: Any, value: Any) -> Any:
        return self.context.make_array(array_type)(self.context, self.builder, value).data

    def place(self, data: Any, index: Any, vector: int = 0) -> Any:
        index = self.builder.add(index, _long(vector * LANES))
        return self.builder.bitcast(self.builder.gep(data, [index]), _vector.as_pointer())

    def load(self, data: Any, index: Any, count: int) -> list[Any]:
        """`count` vectors of a row that begins at an index."""
        return [self.builder.load(self.place(data, index, k), align=4) for k in range(count)]

    def store(self, values: list[Any], data: Any, index: Any) -> None:
        for k, value in enumerate(values):
            self.builder.store(value, self.place(data, index, k), align=4)

    def scalar(self, data: Any, index: Any) -> Any:
        return self.builder.load(self.builder.gep(data, [index]))

    def spread(self, scalar: Any) -> Any:
        """The same number in every lane."""
        nothing = ir.Constant(_vector, ir.Undefined)
        first = self.builder.insert_element(nothing, scalar, _word(0))
        return self.builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(_word, LANES), [0] * LANES))

    def constant(self, number: float) -> Any:
        return ir.Constant(_vector, [number] * LANES)

    def variables(self, values: list[Any]) -> list[Any]:
        """Vectors that change in a loop."""
        places = [cgutils.alloca_once(self.builder, v.type) for v in values]
        for place, value in zip(places, values, strict=True):
            self.builder.store(value, place)
        return places

    def loaded(self, places: list[Any]) -> list[Any]:
        return [self.builder.load(place) for place in places]

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, in one rounding where the processor can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def across(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """The lanes of a vector combined, in every lane."""
        size = LANES // 2
        while size:
            mask = ir.Constant(ir.VectorType(_word, LANES), [k ^ size for k in range(LANES)])
            vector = combine(vector, self.builder.shuffle_vector(vector, vector, mask))
            size //= 2
        return vector

    def fetch(self, data: Any, index: Any, count: int) -> None:
        """Have `count` vectors brought near from memory: a cache line holds two."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _word, _word, _word])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        for k in range(0, count, 2):
            place = self.builder.bitcast(self.place(data, index, k), byte)
            self.builder.call(function, [place, _word(0), _word(3), _word(1)])

    def row_of(self, vertex: Any, index: Any, width: Any) -> Any:
        """Where the row of the vertex at an index begins."""
        return self.builder.mul(self.builder.sext(self.scalar(vertex, index), _long), width)

    def in_blocks(self, width: Any, emit: Callable[[Any, int], None]) -> None:
        """emit(first channel, vectors) over a row of `width` channels: MAX_VECTORS at a time, then the rest."""
        b, most = self.builder, MAX_VECTORS * LANES
        with cgutils.for_range_slice(b, _long(0), width, _long(most)) as (first, _):
            left = b.udiv(b.sub(width, first), _long(LANES))
            end = b.append_basic_block("row_end")
            full = b.append_basic_block("row_full")
            choice = b.switch(left, full)
            for count in range(1, MAX_VECTORS + 1):
                block = full if count == MAX_VECTORS else b.append_basic_block(f"row_{count}")
                if count < MAX_VECTORS:
                    choice.add_case(_long(count), block)
                b.position_at_end(block)
                emit(first, count)
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

    def emit(first: Any, count: int) -> None:
        sums = r.variables(r.load(start, b.add(start_at, first), count))
        with cgutils.for_range(b, corners) as corner:
            index = b.add(at, corner.index)
            factor = r.spread(r.scalar(weight, index))
            row = r.load(rows, b.add(r.row_of(vertex, index, width), first), count)
            for place, value in zip(sums, row, strict=True):
                b.store(r.multiply_add(factor, value, b.load(place)), place)
        r.store(r.loaded(sums), out, b.add(out_at, first))

    r.in_blocks(width, emit)


@_operation(arrays=4)
def scatter(
    r: Any, rows: Any, values: Any, vertex: Any, weight: Any,
    values_at: Any, at: Any, corners: Any, width: Any,
) -> None:  # fmt: skip
    """rows[vertex] += weight * values, for each of a pixel's corners."""
    b = r.builder

    def emit(first: Any, count: int) -> None:
        own = r.load(values, b.add(values_at, first), count)
        with cgutils.for_range(b, corners) as corner:
            index = b.add(at, corner.index)
            factor = r.spread(r.scalar(weight, index))
            to = b.add(r.row_of(vertex, index, width), first)
            row = r.load(rows, to, count)
            r.store([r.multiply_add(factor, x, y) for x, y in zip(own, row, strict=True)], rows, to)

    r.in_blocks(width, emit)


@_operation(arrays=1)
def softmax(r: Any, row: Any, at: Any, width: Any) -> None:
    """row = exp(row) / sum of exp(row), in place."""
    b = r.builder
    step = _long(LANES)
    largest = r.variables(r.load(row, at, 1))
    with cgutils.for_range_slice(b, step, width, step) as (first, _):
        b.store(r.larger(b.load(largest[0]), r.load(row, b.add(at, first), 1)[0]), largest[0])
    top = r.across(b.load(largest[0]), r.larger)
    total = r.variables([r.constant(0.0)])

    def powers(first: Any, count: int) -> None:
        values = _exp(r, [b.fsub(x, top) for x in r.load(row, b.add(at, first), count)])
        r.store(values, row, b.add(at, first))
        for value in values:
            b.store(b.fadd(b.load(total[0]), value), total[0])

    r.in_blocks(width, powers)
    scale = b.fdiv(r.constant(1.0), r.across(b.load(total[0]), b.fadd))
    with cgutils.for_range_slice(b, _long(0), width, step) as (first, _):
        place = b.add(at, first)
        r.store([b.fmul(scale, r.load(row, place, 1)[0])], row, place)


def _exp(r: Rows, numbers: list[Any]) -> list[Any]:
    """exp(x) of each x <= 0; step by step for all of them, so that the processor has several to work on."""
    b, lowest = r.builder, r.constant(_SMALLEST_EXPONENT)
    scaled = [b.fmul(x, r.constant(float(np.log2(np.e)))) for x in numbers]
    scaled = [b.select(b.fcmp_ordered("<", x, lowest), lowest, x) for x in scaled]
    # Added to a number this large, x is rounded to a whole number, found in its lowest bits: the exponent.
    large = r.constant(1.5 * 2.0**23 + 127)
    shifted = [b.fadd(large, x) for x in scaled]
    rest = [b.fsub(x, b.fsub(s, large)) for x, s in zip(scaled, shifted, strict=True)]
    whole = ir.VectorType(_word, LANES)
    left = ir.Constant(whole, [23] * LANES)
    exponents = [b.bitcast(b.shl(b.bitcast(s, whole), left), _vector) for s in shifted]
    values = [r.constant(POWER_OF_TWO[0])] * len(numbers)
    for c in POWER_OF_TWO[1:]:
        values = [r.multiply_add(value, x, r.constant(c)) for value, x in zip(values, rest, strict=True)]
    return [b.fmul(value, e) for value, e in zip(values, exponents, strict=True)]


@_operation(arrays=2)
def blur_runs(r: Any, rows: Any, runs: Any, start: Any, stop: Any, base: Any, width: Any) -> None:
    """rows[m] += (rows[before m] + rows[after m]) / 2, in place, along the runs at start .. stop - 1.

    Vertices are counted from row `base` on. A run needs no second buffer: the row before the current one is kept.
    runs must go on for FETCH_AHEAD numbers behind `stop`, the first of them below 0.
    """
    b = r.builder
    half, nothing = r.constant(0.5), r.constant(0.0)

    def emit(first: Any, count: int) -> None:
        def place(entry: Any) -> Any:
            vertex = b.sext(b.xor(entry, b.ashr(entry, _word(31))), _long)  # ~entry if it is below 0
            return b.add(b.mul(b.add(vertex, base), width), first)

        previous = r.variables([nothing] * count)
        with cgutils.for_range_slice(b, start, stop, _long(1)) as (k, _):
            here, following = r.scalar(runs, k), r.scalar(runs, b.add(k, _long(1)))
            r.fetch(rows, place(r.scalar(runs, b.add(k, _long(FETCH_AHEAD)))), count)
            begins = b.icmp_signed("<", here, _word(0))
            ends = b.icmp_signed("<", following, _word(0))
            own, ahead = r.load(rows, place(here), count), r.load(rows, place(following), count)
            sums = [
                b.fadd(b.select(begins, nothing, x), b.select(ends, nothing, y))
                for x, y in zip(r.loaded(previous), ahead, strict=True)
            ]
            r.store([r.multiply_add(half, s, x) for s, x in zip(sums, own, strict=True)], rows, place(here))
            for old, x in zip(previous, own, strict=True):
                b.store(x, old)

    r.in_blocks(width, emit)


@_operation(arrays=2)
def fetch(r: Any, rows: Any, vertex: Any, at: Any, corners: Any, width: Any) -> None:
    """Have the rows of a pixel's corners brought near, to be there by the time they are wanted."""
    b = r.builder
    with cgutils.for_range(b, corners) as corner:
        row = r.row_of(vertex, b.add(at, corner.index), width)
        r.in_blocks(width, lambda first, count: r.fetch(rows, b.add(row, first), count))
