"""Fit an MRF to a network's saved predictions: the paper's stages 2 and 3 with the network left as it is.

    report = fit("predictions", "images", "masks")
    report.save("mrf")

Cross-validation judges both stages: every image is scored by an MRF that never saw it. The result is the stage that
scores best, learned from all images, or an MRF that changes nothing where no stage gains.

Where the images are NIfTI volumes, the MRF is 3-D, with their spacing and with intensity as its one feature, and the
mean Dice of the foreground decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepmrf.data.files import VOID
from deepmrf.data.progress import Phases, Progress, no_phases
from deepmrf.evaluation.dice import VolumeDice, VolumeMetrics, mean_dice, volume_dice
from deepmrf.evaluation.metrics import Scores, SegmentationMetrics
from deepmrf.layers import MeanField
from deepmrf.predict.devices import chosen_device
from deepmrf.predict.tiles import in_tiles
from deepmrf.refine.examples import Example, Examples, open_examples
from deepmrf.refine.learn import FitStage, learn
from deepmrf.refine.matching import count_dims, match_files
from deepmrf.refine.predictions import Folder
from deepmrf.refine.report import FitReport, Fold
from deepmrf.refine.settings import VOLUME_SETTINGS, FitSettings

MIN_GAIN = 5e-4
"""A stage must raise the mIoU (of volumes, the Dice) by this much over what it builds on: less is chance."""


def fit(
    predictions: Folder,
    images: Folder,
    masks: Folder,
    settings: FitSettings | None = None,
    phases: Phases = no_phases,
) -> FitReport:
    """Learn an MRF for the predictions of images or volumes with masks, and score it by cross-validation."""
    settings = settings or default_settings(images)
    chosen_device(settings.device)
    matched, notes = match_files(predictions, images, masks)
    examples = open_examples(matched, Path(masks), settings.labels)
    notes += examples.read_all(phases("reading"))
    if len(examples) < 2:
        count = f"There are {len(examples)} images with predictions and masks to learn from"
        raise ValueError(" ".join([f"{count}; cross-validation needs 2 or more.", *notes]))
    totals = _ScoreSums(examples, settings)
    folds = _cross_validate(examples, settings, totals, phases)
    scores = totals.compute()
    stage = best_stage(scores, totals.dice)
    models = {} if stage == "nothing" else learn(examples, range(len(examples)), settings, phases, stage)
    mean_field = models.get(stage, settings.build(len(examples.labels), 0, examples.spacing))
    return FitReport(
        mean_field.cpu().eval().requires_grad_(False),
        stage,
        examples.labels,
        scores,
        folds,
        settings,
        examples.kind,
        tuple(notes),
        totals.dice,
        examples.label_ids,
    )


def default_settings(images: Folder) -> FitSettings:
    """The settings for pictures, or those for volumes where the folder holds NIfTI files."""
    return VOLUME_SETTINGS if count_dims(images) == 3 else FitSettings()


def split(count: int, folds: int, seed: int) -> list[list[int]]:
    """Every index once, in shuffled folds whose sizes differ by one at most."""
    order = np.random.default_rng([seed, 0]).permutation(count).tolist()
    return [sorted(order[start::folds]) for start in range(min(folds, count))]


def best_stage(scores: dict[FitStage, Scores], dice: dict[FitStage, VolumeDice] | None = None) -> FitStage:
    """The simplest stage that none beats by more than chance: in mIoU, or in Dice where it is given."""
    values = {stage: mean_dice(dice[stage]) if dice else s.miou for stage, s in scores.items()}
    best: FitStage = "nothing"
    for stage, value in values.items():
        if stage != best and value > values[best] + MIN_GAIN:
            best = stage
    return best


def _cross_validate(examples: Examples, settings: FitSettings, totals: _ScoreSums, phases: Phases) -> tuple[Fold, ...]:
    """Learn without each fold in turn and score it; the scores are added to `totals`, too."""
    folds = []
    parts = split(len(examples), settings.folds, settings.seed)
    for number, held_out in enumerate(parts, start=1):
        in_fold = _with_prefix(phases, f"fold {number} of {len(parts)}")
        others = [index for index in range(len(examples)) if index not in held_out]
        models = learn(examples, others, settings, in_fold)
        sums = _ScoreSums(examples, settings)
        _score(models, examples, held_out, (sums, totals), in_fold("scoring"))
        folds.append(Fold(tuple(examples.files[index].stem for index in held_out), sums.compute()))
    return tuple(folds)


def _with_prefix(phases: Phases, prefix: str) -> Phases:
    return lambda name: phases(f"{prefix}: {name}")


class _ScoreSums:
    """The scores of every stage, summed over examples."""

    def __init__(self, examples: Examples, settings: FitSettings) -> None:
        stages: list[FitStage] = ["nothing", "triple penalty", "label contexts"]
        stages = stages if settings.contexts else stages[:2]
        self.volumes, names = examples.dims == 3, examples.labels.names
        kind = VolumeMetrics if self.volumes else SegmentationMetrics
        self.metrics = {stage: kind(len(names), VOID, names) for stage in stages}
        self.dice: dict[FitStage, VolumeDice] = {stage: {} for stage in stages} if self.volumes else {}

    def add(self, stage: FitStage, example: Example, labels: Tensor) -> None:
        """Add the labels that a stage gives an example."""
        mask, metrics = example.mask.long(), self.metrics[stage]
        metrics.update(labels, mask)
        if self.volumes:
            self.dice[stage][example.stem] = volume_dice(labels, mask, len(metrics.names))

    def compute(self) -> dict[FitStage, Scores]:
        """The scores of all examples so far."""
        return {stage: metrics.compute() for stage, metrics in self.metrics.items()}


@torch.no_grad()
def _score(
    models: dict[FitStage, MeanField],
    examples: Examples,
    indices: Sequence[int],
    sums: Sequence[_ScoreSums],
    progress: Progress,
) -> None:
    """Add the scores of every stage on these examples to `sums`."""
    for done, index in enumerate(indices, start=1):
        example = examples[index]
        for stage in sums[0].metrics:
            labels = refined_labels(models[stage], example) if stage != "nothing" else example.log_p.float().argmax(0)
            for sum_ in sums:
                sum_.add(stage, example, labels)
        progress(done, len(indices))


def refined_labels(mrf: MeanField, example: Example) -> Tensor:
    """The labels (*S) that the MRF gives an image or a volume."""
    if example.spacing is None:
        device = mrf.triple_penalty.scale.device
        log_q: Tensor = mrf(example.log_p[None].float().to(device), example.image[None].to(device)).cpu()
        return log_q[0].argmax(0)
    labels = torch.empty(example.mask.shape, dtype=torch.int64)
    for region, log_q in in_tiles(mrf, example.log_p, example.image, spacing=example.spacing):
        labels[region] = log_q.argmax(0)
    return labels
