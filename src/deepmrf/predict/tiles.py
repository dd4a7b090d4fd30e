"""Tiles: images and volumes that are too large to be computed at once, part by part, with the same result.

Each tile is computed with as much around it as its result depends on, and what lies around it is thrown away.
`MeanField.reach` says how much that is for an MRF. Shapes: L labels, F features, *S any number of spatial axes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepmrf.layers import MeanField
from deepmrf.ops.window import Reach

MAX_TILE_BYTES = 1 << 30
"""Bytes that the maps of one tile may take, roughly."""
BYTES_PER_CORNER = 28
"""Bytes that a pixel's corner in the lattice takes, measured; with what building it needs."""
MIN_TILE_SIDE = 8
"""Tiles are not made shorter than this many pixels, whatever the memory."""


@dataclass(frozen=True)
class Tile:
    """A part of an image or volume, as slices along each axis."""

    inner: tuple[slice, ...]
    """The pixels whose result is wanted."""
    outer: tuple[slice, ...]
    """The pixels that are computed: inner and what lies around it."""
    cut: tuple[slice, ...]
    """Where inner lies in outer."""


def tiles(size: Sequence[int], tile: Sequence[int], around: Sequence[Reach], step: int = 1) -> Iterator[Tile]:
    """Cover every pixel of an image of this size once, by tiles of at most `tile` pixels along each axis.

    around: pixels (before, after) each tile along each axis. step: `outer` begins and ends at multiples of it.
    """
    if min(tile) < 1 or min(min(reach) for reach in around) < 0 or step < 1:
        raise ValueError(f"tile={tile}, around={around} and step={step} must be at least 1, 0 and 1 pixels.")
    axes = [_spans(*along, step) for along in zip(size, tile, around, strict=True)]
    for spans in itertools.product(*axes):
        inner, outer, cut = zip(*spans, strict=True)
        yield Tile(inner, outer, cut)


def _spans(size: int, tile: int, around: Reach, step: int) -> list[tuple[slice, slice, slice]]:
    """(inner, outer, cut) along one axis; parts of nearly equal length, so that none is a sliver."""
    count = -(-size // tile)
    edges = [size * n // count for n in range(count + 1)]
    before, after = around
    spans = []
    for start, stop in itertools.pairwise(edges):
        # Whole steps: a zoomed network would round the size of anything else.
        first, last = max(0, start - before) // step * step, min(size, -(-(stop + after) // step) * step)
        spans.append((slice(start, stop), slice(first, last), slice(start - first, stop - first)))
    return spans


def square_tiles(size: Sequence[int], tile: int, margin: int, step: int = 1) -> Iterator[Tile]:
    """The same with one side length and one margin for all axes."""
    return tiles(size, [tile] * len(size), [(margin, margin)] * len(size), step)


def bytes_per_pixel(mrf: MeanField) -> int:
    """Bytes that the maps of an MRF take for each pixel, roughly."""
    contexts, penalty = 0 if mrf.label_contexts is None else mrf.label_contexts.contexts, mrf.triple_penalty
    # The lattice of the global kernel has a corner more than it has axes for each pixel.
    lattice = BYTES_PER_CORNER * (mrf.dims + penalty.features + 1) if penalty.kernel == "global" else 0
    return 4 * (mrf.labels * (contexts + 8) + 4 * penalty.features) + lattice


def tile_size(mrf: MeanField, size: Sequence[int], max_bytes: int = MAX_TILE_BYTES) -> tuple[int, ...]:
    """The largest tile, made by halving, whose maps fit into `max_bytes` with what lies around it."""
    bytes_each = bytes_per_pixel(mrf)
    around = [before + after for before, after in mrf.reach()]
    tile = list(size)
    while bytes_each * math.prod(min(t + a, n) for t, a, n in zip(tile, around, size, strict=True)) > max_bytes:
        longest = max(range(len(tile)), key=lambda axis: tile[axis])
        if tile[longest] <= MIN_TILE_SIDE:
            break
        tile[longest] = -(-tile[longest] // 2)
    return tuple(tile)


@contextmanager
def spaced(mrf: MeanField, spacing: Sequence[float] | None) -> Iterator[None]:
    """Inside the `with` block, the MRF takes pixels to be this far apart; None leaves it as it is.

    The triple penalty's widths and weights are lengths in the unit of the spacing and keep their meaning; windows and
    label contexts are counted in pixels and stay as they are.
    """
    before = mrf.triple_penalty.spacing
    if spacing is not None:
        mrf.triple_penalty.spacing = tuple(float(step) for step in spacing)
    try:
        yield
    finally:
        mrf.triple_penalty.spacing = before


class Maps(Protocol):
    """A tensor, or what reads parts of one from a file: maps[:, rows, columns]."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


def in_tiles(
    mrf: MeanField,
    log_p: Maps,
    image: Tensor,
    tile: Sequence[int] | None = None,
    spacing: Sequence[float] | None = None,
    max_bytes: int = MAX_TILE_BYTES,
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """log_p (L, *S), image (F, *S) -> for each tile, its slices and its log-probabilities (L, *tile), on the CPU.

    tile: its size, without what lies around it; None takes as much as fits into `max_bytes`, which may be all. The MRF
    may be on another device than the maps: only tiles go there.
    """
    size = tuple(log_p.shape[1:])
    mrf = copy.deepcopy(mrf)  # its spacing and origin change, and other threads may use it
    penalty = mrf.triple_penalty
    device = penalty.scale.device
    stride = 1 if mrf.label_contexts is None else mrf.label_contexts.stride
    with spaced(mrf, spacing):
        for part in tiles(size, tile or tile_size(mrf, size, max_bytes), mrf.reach(), stride):
            outer = (slice(None), *part.outer)
            maps = [values[None].contiguous().to(device) for values in (log_p[outer], image[outer])]
            penalty.origin = tuple(along.start for along in part.outer)
            with torch.no_grad():
                log_q = mrf(*(values.float() if values.is_floating_point() else values for values in maps))[0]
            yield part.inner, log_q[(slice(None), *part.cut)].cpu()
