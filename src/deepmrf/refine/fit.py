"""Fit an MRF to a network's saved predictions: the paper's stages 2 and 3 with the network left as it is.

    report = fit("predictions", "images", "masks")
    report.save("mrf")

Cross-validation chooses kernel, gate, label scaling and the number of steps (search.py), and judges each stage: every
image is scored by an MRF that never saw it, nor any image of the same group (folds.py). The result is the stage that
scores best, learned from all images, or an MRF that changes nothing where no stage gains.

Where the images are NIfTI volumes, the MRF is 3-D, with their spacing and with intensity as its one feature, and the
mean Dice of the foreground decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deepmrf.data.progress import Phases, no_phases
from deepmrf.layers import MeanField
from deepmrf.predict.segmenter import chosen_device
from deepmrf.refine.apply import refine_image
from deepmrf.refine.examples import Examples, open_examples
from deepmrf.refine.folds import groups_by_name, groups_by_video, split, thumbnail
from deepmrf.refine.learn import FitStage, Learner
from deepmrf.refine.matching import count_dims, match_files
from deepmrf.refine.predictions import Folder
from deepmrf.refine.report import FitReport, Fold
from deepmrf.refine.search import MIN_GAIN, Search, SearchResult
from deepmrf.refine.settings import VOLUME_SETTINGS, Choice, FitSettings
from deepmrf.refine.tally import Tally, merged

MIN_AGREEMENT = 0.01
"""Predictions whose agreement with the masks (Cohen's kappa) is below this say nothing about the images."""

Tallies = dict[FitStage, Tally]


def fit(
    predictions: Folder,
    images: Folder,
    masks: Folder,
    settings: FitSettings | None = None,
    phases: Phases = no_phases,
    clock: Callable[[], float] = time.monotonic,
) -> FitReport:
    """Learn an MRF for predictions with masks, scored by cross-validation; clock: seconds, for settings.minutes."""
    start = clock()
    settings = settings or default_settings(images)
    chosen_device(settings.device)
    matched, notes = match_files(predictions, images, masks)
    examples = open_examples(matched, Path(masks), settings.labels)
    notes += examples.read_all(phases("reading"))
    if len(examples) < 2:
        count = f"There are {len(examples)} images with predictions and masks to learn from"
        raise ValueError(" ".join([f"{count}; cross-validation needs 2 or more.", *notes]))
    folds = split(_groups(examples, settings, notes), settings.folds, settings.seed)
    search = None
    if _agreement(examples) >= MIN_AGREEMENT:
        search = Search(examples, folds, settings, phases, clock, start).run()
    totals, fold_scores = _score_folds(examples, folds, search, phases)
    values = [{stage: tally.value() for stage, tally in tallies.items()} for tallies in (totals, *fold_scores)]
    stage = best_stage(values[0], values[1:])
    return FitReport(
        _final(examples, settings, search, stage, phases),
        stage,
        examples.labels,
        {stage: tally.scores() for stage, tally in totals.items()},
        tuple(
            Fold(tuple(examples.files[index].stem for index in held_out), {s: t.scores() for s, t in tallies.items()})
            for held_out, tallies in zip(folds, fold_scores, strict=True)
        ),
        settings,
        examples.kind,
        tuple(notes),
        {stage: tally.dice for stage, tally in totals.items() if tally.dice is not None},
        examples.label_ids,
        search,
    )


def default_settings(images: Folder) -> FitSettings:
    """The settings for pictures, or those for volumes where the folder holds NIfTI files."""
    return VOLUME_SETTINGS if count_dims(images) == 3 else FitSettings()


def best_stage(values: dict[FitStage, float], folds: Sequence[dict[FitStage, float]] = ()) -> FitStage:
    """The simplest stage that none beats by more than chance, in total and in most of the folds."""
    best: FitStage = "nothing"
    for stage, value in values.items():
        better = sum(fold[stage] > fold[best] for fold in folds)
        if stage != best and value > values[best] + MIN_GAIN and (not folds or 2 * better > len(folds)):
            best = stage
    return best


def _groups(examples: Examples, settings: FitSettings, notes: list[str]) -> list[str]:
    """The group of each example; a note on them is added to `notes`."""
    stems = [files.stem for files in examples.files]
    if settings.groups is not None:
        groups = groups_by_name(stems, settings.groups)
        notes.append(f"The names show {len(set(groups))} groups: images of one group are held out together.")
        return groups
    if examples.dims == 3:
        return stems
    groups, note = groups_by_video(stems, [thumbnail(examples[i].image) for i in range(len(stems))], settings.folds)
    notes += [note] if note else []
    return groups


def _agreement(examples: Examples) -> float:
    """How far predictions and masks agree beyond chance."""
    tally = Tally(examples)
    for index in range(len(examples)):
        tally.add(examples[index], examples[index].log_p.argmax(0))
    return tally.agreement()


def _score_folds(
    examples: Examples, folds: Sequence[Sequence[int]], search: SearchResult | None, phases: Phases
) -> tuple[Tallies, list[Tallies]]:
    """The scores of each stage on held-out images, in total and fold by fold."""
    stages: list[FitStage] = ["nothing", *(search.models[0] if search else ())]
    in_folds = []
    for number, held_out in enumerate(folds):
        tallies = {stage: Tally(examples, all_scores=True) for stage in stages}
        progress = phases(f"scoring fold {number + 1} of {len(folds)}")
        for done, index in enumerate(held_out, start=1):
            example = examples[index]
            for stage in stages:
                labels = example.log_p.float().argmax(0)
                if search is not None and stage != "nothing":
                    mrf = search.models[number][stage]
                    labels = refine_image(mrf, example.log_p, example.image, example.spacing)[0].long()
                tallies[stage].add(example, labels)
            progress(done, len(held_out))
        in_folds.append(tallies)
    return {stage: merged([tallies[stage] for tallies in in_folds]) for stage in stages}, in_folds


def _final(
    examples: Examples, settings: FitSettings, search: SearchResult | None, stage: FitStage, phases: Phases
) -> MeanField:
    """The MRF of a stage, learned from all images.

    Steps grow with the images: those that cross-validation chose were steps on all images but one fold.
    """
    if search is None or stage == "nothing":
        return settings.build(len(examples.labels), 0, examples.spacing, Choice()).eval().requires_grad_(False)
    learner = Learner(examples, range(len(examples)), settings, search.choice, phases("all images: triple penalty"))
    if stage == "label contexts":
        folds = len(search.models)
        steps = settings.contexts_steps or round(search.steps * folds / (folds - 1))
        learner.learn_contexts(steps, phases("all images: label contexts"))
    return learner.models()[stage].cpu()
