"""CRF losses: teach a network with few labels that pixels which look alike and lie close should agree.

    loss = cross_entropy(scores, scribbles, ignore_index=255) + 0.1 * GatedCRFLoss()(scores.softmax(1), image)

Both losses are the energy of all pairs of pixels whose edges k(i, j) join them, over the number of pixels that count:

    disagreement   sum over i, j of k(i, j) m_i m_j (1 - sum over v of p[v, i] p[v, j])    >= 0, zero if all agree
    agreement    - sum over i, j of k(i, j) m_i m_j      sum over v of p[v, i] p[v, j]     the first less a constant

    k(i, j) = exp(-|I_i - I_j|^2 / 2 a^2 - |i - j|^2 / 2 b^2)

m is a mask, 1 where a pixel counts. Both forms have the same gradient where the p of each pixel sum to one.
Shapes: B batch, L labels, F features of the image, *S one to three spatial axes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepmrf.ops import gaussian_penalty
from deepmrf.ops.lattice import build_lattice, lattice_filter
from deepmrf.ops.lattice.features import bilateral_features
from deepmrf.ops.window import sizes, unit_features

__all__ = ["DenseCRFLoss", "GatedCRFLoss"]

Filter = Callable[[Tensor], Tensor]
"""Sums over edges: maps (B, C, *S) -> (B, C, *S), sum over j of k(i, j) maps[c, j]."""
_RESIZE = {1: "linear", 2: "bilinear", 3: "trilinear"}


class CRFLoss(nn.Module):
    """probabilities (B, L, *S), image (B, F, *S) in [0, 1] or uint8 -> a number.

    colour_width, position_width: a (in the image's unit) and b (in pixels). ignore_labels: labels that do not count.
    nonnegative: the disagreement; False: the agreement.
    """

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
        counted = _checked_mask(probabilities, image, mask)
        dtype = torch.promote_types(probabilities.dtype, torch.float32)  # the sums are beyond half precision
        probabilities, counted = probabilities.to(dtype), counted.to(dtype)
        features = unit_features(image, probabilities.dtype)
        probabilities, features, counted = self.resized(probabilities, features, counted)
        return self._energy(self.filter_of(features), probabilities, counted)

    def resized(self, probabilities: Tensor, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps of the size at which the energy is computed."""
        return probabilities, features, mask

    @abstractmethod
    def filter_of(self, features: Tensor) -> Filter:
        """Return the sums over the edges of an image (B, F, *S)."""

    def _energy(self, apply_filter: Filter, probabilities: Tensor, mask: Tensor) -> Tensor:
        labels = probabilities.shape[1]
        ignored = {label % labels for label in self.ignore_labels if -labels <= label < labels}
        if len(ignored) != len(set(self.ignore_labels)) or len(ignored) == labels:
            raise ValueError(f"ignore_labels={self.ignore_labels} must name some, not all, of the {labels} labels.")
        counted = [label for label in range(labels) if label not in ignored]
        p = (probabilities if not ignored else probabilities[:, counted]) * mask
        agreement = (p * apply_filter(p)).sum()
        pixels = mask.sum().clamp_min(1)
        if not self.nonnegative:
            return -agreement / pixels
        # Labels left out make p sum to less than one: pairs of such pixels agree only as far as the other labels count.
        total = mask if not ignored else p.sum(1, keepdim=True)
        return ((total * apply_filter(total)).sum() - agreement).clamp_min(0) / pixels

    def extra_repr(self) -> str:
        return f"colour_width={self.colour_width:g}, position_width={self.position_width:g}"


def _checked_mask(probabilities: Tensor, image: Tensor, mask: Tensor | None) -> Tensor:
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


class DenseCRFLoss(CRFLoss):
    """Edges between all pairs of pixels, on the permutohedral lattice, in time linear in the pixels; see CRFLoss.

    After Tang et al., On Regularized Losses for Weakly-supervised CNN Segmentation, 2018 (rloss), whose widths are 15
    of 255 and 100. scale: shrink maps, image and b by this factor first; rloss takes 0.5. nonnegative=False is rloss's
    form. The loss is divided by the number of pixels that count, rloss's by the number of images.
    """

    def __init__(
        self,
        *,
        colour_width: float = 15 / 255,
        position_width: float = 100.0,
        scale: float = 1.0,
        ignore_labels: Sequence[int] = (),
        nonnegative: bool = True,
    ) -> None:
        super().__init__(colour_width, position_width, ignore_labels, nonnegative)
        if not 0 < scale <= 1:
            raise ValueError(f"scale={scale!r} must lie above 0, and at most at 1.")
        self.scale = scale

    def resized(self, probabilities: Tensor, features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.scale == 1:
            return probabilities, features, mask
        size = [max(1, round(n * self.scale)) for n in probabilities.shape[2:]]
        features, mask = (functional.interpolate(maps, size, mode="nearest") for maps in (features, mask))
        return functional.interpolate(probabilities, size, mode=_RESIZE[len(size)]), features, mask

    def filter_of(self, features: Tensor) -> Filter:
        with torch.no_grad():
            lattice = build_lattice(bilateral_features(features, self.position_width * self.scale, self.colour_width))
        return lambda maps: lattice_filter(maps.flatten(2).contiguous(), lattice).view(maps.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale:g}"


class GatedCRFLoss(CRFLoss):
    """Edges inside a window, exact, in memory that does not grow with it (ops/gaussian); see CRFLoss.

    After Obukhov et al., Gated CRF Loss for Weakly Supervised Semantic Image Segmentation, 2019.
    window: pixels along each axis that a pixel is compared with, an int or one per axis.
    """

    def __init__(
        self,
        *,
        window: int | Sequence[int] = 11,
        colour_width: float = 0.1,
        position_width: float = 6.0,
        ignore_labels: Sequence[int] = (),
        nonnegative: bool = True,
    ) -> None:
        super().__init__(colour_width, position_width, ignore_labels, nonnegative)
        self.window = window

    def filter_of(self, features: Tensor) -> Filter:
        window = sizes(self.window, features.dim() - 2, "window")
        widths = features.new_tensor([self.colour_width, self.position_width])
        plain = features.new_tensor([1.0, 0.0])
        return lambda maps: gaussian_penalty(maps, features, plain, widths, window, gate=False)

    def extra_repr(self) -> str:
        return f"window={self.window}, {super().extra_repr()}"
