"""Mean-field inference of a dense CRF on lattices: edges between all pairs of pixels.

    q = softmax(-unary - sum over terms of C n_after K (n_before q)),     repeated; at the start q = softmax(-unary)

K is the Gaussian filter of a term's lattice, n_before and n_after scale its points, and C (L, L) is what label v costs
label u: -w on the diagonal for a Potts model that rewards equal labels by w.
Shapes: B images, L labels, N pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepmrf.ops.lattice import cpu_mean_field, gpu_mean_field, lattice_filter
from deepmrf.ops.lattice.terms import NORMALISATIONS, PairwiseTerm, normalisation
from deepmrf.ops.registry import needs_gradient

__all__ = ["NORMALISATIONS", "PairwiseTerm", "mean_field", "messages", "normalisation"]


def mean_field(unary: Tensor, terms: Sequence[PairwiseTerm], iterations: int) -> Tensor:
    """q (B, L, N) after some iterations from the energies unary (B, L, N); gradients flow to unary and C."""
    learned = [x for t in terms for x in (t.compatibility, t.before, t.after) if x is not None]
    if not needs_gradient(unary, *learned):
        for fast in (gpu_mean_field, cpu_mean_field):
            if fast.suits(unary, terms):
                result: Tensor = fast.mean_field(unary, terms, iterations)
                return result
    q = torch.softmax(-unary, dim=1)
    for _ in range(iterations):
        q = torch.softmax(-sum(messages(q, terms), start=unary), dim=1)
    return q


def messages(q: Tensor, terms: Sequence[PairwiseTerm]) -> Iterator[Tensor]:
    """What each term adds to the energy of q (B, L, N): C n_after K (n_before q)."""
    for term in terms:
        message = lattice_filter(q if term.before is None else q * term.before[:, None], term.lattice)
        message = message if term.after is None else message * term.after[:, None]
        compatibility = term.compatibility.to(message)
        if compatibility.dim() == 2:
            yield torch.einsum("uv,bvn->bun", compatibility, message)
        else:
            yield compatibility.view(-1, 1) * message
