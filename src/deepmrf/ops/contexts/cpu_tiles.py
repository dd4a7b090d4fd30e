"""Tiles of an image for the label contexts on CPUs: read them into vector lanes, and write them back.

A vector holds the same pixel of `lanes` different tiles; `size` and `vector` are tuples of length P and `lanes`.
This module imports numba: import it on first use only.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils

from deepmrf.ops.contexts.cpu_transforms import Complex
from deepmrf.ops.jobs import compiled
from deepmrf.ops.vectors import operation


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
