"""Scores of volumes: Dice of each label in each volume, as medicine reports it, and mIoU over all voxels.

    Dice of label c in a volume = 2 |voxels that are c in truth and prediction| / (|true ones| + |predicted ones|)

It is averaged over volumes first and over the foreground labels (all but 0) then. A label that a volume neither has nor
is said to have is left out there; void voxels never count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from deepmrf.data.files import VOID
from deepmrf.evaluation.metrics import Scores, score

Dice = dict[str, tuple[float, ...]]
"""By volume: the Dice of labels 1, 2 ...; NaN where there is nothing to measure."""


def dice(prediction: Tensor, truth: Tensor, labels: int) -> tuple[float, ...]:
    """Of labels 1 .. L - 1 in one volume, ids of any shape."""
    return dice_of(confusion(prediction, truth, labels))


def confusion(prediction: Tensor, truth: Tensor, labels: int) -> Tensor:
    """How many voxels are (true, predicted), (L, L), void left out."""
    known = truth != VOID
    pairs = truth[known].long() * labels + prediction[known].long()
    return torch.bincount(pairs, minlength=labels**2).view(labels, labels)


def dice_of(counts: Tensor) -> tuple[float, ...]:
    """From one volume's confusion (L, L)."""
    both = counts.diagonal().double()
    return tuple((2 * both / (counts.sum(0) + counts.sum(1)))[1:].tolist())


def per_label(scores: Mapping[str, Sequence[float]]) -> list[float]:
    """The mean over volumes for each foreground label; NaN for one that no volume has."""
    rows = torch.tensor([list(values) for values in scores.values()], dtype=torch.float64)  # (V, L - 1)
    found: list[float] = rows.nanmean(0).tolist()
    return found


def mean(scores: Mapping[str, Sequence[float]]) -> float:
    """The mean over the foreground labels of their means over volumes."""
    known = [value for value in per_label(scores) if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def soft_dice(q: Tensor, truth: Tensor) -> Tensor:
    """Dice of probabilities q (B, L, *S) over a whole batch, the mean over the foreground labels that it has."""
    labels = q.shape[1]
    known = (truth != VOID)[:, None]
    true = one_hot(truth.long().where(known[:, 0], 0), labels).movedim(-1, 1) * known  # (B, L, *S)
    axes = (0, *range(2, q.dim()))
    both, either = (2 * q * true).sum(axes)[1:], ((q + true) * known).sum(axes)[1:]
    there = true.sum(axes)[1:] > 0
    return (both / either.clamp_min(1e-6))[there].mean() if bool(there.any()) else q.sum() * 0 + 1


class VolumeMetrics:
    """What SegmentationMetrics counts of images, as far as it makes sense for volumes: IoU and accuracy."""

    def __init__(self, labels: int, names: tuple[str, ...]) -> None:
        self.names, self.volumes = names, 0
        self.confusion = torch.zeros(labels, labels, dtype=torch.int64)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add one volume."""
        self.confusion += confusion(prediction, target, len(self.names))
        self.volumes += 1

    def compute(self) -> Scores:
        """The scores of all volumes so far; TA, LA and BA, which are for pictures, are NaN."""
        nothing = torch.zeros(len(self.names))
        tags = ("right_tags", "ever_tagged", "box_sum", "box_count", "boundary_sum", "boundary_count")
        sums = dict.fromkeys(tags, nothing)
        return score({**sums, "confusion": self.confusion, "images": torch.tensor(self.volumes)}, self.names)
