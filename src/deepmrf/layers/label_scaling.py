"""LabelScaling: what the network says of each label, with a factor and a summand of its own, before the MRF hears it.

    ln p'[u, i] = a[u] ln p[u, i] + b[u]

A network errs about each label in a way of its own: taught with class weights it sees too many bicycles, and where it
knows its training images by heart it is too sure of roads. Two numbers per label, learned from images that the network
never saw, mend that ("vector scaling", Guo et al., 2017), and leave to the MRF what neighbours can tell.
`training/mean_field.py` learns them; b15 normalises.

Shapes: log_p (B, L, *S), a and b (L).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepmrf.layers.inputs import check_count, check_maps

LEAST_LOG_P = -1e4
"""Where a has a gradient, smaller ln p count as this, whose probability is zero, too: -inf would make it infinite."""


def scale_labels(log_p: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The equation above; not normalised."""
    per_label = (1, -1, *[1] * (log_p.dim() - 2))
    factor, summand = (values.to(log_p.dtype).view(per_label) for values in (a, b))
    return torch.addcmul(summand, log_p.clamp_min(LEAST_LOG_P) if factor.requires_grad else log_p, factor)


class LabelScaling(nn.Module):
    """ln p (B, L, *S) -> ln p' (B, L, *S), not normalised; labels: L. Before training it changes nothing."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        check_count("labels", labels)
        self.log_scale = nn.Parameter(torch.zeros(labels))  # a = exp of it, which is positive
        self.bias = nn.Parameter(torch.zeros(labels))

    def forward(self, log_p: Tensor) -> Tensor:
        check_maps("log_p", log_p, len(self.bias), max(log_p.dim() - 2, 1), "labels")
        return scale_labels(log_p, self.log_scale.exp(), self.bias)

    def extra_repr(self) -> str:
        return f"labels={len(self.bias)}"
