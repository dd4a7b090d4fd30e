"""Tiles of an image for the label contexts on CPUs: read them into vector lanes, transform them, and write them back.

A transform works on `lanes` tiles at once: a value is one vector register that holds the same pixel of 16 different
tiles (8 in float64), so that the transforms, written once for scalars, run at full width without a shuffle. They are
emitted as straight LLVM vector code, because the compiler does not find these vectors in loops over lanes.

The spectrum of a real P x P tile, P a power of two: columns 0 and P/2 of the transformed rows are real, so P/2 + 1
frequencies of each are enough; the other P/2 - 1 columns have P. Together P^2/2 + 2 complex numbers, column by column.

`size` and `vector` are tuples of length P and `lanes`: numba compiles a function for each length.
This module imports numba: import it on first use only.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]

from deepmrf.ops.jobs import compiled
from deepmrf.ops.vectors import Vectors, cgutils, operation

Value = Any  # an LLVM value: a vector of lanes
Pair = tuple[Value, Value]  # (real, imaginary)

PADDING = 3
"""Vectors after a row of P in the work array: with an odd stride, a column does not fall into two sets of the cache."""


class Complex(Vectors):
    """Arithmetic on complex vectors of lanes, (real, imaginary): the transforms below are written in it."""

    def __init__(self, builder: Any, data: Any) -> None:
        super().__init__(builder, data.type.pointee)

    def load_all(self, data: Any, start: Value, step: Value, count: int) -> list[Value]:
        """The vectors at start + i * step for i < count."""
        return [self.load(data, start, (step, i)) for i in range(count)]

    def store_all(self, values: list[Value], data: Any, start: Value, step: Value) -> None:
        for i, value in enumerate(values):
            self.store(value, data, start, (step, i))

    def plus(self, a: Pair, b: Pair) -> Pair:
        return self.add(a[0], b[0]), self.add(a[1], b[1])

    def minus(self, a: Pair, b: Pair) -> Pair:
        return self.subtract(a[0], b[0]), self.subtract(a[1], b[1])

    def negative(self, a: Value) -> Value:
        return self.builder.fneg(a)

    def scale(self, a: Value, factor: float) -> Value:
        return self.multiply(a, self.constant(factor))

    def turn(self, a: Pair, k: int, n: int) -> Pair:
        """a times exp(-2 pi i k / n)."""
        k %= n
        re, im = a
        if k == 0:
            return a
        if 2 * k == n:
            return self.negative(re), self.negative(im)
        if 4 * k == n:
            return im, self.negative(re)
        if 4 * k == 3 * n:
            return self.negative(im), re
        c, s = math.cos(2 * math.pi * k / n), -math.sin(2 * math.pi * k / n)
        return self.subtract(self.scale(re, c), self.scale(im, s)), self.add(self.scale(re, s), self.scale(im, c))


def _fourier(v: Complex, x: list[Pair]) -> list[Pair]:
    """X[k] = sum of x[i] exp(-2 pi i k i / n), n a power of two, by split radix."""
    n = len(x)
    if n == 1:
        return x
    if n == 2:
        return [v.plus(x[0], x[1]), v.minus(x[0], x[1])]
    even = _fourier(v, x[0::2])
    result: list[Any] = [None] * n
    quarter = n // 4
    for k, (a, b) in enumerate(zip(_fourier(v, x[1::4]), _fourier(v, x[3::4]), strict=True)):
        a, b = v.turn(a, k, n), v.turn(b, 3 * k, n)
        total, (re, im) = v.plus(a, b), v.minus(a, b)
        result[k], result[k + 2 * quarter] = v.plus(even[k], total), v.minus(even[k], total)
        er, ei = even[k + quarter]
        result[k + quarter] = v.add(er, im), v.subtract(ei, re)
        result[k + 3 * quarter] = v.subtract(er, im), v.add(ei, re)
    return result


def _real_fourier(v: Complex, x: list[Value]) -> list[Pair]:
    """X[0 .. n/2] of a real x: the second half is the conjugate of the first and never computed."""
    n = len(x)
    if n == 1:
        return [(x[0], v.constant(0.0))]
    even, odd = _real_fourier(v, x[0::2]), _real_fourier(v, x[1::2])
    result: list[Any] = [None] * (n // 2 + 1)
    for k in range(n // 4 + 1):
        turned = v.turn(odd[k], k, n)
        re, im = v.minus(even[k], turned)
        result[n // 2 - k] = re, v.negative(im)
        result[k] = v.plus(even[k], turned)
    return result


def _real_inverse(v: Complex, spectrum: list[Pair]) -> list[Value]:
    """n x[i] from X[0 .. n/2]: the steps of _real_fourier undone. It ignores the imaginary parts of X[0] and X[n/2]."""
    half = len(spectrum) - 1
    if half == 1:
        a, b = spectrum[0][0], spectrum[1][0]
        return [v.add(a, b), v.subtract(a, b)]
    even, odd = [], []
    for k in range(half // 2 + 1):
        (re, im), (far_re, far_im) = spectrum[k], spectrum[half - k]
        even.append((v.add(re, far_re), v.subtract(im, far_im)))
        odd.append(v.turn((v.subtract(re, far_re), v.add(im, far_im)), -k, 2 * half))
    first, second = _real_inverse(v, even), _real_inverse(v, odd)
    return [value for pair in zip(first, second, strict=True) for value in pair]


@operation
def _transform(
    builder: Any, size: int, source: Any, re: Any, im: Any, step: Any, target: Any, to_re: Any, to_im: Any, to_step: Any
) -> None:
    """Complex transform from source[re + k step] and [im + k step] to target alike; swap re and im for the inverse."""
    v = Complex(builder, source)
    real, imaginary = v.load_all(source, re, step, size), v.load_all(source, im, step, size)
    result = _fourier(v, list(zip(real, imaginary, strict=True)))
    v.store_all([value for value, _ in result], target, to_re, to_step)
    v.store_all([value for _, value in result], target, to_im, to_step)


@operation
def _real_transform(
    builder: Any, size: int, source: Any, start: Any, step: Any, target: Any, to_re: Any, to_im: Any, to_step: Any
) -> None:
    """P real values to P/2 + 1 complex ones; see _transform."""
    v = Complex(builder, source)
    result = _real_fourier(v, v.load_all(source, start, step, size))
    v.store_all([value for value, _ in result], target, to_re, to_step)
    v.store_all([value for _, value in result], target, to_im, to_step)


@operation
def _inverse_real_transform(
    builder: Any, size: int, source: Any, re: Any, im: Any, step: Any, target: Any, start: Any, to_step: Any
) -> None:
    """P/2 + 1 complex values to P real ones, P times too large; see _transform."""
    v = Complex(builder, source)
    real, imaginary = (v.load_all(source, part, step, size // 2 + 1) for part in (re, im))
    v.store_all(_real_inverse(v, list(zip(real, imaginary, strict=True))), target, start, to_step)


@compiled
def spectrum(size, rows, cells, vector, work, target, to, imaginary, step):  # type: ignore[no-untyped-def]
    """The spectra of the tiles in cells (P, P, lanes), of which only the first rows are not zero.

    Frequency f goes to target[to + f step], its imaginary part `imaginary` further.
    """
    lanes, side = len(vector), len(size)
    half, stride = side // 2, (side + PADDING) * lanes
    for r in range(rows):
        _real_transform(size, cells, r * side * lanes, lanes, work, r * stride, r * stride + lanes, 2 * lanes)
    work[rows * stride :] = 0
    for column in range(0, side + 1, side):
        _real_transform(size, work, column * lanes, stride, target, to, to + imaginary, step)
        to += (half + 1) * step
    for column in range(1, half):
        at = 2 * column * lanes
        _transform(size, work, at, at + lanes, stride, target, to, to + imaginary, step)
        to += side * step


@compiled
def inverse_columns(size, source, at, imaginary, step, vector, work, to):  # type: ignore[no-untyped-def]
    """The inverse of `spectrum` up to the rows, which `inverse_row` finishes; P^2 times too large."""
    lanes, side = len(vector), len(size)
    half, stride = side // 2, (side + PADDING) * lanes
    for column in range(0, side + 1, side):
        _inverse_real_transform(size, source, at, at + imaginary, step, work, to + column * lanes, stride)
        at += (half + 1) * step
    for column in range(1, half):
        re = to + 2 * column * lanes
        _transform(size, source, at + imaginary, at, step, work, re + lanes, re, stride)
        at += side * step


@compiled
def inverse_row(size, work, at, vector, target, to):  # type: ignore[no-untyped-def]
    """One row of the tiles from the result of `inverse_columns`."""
    lanes = len(vector)
    _inverse_real_transform(size, work, at, at + lanes, 2 * lanes, target, to, lanes)


@operation
def transpose(builder: Any, source: Any, start: Any, step: Any, target: Any, to: Any, to_step: Any) -> None:
    """A square of lanes x lanes values, rows `step` apart in source, turned into rows `to_step` apart in target."""
    v = Complex(builder, source)
    v.store_all(v.transposed(v.load_all(source, start, step, v.lanes)), target, to, to_step)


@operation
def _copy(builder: Any, source: Any, start: Any, target: Any, to: Any, count: Any) -> None:
    """target[to + c] = source[start + c] for c < count, converted. Numba's own loop tests each index for below 0."""
    wanted = target.type.pointee
    with cgutils.for_range(builder, count) as loop:
        value = builder.load(builder.gep(source, [builder.add(start, loop.index)]))
        if value.type != wanted:  # bytes say which pattern is active
            value = (builder.uitofp if isinstance(value.type, ir.IntType) else builder.fptoui)(value, wanted)
        builder.store(value, builder.gep(target, [builder.add(to, loop.index)]))


@compiled
def locate(grid, first, batch, vector, origins):  # type: ignore[no-untyped-def]
    """(image, row, column) where tile first + lane begins, into origins (lanes, 3); image -1 after the last tile.

    grid is (tiles down, tiles across, rows of a tile, columns of a tile).
    """
    down, across, rows, columns = grid
    for lane in range(len(vector)):
        image, tile = divmod(first + lane, down * across)
        origins[lane, 0] = image if image < batch else -1
        origins[lane, 1] = tile // across * rows
        origins[lane, 2] = tile % across * columns


@compiled
def gather(size, image, channel, origins, corner, high, wide, vector, strip, cells):  # type: ignore[no-untyped-def]
    """high x wide pixels of each tile, from its origin plus `corner` on, into cells (P, P, lanes); zeros outside.

    A row of each tile is copied into strip (lanes, P), which is then transposed: single values would cost more than the
    transform.
    """
    lanes, side = len(vector), len(size)
    _, channels, size_y, size_x = image.shape
    flat = image.reshape(-1)
    strip[:] = 0
    for r in range(high):
        for lane in range(lanes):
            b, y, x = origins[lane, 0], origins[lane, 1] + corner[0] + r, origins[lane, 2] + corner[1]
            low, top = max(-x, 0), min(size_x - x, wide)
            if b >= 0 and 0 <= y < size_y and low < top:
                start = ((b * channels + channel) * size_y + y) * size_x + x + low
                _copy(flat, start, strip, lane * side + low, top - low)
            else:
                strip[lane * side : lane * side + wide] = 0
        for c in range(0, side, lanes):
            transpose(strip, c, side, cells, (r * side + c) * lanes, lanes)


@compiled
def scatter(size, values, origins, r, wide, vector, strip, channel, target):  # type: ignore[no-untyped-def]
    """The first `wide` numbers of row r of the tiles, values (P, lanes), into the image."""
    lanes, side = len(vector), len(size)
    _, channels, size_y, size_x = target.shape
    flat = target.reshape(-1)
    for c in range(0, side, lanes):
        transpose(values, c * lanes, lanes, strip, c, side)
    for lane in range(lanes):
        b, y, x = origins[lane, 0], origins[lane, 1] + r, origins[lane, 2]
        if b >= 0 and y < size_y:
            to = ((b * channels + channel) * size_y + y) * size_x + x
            _copy(strip, lane * side, flat, to, min(wide, size_x - x))
