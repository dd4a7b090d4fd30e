"""Mean-field inference of a dense CRF on lattices: edges between all pairs of pixels.

    q = softmax(-unary - sum over terms of C n_after K (n_before q)),     repeated; at the start q = softmax(-unary)

K is the Gaussian filter of a term's lattice, n_before and n_after scale its points, and C (L, L) is what label v costs
label u: -w on the diagonal for a Potts model that rewards equal labels by w.
Shapes: B images, L labels, N pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmrf.ops.lattice import Lattice, cpu_mean_field, gpu_mean_field, lattice_filter
from deepmrf.ops.registry import needs_gradient

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
