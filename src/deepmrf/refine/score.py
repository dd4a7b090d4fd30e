"""Score saved predictions against masks: how good is a folder, and what does a second one add?

    report = score(["predictions", "refined"], "masks")
    report.scores["refined"].miou, report.gain.miou.low

Scored are the images that all folders predict and that have a mask. Masks stand for the images themselves, which say
nothing more here: predictions need only have their size. A pixel to which a label map gives no label (255) is wrong.

Frames of a video are told by their names and by masks that resemble the next ones; the interval then counts stretches.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.data.dataset import need_folder
from deepmrf.data.files import VOID
from deepmrf.data.progress import Phases, no_phases
from deepmrf.evaluation.dice import VolumeDice
from deepmrf.evaluation.intervals import Gain, Interval, measure_dice_gain, measure_gain
from deepmrf.evaluation.metrics import Scores, confusion
from deepmrf.refine.examples import Example, Examples, open_examples
from deepmrf.refine.folds import THUMBNAIL_SIDE, find_videos
from deepmrf.refine.matching import MatchedFiles, match_files
from deepmrf.refine.predictions import Folder
from deepmrf.refine.tally import Tally

LABEL_MAP = "label ids"
"""How `Examples.kinds` begins where predictions are label maps."""
MIN_RESEMBLANCE_OF_MASKS = 0.4
"""Correlation of successive masks, their median, from which on they are frames of one video."""


@dataclass(frozen=True)
class PredictionScores:
    """The scores of folders of predictions on the same images."""

    scores: dict[str, Scores]
    """By folder."""
    gain: Gain | None
    """What the second of two folders adds to the first; None for other numbers of folders."""
    dice: dict[str, VolumeDice]
    """By folder; empty for images."""
    dice_gain: Interval | None
    """What the second of two folders of volumes adds to the mean Dice of the first."""
    notes: tuple[str, ...]
    """What is missing or odd."""


def score(
    predictions: Sequence[Folder], masks: Folder, labels: int | None = None, phases: Phases = no_phases
) -> PredictionScores:
    """Score folders of predictions against masks; labels: how many, where neither labels.json nor predictions tell."""
    names = [os.fspath(folder) for folder in predictions]
    need_folder(Path(masks), "the masks")
    matched, notes = [], list[str]()
    for name, folder in zip(names, predictions, strict=True):
        pairs, missing = match_files(folder, masks, masks)
        matched.append(pairs)
        notes += [f"{name}: {note}" for note in missing]
    stems = set.intersection(*[{files.stem for files in folder} for folder in matched])
    if not stems:
        raise FileNotFoundError(f"No mask has a prediction in each of {', '.join(names)}: give them equal names.")
    examples = _open([[files for files in folder if files.stem in stems] for folder in matched], Path(masks), labels)
    scores, dice, confusions, thumbnails = dict[str, Scores](), dict[str, VolumeDice](), list[Tensor](), list[Tensor]()
    for name, part in zip(names, examples, strict=True):
        tally, progress = Tally(part, all_scores=True, abstains=True), phases(name)
        matrices, unlabelled = [], 0
        for done, example in enumerate(map(part.__getitem__, range(len(part))), start=1):
            labels_there = _label_map(part, example)
            unlabelled += int(((labels_there == VOID) & (example.mask != VOID)).sum())
            tally.add(example, labels_there)
            matrices.append(confusion(labels_there, example.mask, len(part.labels), VOID, abstains=True))
            if part is examples[0] and part.dims == 2:
                thumbnails.append(_thumbnail(example.mask, len(part.labels)))
            progress(done, len(part))
        scores[name] = tally.scores()
        confusions.append(torch.stack(matrices))
        if tally.dice is not None:
            dice[name] = tally.dice
        if unlabelled:
            share = unlabelled / int(confusions[-1].sum())
            notes.append(f"{name}: {share:.1%} of the labelled pixels have no label there, and count as wrong.")
    gain = dice_gain = None
    if len(examples) == 2:
        runs = _frames_of_videos([files.stem for files in examples[0].files], thumbnails) if thumbnails else []
        gain = measure_gain(confusions[0], confusions[1], examples[0].labels.names, runs=runs)
        dice_gain = measure_dice_gain(dice[names[0]], dice[names[1]]) if dice else None
    return PredictionScores(scores, gain, dice, dice_gain, tuple(notes))


def _label_map(examples: Examples, example: Example) -> Tensor:
    """The label of each pixel (*S), VOID where a label map has none."""
    labels = example.log_p.argmax(0)
    kind = next(kind for kind, stems in examples.kinds.items() if example.stem in stems)
    if not kind.startswith(LABEL_MAP):
        return labels
    unlabelled = example.log_p.amax(0) == example.log_p.amin(0)  # a label that is there is more probable than others
    return labels.masked_fill(unlabelled, VOID) if len(examples.labels) > 1 else labels


def _thumbnail(mask: Tensor, labels: int) -> Tensor:
    """What is compared of a mask (H, W): the share of each label in each of a few cells."""
    maps = functional.one_hot(mask.long().where(mask != VOID, labels), labels + 1)[..., :labels].permute(2, 0, 1)
    return functional.adaptive_avg_pool2d(maps.float(), THUMBNAIL_SIDE).flatten()


def _frames_of_videos(stems: Sequence[str], thumbnails: Sequence[Tensor]) -> list[list[int]]:
    """The indices of the frames of each video. What all masks have in common, as in streets, is no resemblance."""
    usual = torch.stack(list(thumbnails)).mean(0)
    unusual = [thumbnail - usual for thumbnail in thumbnails]
    return list(find_videos(stems, unusual, MIN_RESEMBLANCE_OF_MASKS).values())


def _open(matched: list[list[MatchedFiles]], masks: Path, labels: int | None) -> list[Examples]:
    """The examples of each folder, all with the same labels."""
    opened = [open_examples(files, masks, labels) for files in matched]
    most = max(len(examples.labels) for examples in opened)
    if all(len(examples.labels) == most for examples in opened):
        return opened
    return [open_examples(files, masks, most) for files in matched]  # a label map need not show the last labels
