"""Mean-field inference of a dense CRF on lattices: edges between all pairs of pixels.

    q = softmax(-unary - sum over terms of C n_after K (n_before q)),     repeated; at the start q = softmax(-unary)

K is the Gaussian filter of a term's lattice, n_before and n_after scale its points, and C (L, L) is what label v costs
label u: -w on the diagonal for a Potts model that rewards equal labels by w.
Shapes: B images, L labels, N pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    weight = lattice.weight
    total = lattice_filter(torch.ones_like(weight[:, :, 0])[:, None], lattice)[:, 0] + _SMALLEST_SUM  # (B, N)
    if kind == "symmetric":
        return total.rsqrt(), total.rsqrt()
    return (total.reciprocal(), None) if kind == "before" else (None, total.reciprocal())


def mean_field(unary: Tensor, terms: Sequence[PairwiseTerm], iterations: int) -> Tensor:
    """q (B, L, N) after some iterations from the energies unary (B, L, N); gradients flow to unary and C."""
    q = torch.softmax(-unary, dim=1)
    for _ in range(iterations):
        energy = unary
        for term in terms:
            message = lattice_filter(q if term.before is None else q * term.before[:, None], term.lattice)
            message = message if term.after is None else message * term.after[:, None]
            energy = energy + _compatible(term.compatibility, message)
        q = torch.softmax(-energy, dim=1)
    return q


def _compatible(compatibility: Tensor, message: Tensor) -> Tensor:
    """C message, for each form of C."""
    compatibility = compatibility.to(message)
    if compatibility.dim() == 2:
        return torch.einsum("uv,bvn->bun", compatibility, message)
    return compatibility.view(-1, 1) * message
