"""DenseCRFLoss: what pixels pay that look alike, lie close and disagree, over all pairs of an image.

    loss = 1 / |m| sum over all i, j of k(i, j) m_i m_j (1 - sum over v of p[v, i] p[v, j])
    k(i, j) = exp(-|I_i - I_j|^2 / 2 a^2 - |i - j|^2 / 2 b^2)

The sums are filtered on the permutohedral lattice (ops/lattice), in time linear in the pixels, with gradients to the
probabilities. After Tang et al., On Regularized Losses for Weakly-supervised CNN Segmentation, 2018 (rloss).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.losses.pairs import CRFLoss, Filter
from deepmrf.ops.lattice import build_lattice, lattice_filter
from deepmrf.ops.lattice.features import bilateral_features

_RESIZE = {1: "linear", 2: "bilinear", 3: "trilinear"}


class DenseCRFLoss(CRFLoss):
    """probabilities (B, L, *S), image (B, F, *S) in [0, 1] or uint8 -> a number; *S has one to three axes.

    colour_width, position_width: a (in the image's unit) and b (in pixels), rloss's 15 of 255 and 100. scale: shrink
    maps, image and b by this factor first; rloss takes 0.5. ignore_labels: labels that do not count. nonnegative: zero
    where all agree; False is rloss's form, less a part that does not depend on the probabilities. The loss is divided
    by the number of pixels that count, rloss's by the number of images.
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
        return (
            functional.interpolate(probabilities, size, mode=_RESIZE[len(size)]),
            functional.interpolate(features, size, mode="nearest"),
            functional.interpolate(mask, size, mode="nearest"),
        )

    def filter_of(self, features: Tensor) -> Filter:
        with torch.no_grad():
            lattice = build_lattice(bilateral_features(features, self.position_width * self.scale, self.colour_width))
        return lambda maps: lattice_filter(maps.flatten(2).contiguous(), lattice).view(maps.shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale:g}"
