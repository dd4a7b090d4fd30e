"""Operations on vectors of neighbouring pixels for the Gaussian kernel's window sum, as numba can call them.

numba leaves the choice of vector instructions to LLVM's optimiser, which finds neither the sums nor an exponential (it
has no vector exp to call); both are therefore spelt out here. LLVM turns them into whatever the processor has.

Every operation is for a group of GROUP rows of pixels j, one vector each, whose neighbours z are in one row: z is read
once for the group. The numbers that belong to the offsets dx of a row, s and colours, are (dx, GROUP, vector).

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

GROUP = 3
"""Rows of pixels that share their neighbours."""
_features: str = cpu_target.target_context.codegen().magic_tuple()[2]
WIDE = "+avx512vl" in _features
"""Does numba compile for 32 registers of 64 bytes? Else they are taken to be 16 of 32 bytes."""
VECTOR = 64 if WIDE else 32
"""Bytes in a vector."""
MOST = 8 if WIDE else 4
"""Labels summed at once: GROUP x MOST sums and what they need fit the registers."""
STEP = 4
"""Offsets whose pairs are summed at once, for the same reason."""


def _power_of_two(degree: int) -> list[float]:
    """Coefficients of 2^r on [-1/2, 1/2], highest first."""
    fit = np.polynomial.Chebyshev.interpolate(np.exp2, degree, domain=[-0.5, 0.5])
    return [float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef[::-1]]


POLYNOMIALS = {4: _power_of_two(5), 8: _power_of_two(11)}
"""By the bytes of a number: within rounding of float32 and float64."""


class _Vectors:
    """Vectors of one element type in the function being built."""

    def __init__(self, context: Any, builder: Any, array_type: Any) -> None:
        self.builder, self.context = builder, context
        self.element = context.get_value_type(array_type.dtype)
        self.bytes = context.get_abi_sizeof(self.element)
        self.lanes = VECTOR // self.bytes
        self.vector = ir.VectorType(self.element, self.lanes)
        self.integers = ir.VectorType(ir.IntType(8 * self.bytes), self.lanes)

    def data(self, array_type: Any, value: Any) -> Any:
        return self.context.make_array(array_type)(self.context, self.builder, value).data

    def index(self, *terms: Any) -> Any:
        """The sum of terms, each a number or a product of numbers; those known now are plain ints."""
        kind = ir.IntType(64)
        total = kind(0)
        for term in terms:
            product = kind(1)
            for factor in term if isinstance(term, tuple) else (term,):
                product = self.builder.mul(product, kind(factor) if isinstance(factor, int) else factor)
            total = self.builder.add(total, product)
        return total

    def _at(self, data: Any, index: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(data, [index]), self.vector.as_pointer())

    def load(self, data: Any, *terms: Any) -> Any:
        return self.builder.load(self._at(data, self.index(*terms)), align=self.bytes)

    def store(self, value: Any, data: Any, *terms: Any) -> None:
        self.builder.store(value, self._at(data, self.index(*terms)), align=self.bytes)

    def spread(self, data: Any, *terms: Any) -> Any:
        """The same number in every lane."""
        scalar = self.builder.load(self.builder.gep(data, [self.index(*terms)]))
        one = self.builder.insert_element(ir.Constant(self.vector, ir.Undefined), scalar, ir.IntType(32)(0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(one, ir.Constant(self.vector, ir.Undefined), mask)

    def variable(self, value: Any) -> Any:
        """A vector that changes in a loop."""
        place = cgutils.alloca_once(self.builder, self.vector)
        self.builder.store(value, place)
        return place

    def real(self, number: float) -> Any:
        return ir.Constant(self.vector, [number] * self.lanes)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, in one rounding where the processor can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def accumulate(self, place: Any, a: Any, b: Any) -> None:
        self.builder.store(self.multiply_add(a, b, self.builder.load(place)), place)

    def exp2_of_negative(self, numbers: list[Any]) -> list[Any]:
        """2^-x of each x >= 0; below the smallest normal number it is 0; NaN stays NaN.

        Step by step for all of them, so that the processor has several to work on while it waits for one.
        """
        b = self.builder
        mantissa, bias = (23, 127) if self.bytes == 4 else (52, 1023)
        # Its exponent would be 0: the number is. Written so that a NaN fails the comparison and is kept.
        most = self.real(float(bias))
        cut = [b.select(b.fcmp_ordered("<", most, x), most, x) for x in numbers]
        # Added to a number this large, -x is rounded to a whole number, found in its lowest bits: the exponent.
        large = self.real(1.5 * 2.0**mantissa + bias)
        shifted = [b.fsub(large, x) for x in cut]
        rounded = [b.fsub(large, x) for x in shifted]
        rest = [b.fsub(n, x) for n, x in zip(rounded, cut, strict=True)]
        left = ir.Constant(self.integers, [mantissa] * self.lanes)
        powers = [b.bitcast(b.shl(b.bitcast(x, self.integers), left), self.vector) for x in shifted]
        coefficients = POLYNOMIALS[self.bytes]
        values = [self.real(coefficients[0])] * len(numbers)
        for c in coefficients[1:]:
            values = [self.multiply_add(value, x, self.real(c)) for value, x in zip(values, rest, strict=True)]
        return [b.fmul(value, power) for value, power in zip(values, powers, strict=True)]


def _operation(arrays: int) -> Callable[[Callable[..., None]], Any]:
    """emit(vectors, data .., numbers ..) as a function of so many arrays of one element type and then of integers."""

    def decorate(emit: Callable[..., None]) -> Any:
        @wraps(emit)  # for its signature, in which the vectors stand where numba gives the context
        def typed(typing: Any, *given: Any) -> Any:
            signature = types.void(*given[:arrays], *[types.intp] * (len(given) - arrays))

            def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                v = _Vectors(context, builder, signature.args[0])
                data = [v.data(*pair) for pair in zip(signature.args[:arrays], arguments[:arrays], strict=True)]
                emit(v, *data, *arguments[arrays:])
                return context.get_dummy_value()

            return signature, build

        return intrinsic(typed)

    return decorate


def _similarity(features: int | None, keep: bool) -> Any:
    """The operation for so many features, or for a number known when it runs; with `keep`, colours are stored."""

    @_operation(arrays=4)
    def similarity(
        v: Any, s: Any, colours: Any, g: Any, places: Any, to: Any, here: Any, there: Any, line: Any, plane: Any,
        count: Any, place: Any, places_row: Any, size: Any,
    ) -> None:  # fmt: skip
        """s = 2^-(colours + places), colours = sum over features of (g[j] - g[z])^2, for `size` offsets in a row.

        j is at `here` and in the next lines of g, the first z at `there`. A line further down, the same neighbours are
        a row of places further up.
        """
        b, rows = v.builder, range(GROUP)

        def centre(f: Any) -> list[Any]:
            return [v.load(g, here, (f, plane), (r, line)) for r in rows]

        def add(totals: list[Any], f: Any, dx: Any, mine: list[Any]) -> None:
            other = v.load(g, there, (f, plane), dx)
            for total, one in zip(totals, mine, strict=True):
                step = b.fsub(one, other)
                v.accumulate(total, step, step)

        centres = [centre(f) for f in range(features or 0)]
        with cgutils.for_range(b, size) as offset:
            dx = offset.index
            apart = [v.spread(places, place, dx, (-r, places_row)) for r in rows]
            totals = [v.variable(v.real(0.0) if keep else apart[r]) for r in rows]
            if features is None:
                with cgutils.for_range(b, count) as loop:
                    add(totals, loop.index, dx, centre(loop.index))
            for f, mine in enumerate(centres):
                add(totals, f, dx, mine)
            wholes = [b.load(total) for total in totals]
            if keep:
                for r in rows:
                    v.store(wholes[r], colours, to, (dx, GROUP * v.lanes), r * v.lanes)
                wholes = [b.fadd(wholes[r], apart[r]) for r in rows]
            for r, weight in enumerate(v.exp2_of_negative(wholes)):
                v.store(weight, s, to, (dx, GROUP * v.lanes), r * v.lanes)

    return similarity


similarity_3, similarity_any = _similarity(3, keep=False), _similarity(None, keep=False)
similarity_3_kept, similarity_any_kept = _similarity(3, keep=True), _similarity(None, keep=True)


@_operation(arrays=3)
def add_products(
    v: Any, total: Any, s: Any, x: Any,
    to: Any, to_row: Any, pitch: Any, at: Any, line: Any, row: Any, s_row: Any, rows: Any, size: Any, labels: Any,
) -> None:  # fmt: skip
    """total[r, label] += sum of s[r] * x[label], for up to MOST labels, over rows of x and `size` offsets in each."""
    b = v.builder
    end = b.append_basic_block("end")
    choice = b.switch(labels, end)
    for count in range(1, MOST + 1):
        block = b.append_basic_block(f"labels_{count}")
        choice.add_case(labels.type(count), block)
        b.position_at_end(block)
        places = [(r, k, (to, (r, to_row), (k, pitch))) for r in range(GROUP) for k in range(count)]
        sums = {(r, k): v.variable(v.load(total, *place)) for r, k, place in places}
        with cgutils.for_range(b, rows) as outer:
            first, weight = v.index(at, (outer.index, row)), v.index((outer.index, s_row))
            with cgutils.for_range(b, size) as offset:
                dx = offset.index
                factors = [v.load(s, weight, (dx, GROUP * v.lanes), r * v.lanes) for r in range(GROUP)]
                for k in range(count):
                    other = v.load(x, first, (k, line), dx)
                    for r in range(GROUP):
                        v.accumulate(sums[r, k], factors[r], other)
        for r, k, place in places:
            v.store(b.load(sums[r, k]), total, *place)
        b.branch(end)
    b.position_at_end(end)


@_operation(arrays=6)
def weigh_pairs(
    v: Any, s: Any, colours: Any, mine: Any, x: Any, places: Any, sums: Any,
    to: Any, own_at: Any, pitch: Any, at: Any, line: Any, labels: Any, place: Any, places_row: Any, size: Any,
) -> None:  # fmt: skip
    """s *= mine . x, over labels; sums (2, vector) += (s * colours, s * places), for `size` offsets, STEP at a time."""
    b, rows = v.builder, range(GROUP)
    lengths = [v.variable(v.load(sums, k * v.lanes)) for k in range(2)]
    with cgutils.for_range_slice(b, size.type(0), size, size.type(STEP)) as (dx, _):
        pairs = {(r, k): v.variable(v.real(0.0)) for k in range(STEP) for r in rows}
        with cgutils.for_range(b, labels) as label:
            own = [v.load(mine, own_at, (label.index, pitch), (r, labels, pitch)) for r in rows]
            for k in range(STEP):
                other = v.load(x, at, (label.index, line), dx, k)
                for r in rows:
                    v.accumulate(pairs[r, k], own[r], other)
        for (r, k), pair in pairs.items():
            here = (to, (dx, GROUP * v.lanes), (k * GROUP + r) * v.lanes)
            one = b.fmul(b.load(pair), v.load(s, *here))
            v.store(one, s, *here)
            v.accumulate(lengths[0], one, v.load(colours, *here))
            v.accumulate(lengths[1], one, v.spread(places, place, dx, k, (-r, places_row)))
    for k in range(2):
        v.store(b.load(lengths[k]), sums, k * v.lanes)


@_operation(arrays=3)
def pull(
    v: Any, total: Any, pairs: Any, g: Any, to: Any, here: Any, there: Any, line: Any, at: Any, size: Any,
) -> None:  # fmt: skip
    """total[r] += sum of pairs[r] * (g[j] - g[z]), over `size` offsets in a row, for one feature."""
    b, rows = v.builder, range(GROUP)
    sums = [v.variable(v.real(0.0)) for _ in rows]  # from 0 on: terms of either sign, summed row by row
    centres = [v.load(g, here, (r, line)) for r in rows]
    with cgutils.for_range(b, size) as offset:
        other = v.load(g, there, offset.index)
        for r in rows:
            pair = v.load(pairs, at, (offset.index, GROUP * v.lanes), r * v.lanes)
            v.accumulate(sums[r], pair, b.fsub(centres[r], other))
    for r in rows:
        v.store(b.fadd(v.load(total, to, r * v.lanes), b.load(sums[r])), total, to, r * v.lanes)
