"""Vectors of numbers in functions that numba compiles.

numba leaves the choice of vector instructions to LLVM's optimiser, which finds few of them. `Vectors` spells them out,
and LLVM turns them into whatever the processor has. `operation` makes code that is written so callable from a compiled
function.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray

from deepmrf.ops.jobs import FUSED, compiled

# Parts of numba come from numba as a whole, here and in all kernels: a thread that begins with a part, while another
# one imports the whole, gets a module that is not finished.
cgutils, types, intrinsic = numba.core.cgutils, numba.core.types, numba.extending.intrinsic
cpu_target = numba.core.registry.cpu_target
CACHE_LINE = 64
"""Bytes. A vector that lies in two lines takes twice the time."""
FLOAT, DOUBLE, INDEX = ir.FloatType(), ir.DoubleType(), ir.IntType(64)


class Vectors:
    """Operations on vectors of one type of number, in the function being built.

    An index counts numbers from the start of an array. It is given as terms to add up: a term is a number or a tuple of
    numbers to multiply, and a number is an int, or a value that is known when the function runs.
    """

    def __init__(self, builder: Any, element: Any = DOUBLE, size: int = CACHE_LINE) -> None:
        """element: FLOAT or DOUBLE. size: bytes of a vector."""
        self.builder, self.element = builder, element
        self.lanes = size // _bytes(element)
        self.vector = ir.VectorType(element, self.lanes)

    def index(self, *terms: Any) -> Any:
        total = INDEX(0)
        for term in terms:
            product = INDEX(1)
            for factor in term if isinstance(term, tuple) else (term,):
                factor = INDEX(factor) if isinstance(factor, int) else factor
                product = self.builder.mul(product, factor, flags=("nsw",))
            total = self.builder.add(total, product, flags=("nsw",))
        return total

    def _pointer(self, data: Any, terms: Sequence[Any]) -> Any:
        return self.builder.gep(data, [self.index(*terms)])

    def load(self, data: Any, *terms: Any) -> Any:
        """As many numbers as there are lanes, widened if need be; arrays need not be aligned."""
        given = data.type.pointee
        pointer = self.builder.bitcast(self._pointer(data, terms), ir.VectorType(given, self.lanes).as_pointer())
        value = self.builder.load(pointer, align=_bytes(given))
        return value if given == self.element else self.builder.fpext(value, self.vector)

    def store(self, value: Any, data: Any, *terms: Any) -> None:
        """The reverse of load."""
        wanted = ir.VectorType(data.type.pointee, self.lanes)
        if wanted != self.vector:
            value = self.builder.fptrunc(value, wanted)
        pointer = self.builder.bitcast(self._pointer(data, terms), wanted.as_pointer())
        self.builder.store(value, pointer, align=_bytes(data.type.pointee))

    def prefetch(self, data: Any, *terms: Any, write: bool = False, locality: int = 2) -> None:
        """Bring the numbers at an index, in the array or not, near; locality: 3 for the first cache, 2 the second."""
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = self.builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        pointer = self.builder.bitcast(self._pointer(data, terms), byte)
        self.builder.call(function, [pointer, word(int(write)), word(locality), word(1)])

    def spread(self, scalar: Any) -> Any:
        """The same number in every lane."""
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.IntType(32)(0))
        return self.builder.shuffle_vector(first, undefined, _mask([0] * self.lanes))

    def spread_from(self, data: Any, *terms: Any) -> Any:
        """The number at an index in every lane."""
        return self.spread(self.builder.load(self._pointer(data, terms)))

    def constant(self, number: float) -> Any:
        return ir.Constant(self.vector, [number] * self.lanes)

    def variable(self, value: Any) -> Any:
        """A pointer to a vector that changes in a loop."""
        pointer = cgutils.alloca_once(self.builder, self.vector)
        self.builder.store(value, pointer)
        return pointer

    def add(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=FUSED)

    def subtract(self, a: Any, b: Any) -> Any:
        return self.builder.fsub(a, b, flags=FUSED)

    def multiply(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=FUSED)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c"""
        return self.add(self.multiply(a, b), c)

    def accumulate(self, variable: Any, a: Any, b: Any) -> None:
        """variable += a * b"""
        self.builder.store(self.multiply_add(a, b, self.builder.load(variable)), variable)

    def exp2_of_negative(self, numbers: Sequence[Any]) -> list[Any]:
        """2^-x of each x >= 0; 0 below the smallest normal number; NaN stays. Side by side: none waits for another."""
        b = self.builder
        mantissa, bias = (23, 127) if self.element == FLOAT else (52, 1023)
        # From here on the exponent of the result is 0, and so is the result. A NaN fails the comparison and stays.
        largest = self.constant(float(bias))
        limited = [b.select(b.fcmp_ordered("<", largest, x), largest, x) for x in numbers]
        # Added to a number this large, -x is rounded to a whole number, which stands in the lowest bits: the exponent.
        large = self.constant(1.5 * 2.0**mantissa + bias)
        shifted = [b.fsub(large, x) for x in limited]
        rounded = [b.fsub(large, x) for x in shifted]
        rest = [b.fsub(n, x) for n, x in zip(rounded, limited, strict=True)]
        integers = ir.VectorType(ir.IntType(8 * _bytes(self.element)), self.lanes)
        left = ir.Constant(integers, [mantissa] * self.lanes)
        powers = [b.bitcast(b.shl(b.bitcast(x, integers), left), self.vector) for x in shifted]
        first, *coefficients = _exp2_coefficients(5 if self.element == FLOAT else 11)
        values = [self.constant(first)] * len(numbers)
        for c in coefficients:
            values = [self.multiply_add(value, x, self.constant(c)) for value, x in zip(values, rest, strict=True)]
        return [b.fmul(value, power) for value, power in zip(values, powers, strict=True)]

    def transposed(self, rows: Sequence[Any]) -> list[Any]:
        """As many vectors as lanes, the rows of a matrix, to its columns: larger, then smaller blocks are exchanged."""
        rows, lanes = list(rows), range(self.lanes)
        size = self.lanes // 2
        while size:
            first = _mask([k if not k & size else self.lanes + k - size for k in lanes])
            second = _mask([k + size if not k & size else self.lanes + k for k in lanes])
            for i in lanes:
                if not i & size:
                    a, b = rows[i], rows[i + size]
                    rows[i] = self.builder.shuffle_vector(a, b, first)
                    rows[i + size] = self.builder.shuffle_vector(a, b, second)
            size //= 2
        return rows


@cache
def _exp2_coefficients(degree: int) -> list[float]:
    """Coefficients of 2^r on [-1/2, 1/2], highest first; degree 5 is within rounding of float32, 11 of float64."""
    fit = np.polynomial.Chebyshev.interpolate(np.exp2, degree, domain=[-0.5, 0.5])
    return [float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef[::-1]]


def _bytes(element: Any) -> int:
    return 4 if element == FLOAT else 8


def _mask(lanes: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


def operation(emit: Callable[..., None]) -> Any:
    """A function that compiled code can call, from emit(builder, *arguments), which writes its instructions.

    emit gets an array as a pointer to its first number, and a tuple as its length: a compiled function is made for each
    length, so that sizes which must be known beforehand are passed as tuples.
    """

    @wraps(emit)  # for its signature, in which the builder stands where numba gives the typing context
    def typed(typing: Any, *given: Any) -> Any:
        signature = types.void(*[_argument_type(kind) for kind in given])

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def argument(kind: Any, value: Any) -> Any:
                if isinstance(kind, types.Array):
                    return context.make_array(kind)(context, builder, value).data
                tuple_type = types.BaseTuple  # type: ignore[attr-defined, unused-ignore]
                return len(kind) if isinstance(kind, tuple_type) else value

            emit(builder, *[argument(*pair) for pair in zip(signature.args, arguments, strict=True)])
            return context.get_dummy_value()

        return signature, build

    return intrinsic(typed)


def _argument_type(kind: Any) -> Any:
    if isinstance(kind, types.Boolean):
        return types.boolean
    if isinstance(kind, types.Integer):
        return types.intp
    return types.float64 if isinstance(kind, types.Float) else kind


@compiled
def aligned(size: int, like: NDArray[Any]) -> NDArray[Any]:
    """Zeros of the type of an array, from the start of a cache line on."""
    numbers = np.zeros(size + CACHE_LINE // like.itemsize, like.dtype)
    skip = -numbers.ctypes.data % CACHE_LINE // like.itemsize
    return numbers[skip : skip + size]
