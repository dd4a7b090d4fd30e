"""The permutohedral lattice of a set of points: which simplex holds each point, and which vertices are neighbours.

Points f (d axes) are lifted into the plane x_0 + .. + x_d = 0 of d + 1 axes and scaled so that one step of the blur,
(1/2, 1, 1/2), is a Gaussian of width 1. The plane is tiled by simplices. Their vertices are the points whose
coordinates are whole numbers, all equal modulo d + 1. That remainder r differs among the d + 1 vertices of a simplex.

    point n ──> d + 1 vertices      vertex[b, n, r]       row of the vertex of remainder r, first touched first
                                    weight[b, n, r]       barycentric weight, their sum over r is 1
    vertex m ──> 2 (d + 1) others   neighbours[j, 0, m]   row of m + axis_j,  neighbours[j, 1, m]  of m - axis_j, or -1

Two vertices are equal when their keys are: key(x) = sum over i < d of multiplier_i x_i, a 64-bit number. Multipliers
give each axis its own digits where 63 bits suffice for the range of coordinates, so that keys are exact; else they are
fixed random numbers. A key is linear, so the key of a neighbour is a sum: key(m + axis_j) = key(m) + key(axis_j).

Numbers are rounded as in the code that most people use for dense CRFs (order of sums, ties to even), so that points
on the border of two simplices fall to the same side.
Shapes: B images, N points each, d feature axes, M vertices of all images together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

MAX_COORDINATE = 2.0**22
"""Larger coordinates of float32 have too few digits behind the point."""
MAX_KEY_BITS = 62


@dataclass(frozen=True)
class Lattice:
    """The lattice of a batch of points; see the head of this module. It serves any number of filter calls."""

    vertex: Tensor
    """(B, N, d + 1) int32: row of each point's vertices among those of all images."""
    weight: Tensor
    """(B, N, d + 1) float: barycentric weights."""
    vertices: int
    """The number of vertices of all images, M."""
    links: Tensor
    """Which vertices are neighbours: `neighbours` (d + 1, 2, M), or else `runs`, flat, see there."""
    run_ends: Tensor
    """(d + 1, B + 1) int64: the runs of axis j and image b are links[run_ends[j, b] : run_ends[j, b + 1]]. Or empty."""
    first_vertex: tuple[int, ...] = ()
    """If links are runs, image b has the vertices first_vertex[b] .. first_vertex[b + 1] - 1."""
    splat_tables: tuple[Tensor, ...] = ()
    """What the GPU reads when it splats (gpu.splat_tables), once it is there."""

    @property
    def axes(self) -> int:
        """The number of feature axes, d."""
        return self.vertex.shape[2] - 1

    def to(self, device: torch.device | str) -> Lattice:
        """The same lattice on another device."""
        vertex, weight = self.vertex.to(device), self.weight.to(device)
        return Lattice(vertex, weight, self.vertices, self.neighbours.to(device), self.run_ends.new_empty(0))

    @cached_property
    def neighbours(self) -> Tensor:
        """(d + 1, 2, M) int32: the vertex before and after along each axis of the blur, -1 where there is none."""
        if self.links.dim() == 3:
            return self.links
        return neighbours_of_runs(self.links, self.run_ends, self.vertices)


class Arguments(NamedTuple):
    """The arguments of the operator that filters by a lattice's tensors."""

    values: Tensor
    """(B, C, N)."""
    vertex: Tensor
    weight: Tensor
    links: Tensor
    tables: Sequence[Tensor]
    """(run_ends,) if links are runs; on a GPU, splat_tables."""
    vertices: int
    transpose: bool


def slice_scale(axes: int) -> float:
    """What makes the filter of one point 1 at that point."""
    return 1 / (1 + 2.0**-axes)


def neighbours_of_runs(runs: Tensor, run_ends: Tensor, vertices: int) -> Tensor:
    """Lattice.neighbours from runs (flat, int32): neighbours one after the other, ~vertex where a run begins.

    Vertices without neighbours are in no run. Behind the last one are more numbers below 0.
    """
    neighbours = runs.new_full((len(run_ends), 2, vertices), -1)
    for axis, ends in enumerate(run_ends.tolist()):
        part = runs[ends[0] : ends[-1]].long()
        vertex = torch.where(part < 0, ~part, part)
        linked = (part >= 0).nonzero()[:, 0]
        neighbours[axis, 1, vertex[linked]] = vertex[linked - 1].int()
        neighbours[axis, 0, vertex[linked - 1]] = vertex[linked].int()
    return neighbours


def scale_factors(axes: int, dtype: torch.dtype) -> list[float]:
    """What each feature axis is multiplied by when it is lifted, rounded as float32 code would."""
    deviation = torch.tensor(math.sqrt(2 / 3) * (axes + 1), dtype=dtype).item()
    return [torch.tensor(deviation / math.sqrt((i + 2) * (i + 1)), dtype=dtype).item() for i in range(axes)]


def key_multipliers(extents: Sequence[int]) -> list[int]:
    """A multiplier per axis whose coordinates differ by less than its extent; random ones where bits do not suffice."""
    if sum(math.log2(e) for e in extents) < MAX_KEY_BITS:
        return [math.prod(extents[:i]) for i in range(len(extents))]
    state, result = 0x9E3779B97F4A7C15, []
    for _ in extents:  # the generator splitmix64
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        result.append(((z ^ (z >> 31)) | 1) - 2**63)
    return result


def key_extents(reach: Sequence[float]) -> list[int]:
    """How far apart the coordinates of vertices and their neighbours may be, axis by axis, from the largest magnitude
    of each scaled feature: a lifted coordinate is a sum of them, that before its own axis as many times as its number.
    """
    axes = len(reach)
    largest = [sum(reach[i:]) + i * reach[max(i - 1, 0)] for i in range(axes)]
    if max(largest) > MAX_COORDINATE:  # kernels would find a simplex that does not exist, and write outside of arrays
        raise ValueError(f"Features reach {max(largest):.3g} widths, too far for float32: give larger widths.")
    return [2 * math.ceil(x) + 6 * (axes + 1) + 1 for x in largest]


def lift(features: Tensor) -> Tensor:
    """Points (B, d, N) in the plane x_0 + .. + x_d = 0: (B, d + 1, N)."""
    axes = features.shape[1]
    total = torch.zeros_like(features[:, 0])
    lifted = features.new_empty(features.shape[0], axes + 1, features.shape[2])
    for i in range(axes, 0, -1):
        scaled = features[:, i - 1] * scale_factors(axes, features.dtype)[i - 1]
        lifted[:, i] = total - scaled * i
        total = total + scaled
    lifted[:, 0] = total
    return lifted


def enclosing_simplex(lifted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each point (B, d + 1, N): the simplex's vertex of remainder 0, the order of its axes, and the weights.

    axis_of_rank[:, k] is the axis with the k-th largest offset from that vertex: the vertex of remainder r is 1 larger
    on every axis than that of r - 1, and d + 1 smaller on axis_of_rank[:, d + 1 - r].
    """
    sides = lifted.shape[1]
    inverse = torch.tensor(1 / sides, dtype=lifted.dtype).item()
    multiples = torch.round(lifted * inverse)
    origin = multiples * sides
    excess = multiples.sum(1, keepdim=True)
    by_offset = torch.sort(lifted - origin, dim=1, descending=True, stable=True).indices
    rank = torch.argsort(by_offset, dim=1) + excess.long()
    wrap = (rank < 0).long() - (rank >= sides).long()
    rank, origin = rank + sides * wrap, origin + sides * wrap
    axis_of_rank = torch.argsort(rank, dim=1)
    offset = ((lifted - origin) * inverse).gather(1, axis_of_rank)  # falls with the rank
    first = offset[:, -1:] + (1 - offset[:, :1])
    rest = (offset[:, :-1] - offset[:, 1:]).flip(1)
    return origin.long(), axis_of_rank, torch.cat([first, rest], dim=1)


def require_finite(finite: bool) -> None:
    """Raise unless all features are finite."""
    if not finite:
        raise ValueError("Features must be finite numbers: look for NaN, infinities and widths of zero.")


def build_plain(features: Tensor) -> Lattice:
    """The lattice by sorting keys, with PyTorch alone, on any device."""
    batch, axes, points = features.shape
    require_finite(bool(torch.isfinite(features).all()))
    origin, axis_of_rank, weight = enclosing_simplex(lift(features))
    if batch * points == 0:
        empty = torch.empty(axes + 1, 2, 0, dtype=torch.int32, device=features.device)
        weight = weight.mT.contiguous()
        return Lattice(weight.int(), weight, 0, empty, empty.new_empty(0))
    low, high = torch.stack(torch.aminmax(origin.transpose(0, 1).flatten(1), dim=1)).tolist()
    extents = [int(b - a) + 1 + 4 * (axes + 1) for a, b in zip(low[:axes], high[:axes], strict=True)]
    multipliers = key_multipliers([*extents, batch])
    multiplier = torch.tensor([*multipliers[:axes], 0], device=features.device)  # the last axis follows from the others
    image = torch.arange(batch, device=features.device)[:, None] * multipliers[axes]
    keys = [(origin * multiplier[:, None]).sum(1) + image]
    for r in range(1, axes + 1):
        keys.append(keys[-1] + multiplier.sum() - (axes + 1) * multiplier[axis_of_rank[:, axes + 1 - r]])
    steps = (axes + 1) * multiplier - multiplier.sum()
    vertex, neighbours = _number(torch.stack(keys, dim=2), steps)
    return Lattice(vertex, weight.mT.contiguous(), neighbours.shape[2], neighbours, neighbours.new_empty(0))


def _number(keys: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Vertices in the order of their first touch by keys (B, N, d + 1), and their neighbours."""
    distinct, which = torch.unique(keys.flatten(), return_inverse=True)
    touch = torch.arange(which.numel(), device=keys.device)
    first = torch.full_like(distinct, which.numel()).scatter_reduce_(0, which, touch, "amin")
    order = torch.argsort(first)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=keys.device)
    neighbours = []
    for step in steps:
        for target in (distinct[order] + step, distinct[order] - step):
            index = torch.searchsorted(distinct, target).clamp_(max=len(distinct) - 1)
            neighbours.append(torch.where(distinct[index] == target, row[index], -1).int())
    shape = (len(steps), 2, len(distinct))
    return row[which].int().view(keys.shape), torch.stack(neighbours).view(shape)
