"""The energy of all pairs of pixels, given a filter K with weights k(i, j):

    disagreement   sum over i, j of k(i, j) m_i m_j (1 - sum over v of p[v, i] p[v, j])    >= 0, zero if all agree
    agreement    - sum over i, j of k(i, j) m_i m_j      sum over v of p[v, i] p[v, j]     the first less a constant

m is a mask, 1 where a pixel counts. Both have the same gradient where the p of each pixel sum to one.
Shapes: B batch, L labels, F features of the image, *S spatial axes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from deepmrf.ops.distance import unit_features

Filter = Callable[[Tensor], Tensor]
"""K: maps (B, C, *S) -> (B, C, *S)."""


def check_inputs(probabilities: Tensor, image: Tensor, mask: Tensor | None) -> Tensor:
    """Check shapes and values, and return the mask (B, 1, *S) as numbers."""
    if probabilities.dim() < 3 or not probabilities.is_floating_point():
        raise ValueError(f"The probabilities have shape {tuple(probabilities.shape)}: give floats (B, L, *S).")
    batch, size = probabilities.shape[0], probabilities.shape[2:]
    if image.dim() != probabilities.dim() or image.shape[0] != batch or image.shape[2:] != size:
        raise ValueError(
            f"The image has shape {tuple(image.shape)}, the probabilities {tuple(probabilities.shape)}: give an image "
            "(B, F, *S) of the same batch and size."
        )
    with torch.no_grad():
        if not bool(torch.isfinite(probabilities).all()) or bool((probabilities < -1e-6).any()):
            raise ValueError("The probabilities must be finite and not negative: pass scores.softmax(1).")
    if mask is None:
        return probabilities.new_ones(batch, 1, *size)
    mask = mask[:, None] if mask.dim() == probabilities.dim() - 1 else mask
    if mask.shape != (batch, 1, *size):
        raise ValueError(f"The mask has shape {tuple(mask.shape)}: give (B, *S) or (B, 1, *S) like the probabilities.")
    return mask.to(probabilities)


def energy(
    apply_filter: Filter, probabilities: Tensor, mask: Tensor, ignore_labels: Sequence[int], nonnegative: bool
) -> Tensor:
    """The energy above over the number of pixels that count: a number."""
    labels = probabilities.shape[1]
    ignored = {label % labels for label in ignore_labels if -labels <= label < labels}
    if len(ignored) != len(set(ignore_labels)) or len(ignored) == labels:
        raise ValueError(
            f"ignore_labels={list(ignore_labels)} must name some, not all, of the labels 0 to {labels - 1}."
        )
    counted = [label for label in range(labels) if label not in ignored]
    p = (probabilities if not ignored else probabilities[:, counted]) * mask
    agreement = (p * apply_filter(p)).sum()
    pixels = mask.sum().clamp_min(1)
    if not nonnegative:
        return -agreement / pixels
    # Labels left out make p sum to less than one: pairs of such pixels agree only as far as the other labels count.
    total = mask if not ignored else p.sum(1, keepdim=True)
    return ((total * apply_filter(total)).sum() - agreement).clamp_min(0) / pixels


class CRFLoss(nn.Module):
    """A loss by the energy above: probabilities (B, L, *S), image (B, F, *S) in [0, 1] or uint8 -> a number."""

    def __init__(
        self, colour_width: float, position_width: float, ignore_labels: Sequence[int], nonnegative: bool
    ) -> None:
        super().__init__()
        if not (colour_width > 0 and position_width > 0):
            raise ValueError(
                f"colour_width={colour_width!r}, position_width={position_width!r}: widths must be positive numbers."
            )
        self.colour_width, self.position_width = colour_width, position_width
        self.ignore_labels, self.nonnegative = tuple(ignore_labels), nonnegative

    def forward(self, probabilities: Tensor, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask (B, *S): 1 where a pixel counts, 0 where it does not."""
        counted = check_inputs(probabilities, image, mask)
        features = unit_features(image, probabilities.dtype)
        probabilities, features, counted = self.resized(probabilities, features, counted)
        return energy(self.filter_of(features), probabilities, counted, self.ignore_labels, self.nonnegative)

    def resized(self, probabilities: Tensor, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps of the size at which the energy is computed."""
        return probabilities, features, mask

    @abstractmethod
    def filter_of(self, features: Tensor) -> Filter:
        """Return K for an image (B, F, *S)."""

    def extra_repr(self) -> str:
        return f"colour_width={self.colour_width:g}, position_width={self.position_width:g}"
