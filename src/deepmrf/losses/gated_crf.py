"""GatedCRFLoss: what pixels pay that look alike, lie close and disagree, inside a window.

    loss = 1 / |m| sum over j, z in N(j), z != j, of k(j, z) m_j m_z (1 - sum over v of p[v, j] p[v, z])
    k(j, z) = exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2)

The sums are those of the Gaussian triple penalty (ops/gaussian): exact, nothing is unfolded, memory does not grow with
the window. After Obukhov et al., Gated CRF Loss for Weakly Supervised Semantic Image Segmentation, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deepmrf.losses.pairs import CRFLoss, Filter
from deepmrf.ops import gaussian_penalty
from deepmrf.ops.window import sizes


class GatedCRFLoss(CRFLoss):
    """probabilities (B, L, *S), image (B, F, *S) in [0, 1] or uint8 -> a number; *S has one to three axes.

    window: pixels along each axis that a pixel is compared with, an int or one per axis. colour_width, position_width:
    a (in the image's unit) and b (in pixels). ignore_labels: labels that do not count. nonnegative: zero where all
    agree; False drops the part that does not depend on the probabilities.
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
