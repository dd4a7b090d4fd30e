"""The pairwise terms of a dense CRF: a lattice, what pairs of labels cost, and how pixels are normalised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmrf.ops.lattice import Lattice, lattice_filter

NORMALISATIONS = ("symmetric", "before", "after", "none")
_SMALLEST_SUM = 1e-20


@dataclass(frozen=True)
class PairwiseTerm:
    """One Gaussian kernel of a dense CRF."""

    lattice: Lattice
    """Of the pixels' features: B images, or one that serves them all."""
    compatibility: Tensor
    """C: a matrix (L, L), its diagonal (L,), or one number () for every label; it is added to the energy."""
    before: Tensor | None = None
    """n_before (B or 1, N), or None for 1."""
    after: Tensor | None = None
    """n_after (B or 1, N), or None for 1."""


def normalisation(lattice: Lattice, kind: str) -> tuple[Tensor | None, Tensor | None]:
    """(n_before, n_after), each (B, N) or None for 1, that divide by the sum of each pixel's edges, K 1.

    "symmetric" divides by its root on both sides, "before" and "after" on one, "none" on neither.
    """
    if kind not in NORMALISATIONS:
        raise ValueError(f"There is no normalisation {kind!r}: choose one of {', '.join(NORMALISATIONS)}.")
    if kind == "none":
        return None, None
    images, points, _ = lattice.vertex.shape
    weight = lattice.weight
    if weight.device.type == "cpu":  # by numpy: PyTorch's threads would go on waiting and slow down those after
        ones = torch.from_numpy(np.ones((images, 1, points), weight.numpy().dtype))
        with torch.inference_mode():  # past the dispatcher
            array = lattice_filter(ones, lattice)[:, 0].numpy() + _SMALLEST_SUM  # (B, N)
        scale = torch.from_numpy(1 / np.sqrt(array) if kind == "symmetric" else 1 / array)
    else:
        total = lattice_filter(weight.new_ones(images, 1, points), lattice)[:, 0] + _SMALLEST_SUM
        scale = total.rsqrt() if kind == "symmetric" else total.reciprocal()
    return (None if kind == "after" else scale), (None if kind == "before" else scale)
