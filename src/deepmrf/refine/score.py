"""Score saved predictions against masks: how good is a folder, and what does a second one add?

    report = score(["predictions", "refined"], "masks")
    report.scores["refined"].miou, report.gain.miou.low

Scored are the images that all folders predict and that have a mask. Masks stand for the images themselves, which say
nothing more here: predictions need only have their size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deepmrf.data.dataset import need_folder
from deepmrf.data.files import VOID
from deepmrf.data.progress import Phases, no_phases
from deepmrf.evaluation.intervals import Gain, measure_gain
from deepmrf.evaluation.metrics import Scores, confusion
from deepmrf.refine.examples import Examples, open_examples
from deepmrf.refine.matching import MatchedFiles, match_files
from deepmrf.refine.predictions import Folder
from deepmrf.refine.tally import Tally


@dataclass(frozen=True)
class PredictionScores:
    """The scores of folders of predictions on the same images."""

    scores: dict[str, Scores]
    """By folder."""
    gain: Gain | None
    """What the second of two folders adds to the first; None for volumes, and for other numbers of folders."""
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
        pairs, missing = match_files(folder, masks)
        matched.append([replace(files, mask=files.image) for files in pairs])
        notes += [f"{name}: {note}" for note in missing]
    stems = set.intersection(*[{files.stem for files in folder} for folder in matched])
    if not stems:
        raise FileNotFoundError(f"No mask has a prediction in each of {', '.join(names)}: give them equal names.")
    examples = _open([[files for files in folder if files.stem in stems] for folder in matched], Path(masks), labels)
    scores, confusions = dict[str, Scores](), list[torch.Tensor]()
    for name, part in zip(names, examples, strict=True):
        tally, progress = Tally(part, all_scores=True), phases(name)
        matrices = []
        for done, example in enumerate(map(part.__getitem__, range(len(part))), start=1):
            map_of_labels = example.log_p.argmax(0)
            tally.add(example, map_of_labels)
            matrices.append(confusion(map_of_labels, example.mask, len(part.labels), VOID))
            progress(done, len(part))
        scores[name] = tally.scores()
        confusions.append(torch.stack(matrices))
    gain = None
    if len(examples) == 2 and examples[0].dims == 2:
        before, after = confusions
        gain = measure_gain(before, after, examples[0].labels.names)
    return PredictionScores(scores, gain, tuple(notes))


def _open(matched: list[list[MatchedFiles]], masks: Path, labels: int | None) -> list[Examples]:
    """The examples of each folder, all with the same labels."""
    opened = [open_examples(files, masks, labels) for files in matched]
    most = max(len(examples.labels) for examples in opened)
    if all(len(examples.labels) == most for examples in opened):
        return opened
    return [open_examples(files, masks, most) for files in matched]  # a label map need not show the last labels
