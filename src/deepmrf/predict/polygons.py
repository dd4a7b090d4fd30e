"""Polygons: the outlines of the regions of a label map, exact to the pixel.

An outline runs along the sides of pixels, so that its corners are whole numbers: the pixel in column x and row y is the
square from (x, y) to (x + 1, y + 1). Outer rings run clockwise as one looks at the image, holes run the other way; each
has its region on its right, and touches itself only where pixels meet at a corner. Filling the outer ring without its
holes gives the region back, and the areas enclosed are its number of pixels.

Border following: a side is a pixel and one of its four sides beyond which another label, or nothing, lies. After it,
the outline turns right if the pixel ahead has another label, goes straight on if the one ahead and to the left has,
and turns left otherwise. This joins every side to one other, and the rings are the circles of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.predict.regions import Ints, find_regions

TOP, RIGHT, BOTTOM, LEFT = range(4)
"""The sides of a pixel in the order in which an outer ring takes them."""
OUTSIDE = -1
"""The label beyond the edge of the image."""


@dataclass(frozen=True, eq=False, repr=False)
class Polygon:
    """The outline of a region: pixels of one label that hang together by their sides."""

    name: str
    """The name of its label."""
    label: int
    area: int
    """Number of its pixels."""
    outer: NDArray[np.int64]
    """(N, 2): the corners (x, y) of its outer ring, clockwise; the last is joined to the first."""
    holes: tuple[NDArray[np.int64], ...]
    """Rings (N, 2) of what it encloses, anticlockwise."""

    def __repr__(self) -> str:
        holes = f", holes: {len(self.holes)}" if self.holes else ""
        return f"Polygon({self.name!r}, {self.area} pixels, {len(self.outer)} corners{holes})"

    def box(self) -> tuple[int, int, int, int]:
        """(left, top, width, height)."""
        x, y = self.outer.T
        return int(x.min()), int(y.min()), int(np.ptp(x)), int(np.ptp(y))

    def single_ring(self) -> NDArray[np.int64]:
        """One ring (N, 2) without holes: a cut leads from the first corner to each hole and back on the same line.

        Programs that fill by counting crossings, as pycocotools does, draw nothing along the cuts.
        """
        start = self.outer[:1]
        parts = [self.outer]
        for hole in self.holes:
            parts += [start, hole, hole[:1]]
        return np.concatenate([*parts, *[start] * bool(self.holes)])


def find_polygons(labels: NDArray[Any], names: tuple[str, ...]) -> list[Polygon]:
    """Outline every region of a label map (H, W), the largest first."""
    regions = find_regions(labels)
    pixels, rings = _rings(labels)
    rings_of: dict[int, list[Ints]] = {}
    for region, ring in zip(regions.at(pixels).tolist(), rings, strict=True):
        rings_of.setdefault(region, []).append(ring)
    polygons = []
    for region in np.argsort(-regions.areas, kind="stable").tolist():
        label, area = int(regions.labels[region]), int(regions.areas[region])
        outer, *holes = rings_of[region]  # the outer ring goes through the topmost row, so that it is found first
        polygons.append(Polygon(names[label], label, area, outer, tuple(holes)))
    return polygons


def _rings(labels: NDArray[Any]) -> tuple[Ints, list[Ints]]:
    """(a pixel of each ring's region as an index into the flat map, the corners (N, 2) of each ring).

    They come in the order of their first pixel with a top side.
    """
    height, width = labels.shape
    padded = np.full((height + 2, width + 2), OUTSIDE, np.int16)
    padded[1:-1, 1:-1] = labels
    flat, row = padded.reshape(-1), width + 2
    steps = (-row, 1, row, -1)  # to the pixel beyond each side
    beyond_sides = (padded[:-2, 1:-1], padded[1:-1, 2:], padded[2:, 1:-1], padded[1:-1, :-2])
    pixels = []  # that have each side, as indices into the padded map
    for others in beyond_sides:
        y, x = np.divmod(np.flatnonzero(labels != others), width)
        pixels.append((y + 1) * row + x + 1)
    offsets = np.cumsum([0, *map(len, pixels)])

    def number(side: int, of: Ints) -> Ints:
        """The numbers of sides of pixels."""
        numbers: Ints = offsets[side] + np.searchsorted(pixels[side], of)
        return numbers

    following, turns, corners = [], [], []
    for side, own in enumerate(pixels):
        right, left = (side + 1) % 4, (side + 3) % 4
        ahead = own + steps[right]
        beyond = ahead + steps[side]
        turns_right, turns_left = flat[ahead] != flat[own], flat[beyond] == flat[own]
        after = np.where(turns_left, number(left, beyond), number(side, ahead))
        following.append(np.where(turns_right, number(right, own), after))
        turns.append(turns_right | turns_left)
        y, x = np.divmod(own, row)  # one more than without the padding
        corners.append(np.stack([x - (side in (BOTTOM, LEFT)), y - (side in (TOP, LEFT))], 1))
    corner_of = np.concatenate(corners)
    top = pixels[TOP]
    firsts, circles = _circles(np.concatenate(following), np.concatenate(turns), len(top))
    pixels_of_rings = (top[firsts] // row - 1) * width + top[firsts] % row - 1
    return pixels_of_rings, [corner_of[circle] for circle in circles]


def _circles(following: Ints, turns: NDArray[np.bool_], starts: int) -> tuple[list[int], list[list[int]]]:
    """(first side, the sides that end in a corner) of every circle; each goes through one of the first `starts`."""
    after, turning, seen = following.tolist(), turns.tolist(), bytearray(len(following))
    firsts, circles = [], []
    for first in range(starts):
        if seen[first]:
            continue
        side, circle = first, list[int]()
        while not seen[side]:
            seen[side] = 1
            if turning[side]:
                circle.append(side)
            side = after[side]
        firsts.append(first)
        circles.append([circle[-1], *circle[:-1]])
    return firsts, circles
