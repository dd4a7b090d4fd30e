"""The energy of a labeling and the free energy of a distribution, which the mean field lowers.

    E(y) = sum over i of Phi(y_i)  +  1/2 sum over i, j of Psi(y_i, y_j),      Phi(u) = -ln p[u, i]
    F(Q) = sum over y of Q(y) E(y)  +  sum over y of Q(y) ln Q(y),             Q(y) = product over i of q[y_i, i]
    P(y) = exp(-E(y)) / Z,                                                      KL(Q || P) = F(Q) + ln Z

What pixel i pays for its label, the sum over j of Psi, is o14 of b13 and b14:

    m[u, i] = min over k of sum over v, j of mu_k(u, v, j - i) t[v, j]

with t[v, j] = q[v, j] sum over z of d(j, z) p[v, z], p being the network's (the paper's Psi), or, without the gate,
t[v, j] = sum over z of d(j, z) q[v, z] (dense CRF's). Each pair of pixels stands in the sums of both, hence the half.

F(Q) is the sum over all y exactly if K = 1 and a pixel is no neighbour of its own. Where Psi is symmetric besides, one
pixel updated after the other lowers F(Q) at each step; the layer updates all at once.
Shapes: labels (B, *S), log_p and log_q (B, L, *S), image (B, F, *S).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from deepmrf.layers.mean_field import MeanField


def messages(mrf: MeanField, q: Tensor, log_p: Tensor, image: Tensor | None) -> Tensor:
    """m (B, L, *S): what each pixel pays for each label, given what q says of the others."""
    penalty = mrf.triple_penalty
    if penalty.gate:
        ungated = copy.copy(penalty)  # the same parameters
        ungated.gate = False
        t: Tensor = q * (ungated(mrf.belief(log_p), image) - penalty.shift) + penalty.shift
    else:
        t = penalty(q, image)
    if mrf.label_contexts is None:
        return t
    penalties: Tensor = mrf.label_contexts(t)
    return penalties


def energy(mrf: MeanField, labels: Tensor, log_p: Tensor, image: Tensor | None) -> Tensor:
    """E(y) of label maps (B, *S): a number per image, (B,)."""
    if labels.shape != (log_p.shape[0], *log_p.shape[2:]) or labels.is_floating_point():
        raise ValueError(
            f"The labels have shape {tuple(labels.shape)} and type {labels.dtype}: give whole numbers of shape "
            f"{(log_p.shape[0], *log_p.shape[2:])}."
        )
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < mrf.labels:
        raise ValueError(f"The labels are {int(labels.min())} to {int(labels.max())}: give 0 to {mrf.labels - 1}.")
    chosen = functional.one_hot(labels.long(), mrf.labels).movedim(-1, 1).to(log_p.dtype)  # (B, L, *S)
    return _expected_energy(mrf, chosen, log_p, image)


def free_energy(mrf: MeanField, log_q: Tensor, log_p: Tensor, image: Tensor | None) -> Tensor:
    """F(Q) of the distribution with the probabilities exp(log_q) at each pixel: a number per image, (B,)."""
    q = log_q.exp()
    negentropy = torch.where(q > 0, q * log_q, torch.zeros_like(q)).flatten(1).sum(1)
    return _expected_energy(mrf, q, log_p, image) + negentropy


def _expected_energy(mrf: MeanField, q: Tensor, log_p: Tensor, image: Tensor | None) -> Tensor:
    if mrf.unary != "softmax":
        raise ValueError(f"The energy is that of unary='softmax', but this layer has unary={mrf.unary!r}.")
    unary = -mrf.tempered(log_p).log_softmax(1)
    own = torch.where(q > 0, q * unary, torch.zeros_like(q))  # labels of probability zero may cost infinitely much
    return (own + q * messages(mrf, q, log_p, image) / 2).flatten(1).sum(1)
