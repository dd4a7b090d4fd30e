"""The settings of a fit: how large the MRF is, and how it is learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepmrf.layers import MeanField
from deepmrf.layers.inputs import check_temperature
from deepmrf.layers.triple_penalty import Kernel

SAME_SPACING = 1.01
"""Axes whose spacings differ by less than this factor get the same number of voxels."""
WINDOWS = {"gaussian": 21, "distance": 51}
"""Side of the window by kernel, pixels, for images: the cost of the distance kernel does not grow with it."""
KERNELS: tuple[Kernel, ...] = ("distance", "global", "gaussian")
"""What is tried of images; of volumes, all but "global"."""
TEMPERATURES = (0.7, 1.4)
"""What is tried where the settings leave it open; temperatures besides 1."""
MINIMUM = {
    **{"window": 2, "contexts": 0, "context_size": 1, "folds": 2, "crop": 16, "batch": 1},
    **{"penalty_steps": 1, "contexts_steps": 1, "seed": 0},
}
"""The least value of every whole number in FitSettings."""


@dataclass(frozen=True)
class Choice:
    """What a fit chooses by cross-validation."""

    kernel: Kernel = "distance"
    gate: bool = False
    temperature: float = 1.0
    label_scaling: bool = False

    def __str__(self) -> str:
        gate = "gate" if self.gate else "no gate"
        temperature = "" if self.temperature == 1 else f", temperature {self.temperature:g}"
        scaling = ", label scaling" if self.label_scaling else ""
        return f"{self.kernel}, {gate}{temperature}{scaling}"


@dataclass(frozen=True)
class FitSettings:
    """How an MRF is learned. The defaults take less than four minutes for 60 images of 480 x 360 on two cores."""

    window: int | None = None
    """Side of the triple penalty's window, pixels; None: WINDOWS."""
    kernel: Kernel | None = None
    """None tries each of KERNELS. "global" is one step of a dense CRF over all pairs of pixels (all_pairs.py): its
    numbers are tried on whole images, for which `penalty_steps` and `penalty_rate` mean nothing; with contexts=0, nor
    do `crop` and `batch`."""
    gate: bool | None = None
    """The factor q[v, j] of the triple penalty; None tries with and without."""
    temperature: float | None = None
    """Divides log-probabilities; None is 1, and tries TEMPERATURES, too, where label_scaling is off."""
    label_scaling: bool | None = None
    """Learn a factor and a summand of each label's log-probability before all else, which makes up
    for any temperature; None tries with and without."""
    contexts: int = 3
    """Patterns per label; 0 learns the triple penalty alone."""
    context_size: int = 9
    """Side of the patterns, pixels."""
    folds: int = 3
    """Parts of the cross-validation."""
    groups: str | None = None
    """A regular expression that finds the group of an image in its name; None keeps the frames of a video together."""
    minutes: float = 3.0
    """How long a fit may take, about."""
    crop: int = 128
    """Side of the square crops to learn from, pixels."""
    batch: int = 4
    """Crops per step."""
    penalty_steps: int = 60
    contexts_steps: int | None = None
    """None: as many as cross-validation finds best."""
    penalty_rate: float = 0.05
    contexts_rate: float = 1e-2
    labels: int | None = None
    """How many labels there are, where neither labels.json nor the predictions tell."""
    seed: int = 0
    """Of folds, crops and starting values."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, bound in MINIMUM.items():
            value = getattr(self, name)
            if value is None and name in ("window", "contexts_steps"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < bound:
                raise ValueError(f"{name}={value!r} must be a whole number, at least {bound}.")
        count = self.labels
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 2 <= count <= 255):
            raise ValueError(f"labels={count!r} must be a whole number from 2 to 255; without it, they are counted.")
        for name in ("penalty_rate", "contexts_rate"):
            if not 0 < getattr(self, name) < 10:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0 and below 10.")
        if not 0 < self.minutes < math.inf:
            raise ValueError(f"minutes={self.minutes!r} must be above 0.")
        if self.temperature is not None:
            check_temperature(self.temperature)
        if self.kernel not in (None, *KERNELS):
            problem = "does not learn from crops" if self.kernel == "learned" else "is unknown"
            raise ValueError(f"kernel={self.kernel!r} {problem}: choose 'distance', 'gaussian' or 'global'.")
        if self.kernel == "global" and self.gate:
            raise ValueError("kernel='global' has no gate here: leave the gate out, or choose another kernel.")

    def kernels(self, dims: int = 2) -> list[Choice]:
        """The kernels to try; without a gate, at temperature 1 and with label scaling where these are left open."""
        with_global = dims == 2 and not self.gate
        tried = [kernel for kernel in KERNELS if kernel != "global" or with_global]
        kernels = tried if self.kernel is None else [self.kernel]
        scaling = self.label_scaling is not False
        return [Choice(kernel, bool(self.gate), self.temperature or 1.0, scaling) for kernel in kernels]

    def variants(self, choice: Choice) -> list[Choice]:
        """The same with a gate, and without label scaling or, where it is off, at other temperatures, if left open."""
        variants = [replace(choice, gate=True)] if self.gate is None and choice.kernel != "global" else []
        if self.label_scaling is None:
            variants.append(replace(choice, label_scaling=False))
        elif not self.label_scaling and self.temperature is None:
            variants += [replace(choice, temperature=temperature) for temperature in TEMPERATURES]
        return variants

    def build(
        self, labels: int, contexts: int, spacing: Sequence[float] | None = None, choice: Choice | None = None
    ) -> MeanField:
        """Make an MRF that still returns its input; for volumes if a spacing is given."""
        choice = choice or self.kernels()[0]
        is_global = choice.kernel == "global"
        dims, axes = (2, (1.0, 1.0)) if spacing is None else (3, tuple(spacing))
        return MeanField(
            labels,
            dims=dims,
            features=3 if dims == 2 else 1,
            spacing=spacing,
            window=None if is_global else size_in_voxels(self.window or WINDOWS[choice.kernel], axes),
            kernel=choice.kernel,
            gate=choice.gate,
            smoothness=choice.kernel == "gaussian",
            normalize=choice.kernel != "distance",
            contexts=contexts,
            context_size=size_in_voxels(self.context_size, axes),
            temperature=choice.temperature,
            label_scaling=choice.label_scaling,
        )


VOLUME_SETTINGS = FitSettings(
    label_scaling=False,
    window=5,
    context_size=3,
    crop=48,
    batch=2,
    penalty_steps=40,
    penalty_rate=0.15,
    contexts_rate=2e-3,
)
"""The defaults for volumes; `window` and `context_size` count voxels along the finest axis. Whether a scaling of labels
helps volumes was not measured."""


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
