"""Connected regions of a label map, and label maps without small or unsure regions.

A region is a set of cells of one label that hang together by their sides: pixels by 4 sides, voxels by 6. A label map
(*S) of any number of axes is cut into runs, stretches of one label along its last axis. Runs that touch across another
axis belong to one region if they have one label, and share a border if they have two.

`absorb` changes a label map as this does, which is what its tests compare it with:

    while some regions are too small or too unsure:
        take the smallest of them, the first in the map if several are of one size
        give it the label with which it shares the longest border, the lowest if several are equal

A region is too small if its area is below `min_area`. It is too unsure if the mean confidence, over those of its cells
that have kept their label, is below `min_confidence`. A region without neighbours stays.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Regions:
    """The regions of a label map, numbered in the order of their first cells."""

    starts: Ints
    """The first cell of each run, as an index into the flat label map."""
    run_regions: Ints
    """The region of each run."""
    run_lengths: Ints
    """The cells of each run."""
    labels: Ints
    """The label of each region."""
    areas: Ints
    """The number of cells of each region."""
    borders: tuple[Ints, Ints, Ints]
    """(region, other region, sides that they share) of each pair of neighbours, several times if they touch so."""

    def at(self, cells: Ints) -> Ints:
        """The regions of cells, given as indices into the flat label map."""
        return self.run_regions[np.searchsorted(self.starts, cells, "right") - 1]


def find_regions(labels: NDArray[Any]) -> Regions:
    """Find the regions of a label map (*S)."""
    flat, shape = labels.reshape(-1), labels.shape
    change = np.empty(flat.size, bool)
    change[:1] = True
    np.not_equal(flat[1:], flat[:-1], out=change[1:])
    change.reshape(-1, shape[-1] if flat.size else 1)[:, :1] = True
    starts = np.flatnonzero(change)
    lengths = np.diff(starts, append=flat.size)
    run_labels = flat[starts].astype(np.int64)
    same = np.flatnonzero(starts[1:] % shape[-1] != 0)  # runs whose successor lies in the same row
    pairs = [(same, same + 1, np.ones_like(same))]
    for axis in range(labels.ndim - 1):
        pairs.append(_touching(starts, flat.size, stride=math.prod(shape[axis + 1 :]), count=shape[axis]))
    first, second, sides = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    equal = run_labels[first] == run_labels[second]
    roots = _joined(len(starts), first[equal], second[equal])
    first_runs, regions = np.unique(roots, return_inverse=True)  # the root is the first run, so the order is theirs
    areas = np.bincount(regions, lengths, len(first_runs)).astype(np.int64)
    borders = regions[first[~equal]], regions[second[~equal]], sides[~equal]
    return Regions(starts, regions, lengths, run_labels[first_runs], areas, borders)


def _touching(starts: Ints, size: int, stride: int, count: int) -> tuple[Ints, Ints, Ints]:
    """(run, other run, sides) of runs that touch across an axis of `count` cells that are `stride` cells apart."""
    cuts = np.union1d(starts, starts[starts + stride < size] + stride)  # between two cuts, both runs stay the same
    lengths = np.diff(cuts, append=size)
    inner = cuts // stride % count > 0  # the others have no neighbour before them
    cuts, lengths = cuts[inner], lengths[inner]
    before, after = (np.searchsorted(starts, cells, "right") - 1 for cells in (cuts - stride, cuts))
    return before, after, lengths


def _joined(count: int, first: Ints, second: Ints) -> Ints:
    """The lowest number that each of `count` numbers is joined to by pairs, directly or by others."""
    roots = np.arange(count)
    while len(first):
        low, high = np.minimum(first, second), np.maximum(first, second)
        np.minimum.at(roots, high, low)
        while not np.array_equal(roots, jumped := roots[roots]):
            roots = jumped
        first, second = roots[first], roots[second]
        apart = first != second
        first, second = first[apart], second[apart]
    return roots


def absorb(
    labels: NDArray[np.uint8], confidence: NDArray[Any] | None = None, min_area: int = 0, min_confidence: float = 0.0
) -> NDArray[np.uint8]:
    """The label map (*S) without regions that are too small, or too unsure by `confidence` (*S): see above."""
    regions = find_regions(labels)
    sums = regions.areas.astype(float)
    if confidence is not None and min_confidence > 0 and labels.size:
        run_sums = np.add.reduceat(confidence.reshape(-1), regions.starts, dtype=np.float64)
        sums = np.bincount(regions.run_regions, run_sums, len(sums))
    new_labels = _Merging(regions, sums, min_area, min_confidence).labels()
    if np.array_equal(new_labels, regions.labels):
        return labels
    return np.repeat(new_labels[regions.run_regions].astype(np.uint8), regions.run_lengths).reshape(labels.shape)


class _Merging:
    """Regions that are merged one by one. Of those that are merged, the one with the most neighbours stands for all."""

    def __init__(self, regions: Regions, sums: NDArray[np.float64], min_area: int, min_confidence: float) -> None:
        self.min_area, self.min_confidence = min_area, min_confidence
        self.region_labels, self.areas = regions.labels.tolist(), regions.areas.tolist()
        self.kept_cells, self.sums = regions.areas.tolist(), sums.tolist()
        self.firsts, self.parents = list(range(len(sums))), list(range(len(sums)))
        self.borders: list[dict[int, int]] = [{} for _ in self.areas]
        first, second, sides = regions.borders
        pairs, positions = np.unique(
            np.minimum(first, second) * len(sums) + np.maximum(first, second), return_inverse=True
        )
        totals = np.bincount(positions, sides, len(pairs)).astype(np.int64)
        for pair, total in zip(pairs.tolist(), totals.tolist(), strict=True):
            low, high = divmod(pair, len(sums))
            self.borders[low][high] = self.borders[high][low] = total

    def labels(self) -> Ints:
        """Merge all that is to be merged, and return the new label of each region."""
        queue = [(area, region, region) for region, area in enumerate(self.areas) if self._is_weak(region)]
        heapq.heapify(queue)
        while queue:
            area, _, region = heapq.heappop(queue)
            if self.parents[region] != region or area != self.areas[region]:
                continue  # merged since it was queued
            merged = self._merge(region)
            if self._is_weak(merged):
                heapq.heappush(queue, (self.areas[merged], self.firsts[merged], merged))
        return np.array([self.region_labels[self._root(region)] for region in range(len(self.parents))], np.int64)

    def _is_weak(self, region: int) -> bool:
        unsure = self.sums[region] < self.min_confidence * self.kept_cells[region]
        return bool(self.borders[region]) and (self.areas[region] < self.min_area or unsure)

    def _merge(self, region: int) -> int:
        """Merge a region with its neighbours of the label that it shares the longest border with."""
        sides: dict[int, int] = defaultdict(int)
        for other, length in self.borders[region].items():
            sides[self.region_labels[other]] += length
        label = min(sides, key=lambda name: (-sides[name], name))
        members = [region, *(other for other in self.borders[region] if self.region_labels[other] == label)]
        self.kept_cells[region], self.sums[region] = 0, 0.0
        root = max(members, key=lambda member: len(self.borders[member]))
        self.region_labels[root] = label
        for member in members:
            if member != root:
                self._join(member, root)
        return root

    def _join(self, member: int, root: int) -> None:
        """Give what a region has to another one."""
        self.parents[member] = root
        self.firsts[root] = min(self.firsts[root], self.firsts[member])
        for totals in (self.areas, self.kept_cells, self.sums):
            totals[root] += totals[member]
        for other, length in self.borders[member].items():
            del self.borders[other][member]
            if other != root:
                total = self.borders[root].get(other, 0) + length
                self.borders[root][other] = self.borders[other][root] = total
        self.borders[member] = {}

    def _root(self, region: int) -> int:
        while self.parents[region] != region:
            self.parents[region] = region = self.parents[self.parents[region]]
        return region
