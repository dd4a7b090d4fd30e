"""Sums behind the scores of label maps: mIoU for images, the mean Dice of the foreground for volumes."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from torch import Tensor

from deepmrf.data.files import VOID
from deepmrf.evaluation.dice import VolumeDice, VolumeMetrics, mean_dice, volume_dice
from deepmrf.evaluation.metrics import Scores, SegmentationMetrics
from deepmrf.refine.examples import Example, Examples


class Tally:
    """The scores of examples' label maps.

    all_scores: those of boundaries, boxes and tags of images, too. abstains: label maps may hold VOID for no label.
    """

    def __init__(self, examples: Examples, all_scores: bool = False, abstains: bool = False) -> None:
        names, volumes = examples.labels.names, examples.dims == 3
        kind = SegmentationMetrics if all_scores and not volumes else VolumeMetrics
        options = {"abstains": abstains, "compute_with_cache": False}  # `merged` adds to what was computed
        self.metrics = kind(len(names), VOID, names, **options)
        self.dice: VolumeDice | None = {} if volumes else None

    def add(self, example: Example, labels: Tensor) -> None:
        """Add the labels (*S) of an example."""
        mask = example.mask.long()
        self.metrics.update(labels, mask)
        if self.dice is not None:
            self.dice[example.stem] = volume_dice(labels, mask, len(self.metrics.names))

    def scores(self) -> Scores:
        """All scores of the examples so far."""
        return self.metrics.compute()

    def value(self) -> float:
        """The score that decides."""
        return self.scores().miou if self.dice is None else mean_dice(self.dice)

    def agreement(self) -> float:
        """Cohen's kappa less three of its standard errors: 1 where all labels are right, 0 or less by chance."""
        count = float(self.metrics.confusion.sum())
        pairs = self.metrics.confusion.double() / count
        chance = float(pairs.sum(0) @ pairs.sum(1))
        error = math.sqrt(chance * (1 - chance) / count)
        return (float(pairs.diagonal().sum()) - chance - 3 * error) / max(1 - chance, 1e-12)


def merged(tallies: Sequence[Tally]) -> Tally:
    """The scores of all their examples."""
    result = copy.deepcopy(tallies[0])
    for tally in tallies[1:]:
        result.metrics.merge_state(tally.metrics)
        if result.dice is not None:
            result.dice |= tally.dice or {}
    return result
