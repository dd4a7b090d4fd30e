"""An MRF on maps that are too large to be computed at once: tile by tile, with the same result.

What an MRF says of a pixel depends on the pixels within its reach alone. Along each axis that is, before and behind,

    iterations * (reach of the triple penalty's window + reach of the label contexts)  + reach of the window again
                                                                                       where `normalize` is on,

so a tile is cut with that much around it, and what lies around it is thrown away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from deepmrf.layers import MeanField
from deepmrf.ops.window import Reach, reaches

BUDGET = 1 << 30
"""Bytes that the maps of one tile may take, roughly."""
SMALLEST = 8
"""Tiles are no shorter than this, whatever the budget."""

Tile = tuple[slice, ...]


def halo(mrf: MeanField) -> list[Reach]:
    """How far the MRF looks along each axis, (pixels before, pixels behind)."""
    around = reaches(mrf.triple_penalty.window)
    contexts = mrf.label_contexts
    beyond = reaches(contexts.size) if contexts is not None else [(0, 0)] * mrf.dims
    # The norm of a neighbour counts its own neighbours; it does not change with the iterations.
    more = 1 if mrf.triple_penalty.normalize else 0
    return [
        (mrf.iterations * (a + c) + more * a, mrf.iterations * (b + d) + more * b)
        for (a, b), (c, d) in zip(around, beyond, strict=True)
    ]


def tile_size(mrf: MeanField, size: Sequence[int], budget: int = BUDGET) -> tuple[int, ...]:
    """The largest tile, made by halving, that fits into the budget with its halo."""
    contexts = 0 if mrf.label_contexts is None else mrf.label_contexts.contexts
    bytes_each = 4 * (mrf.labels * (contexts + 8) + 4 * mrf.triple_penalty.features)
    around = [before + behind for before, behind in halo(mrf)]
    tile = list(size)
    while bytes_each * math.prod(min(t + a, n) for t, a, n in zip(tile, around, size, strict=True)) > budget:
        longest = max(range(len(tile)), key=lambda axis: tile[axis])
        if tile[longest] <= SMALLEST:
            break
        tile[longest] = -(-tile[longest] // 2)
    return tuple(tile)


def tiles(size: Sequence[int], tile: Sequence[int]) -> Iterator[Tile]:
    """Cuts that cover every pixel once."""
    starts = [range(0, n, t) for n, t in zip(size, tile, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(a, min(a + t, n)) for a, t, n in zip(corner, tile, size, strict=True))


@contextmanager
def spaced(mrf: MeanField, spacing: Sequence[float] | None) -> Iterator[None]:
    """The MRF for pixels that are this far apart, inside a `with` block; None leaves it as it is.

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


def in_tiles(
    mrf: MeanField,
    log_p: Tensor,
    image: Tensor,
    tile: Sequence[int] | None = None,
    spacing: Sequence[float] | None = None,
) -> Iterator[tuple[Tile, Tensor]]:
    """log_p (L, *S), image (F, *S) -> each tile's place and its log-probabilities (L, *tile), on the CPU.

    tile: its size without the halo; None takes as much as fits into the budget, which may be all. The MRF may be on
    another device than the maps: only tiles go there.
    """
    size, around = tuple(log_p.shape[1:]), halo(mrf)
    device = mrf.triple_penalty.scale.device
    for place in tiles(size, tile or tile_size(mrf, size)):
        wide = [
            slice(max(cut.start - before, 0), min(cut.stop + behind, n))
            for cut, (before, behind), n in zip(place, around, size, strict=True)
        ]
        inner = [slice(cut.start - w.start, cut.stop - w.start) for cut, w in zip(place, wide, strict=True)]
        given = (maps[(slice(None), *wide)][None].to(device) for maps in (log_p, image))
        with torch.no_grad(), spaced(mrf, spacing):
            log_q = mrf(*(m.float() if m.is_floating_point() else m for m in given))[0]
        yield place, log_q[(slice(None), *inner)].cpu()
