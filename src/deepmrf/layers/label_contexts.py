"""b13 and b14, the mixture of local label contexts: what label u pays at pixel i for the labels around i.

    b13   o13[u, k, i] = sum over labels v and pixels j in N(i) of mu_k(u, v, j - i) t[v, j] + bias[u, k]
    b14   o14[u, i]    = min over k of o13[u, k, i]

A label can have several typical surroundings (a person beside a table, a person behind a table): the minimum picks the
cheapest of the K patterns at each pixel. The operator and its slow reference: ops/contexts. `rank` and `stride` make
it cheaper and approximate: ops/contexts/low_rank.py. With `links`, the pixels of other frames are those on a
trajectory: linking.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmrf import ops
from deepmrf.flow.clip import fold, unfold
from deepmrf.layers.inputs import check_count, check_maps, check_real
from deepmrf.layers.linking import Links
from deepmrf.ops.window import reaches, sizes

INITIAL_WEIGHT = 1e-4 / (3 * 255**2)
"""Largest sum of |mu_k(u, v, .)| over an untrained pattern: for RGB up to 255, o14 stays below 1e-4."""


def default_context_size(dims: int, temporal: bool = False) -> int | tuple[int, ...]:
    """The paper's 9 x 9 for images and 3 x 7 x 7 for clips; 5 along each axis of volumes."""
    if temporal:
        return (3, 7, 7)
    return 9 if dims in (1, 2) else 5


class LabelContexts(nn.Module):
    """b13 and b14 as a layer: t (B, L, *S) -> o14 (B, L, *S).

    labels: L. contexts: K, the number of patterns per label. size: pixels along each axis of a pattern, an int or one
    per axis; None: `default_context_size`.
    rank: patterns as sums of this many separable ones, for images. stride: evaluate on a grid coarser by this factor
    and interpolate, for images. `compress` makes such a layer from a trained one.
    The initial patterns are noise: too small to change a result, yet different for each k, so that training can tell
    them apart.
    """

    def __init__(
        self,
        labels: int,
        contexts: int = 5,
        size: int | Sequence[int] | None = None,
        *,
        dims: int = 2,
        rank: int | None = None,
        stride: int = 1,
    ) -> None:
        super().__init__()
        for name, value in (("labels", labels), ("contexts", contexts), ("stride", stride)):
            check_count(name, value)
        if contexts > 255:
            raise ValueError(f"contexts={contexts} is more than 255 patterns per label: the paper uses 5.")
        if (rank is not None or stride > 1) and dims != 2:
            raise ValueError(f"rank={rank} and stride={stride} are for images, but dims={dims}: leave them out.")
        self.labels, self.contexts, self.dims, self.rank, self.stride = labels, contexts, dims, rank, stride
        self.size = sizes(default_context_size(dims) if size is None else size, dims, "context_size")
        self.error = 0.0
        """Relative error of compressed patterns: norm of the difference from the original ones over their norm."""
        if rank is None:
            self.weight = nn.Parameter(torch.empty(labels * contexts, labels, *self.size))
        else:
            full = min(labels * self.size[0], labels * contexts * self.size[1])
            if not 1 <= rank <= full:
                raise ValueError(f"rank={rank!r} must be between 1 and {full}, which is exact.")
            self.first = nn.Parameter(torch.empty(rank, labels, self.size[0], 1))
            self.second = nn.Parameter(torch.empty(labels * contexts, rank, 1, self.size[1]))
        self.bias = nn.Parameter(torch.zeros(labels * contexts))
        self.reset_parameters()

    def reset_parameters(self, total: float = INITIAL_WEIGHT) -> None:
        """Fill patterns with noise so small that |o14| stays below `total` times the largest sum of t over labels."""
        bound = total / math.prod(self.size)
        if self.rank is None:
            nn.init.uniform_(self.weight, -bound, bound)
        else:
            for factor in (self.first, self.second):
                nn.init.uniform_(factor, -math.sqrt(bound / self.rank), math.sqrt(bound / self.rank))
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def set_compatibility(self, compatibility: Tensor) -> None:
        """Make label u pay compatibility[u, v] for label v at the same pixel, and nothing for its surroundings."""
        if tuple(compatibility.shape) != (self.labels, self.labels):
            raise ValueError(f"compatibility has shape {tuple(compatibility.shape)}: pass {(self.labels,) * 2}.")
        if self.rank is not None:
            raise ValueError("Compressed contexts cannot take a compatibility: set it before compress.")
        self.weight.zero_()
        self.bias.zero_()
        centre = tuple(n // 2 for n in self.size)
        patterns = self.weight.movedim((0, 1), (-2, -1))  # a view with the filter's axes first
        patterns[centre] = compatibility.to(self.weight).repeat_interleave(self.contexts, dim=0)

    @torch.no_grad()
    def compress(self, rank: int | None = None, stride: int = 1) -> LabelContexts:
        """Return a cheaper, approximate layer; its `error` is the relative error of its patterns.

        rank: replace the patterns by the closest sums of `rank` separable ones; None keeps them.
        stride: evaluate on a grid coarser by this factor.
        """
        if self.rank is not None:
            raise ValueError(f"These contexts have rank {self.rank} already: compress the layer they came from.")
        layer = LabelContexts(self.labels, self.contexts, self.size, dims=self.dims, rank=rank, stride=stride)
        layer.to(self.weight)
        if rank is None:
            layer.weight.copy_(self.weight)
        else:
            first, second, layer.error = ops.separate(self.weight, rank)
            layer.first.copy_(first)
            layer.second.copy_(second)
        layer.bias.copy_(self.bias)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_((self.bias if name == "bias" else self.weight).requires_grad)
        return layer

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
        """o14 of each frame from its stack: 2-D patterns over the maps of all frames of the stack.

        Patterns of a single frame need no stacks: t may then be of some frames only.
        """
        full = reaches(self.size)[0]
        if full == (0, 0):
            weight = self.weight.squeeze(2).to(t.dtype)
            return unfold(ops.label_contexts(fold(t), weight, bias, self.contexts), len(t))
        before, after = reach = links.reach(full)
        weight = self.weight.narrow(2, full[0] - before, before + 1 + after).flatten(1, 2).to(t.dtype)

        def run(span: slice) -> Tensor:
            return ops.label_contexts(links.stack(t, reach, span).flatten(1, 2), weight, bias, self.contexts)

        return links.over(t, weight.shape[1], run)

    def extra_repr(self) -> str:
        text = f"labels={self.labels}, contexts={self.contexts}, size={self.size}, dims={self.dims}"
        text += f", rank={self.rank}" if self.rank else ""
        return text + (f", stride={self.stride}" if self.stride > 1 else "")
