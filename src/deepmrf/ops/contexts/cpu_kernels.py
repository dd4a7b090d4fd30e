"""Kernels of the label contexts in the frequency domain; imported on first use only, since it loads Numba.

Everything here works on `lanes` tiles at once: a value is one vector register that holds the same place of 16 float32
(8 float64) different tiles, so that the transforms, written once for scalars, run at full width without a shuffle.
The transforms and the complex product are emitted as straight LLVM vector code: loops over lanes in Numba would leave
it to the compiler to find the vectors, and it does not find these.

A static size (the side of a tile, the lanes, the rows of a block) is a tuple of that length: Numba then compiles per
size, and its cache on disk keeps each of them, which it would not for functions made per size.

Spectrum of a real P x P tile, P a power of two: columns 0 and P/2 of the transformed rows are real, so P/2 + 1
frequencies each say all; the other P/2 - 1 columns have P. Together P^2/2 + 2 complex numbers, column after column.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils

from deepmrf.ops.jobs import ANY_ORDER, compiled
from deepmrf.ops.vectors import Vectors, operation

Value = Any  # an LLVM value: a vector of lanes
Pair = tuple[Value, Value]  # (real, imaginary)


class _Complex(Vectors):
    """Arithmetic on complex vectors of lanes, (real, imaginary): what the transforms below are written in."""

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


def _fourier(v: _Complex, x: list[Pair]) -> list[Pair]:
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


def _real_fourier(v: _Complex, x: list[Value]) -> list[Pair]:
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


def _real_inverse(v: _Complex, spectrum: list[Pair]) -> list[Value]:
    """n x[i] from X[0 .. n/2]: the steps of _real_fourier undone. Imaginary parts of X[0] and X[n/2] are not read."""
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
    v = _Complex(builder, source)
    real, imaginary = v.load_all(source, re, step, size), v.load_all(source, im, step, size)
    result = _fourier(v, list(zip(real, imaginary, strict=True)))
    v.store_all([value for value, _ in result], target, to_re, to_step)
    v.store_all([value for _, value in result], target, to_im, to_step)


@operation
def _real_transform(
    builder: Any, size: int, source: Any, start: Any, step: Any, target: Any, to_re: Any, to_im: Any, to_step: Any
) -> None:
    """P real values to P/2 + 1 complex ones; see _transform."""
    v = _Complex(builder, source)
    result = _real_fourier(v, v.load_all(source, start, step, size))
    v.store_all([value for value, _ in result], target, to_re, to_step)
    v.store_all([value for _, value in result], target, to_im, to_step)


@operation
def _inverse_real_transform(
    builder: Any, size: int, source: Any, re: Any, im: Any, step: Any, target: Any, start: Any, to_step: Any
) -> None:
    """P/2 + 1 complex values to P real ones, P times too large; see _transform."""
    v = _Complex(builder, source)
    real, imaginary = (v.load_all(source, part, step, size // 2 + 1) for part in (re, im))
    v.store_all(_real_inverse(v, list(zip(real, imaginary, strict=True))), target, start, to_step)


@operation
def _product(
    builder: Any, rows: int, left: Any, at: Any, row_step: Any, step: Any, imaginary: Any, right: Any, of: Any,
    of_step: Any, target: Any, to: Any, to_step: Any, inputs: Any, add: Any,
) -> None:  # fmt: skip
    """target[u] = sum over v of conj(left[u, v]) right[v], complex, for a block of rows u and one vector of lanes.

    left[at + u row_step + v step], its imaginary part `imaginary` further; right[of + v of_step] and target[to + u
    to_step] are vectors, their imaginary parts half a step further. `add` adds to what the target holds. The sums stay
    in registers all along, two for each row.
    """
    v = _Complex(builder, left)
    half, to_half = (builder.udiv(size, size.type(2)) for size in (of_step, to_step))
    sums = [[v.variable(v.constant(0.0)) for _ in range(rows)] for _ in range(2)]
    with cgutils.for_range(builder, inputs) as loop:
        i = loop.index
        ar, ai = v.load(right, of, (i, of_step)), v.load(right, of, (i, of_step), half)
        for u, (re, im) in enumerate(zip(*sums, strict=True)):
            br = v.spread_from(left, at, (i, step), (row_step, u))
            bi = v.spread_from(left, at, (i, step), imaginary, (row_step, u))
            builder.store(v.add(v.add(builder.load(re), v.multiply(br, ar)), v.multiply(bi, ai)), re)
            builder.store(v.subtract(v.add(builder.load(im), v.multiply(br, ai)), v.multiply(bi, ar)), im)
    for start, parts in zip(((to,), (to, to_half)), sums, strict=True):
        with builder.if_then(add):
            for u, total in enumerate(parts):
                builder.store(v.add(builder.load(total), v.load(target, *start, (to_step, u))), total)
        for u, total in enumerate(parts):
            v.store(builder.load(total), target, *start, (to_step, u))


@operation
def _transpose(builder: Any, source: Any, start: Any, step: Any, target: Any, to: Any, to_step: Any) -> None:
    """A square of lanes x lanes values, rows `step` apart in source, turned into rows `to_step` apart in target."""
    v = _Complex(builder, source)
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
def _spectrum(size, rows, cells, vector, work, target, to, imaginary, step):  # type: ignore[no-untyped-def]
    """The spectra of the tiles in cells (P, P, lanes), of which only the first rows are not zero.

    Frequency f goes to target[to + f step], its imaginary part `imaginary` further.
    """
    lanes = len(vector)
    side = len(size)
    half = side // 2
    stride = (side + 3) * lanes  # of a row of work: odd, so that a column does not fall into two sets of the cache
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
def _columns(size, source, at, imaginary, step, vector, work, to):  # type: ignore[no-untyped-def]
    """The reverse of _spectrum up to the rows, which _row finishes; P^2 times too large."""
    lanes = len(vector)
    side = len(size)
    half = side // 2
    stride = (side + 3) * lanes
    for column in range(0, side + 1, side):
        _inverse_real_transform(size, source, at, at + imaginary, step, work, to + column * lanes, stride)
        at += (half + 1) * step
    for column in range(1, half):
        re = to + 2 * column * lanes
        _transform(size, source, at + imaginary, at, step, work, re + lanes, re, stride)
        at += side * step


@compiled
def _row(size, work, at, vector, target, to):  # type: ignore[no-untyped-def]
    """One row of the tiles from what _columns left."""
    lanes = len(vector)
    _inverse_real_transform(size, work, at, at + lanes, 2 * lanes, target, to, lanes)


@compiled
def _locate(grid, first, batch, vector, places):  # type: ignore[no-untyped-def]
    """(image of the batch, first row, first column) of tiles first .., into places; image -1 past the last tile.

    grid is (tiles down, tiles across, rows of a tile, columns of a tile).
    """
    down, across, m_y, m_x = grid
    for lane in range(len(vector)):
        b, place = divmod(first + lane, down * across)
        places[lane, 0] = b if b < batch else -1
        places[lane, 1] = place // across * m_y
        places[lane, 2] = place % across * m_x


@compiled
def _gather(size, image, channel, places, corner, high, wide, vector, strip, cells):  # type: ignore[no-untyped-def]
    """high x wide pixels of each tile, from `corner` off its place, into cells (P, P, lanes); zeros outside the image.

    A row of a tile is read as a whole into strip (lanes, P), and the square turned: single values would cost more than
    the transform.
    """
    lanes, side = len(vector), len(size)
    _, channels, size_y, size_x = image.shape
    flat = image.reshape(-1)
    strip[:] = 0
    for r in range(high):
        for lane in range(lanes):
            b, y, x = places[lane, 0], places[lane, 1] + corner[0] + r, places[lane, 2] + corner[1]
            low, top = max(-x, 0), min(size_x - x, wide)
            if b >= 0 and 0 <= y < size_y and low < top:
                _copy(
                    flat,
                    ((b * channels + channel) * size_y + y) * size_x + x + low,
                    strip,
                    lane * side + low,
                    top - low,
                )
            else:
                strip[lane * side : lane * side + wide] = 0
        for c in range(0, side, lanes):
            _transpose(strip, c, side, cells, (r * side + c) * lanes, lanes)


@compiled
def _scatter(size, values, places, r, wide, vector, strip, channel, target):  # type: ignore[no-untyped-def]
    """Row r of the tiles, values (P, lanes), the first `wide` of it, to where it belongs in the image."""
    lanes, side = len(vector), len(size)
    _, channels, size_y, size_x = target.shape
    flat = target.reshape(-1)
    for c in range(0, side, lanes):
        _transpose(values, c * lanes, lanes, strip, c, side)
    for lane in range(lanes):
        b, y, x = places[lane, 0], places[lane, 1] + r, places[lane, 2]
        if b >= 0 and y < size_y:
            to = ((b * channels + channel) * size_y + y) * size_x + x
            _copy(strip, lane * side, flat, to, min(wide, size_x - x))


@compiled
def filter_spectra(size, filters, vector, target, start, stop):  # type: ignore[no-untyped-def]
    """filters (passes, Q, h, w) to target (passes, F, 2, Q), Q a multiple of lanes, for groups start .. stop - 1."""
    lanes = len(vector)
    side = len(size)
    _, count, high, wide = filters.shape
    groups = count // lanes
    cells = np.zeros(side * side * lanes, filters.dtype)
    work = np.empty(side * (side + 3) * lanes, filters.dtype)
    flat = target.reshape(-1)
    for number in range(start, stop):
        one, group = number // groups, number % groups
        for lane in range(lanes):
            for r in range(high):
                for c in range(wide):
                    cells[(r * side + c) * lanes + lane] = filters[one, group * lanes + lane, r, c]
        to = one * target.shape[1] * 2 * count + group * lanes
        _spectrum(size, high, cells, vector, work, flat, to, count, 2 * count)


@compiled
def _least(values, offset, k, best, chosen):  # type: ignore[no-untyped-def]
    """Keep the smaller of best and values + offset, and which k it came from."""
    which = best.dtype.type(k)
    for i in range(best.size):
        value = values[i] + offset
        less = k == 0 or value < best[i]
        best[i] = value if less else best[i]
        chosen[i] = which if less else chosen[i]


@compiled
def forward_tiles(size, rows, image, filters, vector, block, bias, contexts, corner, grid, out, active, start, stop):  # type: ignore[no-untyped-def]
    """o14 of the groups start .. stop - 1 of tiles: transform; then product, inverse and minimum, some labels at once.

    filters (passes, F, 2, Q): the spectra of `block` patterns at a time, for each of the L inputs, in the first L block
    of Q places. The K L maps exist for the patterns of one pass and one group of tiles only.
    """
    lanes = len(vector)
    side, (m_y, m_x) = len(size), grid[2:]
    labels = image.shape[1]
    passes, frequencies, _, count = filters.shape
    stride = (side + 3) * lanes
    cells = np.empty(side * side * lanes, image.dtype)
    work = np.empty(contexts * side * stride, image.dtype)
    spectrum = np.empty(frequencies * labels * 2 * lanes, image.dtype)
    product = np.empty(frequencies * block * 2 * lanes, image.dtype)
    row = np.empty(side * lanes, image.dtype)
    best = np.zeros(side * lanes, image.dtype)
    chosen = np.zeros(side * lanes, image.dtype)
    strip = np.empty(side * lanes, image.dtype)
    places = np.empty((lanes, 3), np.int64)
    left = filters.reshape(-1)
    together = block // contexts
    for first in range(start * lanes, stop * lanes, lanes):
        _locate(grid, first, image.shape[0], vector, places)
        for v in range(labels):
            _gather(size, image, v, places, corner, side, side, vector, strip, cells)
            _spectrum(size, side, cells, vector, work, spectrum, 2 * v * lanes, lanes, 2 * labels * lanes)
        for one in range(passes):
            for f in range(frequencies):
                at, of = (one * frequencies + f) * 2 * count, 2 * f * labels * lanes
                for u in range(0, block, len(rows)):
                    to = 2 * (f * block + u) * lanes
                    _product(
                        rows,
                        left,
                        at + u,
                        1,
                        block,
                        count,
                        spectrum,
                        of,
                        2 * lanes,
                        product,
                        to,
                        2 * lanes,
                        labels,
                        False,
                    )
            for label in range(one * together, min((one + 1) * together, out.shape[1])):
                for k in range(contexts):
                    at = 2 * ((label - one * together) * contexts + k) * lanes
                    _columns(size, product, at, lanes, 2 * block * lanes, vector, work, k * side * stride)
                for r in range(m_y):
                    for k in range(contexts):
                        _row(size, work, (k * side + r) * stride, vector, row, 0)
                        _least(row, bias[label * contexts + k], k, best[: m_x * lanes], chosen)
                    _scatter(size, best, places, r, m_x, vector, strip, label, out)
                    _scatter(size, chosen, places, r, m_x, vector, strip, label, active)


@compiled
def backward_tiles(  # type: ignore[no-untyped-def]
    size, rows, grad, active, image, filters, vector, block, contexts, corner, grid, out, weights, image_too,
    weights_too, start, stop,
):  # fmt: skip
    """Gradients from the groups start .. stop - 1 of tiles; see forward_tiles.

    Towards the image: the active patterns' gradients (K L maps) are correlated with the flipped filters, filters
    (1, F, 2, Q) of `block` >= L outputs. Towards the filters: that spectrum times the image's own, tile by tile, summed
    into weights (F, K L / lanes rounded up, block, 2, lanes).
    """
    lanes = len(vector)
    side, (m_y, m_x) = len(size), grid[2:]
    labels = image.shape[1]
    _, frequencies, _, count = filters.shape
    payers = grad.shape[1]
    maps, padded = payers * contexts, weights.shape[1] * lanes
    wide = -(-block // lanes) * lanes
    stride = (side + 3) * lanes
    cells = np.empty(side * side * lanes, image.dtype)
    which = np.empty(side * side * lanes, image.dtype)
    masked = np.empty(side * side * lanes, image.dtype)
    inner = np.zeros(side * side * lanes, image.dtype)
    work = np.empty(side * stride, image.dtype)
    spectrum = np.zeros(frequencies * padded * 2 * lanes, image.dtype)
    product = np.zeros(frequencies * wide * 2 * lanes, image.dtype)
    turned = np.empty(lanes * 2 * padded, image.dtype)
    narrow = np.empty(lanes * 2 * wide, image.dtype)
    row = np.empty(side * lanes, image.dtype)
    strip = np.empty(side * lanes, image.dtype)
    places = np.empty((lanes, 3), np.int64)
    left, total = filters.reshape(-1), weights.reshape(-1)
    for first in range(start * lanes, stop * lanes, lanes):
        _locate(grid, first, image.shape[0], vector, places)
        for u in range(payers):
            _gather(size, grad, u, places, corner, side, side, vector, strip, cells)
            _gather(size, active, u, places, corner, side, side, vector, strip, which)
            for k in range(contexts):
                number = cells.dtype.type(k)
                for i in range(cells.size):
                    masked[i] = cells[i] if which[i] == number else cells.dtype.type(0)
                to = 2 * (u * contexts + k) * lanes
                _spectrum(size, side, masked, vector, work, spectrum, to, lanes, 2 * padded * lanes)
        if image_too:
            for f in range(frequencies):
                at, of = 2 * f * count, 2 * f * padded * lanes
                for v in range(0, block, len(rows)):
                    to = 2 * (f * block + v) * lanes
                    _product(
                        rows,
                        left,
                        at + v,
                        1,
                        block,
                        count,
                        spectrum,
                        of,
                        2 * lanes,
                        product,
                        to,
                        2 * lanes,
                        maps,
                        False,
                    )
            for v in range(labels):
                _columns(size, product, 2 * v * lanes, lanes, 2 * block * lanes, vector, work, 0)
                for r in range(m_y):
                    _row(size, work, r * stride, vector, row, 0)
                    _scatter(size, row, places, r, m_x, vector, strip, v, out)
        if weights_too:
            for v in range(labels):
                _gather(size, image, v, places, (0, 0), m_y, m_x, vector, strip, inner)
                _spectrum(size, m_y, inner, vector, work, product, 2 * v * lanes, lanes, 2 * wide * lanes)
            for f in range(frequencies):  # both spectra from (map, tile) to (tile, map): the sum is over tiles
                for part in range(2):
                    for v in range(0, wide, lanes):
                        at = 2 * (f * wide + v) * lanes + part * lanes
                        _transpose(product, at, 2 * lanes, narrow, part * wide + v, 2 * wide)
                    for u in range(0, padded, lanes):
                        at = 2 * (f * padded + u) * lanes + part * lanes
                        _transpose(spectrum, at, 2 * lanes, turned, part * padded + u, 2 * padded)
                for u in range(0, padded, lanes):
                    for v in range(0, block, len(rows)):
                        to = 2 * ((f * padded + u) * block + v * lanes)
                        _product(
                            rows, narrow, v, 1, 2 * wide, wide, turned, u, 2 * padded, total, to, 2 * lanes, lanes, True
                        )


@compiled
def filters_from_spectra(size, weights, vector, target, start, stop):  # type: ignore[no-untyped-def]
    """weights (F, U, V, 2, lanes) back to filters: target (V, h, w, U lanes), for start .. stop - 1 of the U V."""
    lanes = len(vector)
    side = len(size)
    blocks, rows = weights.shape[1:3]
    stride = (side + 3) * lanes
    work = np.empty(side * stride, weights.dtype)
    row = np.empty(side * lanes, weights.dtype)
    flat = weights.reshape(-1)
    for number in range(start, stop):
        group, v = number // rows, number % rows
        _columns(size, flat, 2 * number * lanes, lanes, 2 * blocks * rows * lanes, vector, work, 0)
        for r in range(target.shape[1]):
            _row(size, work, r * stride, vector, row, 0)
            for c in range(target.shape[2]):
                for lane in range(lanes):
                    target[v, r, c, group * lanes + lane] = row[c * lanes + lane]


@partial(compiled, fastmath=ANY_ORDER)
def bias_sums(grad, active, target, start, stop):  # type: ignore[no-untyped-def]
    """target[channel, k] = sum of grad (B L, pixels) where pattern k is active, for channels start .. stop - 1."""
    part = 4096  # of a map: short enough to stay in the cache, and for sums in grad's own precision
    for channel in range(start, stop):
        for at in range(0, grad.shape[1], part):
            values, which = grad[channel, at : at + part], active[channel, at : at + part]
            for k in range(target.shape[1]):
                number = np.uint8(k)
                total = grad.dtype.type(0)
                for i in range(values.size):
                    total += values[i] if which[i] == number else grad.dtype.type(0)
                target[channel, k] += total
