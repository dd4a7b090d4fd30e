"""Vectors of eight float64 numbers in a function that numba compiles.

numba leaves the choice of vector instructions to LLVM's optimiser, which finds few of them. These spell them out, and
LLVM turns them into whatever the processor has. Arrays are taken whole, with places to begin at: a slice made in a loop
costs numba more than the work done on it.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 8
"""Numbers in a vector."""
AHEAD = 64
"""How many pixels before its turn something is fetched from memory; after the end of a row comes the next one."""


class Vectors:
    """Operations on vectors in the function being built. Indices count numbers, from the start of an array."""

    def __init__(self, context: Any, builder: Any, lanes: int = LANES) -> None:
        self.context, self.builder, self.lanes = context, builder, lanes
        self.vector = ir.VectorType(ir.DoubleType(), lanes)

    def data(self, array_type: Any, value: Any) -> Any:
        return self.context.make_array(array_type)(self.context, self.builder, value).data

    def plus(self, index: Any, by: Any) -> Any:
        by = ir.Constant(index.type, by) if isinstance(by, int) else by
        return self.builder.add(index, by, flags=("nsw",))

    def times(self, index: Any, by: Any) -> Any:
        by = ir.Constant(index.type, by) if isinstance(by, int) else by
        return self.builder.mul(index, by, flags=("nsw",))

    def load(self, data: Any, index: Any) -> Any:
        """As many numbers as there are lanes, widened if they are float32; arrays need not be aligned."""
        given = data.type.pointee
        place = self.builder.bitcast(self.builder.gep(data, [index]), ir.VectorType(given, self.lanes).as_pointer())
        value = self.builder.load(place, align=self.context.get_abi_sizeof(given))
        return value if given == ir.DoubleType() else self.builder.fpext(value, self.vector)

    def store(self, value: Any, data: Any, index: Any) -> None:
        """The reverse of load."""
        wanted = data.type.pointee
        narrow = ir.VectorType(wanted, self.lanes)
        if wanted != ir.DoubleType():
            value = self.builder.fptrunc(value, narrow)
        place = self.builder.bitcast(self.builder.gep(data, [index]), narrow.as_pointer())
        self.builder.store(value, place, align=self.context.get_abi_sizeof(wanted))

    def prefetch(self, data: Any, index: Any, write: bool = False) -> None:
        """Have the numbers at a place, which need not exist, brought near by the time they are wanted."""
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        place = self.builder.bitcast(self.builder.gep(data, [index]), byte)
        self.builder.call(function, [place, word(int(write)), word(2), word(1)])

    def spread(self, scalar: Any) -> Any:
        """The same number in every lane."""
        nothing = ir.Constant(self.vector, ir.Undefined)
        one = self.builder.insert_element(nothing, scalar, ir.IntType(32)(0))
        return self.builder.shuffle_vector(one, nothing, self._mask([0] * self.lanes))

    def spread_from(self, data: Any, index: Any) -> Any:
        return self.spread(self.builder.load(self.builder.gep(data, [index])))

    def zero(self) -> Any:
        return ir.Constant(self.vector, [0.0] * self.lanes)

    def add(self, a: Any, b: Any) -> Any:
        """a + b. A product that is added or subtracted is rounded only once where the processor can."""
        return self.builder.fadd(a, b, flags=("contract",))

    def subtract(self, a: Any, b: Any) -> Any:
        return self.builder.fsub(a, b, flags=("contract",))

    def multiply(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=("contract",))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c"""
        return self.add(self.multiply(a, b), c)

    def transposed(self, rows: Sequence[Any]) -> list[Any]:
        """Eight vectors as the rows of a matrix, to its columns: blocks of 4, then 2, then 1 change places."""
        rows = list(rows)
        size = LANES // 2
        while size:
            for i in range(LANES):
                if not i & size:
                    a, b = rows[i], rows[i + size]
                    first = [k if not k & size else LANES + k - size for k in range(LANES)]
                    second = [k + size if not k & size else LANES + k for k in range(LANES)]
                    rows[i] = self.builder.shuffle_vector(a, b, self._mask(first))
                    rows[i + size] = self.builder.shuffle_vector(a, b, self._mask(second))
            size //= 2
        return rows

    def _mask(self, lanes: list[int]) -> Any:
        return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


def along(context: Any, builder: Any, size: Any, step: Callable[[Vectors, Any], None]) -> None:
    """step(vectors, x) for every eighth x below size, then one by one for those that do not fill a vector."""
    one = ir.Constant(size.type, 1)
    zero, stride = ir.Constant(size.type, 0), ir.Constant(size.type, LANES)
    whole = builder.and_(size, ir.Constant(size.type, -LANES))
    with cgutils.for_range_slice(builder, zero, whole, stride) as (x, _):
        step(Vectors(context, builder), x)
    with cgutils.for_range_slice(builder, whole, size, one) as (x, _):
        step(Vectors(context, builder, 1), x)


def _to_lanes(product: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def to_lanes(typing: Any, a: Any, b: Any, at: Any, step: Any, rows: Any, size: Any, out: Any, out_at: Any) -> Any:
        """out[i, k] = a[k * step + i] (times b's) for i < size: rows become lanes.

        There are `rows` of them, at most eight; the last one fills the other lanes too.
        """
        i = types.intp
        signature = types.void(a, b, i, i, i, i, out, i)

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, _, at, step, rows, size, _, out_at = arguments
            w = Vectors(context, builder)
            a, b, out = (w.data(signature.args[n], arguments[n]) for n in (0, 1, 6))
            last = w.plus(rows, -1)
            starts = []
            for k in range(LANES):
                lane = ir.Constant(last.type, k)
                lane = builder.select(builder.icmp_signed("<", lane, last), lane, last)
                starts.append(w.plus(at, w.times(lane, step)))

            def move(v: Vectors, x: Any) -> None:
                values = [v.load(a, v.plus(start, x)) for start in starts]
                if product:
                    others = [v.load(b, v.plus(start, x)) for start in starts]
                    values = [v.multiply(one, other) for one, other in zip(values, others, strict=True)]
                if v.lanes == LANES:
                    for start in starts:
                        for data in (a, b) if product else (a,):
                            v.prefetch(data, v.plus(v.plus(start, x), AHEAD))
                to = v.plus(out_at, v.times(x, LANES))
                for k, value in enumerate(v.transposed(values) if v.lanes == LANES else values):
                    v.store(value, out, v.plus(to, k * v.lanes))

            along(context, builder, size, move)
            return context.get_dummy_value()

        return signature, build

    return to_lanes


rows_to_lanes, products_to_lanes = _to_lanes(False), _to_lanes(True)


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def lanes_to_rows(typing: Any, a: Any, at: Any, size: Any, out: Any, out_at: Any, step: Any) -> Any:
    """out[k * step + i] = a[i, k] for i < size, rounded up to eights: lanes become rows."""
    i = types.intp
    signature = types.void(a, i, i, out, i, i)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, at, size, out, out_at, step = arguments
        v = Vectors(context, builder)
        a, out = v.data(signature.args[0], a), v.data(signature.args[3], out)
        zero, stride = ir.Constant(size.type, 0), ir.Constant(size.type, LANES)
        with cgutils.for_range_slice(builder, zero, size, stride) as (x, _):
            begin = v.plus(at, v.times(x, LANES))
            values = [v.load(a, v.plus(begin, k * LANES)) for k in range(LANES)]
            for k, value in enumerate(v.transposed(values)):
                v.store(value, out, v.plus(v.plus(out_at, v.times(step, k)), x))
        return context.get_dummy_value()

    return signature, build
