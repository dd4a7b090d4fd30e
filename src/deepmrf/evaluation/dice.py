"""Scores of volumes: the Dice of each label in each volume, as medicine reports it, and the mIoU over all voxels.

    Dice of label c in a volume = 2 |voxels that are c in truth and prediction| / (|true ones| + |predicted ones|)

The mean is taken over volumes first, then over the foreground labels (all but 0). A label that is neither in a volume
nor predicted there does not count there; void voxels never count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from deepmrf.data.files import VOID
from deepmrf.evaluation.metrics import SegmentationMetrics, confusion, mean

VolumeDice = dict[str, tuple[float, ...]]
"""Name of a volume: the Dice of its labels 1, 2 ...; NaN where there is nothing to measure."""


def volume_dice(prediction: Tensor, truth: Tensor, labels: int) -> tuple[float, ...]:
    """Return the Dice of labels 1 .. L - 1 in one volume, from label ids of any shape."""
    counts = confusion(prediction, truth, labels, abstains=True)
    both = counts.diagonal().double()
    return tuple((2 * both / (counts.sum(0)[:labels] + counts.sum(1)))[1:].tolist())


def dice_per_label(dice: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the mean over volumes for each foreground label; NaN for one that no volume has."""
    rows = torch.tensor([list(values) for values in dice.values()], dtype=torch.float64)  # (V, L - 1)
    means: list[float] = rows.nanmean(0).tolist()
    return means


def mean_dice(dice: Mapping[str, Sequence[float]]) -> float:
    """Return the mean over the foreground labels of their means over volumes."""
    return mean(dice_per_label(dice))


def soft_dice(q: Tensor, truth: Tensor) -> Tensor:
    """Dice of probabilities q (B, L, *S) over the whole batch, the mean over the foreground labels in `truth`."""
    both, either, present = _soft_counts(q, truth)
    return _mean_of_present((2 * both / either.clamp_min(1e-6))[1:], present[1:])


def soft_iou(q: Tensor, truth: Tensor) -> Tensor:
    """IoU of probabilities q (B, L, *S) over the whole batch, the mean over the labels in `truth`."""
    both, either, present = _soft_counts(q, truth)
    return _mean_of_present(both / (either - both).clamp_min(1e-6), present)


def _soft_counts(q: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each label: its probability summed over its pixels, over all pixels plus its pixels, and if it has any."""
    known = (truth != VOID)[:, None]
    true = one_hot(truth.long().where(known[:, 0], 0), q.shape[1]).movedim(-1, 1) * known  # (B, L, *S)
    axes = (0, *range(2, q.dim()))
    return (q * true).sum(axes), ((q + true) * known).sum(axes), true.sum(axes) > 0


def _mean_of_present(values: Tensor, present: Tensor) -> Tensor:
    """The mean over the labels that are present; 1, with a gradient of 0, where none is."""
    return values[present].mean() if bool(present.any()) else values.sum() * 0 + 1


class VolumeMetrics(SegmentationMetrics):
    """IoU and accuracy of volumes; TA, LA and BA, which are for images, are NaN."""

    def update(self, prediction: Tensor, target: Tensor, objects: Tensor | None = None) -> None:
        """Add one volume: label ids of any shape; objects are not used."""
        self.confusion += confusion(prediction, target, self.labels, self.ignore, self.abstains)
        self.images += 1
