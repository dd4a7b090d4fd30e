"""Mixture of local label contexts (b13 + b14): what label u pays at pixel i for the labels around i.

    o13[u, k, i] = sum over labels v and pixels j in N(i) of mu_k(u, v, j - i) t[v, j] + bias[u, k]
    o14[u, i]    = min over k of o13[u, k, i]

A label may sit in several surroundings (a person beside a table, a person behind one); the minimum picks, for every
pixel, the pattern that costs least. Function and reference: ops/contexts.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmrf import ops
from deepmrf.layers.inputs import check_maps, check_real
from deepmrf.ops.window import sizes

QUIET = 1e-4 / (3 * 255**2)
"""All the penalty an untrained layer may add, per unit of t: with RGB even in [0, 255], 1e-4 of log-probability."""


class LabelContexts(nn.Module):
    """b13 and b14 as a layer: t (B, L, *S) -> o14 (B, L, *S).

    labels: L. contexts: K, how many patterns each label has. size: pixels along each axis, one int or one per axis.
    It starts as noise so small that it changes nothing, yet tells the K patterns apart when training starts.
    """

    def __init__(self, labels: int, contexts: int = 5, size: int | Sequence[int] = 9, *, dims: int = 2) -> None:
        super().__init__()
        for name, value in (("labels", labels), ("contexts", contexts)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1.")
        if contexts > 255:
            raise ValueError(f"contexts={contexts} is more than 255 patterns per label: the paper uses 5.")
        self.labels, self.contexts, self.dims = labels, contexts, dims
        self.size = sizes(size, dims, "context_size")
        self.weight = nn.Parameter(torch.empty(labels * contexts, labels, *self.size))
        self.bias = nn.Parameter(torch.zeros(labels * contexts))
        self.reset_parameters()

    def reset_parameters(self, quiet: float = QUIET) -> None:
        """Noise that is below notice: |o14| stays under `quiet` times the largest sum of t over the labels."""
        bound = quiet / math.prod(self.size)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)

    @torch.no_grad()
    def set_compatibility(self, compatibility: Tensor) -> None:
        """Make label u pay compatibility[u, v] for label v at the same pixel, and nothing for its surroundings."""
        if tuple(compatibility.shape) != (self.labels, self.labels):
            raise ValueError(
                f"compatibility has shape {tuple(compatibility.shape)}: pass ({self.labels}, {self.labels})."
            )
        self.weight.zero_()
        self.bias.zero_()
        centre = tuple(n // 2 for n in self.size)
        patterns = self.weight.movedim((0, 1), (-2, -1))  # a view with the filter's axes first
        patterns[centre] = compatibility.to(self.weight).repeat_interleave(self.contexts, dim=0)

    def forward(self, t: Tensor) -> Tensor:
        check_maps("t", t, self.labels, self.dims, "labels")
        check_real("t", t)
        return ops.label_contexts(t, self.weight.to(t.dtype), self.bias.to(t.dtype), self.contexts)

    def extra_repr(self) -> str:
        return f"labels={self.labels}, contexts={self.contexts}, size={self.size}, dims={self.dims}"
