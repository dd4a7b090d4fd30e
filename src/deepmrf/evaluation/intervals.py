"""The gain of one labelling over another on the same images, with its interval: does an MRF earn its place?

    gain        score after - score before; mIoU and IoU come from the confusion matrices of all images, summed
    low, high   about the middle 95 % of the gains of 2,000 samples: a paired bootstrap over images

A sample holds as many images as there are, drawn with replacement, and both labellings are scored on it: their mIoU is
over the labels that the sample truly shows, so that stray pixels of another label do not weigh as much as a label. (A
label that is predicted, but that no image at all shows, counts 0 in every sample, as it does in the score.)

Neighbouring frames of a video are alike, so that drawing them one by one would pretend to know more than is known. They
are drawn in stretches of 10 consecutive frames (a video's last frame is followed by its first), each frame as often as
any image.

A bootstrap of few images or stretches is too narrow, as the normal distribution is in place of Student's t. The share
of the samples beyond each end is therefore smaller than 2.5 %: 0.9 % of 10 stretches, 2.3 % of 100 images
(`tail_share`). Fewer than two give no interval.

Shapes: N images or stretches, L labels, D samples.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from deepmrf.data.dataset import Dataset, Item
from deepmrf.evaluation.dice import VolumeDice
from deepmrf.evaluation.metrics import confusion, none_for_nan
from deepmrf.layers.inputs import check_count

DRAWS = 2000
LEVEL = 0.95
STRETCH_FRAMES = 10
"""Consecutive frames of a video that are drawn together."""
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A gain in [-1, 1] with its interval; NaN where there is nothing to measure."""

    value: float
    low: float
    high: float

    def to_dict(self, name: str = "gain") -> dict[str, float | None]:
        """Return plain numbers for JSON, None for NaN; the value by that name."""
        return {name: none_for_nan(self.value), "low": none_for_nan(self.low), "high": none_for_nan(self.high)}


@dataclass(frozen=True)
class Gain:
    """What one labelling adds to another."""

    names: tuple[str, ...]
    miou: Interval
    pixel_accuracy: Interval
    iou_per_class: tuple[Interval, ...]
    """NaN for a label that is in neither truth nor prediction, before or after."""
    better: int
    """Number of images with more right pixels than before."""
    worse: int
    """Number of images with fewer."""
    images: int
    stretches: int
    """Number of images, or stretches of frames, in a sample."""
    stretch_frames: int
    """Frames of the longest stretch; 1 if all are images on their own."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON: mIoU's gain with its interval, and those of pixel accuracy and each class."""
        per_class = zip(self.names, self.iou_per_class, strict=True)
        counts = ("better", "worse", "images", "stretches", "stretch_frames")
        return {
            **self.miou.to_dict("miou"),
            **{name: getattr(self, name) for name in counts},
            "pixel_accuracy": self.pixel_accuracy.to_dict(),
            "iou_per_class": {name: interval.to_dict() for name, interval in per_class},
        }


def measure_gain(
    before: Sequence[ArrayLike] | Tensor,
    after: Sequence[ArrayLike] | Tensor,
    names: Sequence[str] | None = None,
    *,
    runs: Sequence[Sequence[int]] | None = None,
    stretch: int = STRETCH_FRAMES,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: int = 0,
) -> Gain:
    """Return what `after` adds to `before`: of each image its confusion matrix (L, L), (true label, predicted label).

    Matrices (L, L + 1) count, in the last column, pixels that got no label.
    An MRF earns its place if `measure_gain(network, model).miou.low > 0`.

    names: one for each label. runs: the indices of consecutive frames of each video; images in none of them, and all by
    default, are images on their own. stretch: frames that are drawn together. draws: D. level: how often an interval
    should hold the gain that more such images would have.
    """
    first, second = _matrices("before", before), _matrices("after", after)
    check_count("stretch", stretch)
    check_count("draws", draws)
    if not 0 < level < 1:
        raise ValueError(f"level={level} is no share of cases: give one between 0 and 1, such as 0.95.")
    if first.shape[:2] != second.shape[:2] or not np.array_equal(first.sum(2), second.sum(2)):
        raise ValueError("before and after differ in their true labels: give matrices of the same images in one order.")
    if not first.any():
        raise ValueError("There is nothing to score: give confusion matrices of an image that is not all void.")
    images, labels = first.shape[:2]
    if names is not None and len(names) != labels:
        raise ValueError(f"names holds {len(names)} names for {labels} labels: give one per label.")
    counts = np.stack([_label_counts(first), _label_counts(second)], 1)  # (N, 2, 3, L)
    stretches, lengths = _stretches(counts, _checked_runs(runs or (), images), stretch)
    weights = 1 / lengths  # every frame is in `length` stretches
    drawn = max(round(weights.sum()), 1)
    random = np.random.default_rng(seed)
    repeats = random.multinomial(drawn, weights / weights.sum(), draws)  # (D, N)
    samples = (repeats.astype(float) @ stretches.reshape(images, -1)).reshape(draws, *counts.shape[1:])
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # 0 / 0 is NaN: nothing to measure
        total = counts.sum(0)[None]
        invented = (total[:, :, 1] == 0) & (total[:, :, 2] > 0)  # (1, 2, L)
        values, sampled = _gains(total, invented)[0], _gains(samples, invented)  # (2 + L,), (D, 2 + L)
        low = high = np.full_like(values, np.nan)
        if drawn > 1:
            tail = tail_share(level, drawn)
            low, high = np.where(np.isnan(values), np.nan, np.nanquantile(sampled, [tail, 1 - tail], axis=0))
    intervals = [Interval(*map(float, numbers)) for numbers in zip(values, low, high, strict=True)]
    right = counts[:, :, 0].sum(2)  # (N, 2)
    return Gain(
        names=tuple(names) if names is not None else tuple(map(str, range(labels))),
        miou=intervals[0],
        pixel_accuracy=intervals[1],
        iou_per_class=tuple(intervals[2:]),
        better=int((right[:, 1] > right[:, 0]).sum()),
        worse=int((right[:, 1] < right[:, 0]).sum()),
        images=images,
        stretches=drawn,
        stretch_frames=int(lengths.max()),
    )


class ImageConfusions:
    """The confusion matrices of each image of `data`, by predictor. `add` is a Show of evaluate.py.

    share: of all frames of a video that `data` holds, spread over it; of a tenth, a stretch is one frame, not ten.
    """

    def __init__(self, data: Dataset, share: float = 1.0) -> None:
        self.data, self.items = data, list[Item]()
        self.stretch = max(round(STRETCH_FRAMES * share), 1)
        self.matrices: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, item: Item, image: Tensor, mask: Tensor, labels: dict[str, Tensor]) -> None:
        """Add an image."""
        self.items.append(item)
        for name, ids in labels.items():
            self.matrices[name].append(confusion(ids, mask, len(self.data.labels), self.data.labels.ignore).cpu())

    def gain(self, before: str, after: str) -> Gain:
        """Return what one predictor adds to another on the images so far."""
        indices = {item: index for index, item in enumerate(self.items)}
        runs = [[indices[item] for item in run] for run in self.data.subset(self.items).sequences()]
        matrices = self.matrices[before], self.matrices[after]
        return measure_gain(*matrices, self.data.labels.names, runs=runs, stretch=self.stretch)


def measure_dice_gain(before: VolumeDice, after: VolumeDice, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Return what `after` adds to the mean Dice of `before`, volume by volume, with its 95 % interval over volumes."""
    first, second = (np.array([list(dice[name]) for name in before]) for dice in (before, after))  # (V, L - 1) each
    volumes = len(first)
    repeats = np.random.default_rng(seed).multinomial(volumes, [1 / volumes] * volumes, draws).astype(float)  # (D, V)

    def means(dice: Floats, repeats: Floats) -> Floats:
        known = ~np.isnan(dice)
        per_label: Floats = (repeats @ np.where(known, dice, 0)) / (repeats @ known)  # the mean over volumes
        return np.asarray(np.nanmean(per_label, 1), float)

    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # 0 / 0 is NaN: a label that no volume of a sample has
        value = float((means(second, np.ones((1, volumes))) - means(first, np.ones((1, volumes))))[0])
        if volumes < 2:
            return Interval(value, math.nan, math.nan)
        tail = tail_share(LEVEL, volumes)
        low, high = np.nanquantile(means(second, repeats) - means(first, repeats), [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def _matrices(name: str, given: Sequence[ArrayLike] | Tensor) -> Ints:
    matrices = np.stack([np.asarray(matrix) for matrix in given]) if len(given) else np.zeros((0, 0, 0))
    square = matrices.ndim == 3 and matrices.shape[2] - matrices.shape[1] in (0, 1)
    if not square or not len(matrices) or (matrices < 0).any():
        raise ValueError(
            f"{name} has shape {matrices.shape}: give the confusion matrix (L, L) of every image, counts of pixels."
        )
    return matrices.astype(np.int64)


def _checked_runs(runs: Sequence[Sequence[int]], images: int) -> list[list[int]]:
    """Return runs that hold every image once; those in none are runs of one."""
    indices = [index for run in runs for index in run]
    frames = {*indices}
    if len(frames) < len(indices) or not frames <= {*range(images)}:
        raise ValueError(f"runs hold an image twice, or none of the {images}: give each index of an image once.")
    return [*[list(run) for run in runs if len(run)], *[[index] for index in range(images) if index not in frames]]


def _label_counts(matrices: Ints) -> Ints:
    """Return the pixels (N, 3, L) that are right, true and predicted, of each label."""
    labels = matrices.shape[1]
    return np.stack([matrices.diagonal(axis1=1, axis2=2), matrices.sum(2), matrices.sum(1)[:, :labels]], 1)


def _stretches(counts: Ints, runs: Sequence[Sequence[int]], stretch: int) -> tuple[Ints, Ints]:
    """Return the sums (N, ...) over the stretch that begins with each image, and the length (N,) of each stretch."""
    sums, lengths = [], []
    for run in runs:
        length = min(stretch, len(run))
        frames = (np.arange(len(run))[:, None] + np.arange(length)) % len(run)
        sums.append(counts[np.asarray(run)[frames]].sum(1))
        lengths.append(np.full(len(run), length))
    return np.concatenate(sums), np.concatenate(lengths)


def _gains(counts: Ints | Floats, invented: NDArray[np.bool_]) -> Floats:
    """Counts (D, 2, 3, L), before and after -> gains (D, 2 + L): mIoU, pixel accuracy, IoU of each label.

    invented (1, 2, L): labels that are predicted, but that no image shows.
    """
    right, true, predicted = np.moveaxis(counts.astype(float), 2, 0)  # (D, 2, L) each
    iou = right / (true + predicted - right)
    of_shown = np.where(true > 0, iou, np.where(invented, 0.0, np.nan))
    scores = [np.nanmean(of_shown, 2), right.sum(2) / true.sum(2), *np.moveaxis(iou, 2, 0)]
    gains: Floats = np.diff(np.stack(scores, 2), axis=1)[:, 0]
    return gains


def tail_share(level: float, stretches: int) -> float:
    """Return the share of samples beyond each end of an interval of so many images or stretches, two or more."""
    freedom = stretches - 1
    z = NormalDist().inv_cdf((1 + level) / 2)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # Student's, nearly
    return NormalDist().cdf(-t * math.sqrt(stretches / freedom))
