"""GatedCRFLoss: what pixels pay that look alike, lie close and disagree, inside a window.

    loss = 1 / |m| sum over j, z in N(j), z != j, of k(j, z) m_j m_z (1 - sum over v of p[v, j] p[v, z])
    k(j, z) = exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2)

The sums are those of the Gaussian triple penalty (ops/gaussian): exact, nothing is unfolded, memory does not grow with
the window. After Obukhov et al., Gated CRF Loss for Weakly Supervised Semantic Image Segmentation, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from deepmrf.losses.pairs import check_inputs, energy, unit_image
from deepmrf.ops import gaussian_penalty


class GatedCRFLoss(nn.Module):
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
        super().__init__()
        if not (colour_width > 0 and position_width > 0):
            raise ValueError(
                f"colour_width={colour_width!r}, position_width={position_width!r}: widths must be positive numbers."
            )
        self.window, self.colour_width, self.position_width = window, colour_width, position_width
        self.ignore_labels, self.nonnegative = tuple(ignore_labels), nonnegative

    def forward(self, probabilities: Tensor, image: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask (B, *S): 1 where a pixel counts, 0 where it does not."""
        counted = check_inputs(probabilities, image, mask)
        dims = probabilities.dim() - 2
        window = [self.window] * dims if isinstance(self.window, int) else list(self.window)
        if len(window) != dims or min(window) < 1:
            raise ValueError(f"window={self.window!r} must be an int or {dims} ints, each at least 1.")
        features = unit_image(image, probabilities.dtype)
        widths = features.new_tensor([self.colour_width, self.position_width])
        plain = features.new_tensor([1.0, 0.0])

        def apply_filter(maps: Tensor) -> Tensor:
            return gaussian_penalty(maps, features, plain, widths, window, gate=False)

        return energy(apply_filter, probabilities, counted, self.ignore_labels, self.nonnegative)

    def extra_repr(self) -> str:
        return f"window={self.window}, colour_width={self.colour_width:g}, position_width={self.position_width:g}"
