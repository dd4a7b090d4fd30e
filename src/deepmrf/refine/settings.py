"""The settings of a fit: how large the MRF is, and how it is learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepmrf.layers import MeanField
from deepmrf.layers.triple_penalty import Kernel

SAME_SPACING = 1.01
"""Axes whose spacings differ by less than this factor get the same number of voxels."""
MINIMUM = {
    **{"window": 2, "contexts": 0, "context_size": 1, "folds": 2, "crop": 16, "batch": 1},
    **{"penalty_steps": 1, "contexts_steps": 1, "seed": 0},
}
"""The least value of every whole number in FitSettings."""


@dataclass(frozen=True)
class FitSettings:
    """How an MRF is learned. The defaults take minutes for a hundred images on two cores."""

    window: int = 21
    """Side of the triple penalty's window, pixels."""
    kernel: Kernel = "gaussian"
    contexts: int = 3
    """Patterns per label; 0 learns the triple penalty alone."""
    context_size: int = 7
    """Side of the patterns, pixels."""
    folds: int = 3
    """Parts of the cross-validation."""
    crop: int = 128
    """Side of the square crops to learn from, pixels."""
    batch: int = 2
    """Crops per step."""
    penalty_steps: int = 60
    contexts_steps: int = 120
    penalty_rate: float = 0.15
    contexts_rate: float = 5e-3
    labels: int | None = None
    """How many labels there are, where neither labels.json nor the predictions tell."""
    seed: int = 0
    """Of folds, crops and starting values."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, bound in MINIMUM.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < bound:
                raise ValueError(f"{name}={value!r} must be a whole number, at least {bound}.")
        count = self.labels
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 2 <= count <= 255):
            raise ValueError(
                f"labels={count!r} must be a whole number from 2 to 255; leave it out to have them counted."
            )
        for name in ("penalty_rate", "contexts_rate"):
            if not 0 < getattr(self, name) < 10:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0 and below 10.")
        if self.kernel not in ("gaussian", "distance"):
            raise ValueError(f"kernel={self.kernel!r} is not for images of any size: choose 'gaussian' or 'distance'.")

    def build(self, labels: int, contexts: int, spacing: Sequence[float] | None = None) -> MeanField:
        """Make an MRF that still returns its input; for volumes if a spacing is given."""
        gaussian = self.kernel == "gaussian"
        dims, axes = (2, (1.0, 1.0)) if spacing is None else (3, tuple(spacing))
        return MeanField(
            labels,
            dims=dims,
            features=3 if dims == 2 else 1,
            spacing=spacing,
            window=size_in_voxels(self.window, axes),
            kernel=self.kernel,
            gate=not gaussian,
            smoothness=gaussian,
            normalize=gaussian,
            contexts=contexts,
            context_size=size_in_voxels(self.context_size, axes),
        )


VOLUME_SETTINGS = FitSettings(
    window=5, context_size=3, crop=48, penalty_steps=40, contexts_steps=300, contexts_rate=2e-3
)
"""The defaults for volumes; `window` and `context_size` count voxels along the finest axis."""


def size_in_voxels(size: int, spacing: Sequence[float]) -> int | list[int]:
    """`size` voxels along the finest axis, and as many along each other axis as cover the same distance.

    Along a coarser axis it is an odd number, at least 3. One int where all axes have the same spacing.
    """
    finest = min(spacing)
    if all(step <= SAME_SPACING * finest for step in spacing):
        return size
    sizes = []
    for step in spacing:
        count = int(size * finest / step)
        odd = count - 1 + count % 2
        sizes.append(size if step <= SAME_SPACING * finest else min(size, max(3, odd)))
    return sizes
