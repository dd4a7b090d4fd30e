"""Operations on rows of the lattice's values, as numba can call them: a row is all channels of a vertex or a pixel.

    rows    (M, R) float32, flat: vertex m has its channels at m R .. m R + R - 1, R a multiple of LANES
    vertex  (N, D) int32,   flat: pixel n has its D vertices at n D .. n D + D - 1
    weight  (N, D) float32, flat: and their weights

A row is worked on in vectors (ops/vectors.py), up to MAX_UNITS * LANES channels in registers at a time.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]

from deepmrf.ops.vectors import FLOAT, INDEX, Vectors, cgutils, operation

LANES = 8
"""Rows are a multiple of this many channels."""
MAX_UNITS = 4
"""How many times LANES channels of a row are in registers at a time."""
UNROLLED_CORNERS = 3
FETCH_AHEAD = 16
"""How many vertices before its turn a row is fetched from memory."""

_word = ir.IntType(32)
Values = list[Any]
"""The vectors of a block of channels."""


class Block:
    """LANES times `units` channels of a row, from channel `first` on: vectors of 16 channels, the last may have 8."""

    def __init__(self, builder: Any, first: Any, units: int) -> None:
        self.builder, self.first = builder, first
        self.vectors = [Vectors(builder, FLOAT, 64)] * (units // 2) + [Vectors(builder, FLOAT, 32)] * (units % 2)

    def each(self, function: Callable[..., Any], *lists: Values) -> Values:
        """[function(vectors, value, ..)] over the vectors."""
        return [function(*values) for values in zip(self.vectors, *lists, strict=True)]

    def load(self, data: Any, *row: Any) -> Values:
        """The channels of the row that begins at an index."""
        return [v.load(data, self.first, 2 * LANES * k, *row) for k, v in enumerate(self.vectors)]

    def store(self, values: Values, data: Any, *row: Any) -> None:
        for k, (v, value) in enumerate(zip(self.vectors, values, strict=True)):
            v.store(value, data, self.first, 2 * LANES * k, *row)

    def prefetch(self, data: Any, *row: Any) -> None:
        for k, v in enumerate(self.vectors):
            v.prefetch(data, self.first, 2 * LANES * k, *row, locality=3)

    def variables(self, values: Values) -> Values:
        return self.each(Vectors.variable, values)

    def reduced(self, values: Values, combine: Callable[[Any, Any], Any]) -> Any:
        """The lanes of all vectors combined: a scalar."""
        b, shuffle = self.builder, self.builder.shuffle_vector

        def part(vector: Any, start: int, size: int) -> Any:
            return shuffle(vector, vector, ir.Constant(ir.VectorType(_word, size), list(range(start, start + size))))

        total, *others = [part(x, k, LANES) for v, x in zip(self.vectors, values, strict=True)
                          for k in range(0, v.lanes, LANES)]  # fmt: skip
        for other in others:
            total = combine(total, other)
        size = LANES // 2
        while size:
            total = combine(part(total, 0, size), part(total, size, size))
            size //= 2
        return b.extract_element(total, _word(0))

    def exp_of_difference(self, values: Values, top: Any) -> Values:
        """exp(x - top) of each x <= top."""
        scaled = self.each(
            lambda v, x: v.builder.fmul(v.builder.fsub(v.spread(top), x), v.constant(float(np.log2(np.e)))), values
        )
        wide = sum(v.lanes > LANES for v in self.vectors)  # vectors of one size at a time
        return self.vectors[0].exp2_of_negative(scaled[:wide]) + self.vectors[-1].exp2_of_negative(scaled[wide:])


def _in_blocks(b: Any, width: Any, emit: Callable[[Block], None]) -> None:
    """emit(block) over a row of `width` channels: MAX_UNITS times LANES at a time, then the rest."""
    with cgutils.for_range_slice(b, INDEX(0), width, INDEX(MAX_UNITS * LANES)) as (first, _):
        left = b.udiv(b.sub(width, first), INDEX(LANES))
        end = b.append_basic_block("row_end")
        full = b.append_basic_block("row_full")
        choice = b.switch(left, full)
        for units in range(1, MAX_UNITS + 1):
            block = full if units == MAX_UNITS else b.append_basic_block(f"row_{units}")
            if units < MAX_UNITS:
                choice.add_case(INDEX(units), block)
            b.position_at_end(block)
            emit(Block(b, first, units))
            b.branch(end)
        b.position_at_end(end)


def _number(b: Any, data: Any, index: Any) -> Any:
    """The number at an index; a whole number of 32 bits becomes one of 64."""
    number = b.load(b.gep(data, [index]))
    return b.sext(number, INDEX) if number.type == _word else number


def _over_corners(b: Any, at: Any, corners: Any, vertex: Any, weight: Any, emit: Callable[[Any, Any], None]) -> None:
    """emit(vertex, weight) of each corner of the pixel whose corners begin at `at`, several in a round."""

    def corner(k: Any) -> None:
        index = b.add(at, k)
        emit(_number(b, vertex, index), _number(b, weight, index))

    unrolled = b.sub(corners, b.urem(corners, INDEX(UNROLLED_CORNERS)))
    with cgutils.for_range_slice(b, INDEX(0), unrolled, INDEX(UNROLLED_CORNERS)) as (first, _):
        for k in range(UNROLLED_CORNERS):
            corner(b.add(first, INDEX(k)))
    with cgutils.for_range_slice(b, unrolled, corners, INDEX(1)) as (last, _):
        corner(last)


@operation
def gather(
    b: Any, out: Any, start: Any, rows: Any, vertex: Any, weight: Any,
    out_at: Any, start_at: Any, at: Any, corners: Any, width: Any,
) -> None:  # fmt: skip
    """out = start + sum over a pixel's corners of weight * rows[vertex]."""

    def emit(block: Block) -> None:
        sums = block.variables(block.load(start, start_at))

        def add(m: Any, factor: Any) -> None:
            block.each(lambda v, total, x: v.accumulate(total, v.spread(factor), x), sums, block.load(rows, (m, width)))

        _over_corners(b, at, corners, vertex, weight, add)
        block.store([b.load(total) for total in sums], out, out_at)

    _in_blocks(b, width, emit)


@operation
def scatter(
    b: Any, rows: Any, values: Any, vertex: Any, weight: Any, values_at: Any, at: Any, corners: Any, width: Any
) -> None:
    """rows[vertex] += weight * values, for each of a pixel's corners."""

    def emit(block: Block) -> None:
        own = block.load(values, values_at)

        def add(m: Any, factor: Any) -> None:
            old = block.load(rows, (m, width))
            new = block.each(lambda v, x, y: v.multiply_add(v.spread(factor), x, y), own, old)
            block.store(new, rows, (m, width))

        _over_corners(b, at, corners, vertex, weight, add)

    _in_blocks(b, width, emit)


@operation
def softmax(b: Any, row: Any, at: Any, width: Any) -> None:
    """row = exp(row) / sum of exp(row), in place."""
    top, total = cgutils.alloca_once(b, FLOAT), cgutils.alloca_once(b, FLOAT)
    b.store(FLOAT(float("-inf")), top)
    b.store(FLOAT(0.0), total)

    def larger(x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def find_top(block: Block) -> None:
        b.store(larger(block.reduced(block.load(row, at), larger), b.load(top)), top)

    def powers(block: Block) -> None:
        values = block.exp_of_difference(block.load(row, at), b.load(top))
        block.store(values, row, at)
        b.store(b.fadd(b.load(total), block.reduced(values, b.fadd)), total)

    def divided(block: Block, values: Values, by: Any) -> None:
        factor = b.fdiv(FLOAT(1.0), by)
        block.store(block.each(lambda v, x: b.fmul(v.spread(factor), x), values), row, at)

    def at_once(block: Block) -> None:
        values = block.load(row, at)
        values = block.exp_of_difference(values, block.reduced(values, larger))
        divided(block, values, block.reduced(values, b.fadd))

    with b.if_else(b.icmp_signed("<=", width, INDEX(MAX_UNITS * LANES))) as (fits, else_):
        with fits:
            _in_blocks(b, width, at_once)
        with else_:
            _in_blocks(b, width, find_top)
            _in_blocks(b, width, powers)
            _in_blocks(b, width, lambda block: divided(block, block.load(row, at), b.load(total)))


@operation
def blur_runs(b: Any, rows: Any, runs: Any, start: Any, stop: Any, base: Any, width: Any) -> None:
    """rows[m] += (rows[before m] + rows[after m]) / 2, in place, along the runs at start .. stop - 1.

    Vertices are counted from row `base` on. A run needs no second buffer: the row before the current one is saved.
    runs must go on for FETCH_AHEAD numbers behind `stop`, the first of them below 0.
    """

    def emit(block: Block) -> None:
        def row_of(entry: Any) -> Any:
            vertex = b.xor(entry, b.ashr(entry, INDEX(63)))  # ~entry if it is below 0
            return b.add(vertex, base), width

        zeros = [v.constant(0.0) for v in block.vectors]
        previous = block.variables(zeros)
        with cgutils.for_range_slice(b, start, stop, INDEX(1)) as (k, _):
            here, following = _number(b, runs, k), _number(b, runs, b.add(k, INDEX(1)))
            block.prefetch(rows, row_of(_number(b, runs, b.add(k, INDEX(FETCH_AHEAD)))))
            begins, ends = (b.icmp_signed("<", entry, INDEX(0)) for entry in (here, following))
            own, ahead = block.load(rows, row_of(here)), block.load(rows, row_of(following))

            def blurred(v: Vectors, zero: Any, old: Any, x: Any, y: Any) -> Any:
                sides = b.fadd(b.select(begins, zero, b.load(old)), b.select(ends, zero, y))
                b.store(x, old)
                return v.multiply_add(v.constant(0.5), sides, x)

            block.store(block.each(blurred, zeros, previous, own, ahead), rows, row_of(here))

    _in_blocks(b, width, emit)


@operation
def fetch_number(b: Any, numbers: Any, index: Any) -> None:
    """Have a number of an array brought near from memory."""
    Vectors(b).prefetch(numbers, index, locality=3)
