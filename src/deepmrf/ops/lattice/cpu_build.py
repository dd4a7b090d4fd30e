"""Numba kernels that build a lattice: the simplex of each point, a hash table of vertices, and their neighbours.

    points ── find_vertices ──> vertex, weight, and a table of keys        one part of the points per thread
    parts  ── merge, renumber ─> one numbering, in order of first touch    the same for any number of parts
    keys   ── find_runs ──────> runs of neighbours                         one axis of the blur per thread

A table is a flat array of slots (key, number of the vertex + 1), 0 where it is empty: a power of two of them, at most
half of them full. A key's slot is the top bits of its product with a constant; a taken slot sends it to the next one.
A sum is never contracted with a product here, so that every backend finds the same simplices.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.ops.jobs import EXACT, compiled
from deepmrf.ops.lattice.cpu_rows import FETCH_AHEAD, fetch_number

Array = NDArray[Any]

POINTS_AT_ONCE = 128
"""Points lifted together, in vectors: what they need stays in the first cache."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SMALLEST_BITS = 12
_BITS_NEAR = 15
"""Tables of more bits do not stay in the second cache."""
_MAX_SIDES_IN_ORDER = 15
"""Ranks of so many axes are the digits of one 64-bit number."""


@partial(compiled, fastmath=EXACT)
def _home(key: Any, bits: int) -> Any:
    """The slot where a key belongs."""
    return np.int64((np.uint64(key) * _MIX) >> np.uint64(64 - bits))


@partial(compiled, fastmath=EXACT)
def _slot(table: Array, key: Any, bits: int) -> Any:
    """The slot that holds the key, or the empty one where it belongs."""
    mask = (np.int64(1) << bits) - 1
    slot = _home(key, bits)
    while table[2 * slot + 1] != 0 and table[2 * slot] != key:
        slot = (slot + 1) & mask
    return slot


@partial(compiled, fastmath=EXACT)
def _longer(keys: Array, count: int, size: int) -> Array:
    """The first `count` keys, with room for more. (Loops compile much faster than slices of arrays.)"""
    longer = np.empty(size, np.int64)
    for number in range(count):
        longer[number] = keys[number]
    return longer


@partial(compiled, fastmath=EXACT)
def _grown(keys: Array, count: int, bits: int) -> Array:
    """A table of 2^bits slots with the first `count` keys."""
    table = np.zeros(2 << bits, np.int64)
    for number in range(count):
        slot = _slot(table, keys[number], bits)
        table[2 * slot] = keys[number]
        table[2 * slot + 1] = number + 1
    return table


@partial(compiled, fastmath=EXACT)
def _lift(features: Array, first: int, size: int, scales: Array, lifted: Array, origin: Array, rank: Array) -> None:
    """lifted, the nearest vertex of remainder 0 and the rank of each axis for `size` points; see build.py."""
    axes = features.shape[0]
    sides = np.float32(axes + 1)
    inverse = np.float32(1) / sides
    for p in range(size):
        lifted[0, p] = 0
        rank[axes, p] = 0
    for i in range(axes, 0, -1):
        for p in range(size):
            scaled = features[i - 1, first + p] * scales[i - 1]
            lifted[i, p] = lifted[0, p] - np.float32(i) * scaled
            lifted[0, p] += scaled
            rank[i - 1, p] = 0
    for i in range(axes + 1):
        for p in range(size):
            origin[i, p] = np.rint(lifted[i, p] * inverse)
    for i in range(axes):
        for j in range(i + 1, axes + 1):
            for p in range(size):
                less = lifted[i, p] - origin[i, p] * sides < lifted[j, p] - origin[j, p] * sides
                rank[i, p] += np.int32(less)
                rank[j, p] += np.int32(1) - np.int32(less)
    excess = rank[axes + 1]
    for p in range(size):
        excess[p] = 0
    for i in range(axes + 1):
        for p in range(size):
            excess[p] += np.int32(origin[i, p])
    for i in range(axes + 1):
        for p in range(size):
            moved_rank = rank[i, p] + excess[p]
            wrap = np.int32(moved_rank < 0) - np.int32(moved_rank > axes)
            rank[i, p] = moved_rank + wrap * np.int32(axes + 1)
            origin[i, p] = (origin[i, p] + np.float32(wrap)) * sides


@partial(compiled, fastmath=EXACT)
def find_vertices(
    features: Array, start: int, stop: int, scales: Array, multipliers: Array, vertex: Array, weight: Array
) -> tuple[Array, int, Array, int]:
    """Fill vertex and weight for the points start .. stop - 1 of features (d, N); vertices are numbered from 0 on.

    Returns the table, its bits, the keys in order of first touch, and how many there are.
    """
    axes = features.shape[0]
    sides = axes + 1
    inverse = np.float32(1) / np.float32(sides)
    bits = _SMALLEST_BITS
    table, keys, count = np.zeros(2 << bits, np.int64), np.empty(1 << bits, np.int64), 0
    lifted = np.empty((sides, POINTS_AT_ONCE), np.float32)
    origin = np.empty((sides, POINTS_AT_ONCE), np.float32)
    rank = np.empty((sides + 1, POINTS_AT_ONCE), np.int32)
    offset, step = np.empty(sides, np.float32), np.empty(sides, np.int64)
    origin_key, order = np.empty(POINTS_AT_ONCE, np.int64), np.empty(POINTS_AT_ONCE, np.int64)
    corner_key = np.empty(POINTS_AT_ONCE * sides, np.int64)
    every_axis = np.int64(0)
    for i in range(axes):
        every_axis += multipliers[i]
    for first in range(start, stop, POINTS_AT_ONCE):
        size = min(POINTS_AT_ONCE, stop - first)
        _lift(features, first, size, scales, lifted, origin, rank)
        for p in range(size):
            origin_key[p] = 0
            order[p] = 0
        for i in range(sides):
            for p in range(size):
                origin_key[p] += np.int64(origin[i, p]) * multipliers[i]
                order[p] = order[p] * sides + rank[i, p]
                lifted[i, p] = (lifted[i, p] - origin[i, p]) * inverse
        for p in range(size):
            for i in range(sides):
                offset[rank[i, p]] = lifted[i, p]
                step[rank[i, p]] = every_axis - sides * multipliers[i]
            key = origin_key[p]
            weight[first + p, 0] = offset[axes] + (np.float32(1) - offset[0])
            corner_key[p * sides] = key
            for r in range(1, sides):
                weight[first + p, r] = offset[axes - r] - offset[sides - r]
                key += step[sides - r]
                corner_key[p * sides + r] = key
            if bits > _BITS_NEAR:
                for r in range(sides):
                    fetch_number(table, 2 * _home(corner_key[p * sides + r], bits))
        for p in range(size):
            if p and sides <= _MAX_SIDES_IN_ORDER and origin_key[p] == origin_key[p - 1] and order[p] == order[p - 1]:
                for r in range(sides):
                    vertex[first + p, r] = vertex[first + p - 1, r]
                continue
            if 2 * (count + sides) > 1 << bits:
                bits += 2
                keys = _longer(keys, count, 1 << bits)
                table = _grown(keys, count, bits)
            for r in range(sides):
                key = corner_key[p * sides + r]
                slot = _slot(table, key, bits)
                if table[2 * slot + 1] == 0:
                    keys[count] = key
                    count += 1
                    table[2 * slot] = key
                    table[2 * slot + 1] = count
                vertex[first + p, r] = table[2 * slot + 1] - 1
    return table, bits, keys, count


@partial(compiled, fastmath=EXACT)
def merge(
    table: Array, bits: int, keys: Array, count: int, other: Array, other_count: int
) -> tuple[Array, int, Array, int, Array]:
    """Add the vertices of another part's points; also returns their numbers here."""
    numbers = np.empty(other_count, np.int32)
    if 2 * (count + other_count) > 1 << bits or len(keys) < count + other_count:
        while 2 * (count + other_count) > 1 << bits:
            bits += 1
        keys = _longer(keys, count, count + other_count)
        table = _grown(keys, count, bits)
    for m in range(other_count):
        slot = _slot(table, other[m], bits)
        if table[2 * slot + 1] == 0:
            keys[count] = other[m]
            count += 1
            table[2 * slot] = other[m]
            table[2 * slot + 1] = count
        numbers[m] = table[2 * slot + 1] - 1
    return table, bits, keys, count, numbers


@partial(compiled, fastmath=EXACT)
def renumber(vertex: Array, start: int, stop: int, numbers: Array) -> None:
    """vertex = numbers[vertex] for the points start .. stop - 1."""
    for n in range(start, stop):
        for r in range(vertex.shape[1]):
            vertex[n, r] = numbers[vertex[n, r]]


@partial(compiled, fastmath=EXACT)
def find_runs(table: Array, bits: int, keys: Array, count: int, step: int) -> Array:
    """Runs of neighbours along the axis of key `step`: vertices one after the other, ~vertex where a run begins."""
    after, linked = np.empty(count, np.int32), np.zeros(count, np.uint8)
    entries = 0
    for m in range(count):
        if bits > _BITS_NEAR and m + FETCH_AHEAD < count:
            fetch_number(table, 2 * _home(keys[m + FETCH_AHEAD] + step, bits))
        after[m] = table[2 * _slot(table, keys[m] + step, bits) + 1] - 1
        if after[m] >= 0:
            linked[after[m]] = 1
            entries += 1
    for m in range(count):
        entries += linked[m] == 0 and after[m] >= 0
    runs = np.empty(entries, np.int32)
    at = 0
    for m in range(count):
        if linked[m] == 0 and after[m] >= 0:
            runs[at] = ~np.int32(m)
            at += 1
            following = after[m]
            while following >= 0:
                runs[at] = following
                at += 1
                following = after[following]
    return runs
