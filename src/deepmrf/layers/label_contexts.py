"""Mixture of local label contexts (b13 + b14): what label u pays at pixel i for the labels around i.

    o13[u, k, i] = sum over labels v and pixels j in N(i) of mu_k(u, v, j - i) t[v, j] + bias[u, k]
    o14[u, i]    = min over k of o13[u, k, i]

A label may sit in several surroundings (a person beside a table, a person behind one); the minimum picks, for every
pixel, the pattern that costs least. Function and reference: ops/contexts.py. With `rank` or `stride` the same is
evaluated for less, approximately: ops/low_rank.py. With `links`, the pixels of other frames are those on a trajectory:
linking.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmrf import ops
from deepmrf.layers.inputs import check_maps, check_real
from deepmrf.layers.linking import Links
from deepmrf.ops.window import reaches, sizes

QUIET = 1e-4 / (3 * 255**2)
"""All the penalty an untrained layer may add, per unit of t: with RGB even in [0, 255], 1e-4 of log-probability."""


class LabelContexts(nn.Module):
    """b13 and b14 as a layer: t (B, L, *S) -> o14 (B, L, *S).

    labels: L. contexts: K, how many patterns each label has. size: pixels along each axis, one int or one per axis.
    rank: patterns as sums of this many separable ones, in 2-D; cheaper the lower. stride: evaluate on a grid coarser by
    this factor and interpolate, in 2-D. `compress` makes such a layer of a trained one.
    It starts as noise so small that it changes nothing, yet tells the K patterns apart when training starts.
    """

    def __init__(
        self,
        labels: int,
        contexts: int = 5,
        size: int | Sequence[int] = 9,
        *,
        dims: int = 2,
        rank: int | None = None,
        stride: int = 1,
    ) -> None:
        super().__init__()
        for name, value in (("labels", labels), ("contexts", contexts), ("stride", stride)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1.")
        if contexts > 255:
            raise ValueError(f"contexts={contexts} is more than 255 patterns per label: the paper uses 5.")
        if (rank is not None or stride > 1) and dims != 2:
            raise ValueError(f"rank={rank} and stride={stride} are for images, but dims={dims}: leave them out.")
        self.labels, self.contexts, self.dims, self.rank, self.stride = labels, contexts, dims, rank, stride
        self.size = sizes(size, dims, "context_size")
        self.error = 0.0
        """How far compressed patterns are from those they stand for: norm of the difference over norm."""
        if rank is None:
            self.weight = nn.Parameter(torch.empty(labels * contexts, labels, *self.size))
        else:
            full = min(labels * self.size[0], labels * contexts * self.size[1])
            if not 1 <= rank <= full:
                raise ValueError(f"rank={rank!r} must be between 1 and {full}, where patterns are exact.")
            self.first = nn.Parameter(torch.empty(rank, labels, self.size[0], 1))
            self.second = nn.Parameter(torch.empty(labels * contexts, rank, 1, self.size[1]))
        self.bias = nn.Parameter(torch.zeros(labels * contexts))
        self.reset_parameters()

    def reset_parameters(self, quiet: float = QUIET) -> None:
        """Noise that is below notice: |o14| stays under `quiet` times the largest sum of t over the labels."""
        bound = quiet / math.prod(self.size)
        if self.rank is None:
            nn.init.uniform_(self.weight, -bound, bound)
        else:
            for part in (self.first, self.second):
                nn.init.uniform_(part, -math.sqrt(bound / self.rank), math.sqrt(bound / self.rank))
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def set_compatibility(self, compatibility: Tensor) -> None:
        """Make label u pay compatibility[u, v] for label v at the same pixel, and nothing for its surroundings."""
        if tuple(compatibility.shape) != (self.labels, self.labels):
            raise ValueError(
                f"compatibility has shape {tuple(compatibility.shape)}: pass ({self.labels}, {self.labels})."
            )
        if self.rank is not None:
            raise ValueError("Compressed contexts cannot take a compatibility: set it before compress.")
        self.weight.zero_()
        self.bias.zero_()
        centre = tuple(n // 2 for n in self.size)
        patterns = self.weight.movedim((0, 1), (-2, -1))  # a view with the filter's axes first
        patterns[centre] = compatibility.to(self.weight).repeat_interleave(self.contexts, dim=0)

    @torch.no_grad()
    def compress(self, rank: int | None = None, stride: int = 1) -> LabelContexts:
        """A cheaper layer that does nearly the same, with `error` saying how nearly its patterns do.

        Of the sums of `rank` separable patterns it takes the closest one; None keeps the patterns, for a stride alone.
        """
        if self.rank is not None:
            raise ValueError(f"These contexts have rank {self.rank} already: compress the layer they came from.")
        made = LabelContexts(self.labels, self.contexts, self.size, dims=self.dims, rank=rank, stride=stride)
        made.to(self.weight)
        if rank is None:
            made.weight.copy_(self.weight)
        else:
            first, second, made.error = ops.separate(self.weight, rank)
            made.first.copy_(first)
            made.second.copy_(second)
        made.bias.copy_(self.bias)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_((self.bias if name == "bias" else self.weight).requires_grad)
        return made

    def forward(self, t: Tensor, links: Links | None = None) -> Tensor:
        check_maps("t", t, self.labels, self.dims, "labels")
        check_real("t", t)
        bias = self.bias.to(t.dtype)
        if links is not None:
            return self._linked(t, bias, links)
        if self.rank is not None:
            factors = (self.first.to(t.dtype), self.second.to(t.dtype))
            return ops.strided_contexts(t, factors, bias, self.contexts, self.stride)
        if self.stride > 1:
            return ops.strided_contexts(t, self.weight.to(t.dtype), bias, self.contexts, self.stride)
        return ops.label_contexts(t, self.weight.to(t.dtype), bias, self.contexts)

    def _linked(self, t: Tensor, bias: Tensor, links: Links) -> Tensor:
        """One frame of a stack pays: patterns of two axes over as many maps as all frames of the stack have."""
        full = reaches(self.size)[0]
        before, after = reach = links.reach(full)
        weight = self.weight.narrow(2, full[0] - before, before + 1 + after).flatten(1, 2).to(t.dtype)

        def one(span: slice) -> Tensor:
            return ops.label_contexts(links.stack(t, reach, span).flatten(1, 2), weight, bias, self.contexts)

        return links.over(t, weight.shape[1], one)

    def extra_repr(self) -> str:
        made = f"labels={self.labels}, contexts={self.contexts}, size={self.size}, dims={self.dims}"
        return (
            made + (f", rank={self.rank}" if self.rank else "") + (f", stride={self.stride}" if self.stride > 1 else "")
        )
