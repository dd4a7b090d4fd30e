"""Learning an MRF for a network's saved predictions: the paper's stages 2 and 3 with the network left as it is.

    report = fit("predictions", "images", "masks", FitSettings())
    save_mrf(report, "mrf")

Stage 2 learns the triple penalty with the label contexts out of the way (o14 = t), stage 3 the label contexts with the
triple penalty fixed, so that t is computed once per image. Both are judged by cross-validation: every image is scored
by an MRF that never saw it, and what is kept is the stage that scores best, or nothing where neither gains.

Where the images are NIfTI volumes, the MRF is 3-D, with their spacing and with intensity as its one feature, and what
is kept is judged by the mean Dice of the foreground.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.data.files import VOID
from deepmrf.data.progress import Phases, Progress, no_phases
from deepmrf.data.volumes import Spacing
from deepmrf.evaluation.dice import Dice, VolumeMetrics, dice, mean, soft_dice
from deepmrf.evaluation.metrics import Scores, SegmentationMetrics
from deepmrf.layers import MeanField
from deepmrf.predict.devices import chosen_device
from deepmrf.predict.tiles import in_tiles, spaced
from deepmrf.refine.examples import MEMORY, Sample, Samples, open_samples
from deepmrf.refine.folder import (
    VOLUMES,
    FitReport,
    FitSettings,
    Fold,
    Part,
    folder_for_mrf,
    load_coding,
    load_config,
    load_mrf,
    save_mrf,
)
from deepmrf.refine.predictions import Folder, Trio, dims_of, match
from deepmrf.training.mean_field import Trust, minimise, penalty_map, start_contexts

__all__ = [
    "FitReport",
    "FitSettings",
    "Fold",
    "Part",
    "default_settings",
    "fit",
    "folder_for_mrf",
    "learn",
    "load_coding",
    "load_config",
    "load_mrf",
    "save_mrf",
]

MARGIN = 5e-4
"""A stage must raise the mIoU (of volumes, the Dice) by this much over what it builds on: less is chance."""

Metrics = SegmentationMetrics | VolumeMetrics


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
    trios, notes = match(predictions, images, masks)
    samples = _samples(trios, Path(masks), settings)
    notes += samples.check(phases("reading"))
    if len(samples) < 2:
        few = f"There are {len(samples)} images with predictions and masks to learn from"
        raise ValueError(" ".join([f"{few}; cross-validation needs 2 or more.", *notes]))
    names, labels = [trio.stem for trio in samples.trios], len(samples.labels)
    pooled = {part: _metrics(samples) for part in parts(settings)}
    dices: dict[Part, Dice] = {part: {} for part in pooled} if samples.dims == 3 else {}
    folds = []
    held = split(len(samples), settings.folds, settings.seed)
    for number, held_out in enumerate(held):
        what = f"fold {number + 1} of {len(held)}"
        others = [index for index in range(len(samples)) if index not in held_out]
        models = learn(samples, others, settings, _within(phases, what))
        scores = _score(models, samples, held_out, pooled, dices, phases(f"{what}: scoring"))
        folds.append(Fold(tuple(names[index] for index in held_out), scores))
    found: dict[Part, Scores] = {part: metrics.compute() for part, metrics in pooled.items()}
    kept = choose(found, dices)
    models = {} if kept == "nothing" else learn(samples, range(len(samples)), settings, phases, kept)
    mean_field = models.get(kept, settings.build(labels, 0, samples.spacing)).cpu().eval().requires_grad_(False)
    return FitReport(
        mean_field,
        kept,
        samples.labels,
        found,
        tuple(folds),
        settings,
        samples.kind,
        tuple(notes),
        dices,
        samples.coding,
    )


def _within(phases: Phases, fold: str) -> Phases:
    """Phases whose names begin with the fold's."""
    return lambda name: phases(f"{fold}: {name}")


def default_settings(images: Folder) -> FitSettings:
    """Those for pictures, or those for volumes where the folder holds NIfTI files."""
    return VOLUMES if dims_of(images) == 3 else FitSettings()


def _samples(trios: list[Trio], masks: Path, settings: FitSettings) -> Samples:
    return open_samples(trios, masks, settings.labels)


def parts(settings: FitSettings) -> tuple[Part, ...]:
    """What is compared, each building on the one before."""
    return ("nothing", "triple penalty", "label contexts") if settings.contexts else ("nothing", "triple penalty")


def split(count: int, folds: int, seed: int) -> list[list[int]]:
    """Every index once, in shuffled folds whose sizes differ by one at most."""
    order = np.random.default_rng([seed, 0]).permutation(count).tolist()
    return [sorted(order[start::folds]) for start in range(min(folds, count))]


def choose(scores: dict[Part, Scores], dices: dict[Part, Dice] | None = None) -> Part:
    """The simplest part that none beats by more than chance: in mIoU, or in Dice where it is given."""
    values = {part: mean(dices[part]) if dices else found.miou for part, found in scores.items()}
    kept: Part = "nothing"
    for part, value in values.items():
        if value > values[kept] + (0 if part == kept else MARGIN):
            kept = part
    return kept


def learn(
    samples: Samples, indices: Sequence[int], settings: FitSettings, phases: Phases, last: Part = "label contexts"
) -> dict[Part, MeanField]:
    """The MRF after each stage up to `last`, learned from these images alone."""
    labels = len(samples.labels)
    # o14 = t, and scale 0: at first nothing
    penalty = settings.build(labels, 0, samples.spacing).to(settings.device)
    trust = Trust().to(settings.device)
    _learn_penalty(penalty, trust, samples, indices, settings, phases("triple penalty"))
    made: dict[Part, MeanField] = {"triple penalty": penalty}
    if settings.contexts and last == "label contexts":
        whole = settings.build(labels, settings.contexts, samples.spacing).to(settings.device)
        whole.triple_penalty.load_state_dict(penalty.triple_penalty.state_dict())
        _learn_contexts(whole, trust, samples, indices, settings, phases("label contexts"))
        made["label contexts"] = whole
    return made


def _learn_penalty(
    mrf: MeanField,
    trust: Trust,
    samples: Samples,
    indices: Sequence[int],
    settings: FitSettings,
    progress: Progress,
) -> None:
    size, random = samples.crop(settings.crop), np.random.default_rng([settings.seed, 1])

    def loss() -> Tensor:
        chosen = [samples[int(i)] for i in _draw(indices, settings.batch, random)]
        batch = [_crop(sample, size, random) for sample in chosen]
        log_p, image, mask = (torch.stack(part).to(settings.device) for part in zip(*batch, strict=True))
        return _loss(_through(mrf, log_p.float(), image, [sample.spacing for sample in chosen]), trust, mask)

    minimise([mrf.triple_penalty, trust], loss, settings.penalty_steps, settings.penalty_rate, progress)


def _learn_contexts(
    mrf: MeanField,
    trust: Trust,
    samples: Samples,
    indices: Sequence[int],
    settings: FitSettings,
    progress: Progress,
) -> None:
    contexts, room = mrf.label_contexts, MEMORY
    assert contexts is not None  # settings.contexts is not 0
    if samples.dims == 2:
        contexts.set_compatibility(torch.eye(contexts.labels))  # o14 = t, what stage 2 ended with
    else:
        # The same o14, but with t of order one: where stage 2 found little use for it, a tiny t would teach stage 3
        # nothing.
        contexts.set_compatibility(mrf.triple_penalty.scale * torch.eye(contexts.labels, device=settings.device))
        with torch.no_grad():
            mrf.triple_penalty.scale.fill_(1)
    start_contexts(contexts, settings.seed)
    known: dict[int, Tensor] = {}
    size, random = samples.crop(settings.crop), np.random.default_rng([settings.seed + 1, 1])

    def penalty(index: int) -> Tensor:
        nonlocal room
        if index in known:
            return known[index]
        sample = samples[index]
        with spaced(mrf, sample.spacing):
            t = penalty_map(mrf, sample.log_p, sample.image)
        room -= t.nbytes
        if room >= 0:
            known[index] = t
        return t

    def loss() -> Tensor:
        chosen = [int(i) for i in _draw(indices, settings.batch, random)]
        batch = [_crop(samples[i], size, random, penalty(i)) for i in chosen]
        log_p, _, mask, t = (torch.stack(part).to(settings.device) for part in zip(*batch, strict=True))
        return _loss(log_p.float() - contexts(t.float()), trust, mask)  # b13 to b15

    minimise([contexts, trust], loss, settings.contexts_steps, settings.contexts_rate, progress)


def _through(mrf: MeanField, log_p: Tensor, image: Tensor, spacings: Sequence[Spacing | None]) -> Tensor:
    """The MRF on a batch, of which each may have a spacing of its own."""
    if len(set(spacings)) == 1:
        with spaced(mrf, spacings[0]):
            return mrf(log_p, image)  # type: ignore[no-any-return]
    made = []
    for one, spacing in enumerate(spacings):
        with spaced(mrf, spacing):
            made.append(mrf(log_p[one : one + 1], image[one : one + 1]))
    return torch.cat(made)


def _loss(scores: Tensor, trust: Trust, mask: Tensor) -> Tensor:
    """Cross-entropy; of volumes, which are judged by the Dice of their foreground, its soft form too."""
    sure = trust(scores)
    entropy = functional.cross_entropy(sure, mask.long(), ignore_index=VOID)
    return entropy if scores.dim() == 4 else entropy + 1 - soft_dice(sure.softmax(1), mask)


def _draw(indices: Sequence[int], count: int, random: np.random.Generator) -> Any:
    return random.choice(np.asarray(indices), count, replace=len(indices) < count)


def _crop(sample: Sample, size: Sequence[int], random: np.random.Generator, *more: Tensor) -> tuple[Tensor, ...]:
    """The same part of log_p, image, mask and `more`; beyond the image is void. Images may come mirrored.

    Volumes do not: a body's left and right differ.
    """
    whole = sample.mask.shape
    corner = [int(random.integers(max(n - side, 0) + 1)) for n, side in zip(whole, size, strict=True)]
    if sample.marks is not None and len(sample.marks) and random.random() < 0.5:  # much of a volume is background
        mark = sample.marks[int(random.integers(len(sample.marks)))].tolist()
        corner = [_around(m, n, side, random) for m, n, side in zip(mark, whole, size, strict=True)]
    parts = [slice(start, start + side) for start, side in zip(corner, size, strict=True)]
    place: tuple[EllipsisType | slice, ...] = (..., *parts)
    cut = [m[place] for m in (sample.log_p, sample.image, sample.mask, *more)]
    missing = [max(side - n, 0) for n, side in zip(whole, size, strict=True)]
    border = [pixels for behind in reversed(missing) for pixels in (0, behind)]
    if any(border):
        values = (0, 0, VOID, *[0] * len(more))
        cut = [functional.pad(m, border, value=v) for m, v in zip(cut, values, strict=True)]
    mirrored = sample.mask.dim() == 2 and random.random() < 0.5
    return tuple(m.flip(-1) for m in cut) if mirrored else tuple(cut)


def _around(mark: int, whole: int, side: int, random: np.random.Generator) -> int:
    """Where a crop may begin that holds `mark`."""
    first, last = max(mark - side + 1, 0), max(min(mark, whole - side), 0)
    return int(random.integers(min(first, last), last + 1))


def _labels(mrf: MeanField | None, sample: Sample) -> Tensor:
    """What the MRF says of an image or a volume, as ids; None is for the prediction as it came."""
    if mrf is None:
        return sample.log_p.float().argmax(0)
    if sample.spacing is None:
        device = mrf.triple_penalty.scale.device
        log_q: Tensor = mrf(sample.log_p[None].float().to(device), sample.image[None].to(device)).cpu()
        return log_q[0].argmax(0)
    made = torch.empty(sample.mask.shape, dtype=torch.int64)
    for place, tile in in_tiles(mrf, sample.log_p, sample.image, spacing=sample.spacing):
        made[place] = tile.argmax(0)
    return made


def _metrics(samples: Samples) -> Metrics:
    labels = samples.labels
    if samples.dims == 3:
        return VolumeMetrics(len(labels), labels.names)
    return SegmentationMetrics(len(labels), VOID, labels.names)


@torch.no_grad()
def _score(
    models: dict[Part, MeanField],
    samples: Samples,
    indices: Sequence[int],
    pooled: dict[Part, Metrics],
    dices: dict[Part, Dice],
    progress: Progress,
) -> dict[Part, Scores]:
    """The scores of each part on these images, which are added to `pooled` and `dices` too."""
    mine: dict[Part, Metrics] = {part: _metrics(samples) for part in pooled}
    for done, index in enumerate(indices, start=1):
        sample: Sample = samples[index]
        mask = sample.mask.long()
        for part in pooled:
            found = _labels(models[part] if part != "nothing" else None, sample)
            for metrics in (mine[part], pooled[part]):
                metrics.update(found, mask)
            if dices:
                dices[part][sample.stem] = dice(found, mask, len(samples.labels))
        progress(done, len(indices))
    return {part: metrics.compute() for part, metrics in mine.items()}
