"""The Gaussian kernel's window sum as small matrix products, compiled by numba.

    total[j, v] = sum over z of s(j, z) x[z, v]        and, for the gradients,   pair(j, z) = s(j, z) x[z] . y[j]

For four neighbouring pixels j and one row of their windows both are products of small matrices, whose result stays in
registers. s is computed once for all labels, into a buffer of a few kilobytes, and only for one row of windows at once.

numba leaves the choice of vector instructions to LLVM's optimiser, which finds neither the products nor an exponential
(it has no vector exp to call); both are therefore spelt out below as operations on vectors of eight numbers. LLVM turns
those into whatever the processor has.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from deepmrf.ops.numba_support import compiled, compiled_sums

Array = NDArray[Any]

LANES = 8
"""Numbers in a vector."""
TILE = 4
"""Pixels j that share a product: 4 x 3 vectors of results fit 16 registers."""
BLOCK = 32
"""Pixels j whose weights are computed together: what they read and write stays in the first cache."""
LEAD = TILE - 1
"""Zeros before the weights of a window, as far as the windows of a tile's pixels are apart."""
FORWARD, BACKWARD, PAIRS = 0, 1, 2
"""What a job does: t; the gradient to q and the sums over pairs; these alone, for the gradient to the features."""
FAR = 1e30
"""In place of a squared distance: this neighbour does not count."""


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
        self.vector = ir.VectorType(self.element, LANES)
        self.integers = ir.VectorType(ir.IntType(8 * self.bytes), LANES)

    def data(self, array_type: Any, value: Any) -> Any:
        return self.context.make_array(array_type)(self.context, self.builder, value).data

    def at(self, data: Any, index: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(data, [index]), self.vector.as_pointer())

    def load(self, data: Any, index: Any) -> Any:
        return self.builder.load(self.at(data, index), align=self.bytes)

    def store(self, value: Any, data: Any, index: Any) -> None:
        self.builder.store(value, self.at(data, index), align=self.bytes)

    def spread(self, scalar: Any) -> Any:
        """The same number in every lane."""
        one = self.builder.insert_element(ir.Constant(self.vector, ir.Undefined), scalar, ir.IntType(32)(0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return self.builder.shuffle_vector(one, ir.Constant(self.vector, ir.Undefined), mask)

    def real(self, number: float) -> Any:
        return ir.Constant(self.vector, [number] * LANES)

    def whole(self, number: int) -> Any:
        return ir.Constant(self.integers, [number] * LANES)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c, in one rounding where the processor can."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def exp2_of_negative(self, x: Any) -> Any:
        """2^-x for x >= 0; below the smallest normal number it is 0; NaN stays NaN."""
        b = self.builder
        mantissa, bias = (23, 127) if self.bytes == 4 else (52, 1023)
        # Added to a number this large, -x is rounded to a whole number, found in its lowest bits: the exponent.
        large = self.real(1.5 * 2.0**mantissa + bias)
        shifted = b.fsub(large, x)
        rest = b.fsub(b.fsub(large, shifted), x)
        power = b.bitcast(b.shl(b.bitcast(shifted, self.integers), self.whole(mantissa)), self.vector)
        coefficients = POLYNOMIALS[self.bytes]
        value = self.real(coefficients[0])
        for c in coefficients[1:]:
            value = self.multiply_add(value, rest, self.real(c))
        small = b.fcmp_ordered(">", x, self.real(float(bias - 1)))
        return b.select(small, self.real(0.0), b.fmul(value, power))


def _product(vectors: int) -> Any:
    """An intrinsic for a tile of TILE x (vectors * LANES) results."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def product(
        typing: Any, out: Any, out_at: Any, out_row: Any, a: Any, a_at: Any, a_row: Any, a_step: Any,
        b: Any, b_at: Any, b_step: Any, count: Any,
    ) -> Any:  # fmt: skip
        """out[r, c] += sum over i < count of a[r * a_row + i * a_step] * b[i * b_step + c], from the given places."""
        i = types.intp
        signature = types.void(out, i, i, a, i, i, i, b, i, i, i)

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            out, out_at, out_row, a, a_at, a_row, a_step, b, b_at, b_step, count = arguments
            v = _Vectors(context, builder, signature.args[0])
            out, a = v.data(signature.args[0], out), v.data(signature.args[3], a)
            b = v.data(signature.args[7], b)

            def place(r: int, c: int) -> Any:
                index = builder.add(out_at, builder.mul(out_row, ir.Constant(out_row.type, r)))
                return builder.add(index, ir.Constant(index.type, c * LANES))

            sums = [[cgutils.alloca_once(builder, v.vector) for _ in range(vectors)] for _ in range(TILE)]
            for r in range(TILE):
                for c in range(vectors):
                    builder.store(v.load(out, place(r, c)), sums[r][c])
            with cgutils.for_range(builder, count) as loop:
                start = builder.add(b_at, builder.mul(loop.index, b_step))
                row = [v.load(b, builder.add(start, ir.Constant(start.type, c * LANES))) for c in range(vectors)]
                for r in range(TILE):
                    index = builder.add(a_at, builder.mul(loop.index, a_step))
                    index = builder.add(index, builder.mul(a_row, ir.Constant(a_row.type, r)))
                    factor = v.spread(builder.load(builder.gep(a, [index])))
                    for c in range(vectors):
                        builder.store(v.multiply_add(factor, row[c], builder.load(sums[r][c])), sums[r][c])
            for r in range(TILE):
                for c in range(vectors):
                    v.store(builder.load(sums[r][c]), out, place(r, c))
            return context.get_dummy_value()

        return signature, build

    return product


product_1, product_2, product_3 = _product(1), _product(2), _product(3)


def _similarity(features: int | None) -> Any:
    """An intrinsic for so many features, or for a number known when it runs."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def similarity(
        typing: Any, s: Any, s_at: Any, colours: Any, g: Any, g_at: Any, g_plane: Any, j: Any, count: Any,
        places: Any, places_at: Any, size: Any,
    ) -> Any:  # fmt: skip
        """s = 2^-(colours + places), colours = sum over features of (g[j] - g[z])^2, for `size` neighbours in a row."""
        i = types.intp
        signature = types.void(s, i, colours, g, i, i, i, i, places, i, i)

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            s, s_at, colours, g, g_at, g_plane, j, count, places, places_at, size = arguments
            v = _Vectors(context, builder, signature.args[0])
            s, colours = v.data(signature.args[0], s), v.data(signature.args[2], colours)
            g, places = v.data(signature.args[3], g), v.data(signature.args[8], places)
            total = cgutils.alloca_once(builder, v.vector)
            zero, stride = ir.Constant(size.type, 0), ir.Constant(size.type, LANES)

            def add(plane: Any, x: Any) -> None:
                here = v.spread(builder.load(builder.gep(g, [builder.add(plane, j)])))
                step = builder.fsub(here, v.load(g, builder.add(builder.add(plane, g_at), x)))
                builder.store(v.multiply_add(step, step, builder.load(total)), total)

            with cgutils.for_range_slice(builder, zero, size, stride) as (x, _):
                builder.store(v.real(0.0), total)
                if features is None:
                    with cgutils.for_range(builder, count) as loop:
                        add(builder.mul(loop.index, g_plane), x)
                else:
                    for f in range(features):
                        add(builder.mul(ir.Constant(g_plane.type, f), g_plane), x)
                colour, place = builder.load(total), builder.add(s_at, x)
                v.store(colour, colours, place)
                whole = builder.fadd(colour, v.load(places, builder.add(places_at, x)))
                v.store(v.exp2_of_negative(whole), s, place)
            return context.get_dummy_value()

        return signature, build

    return similarity


similarity_1, similarity_3, similarity_any = _similarity(1), _similarity(3), _similarity(None)


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def weigh_pairs(
    typing: Any, pair: Any, pair_at: Any, s: Any, colours: Any, at: Any, places: Any, places_at: Any, size: Any,
    sums: Any,
) -> Any:  # fmt: skip
    """pair *= s; sums (2, LANES) += (pair * colours, pair * places), lane by lane."""
    i = types.intp
    signature = types.void(pair, i, s, colours, i, places, i, i, sums)

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pair, pair_at, s, colours, at, places, places_at, size, sums = arguments
        v = _Vectors(context, builder, signature.args[0])
        pair, sums = v.data(signature.args[0], pair), v.data(signature.args[8], sums)
        s, colours = v.data(signature.args[2], s), v.data(signature.args[3], colours)
        places = v.data(signature.args[5], places)
        zero, stride = ir.Constant(size.type, 0), ir.Constant(size.type, LANES)
        totals = [cgutils.alloca_once(builder, v.vector) for _ in range(2)]
        for total, index in zip(totals, (zero, stride), strict=True):
            builder.store(v.load(sums, index), total)
        with cgutils.for_range_slice(builder, zero, size, stride) as (x, _):
            here = builder.add(at, x)
            one = builder.fmul(v.load(pair, builder.add(pair_at, x)), v.load(s, here))
            v.store(one, pair, builder.add(pair_at, x))
            lengths = v.load(colours, here), v.load(places, builder.add(places_at, x))
            for total, length in zip(totals, lengths, strict=True):
                builder.store(v.multiply_add(one, length, builder.load(total)), total)
        for total, index in zip(totals, (zero, stride), strict=True):
            v.store(builder.load(total), sums, index)
        return context.get_dummy_value()

    return signature, build


@compiled
def similarities(
    s: Array, colours: Array, pixels: int, features: Array, row: int, x: int, other: int, z: int, places: Array, at: int
) -> None:
    """Weights of the neighbours in row `other` of some pixels from x on, whose windows begin at z and after."""
    count, rows, length = features.shape
    width = s.shape[1]
    size = places.shape[2] - LEAD - 2 * LANES
    start, here, plane = other * length + z, row * length + x, rows * length
    for j in range(pixels):
        to = j * width + LEAD
        if count == 3:
            similarity_3(s, to, colours, features, start + j, plane, here + j, count, places, at, size)
        elif count == 1:
            similarity_1(s, to, colours, features, start + j, plane, here + j, count, places, at, size)
        else:
            similarity_any(s, to, colours, features, start + j, plane, here + j, count, places, at, size)


@compiled
def product(
    out: Array, out_at: int, out_row: int, vectors: int, a: Array, a_at: int, a_row: int, a_step: int, b: Array,
    b_at: int, b_step: int, count: int,
) -> None:  # fmt: skip
    """A tile as many vectors wide as asked for, three at a time."""
    c = 0
    while c < vectors:
        left = vectors - c
        here, there = out_at + c * LANES, b_at + c * LANES
        if left >= 3:
            product_3(out, here, out_row, a, a_at, a_row, a_step, b, there, b_step, count)
        elif left == 2:
            product_2(out, here, out_row, a, a_at, a_row, a_step, b, there, b_step, count)
        else:
            product_1(out, here, out_row, a, a_at, a_row, a_step, b, there, b_step, count)
        c += 3


@compiled_sums
def pull_row(pair: Array, here: float, there: Array) -> float:
    """sum of pair * (here - there)"""
    total = pair[0] * 0
    for i in range(len(pair)):
        total += pair[i] * (here - there[i])
    return float(total)


@compiled
def finish(
    mode: int, sums_of: Array, size: int, x: int, row: int, weights: Array, gate: bool, keep: bool,
    q: Array, grad: Array, kept: Array, out: Array,
) -> float:  # fmt: skip
    """A block of pixels of the result, from its sums (pixel, label); going back, returns <q, sums>."""
    w, bias = weights[0], weights[1]
    whole = 0.0
    for v in range(len(q)):
        for i in range(size):
            given, total = sums_of[i, v], w * sums_of[i, v]
            own = q[v, row, x + i]
            if mode == FORWARD:
                if keep:
                    kept[v, row, x + i] = total
                out[v, row, x + i] = (own * total if gate else total) + bias
            else:
                out[v, row, x + i] = total + grad[v, row, x + i] * kept[v, row, x + i] if gate else total
                whole += np.float64(own) * given
    return whole


@compiled
def job(
    mode: int,
    height: int,
    near: Array,
    near_lines: Array,
    centre: Array,
    features: Array,
    places: Array,
    reach: tuple[int, int, int],
    size_x: int,
    weights: Array,
    gate: bool,
    keep: bool,
    features_too: bool,
    q: Array,
    grad: Array,
    kept: Array,
    out: Array,
    pulled: Array,
    sums: Array,
    first: int,
    last: int,
    only: int,
) -> None:
    """Rows first .. last - 1 of an image's R rows: the window sum unless the mode is PAIRS, and pairs unless FORWARD.

    near (R, X, V), near_lines (R, L, X): what is summed over windows, with borders along x, labels last or pixels last.
    centre (L, R, W): what it meets at the centre of the window in a pair. features (F, R, X), scaled, with borders.
    places (T', H', LEAD + X' + 2 LANES): the scaled squared lengths of the offsets of a window.
    reach: how many pixels a window has before its centre; size_x: its size along x.
    q, grad, kept, out (L, R, W), pulled (F, R, W), sums (3,): of pairs, of pairs * colours, of pairs * places.
    only: the one frame whose neighbours count, or -1 for all of them.
    """
    labels, rows, width = q.shape
    count, length = len(features), features.shape[2]
    line = near.shape[2]
    s_width = places.shape[2]
    s, colours = np.zeros((BLOCK, s_width), q.dtype), np.zeros((BLOCK, s_width), q.dtype)
    total, mine = np.zeros((BLOCK, line), q.dtype), np.zeros((labels, BLOCK), q.dtype)
    reached = size_x + TILE - 1  # neighbours of any pixel of a tile
    pair = np.zeros((TILE, (reached + LANES - 1) // LANES * LANES), q.dtype)
    lanes = np.zeros((2, LANES), q.dtype)
    depth = rows // height
    by_colour, by_place, whole = 0.0, 0.0, 0.0
    for row in range(first, last):
        t, y = row // height, row % height
        for x in range(0, width, BLOCK):
            size = min(BLOCK, width - x)
            tiles = (size + TILE - 1) // TILE
            total[:] = 0.0
            if mode != FORWARD:
                mine[:] = 0.0
                for v in range(labels):
                    mine[v, :size] = centre[v, row, x : x + size]
            for dt in range(places.shape[0]):
                for dy in range(places.shape[1]):
                    t_other, y_other = t + dt - reach[0], y + dy - reach[1]
                    if t_other < 0 or t_other >= depth or y_other < 0 or y_other >= height:
                        continue
                    if only >= 0 and t_other != only:
                        continue
                    other = t_other * height + y_other
                    at = (dt * places.shape[1] + dy) * s_width + LEAD
                    similarities(s, colours, tiles * TILE, features, row, reach[2] + x, other, x, places, at)
                    for tile in range(0, tiles * TILE, TILE):
                        if mode != PAIRS:
                            product(
                                total, tile * line, line, line // LANES, s, tile * s_width + LEAD, s_width - 1, 1,
                                near, (other * length + x + tile) * line, line, reached,
                            )  # fmt: skip
                        if mode != FORWARD:
                            pair[:] = 0.0
                            product(
                                pair, 0, pair.shape[1], pair.shape[1] // LANES, mine, tile, 1, BLOCK,
                                near_lines, other * labels * length + x + tile, length, labels,
                            )  # fmt: skip
                            for k in range(min(TILE, size - tile)):
                                # Pixel k of the tile has its window k further along the row.
                                begin = (tile + k) * s_width + LEAD - k
                                weigh_pairs(
                                    pair, k * pair.shape[1], s, colours, begin, places, at - k, pair.shape[1], lanes
                                )
                                if features_too:
                                    for f in range(count):
                                        here = features[f, row, reach[2] + x + tile + k]
                                        there = features[f, other, x + tile : x + tile + pair.shape[1]]
                                        pulled[f, row, x + tile + k] += pull_row(pair[k], here, there)
                    # Few enough terms for float32; from here on there are many.
                    if mode != FORWARD:
                        for i in range(LANES):
                            by_colour += lanes[0, i]
                            by_place += lanes[1, i]
                        lanes[:] = 0.0
            if mode != PAIRS:
                whole += finish(mode, total, size, x, row, weights, gate, keep, q, grad, kept, out)
    sums[0] += whole
    sums[1] += by_colour
    sums[2] += by_place
