"""The kernels of the label contexts on CPUs: products of spectra between the transforms, and the minimum.

Spectra of tiles hold vectors, one lane per tile: number 2 (f M + m) lanes is the real part of frequency f of map m, of
M maps, and the imaginary part follows. `size`, `vector` and `rows` are tuples of length P, `lanes` and the maps of one
product: numba compiles a function for each length, and caches it on disk.
This module imports numba: import it on first use only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from deepmrf.ops.contexts.cpu_tiles import (
    PADDING,
    Complex,
    gather,
    inverse_columns,
    inverse_row,
    locate,
    scatter,
    spectrum,
    transpose,
)
from deepmrf.ops.jobs import ANY_ORDER, compiled
from deepmrf.ops.vectors import aligned, cgutils, operation

PIXELS_PER_SUM = 4096
"""Pixels of a map that the bias' gradient sums in the map's own precision; they stay in the cache for all patterns."""


@operation
def _product(
    builder: Any, rows: int, left: Any, at: Any, step: Any, imaginary: Any, right: Any, of: Any, of_step: Any,
    target: Any, to: Any, to_step: Any, inputs: Any, add: Any,
) -> None:  # fmt: skip
    """target[u] = sum over v of conj(left[u, v]) right[v], complex, for a block of rows u and one vector of lanes.

    left[at + u + v step] is a number, its imaginary part `imaginary` further; right[of + v of_step] and
    target[to + u to_step] are vectors, their imaginary parts half a step further. `add` adds to the target. The sums
    stay in registers, two for each row.
    """
    v = Complex(builder, left)
    half, to_half = (builder.udiv(size, size.type(2)) for size in (of_step, to_step))
    sums = [[v.variable(v.constant(0.0)) for _ in range(rows)] for _ in range(2)]
    with cgutils.for_range(builder, inputs) as loop:
        i = loop.index
        ar, ai = v.load(right, of, (i, of_step)), v.load(right, of, (i, of_step), half)
        for u, (re, im) in enumerate(zip(*sums, strict=True)):
            br = v.spread_from(left, at, (i, step), u)
            bi = v.spread_from(left, at, (i, step), imaginary, u)
            builder.store(v.add(v.add(builder.load(re), v.multiply(br, ar)), v.multiply(bi, ai)), re)
            builder.store(v.subtract(v.add(builder.load(im), v.multiply(br, ai)), v.multiply(bi, ar)), im)
    for start, parts in zip(((to,), (to, to_half)), sums, strict=True):
        with builder.if_then(add):
            for u, total in enumerate(parts):
                builder.store(v.add(builder.load(total), v.load(target, *start, (to_step, u))), total)
        for u, total in enumerate(parts):
            v.store(builder.load(total), target, *start, (to_step, u))


@compiled
def _filtered(rows, vector, filters, index, block, source, maps, inputs, target):  # type: ignore[no-untyped-def]
    """Spectra of `block` outputs into target, from source (F, maps, 2, lanes) and filters[index] (F, 2, Q).

    The filter of input v and output u is number v block + u of Q; only the first `inputs` maps of the source are read.
    """
    lanes = len(vector)
    _, frequencies, _, count = filters.shape
    flat = filters.reshape(-1)
    for f in range(frequencies):
        at, of = (index * frequencies + f) * 2 * count, 2 * f * maps * lanes
        for u in range(0, block, len(rows)):
            to = 2 * (f * block + u) * lanes
            _product(rows, flat, at + u, block, count, source, of, 2 * lanes, target, to, 2 * lanes, inputs, False)


@compiled
def filter_spectra(size, filters, vector, target, start, stop):  # type: ignore[no-untyped-def]
    """filters (passes, Q, h, w) to target (passes, F, 2, Q), Q a multiple of lanes, for groups start .. stop - 1."""
    lanes, side = len(vector), len(size)
    _, count, high, wide = filters.shape
    groups = count // lanes
    cells = aligned(side * side * lanes, filters)
    work = aligned(side * (side + PADDING) * lanes, filters)
    flat = target.reshape(-1)
    for number in range(start, stop):
        index, group = number // groups, number % groups
        for lane in range(lanes):
            for r in range(high):
                for c in range(wide):
                    cells[(r * side + c) * lanes + lane] = filters[index, group * lanes + lane, r, c]
        to = index * target.shape[1] * 2 * count + group * lanes
        spectrum(size, high, cells, vector, work, flat, to, count, 2 * count)


@compiled
def _keep_smaller(values, bias, k, smallest, active):  # type: ignore[no-untyped-def]
    """Replace `smallest` by values + bias where that is smaller, and `active` by k."""
    number = smallest.dtype.type(k)
    for i in range(smallest.size):
        value = values[i] + bias
        less = k == 0 or value < smallest[i]
        smallest[i] = value if less else smallest[i]
        active[i] = number if less else active[i]


@compiled
def forward_tiles(size, rows, image, filters, vector, block, bias, contexts, corner, grid, out, active, start, stop):  # type: ignore[no-untyped-def]
    """o14 of the groups start .. stop - 1 of tiles: transform; then product, inverse and minimum, some labels at once.

    filters (passes, F, 2, Q): the spectra of `block` patterns at a time, for each of the L inputs, in the first L block
    of Q numbers. The K L maps exist for the patterns of one pass and one group of tiles only.
    """
    lanes, side = len(vector), len(size)
    high, wide = grid[2:]
    labels, frequencies = image.shape[1], filters.shape[1]
    stride = (side + PADDING) * lanes
    cells = aligned(side * side * lanes, image)
    work = aligned(contexts * side * stride, image)
    spectra = aligned(frequencies * labels * 2 * lanes, image)
    products = aligned(frequencies * block * 2 * lanes, image)
    row, strip = aligned(side * lanes, image), aligned(side * lanes, image)
    smallest, which = aligned(side * lanes, image), aligned(side * lanes, image)
    origins = np.empty((lanes, 3), np.int64)
    labels_per_pass = block // contexts
    for first in range(start * lanes, stop * lanes, lanes):
        locate(grid, first, image.shape[0], vector, origins)
        for v in range(labels):
            gather(size, image, v, origins, corner, side, side, vector, strip, cells)
            spectrum(size, side, cells, vector, work, spectra, 2 * v * lanes, lanes, 2 * labels * lanes)
        for index in range(filters.shape[0]):
            _filtered(rows, vector, filters, index, block, spectra, labels, labels, products)
            first_label = index * labels_per_pass
            for label in range(first_label, min(first_label + labels_per_pass, out.shape[1])):
                for k in range(contexts):
                    at = 2 * ((label - first_label) * contexts + k) * lanes
                    inverse_columns(size, products, at, lanes, 2 * block * lanes, vector, work, k * side * stride)
                for r in range(high):
                    for k in range(contexts):
                        inverse_row(size, work, (k * side + r) * stride, vector, row, 0)
                        _keep_smaller(row, bias[label * contexts + k], k, smallest[: wide * lanes], which)
                    scatter(size, smallest, origins, r, wide, vector, strip, label, out)
                    scatter(size, which, origins, r, wide, vector, strip, label, active)


@compiled
def _spread(size, grad, active, contexts, origins, corner, vector, maps, scratch, target):  # type: ignore[no-untyped-def]
    """Spectra of the gradient of each pattern where it is active, zero elsewhere, into target (F, maps, 2, lanes)."""
    lanes, side = len(vector), len(size)
    strip, cells, which, masked, work = scratch
    for u in range(grad.shape[1]):
        gather(size, grad, u, origins, corner, side, side, vector, strip, cells)
        gather(size, active, u, origins, corner, side, side, vector, strip, which)
        for k in range(contexts):
            number = cells.dtype.type(k)
            for i in range(cells.size):
                masked[i] = cells[i] if which[i] == number else cells.dtype.type(0)
            spectrum(size, side, masked, vector, work, target, 2 * (u * contexts + k) * lanes, lanes, 2 * maps * lanes)


@compiled
def _add_correlations(rows, vector, left, left_maps, block, right, right_maps, turned_left, turned_right, target):  # type: ignore[no-untyped-def]
    """Add conj(left) right, summed over the tiles, into target (F, right_maps / lanes, block, 2, lanes)."""
    lanes = len(vector)
    flat = target.reshape(-1)
    for f in range(target.shape[0]):
        for part in range(2):  # both spectra from (map, tile) to (tile, map): the sum is over tiles
            for v in range(0, left_maps, lanes):
                at = 2 * (f * left_maps + v) * lanes + part * lanes
                transpose(left, at, 2 * lanes, turned_left, part * left_maps + v, 2 * left_maps)
            for u in range(0, right_maps, lanes):
                at = 2 * (f * right_maps + u) * lanes + part * lanes
                transpose(right, at, 2 * lanes, turned_right, part * right_maps + u, 2 * right_maps)
        for u in range(0, right_maps, lanes):
            for v in range(0, block, len(rows)):
                to = 2 * ((f * right_maps + u) * block + v * lanes)
                _product(
                    rows, turned_left, v, 2 * left_maps, left_maps, turned_right, u, 2 * right_maps, flat, to,
                    2 * lanes, lanes, True,
                )  # fmt: skip


@compiled
def backward_tiles(  # type: ignore[no-untyped-def]
    size, rows, grad, active, image, filters, vector, block, contexts, corner, grid, out, weights, image_too,
    weights_too, start, stop,
):  # fmt: skip
    """Gradients from the groups start .. stop - 1 of tiles; see forward_tiles.

    To the image: the active patterns' gradients (K L maps) are correlated with the flipped filters, (1, F, 2, Q) of
    `block` >= L outputs. To the filters: their spectra times the image's own, tile by tile, summed into weights
    (F, K L / lanes rounded up, block, 2, lanes).
    """
    lanes, side = len(vector), len(size)
    high, wide = grid[2:]
    labels, frequencies = image.shape[1], filters.shape[1]
    patterns, patterns_padded = grad.shape[1] * contexts, weights.shape[1] * lanes
    labels_padded = -(-block // lanes) * lanes
    stride = (side + PADDING) * lanes
    cells, inner = aligned(side * side * lanes, image), aligned(side * side * lanes, image)
    which, masked = aligned(side * side * lanes, image), aligned(side * side * lanes, image)
    work = aligned(side * stride, image)
    spread = aligned(frequencies * patterns_padded * 2 * lanes, image)
    products = aligned(frequencies * labels_padded * 2 * lanes, image)
    turned_spread = aligned(lanes * 2 * patterns_padded, image)
    turned_products = aligned(lanes * 2 * labels_padded, image)
    row, strip = aligned(side * lanes, image), aligned(side * lanes, image)
    origins = np.empty((lanes, 3), np.int64)
    for first in range(start * lanes, stop * lanes, lanes):
        locate(grid, first, image.shape[0], vector, origins)
        scratch = (strip, cells, which, masked, work)
        _spread(size, grad, active, contexts, origins, corner, vector, patterns_padded, scratch, spread)
        if image_too:
            _filtered(rows, vector, filters, 0, block, spread, patterns_padded, patterns, products)
            for v in range(labels):
                inverse_columns(size, products, 2 * v * lanes, lanes, 2 * block * lanes, vector, work, 0)
                for r in range(high):
                    inverse_row(size, work, r * stride, vector, row, 0)
                    scatter(size, row, origins, r, wide, vector, strip, v, out)
        if weights_too:
            for v in range(labels):
                gather(size, image, v, origins, (0, 0), high, wide, vector, strip, inner)
                step = 2 * labels_padded * lanes
                spectrum(size, high, inner, vector, work, products, 2 * v * lanes, lanes, step)
            _add_correlations(
                rows, vector, products, labels_padded, block, spread, patterns_padded, turned_products, turned_spread,
                weights,
            )  # fmt: skip


@compiled
def filters_from_spectra(size, weights, vector, target, start, stop):  # type: ignore[no-untyped-def]
    """weights (F, U, V, 2, lanes) back to filters: target (V, h, w, U lanes), for start .. stop - 1 of the U V."""
    lanes, side = len(vector), len(size)
    blocks, rows = weights.shape[1:3]
    stride = (side + PADDING) * lanes
    work = aligned(side * stride, weights)
    row = aligned(side * lanes, weights)
    flat = weights.reshape(-1)
    for number in range(start, stop):
        group, v = number // rows, number % rows
        inverse_columns(size, flat, 2 * number * lanes, lanes, 2 * blocks * rows * lanes, vector, work, 0)
        for r in range(target.shape[1]):
            inverse_row(size, work, r * stride, vector, row, 0)
            for c in range(target.shape[2]):
                for lane in range(lanes):
                    target[v, r, c, group * lanes + lane] = row[c * lanes + lane]


@partial(compiled, fastmath=ANY_ORDER)
def bias_sums(grad, active, target, start, stop):  # type: ignore[no-untyped-def]
    """target[channel, k] = sum of grad (B L, pixels) where pattern k is active, for channels start .. stop - 1."""
    for channel in range(start, stop):
        for at in range(0, grad.shape[1], PIXELS_PER_SUM):
            values, which = grad[channel, at : at + PIXELS_PER_SUM], active[channel, at : at + PIXELS_PER_SUM]
            for k in range(target.shape[1]):
                number = np.uint8(k)
                total = grad.dtype.type(0)
                for i in range(values.size):
                    total += values[i] if which[i] == number else grad.dtype.type(0)
                target[channel, k] += total
