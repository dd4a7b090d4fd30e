"""Learning an MRF for a network's saved predictions: the paper's stages 2 and 3 with the network left as it is.

    report = fit("predictions", "images", "masks", FitSettings())
    save_mrf(report, "mrf")

Stage 2 learns the triple penalty with the label contexts out of the way (o14 = t), stage 3 the label contexts with the
triple penalty fixed, so that t is computed once per image. Both are judged by cross-validation: every image is scored
by an MRF that never saw it, and what is kept is the stage that scores best, or nothing where neither gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from deepmrf.data.dataset import lookup_table
from deepmrf.data.files import VOID, DataError, read_image, read_mask
from deepmrf.data.folder import read_labels
from deepmrf.data.labels import LabelSet, distinct_colours
from deepmrf.fitted import FitReport, FitSettings, Fold, Part, load_config, load_mrf, save_mrf
from deepmrf.layers import MeanField
from deepmrf.metrics import Scores, SegmentationMetrics
from deepmrf.predictions import Folder, Trio, check_size, count_labels, match, read_with_kind

__all__ = ["FitReport", "FitSettings", "Fold", "Part", "fit", "load_config", "load_mrf", "save_mrf"]

MARGIN = 5e-4
"""A stage must raise the mIoU by this much over what it builds on: less is chance, and costs time."""
MEMORY = 4 << 30
"""Bytes of predictions and images that are kept in memory; what is beyond is read again when needed."""

Progress = Callable[[str, int, int], None]
"""Told (what is being done, done, in all)."""


@dataclass(frozen=True)
class Sample:
    """One image: log_p (L, H, W) of float16, image (3, H, W) and mask (H, W) of uint8."""

    stem: str
    log_p: Tensor
    image: Tensor
    mask: Tensor


class Samples(Sequence[Sample]):
    """The images to learn from, kept in memory as far as they fit."""

    def __init__(self, trios: Sequence[Trio], labels: LabelSet, lookup: Any, colours: Any) -> None:
        self.trios, self.labels, self.lookup, self.colours = list(trios), labels, lookup, colours
        self.kept: dict[str, Sample] = {}
        self.room, self.kind = MEMORY, ""

    def __len__(self) -> int:
        return len(self.trios)

    def __getitem__(self, index: Any) -> Any:
        trio = self.trios[index]
        return self.kept.get(trio.stem) or self._read(trio)

    def _read(self, trio: Trio) -> Sample:
        image = read_image(trio.image)
        assert trio.mask is not None  # match() was given the masks
        mask = read_mask(trio.mask, self.lookup, self.colours)
        log_p, self.kind = read_with_kind(trio.source, len(self.labels), self.labels.names)
        check_size(log_p, image.shape[:2], trio.source, trio.image)
        if mask.shape != image.shape[:2]:
            sizes = f"{mask.shape[1]} x {mask.shape[0]} pixels but its image {image.shape[1]} x {image.shape[0]}"
            raise DataError(f"{trio.mask} is {sizes}; make the mask as large as the image.", trio.mask, "size")
        chw = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        return Sample(trio.stem, log_p.half(), chw, torch.from_numpy(mask))

    def check(self, progress: Progress) -> list[str]:
        """Read every image once; one that is all void teaches nothing and is left out. Returns sentences on these."""
        empty = []
        for done, trio in enumerate(list(self.trios), start=1):
            sample = self._read(trio)
            if bool((sample.mask == VOID).all()):
                empty.append(trio)
            else:
                self.room -= sum(t.nbytes for t in (sample.log_p, sample.image, sample.mask))
                if self.room >= 0:
                    self.kept[trio.stem] = sample
            progress("reading", done, len(self.trios) + len(empty))
        self.trios = [trio for trio in self.trios if trio not in empty]
        return [f"{len(empty)} of the masks are void throughout: {empty[0].stem} ..."] if empty else []


def fit(
    predictions: Folder,
    images: Folder,
    masks: Folder,
    settings: FitSettings | None = None,
    progress: Progress | None = None,
) -> FitReport:
    """Learn an MRF for the predictions of images with masks, and score it by cross-validation."""
    settings, tell = settings or FitSettings(), progress or (lambda *_: None)
    trios, notes = match(predictions, images, masks)
    samples = _samples(trios, Path(masks), settings)
    notes += samples.check(tell)
    if len(samples) < 2:
        raise ValueError(
            f"There are {len(samples)} images with predictions and masks; cross-validation needs 2 or more."
        )
    names, labels = [trio.stem for trio in samples.trios], len(samples.labels)
    pooled = {part: _metrics(samples.labels) for part in parts(settings)}
    folds = []
    held = split(len(samples), settings.folds, settings.seed)
    for number, held_out in enumerate(held):
        what = f"fold {number + 1} of {len(held)}"
        others = [index for index in range(len(samples)) if index not in held_out]
        models = learn(samples, others, settings, lambda words, *n, what=what: tell(f"{what}: {words}", *n))
        scores = _score(models, samples, held_out, pooled, lambda *n, what=what: tell(f"{what}: scoring", *n))
        folds.append(Fold(tuple(names[index] for index in held_out), scores))
    found: dict[Part, Scores] = {part: metrics.compute() for part, metrics in pooled.items()}
    kept = choose(found)
    models = {} if kept == "nothing" else learn(samples, range(len(samples)), settings, tell, kept)
    mean_field = models.get(kept, settings.build(labels, 0)).cpu().eval().requires_grad_(False)
    return FitReport(mean_field, kept, samples.labels, found, tuple(folds), settings, samples.kind, tuple(notes))


def _samples(trios: list[Trio], masks: Path, settings: FitSettings) -> Samples:
    """With the labels that labels.json describes (beside the masks or among them), or else the predictions show."""
    for top in (masks, masks.parent):
        if (top / "labels.json").is_file():
            labels, lookup, colours = read_labels(top)
            return Samples(trios, labels, lookup, colours)
    count = settings.labels or count_labels(trio.source for trio in trios)
    labels = LabelSet(tuple(f"label {label}" for label in range(count)), distinct_colours(count))
    return Samples(trios, labels, lookup_table({label: label for label in range(count)}), None)


def parts(settings: FitSettings) -> tuple[Part, ...]:
    """What is compared, each building on the one before."""
    return ("nothing", "triple penalty", "label contexts") if settings.contexts else ("nothing", "triple penalty")


def split(count: int, folds: int, seed: int) -> list[list[int]]:
    """Every index once, in shuffled folds whose sizes differ by one at most."""
    order = np.random.default_rng([seed, 0]).permutation(count).tolist()
    return [sorted(order[start::folds]) for start in range(min(folds, count))]


def choose(scores: dict[Part, Scores]) -> Part:
    """The simplest part that none beats by more than chance."""
    kept: Part = "nothing"
    for part, found in scores.items():
        if found.miou > scores[kept].miou + (0 if part == kept else MARGIN):
            kept = part
    return kept


def learn(
    samples: Samples, indices: Sequence[int], settings: FitSettings, tell: Progress, last: Part = "label contexts"
) -> dict[Part, MeanField]:
    """The MRF after each stage up to `last`, learned from these images alone."""
    labels = len(samples.labels)
    penalty = settings.build(labels, 0).to(settings.device)  # o14 = t, and scale 0: at first nothing
    trust = nn.Parameter(torch.zeros((), device=settings.device))
    _learn_penalty(penalty, trust, samples, indices, settings, lambda *n: tell("triple penalty", *n))
    made: dict[Part, MeanField] = {"triple penalty": penalty}
    if settings.contexts and last == "label contexts":
        whole = settings.build(labels, settings.contexts).to(settings.device)
        whole.triple_penalty.load_state_dict(penalty.triple_penalty.state_dict())
        _learn_contexts(whole, trust, samples, indices, settings, lambda *n: tell("label contexts", *n))
        made["label contexts"] = whole
    return made


def _learn_penalty(
    mrf: MeanField,
    trust: nn.Parameter,
    samples: Samples,
    indices: Sequence[int],
    settings: FitSettings,
    tell: Callable[[int, int], None],
) -> None:
    def loss(random: np.random.Generator) -> Tensor:
        batch = [_crop(samples[int(i)], settings.crop, random) for i in _draw(indices, settings.batch, random)]
        log_p, image, mask = (torch.stack(part).to(settings.device) for part in zip(*batch, strict=True))
        return _loss(mrf(log_p.float(), image), trust, mask)

    _descend(mrf.triple_penalty, trust, loss, settings.penalty_steps, settings.penalty_rate, settings.seed, tell)


def _learn_contexts(
    mrf: MeanField,
    trust: nn.Parameter,
    samples: Samples,
    indices: Sequence[int],
    settings: FitSettings,
    tell: Callable[[int, int], None],
) -> None:
    contexts, room = mrf.label_contexts, MEMORY
    assert contexts is not None  # settings.contexts is not 0
    contexts.set_compatibility(torch.eye(contexts.labels))  # o14 = t, what stage 2 ended with
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():  # tell the K patterns apart
        noise = torch.randn(contexts.weight.shape, generator=generator) * 1e-2 / contexts.weight[0, 0].numel()
        contexts.weight.add_(noise.to(contexts.weight))
    known: dict[int, Tensor] = {}

    def penalty(index: int) -> Tensor:
        nonlocal room
        if index in known:
            return known[index]
        sample = samples[index]
        with torch.no_grad():
            log_p = sample.log_p[None].float().to(settings.device)
            t: Tensor = mrf.triple_penalty(log_p.softmax(1), sample.image[None].to(settings.device))[0].half().cpu()
        room -= t.nbytes
        if room >= 0:
            known[index] = t
        return t

    def loss(random: np.random.Generator) -> Tensor:
        chosen = [int(i) for i in _draw(indices, settings.batch, random)]
        batch = [_crop(samples[i], settings.crop, random, penalty(i)) for i in chosen]
        log_p, _, mask, t = (torch.stack(part).to(settings.device) for part in zip(*batch, strict=True))
        return _loss(log_p.float() - contexts(t.float()), trust, mask)  # b13 to b15

    _descend(contexts, trust, loss, settings.contexts_steps, settings.contexts_rate, settings.seed + 1, tell)


def _loss(scores: Tensor, trust: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy of softmax(e^trust scores).

    `trust` changes no label and is not kept. It is learned along, since the MRF of an overconfident network would
    otherwise learn to doubt it (a penalty on whatever is predicted) instead of to correct it.
    """
    return functional.cross_entropy(trust.exp() * scores, mask.long(), ignore_index=VOID)


def _draw(indices: Sequence[int], count: int, random: np.random.Generator) -> Any:
    return random.choice(np.asarray(indices), count, replace=len(indices) < count)


def _crop(sample: Sample, side: int, random: np.random.Generator, *more: Tensor) -> tuple[Tensor, ...]:
    """The same square, perhaps mirrored, of log_p, image, mask and `more`; beyond the image is void."""
    height, width = sample.mask.shape
    top, left = (int(random.integers(max(n - side, 0) + 1)) for n in (height, width))
    cut = [m[..., top : top + side, left : left + side] for m in (sample.log_p, sample.image, sample.mask, *more)]
    border = (0, max(side - width, 0), 0, max(side - height, 0))
    if any(border):
        values = (0, 0, VOID, *[0] * len(more))
        cut = [functional.pad(m, border, value=v) for m, v in zip(cut, values, strict=True)]
    return tuple(m.flip(-1) for m in cut) if random.random() < 0.5 else tuple(cut)


def _descend(
    module: nn.Module,
    trust: nn.Parameter,
    loss: Callable[[np.random.Generator], Tensor],
    steps: int,
    rate: float,
    seed: int,
    tell: Callable[[int, int], None],
) -> None:
    """Adam with the rate going down to nothing along half a cosine."""
    module.requires_grad_(True)
    optimiser = torch.optim.Adam([*module.parameters(), trust], lr=rate)
    random = np.random.default_rng([seed, 1])
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        value = loss(random)
        if bool(value.isfinite()):  # a batch of void alone has no loss
            optimiser.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        tell(step + 1, steps)
    module.requires_grad_(False)


def _metrics(labels: LabelSet) -> SegmentationMetrics:
    return SegmentationMetrics(len(labels), VOID, labels.names)


@torch.no_grad()
def _score(
    models: dict[Part, MeanField],
    samples: Samples,
    indices: Sequence[int],
    pooled: dict[Part, SegmentationMetrics],
    tell: Callable[[int, int], None],
) -> dict[Part, Scores]:
    """The scores of each part on these images, which are added to `pooled` too."""
    mine: dict[Part, SegmentationMetrics] = {part: _metrics(samples.labels) for part in pooled}
    for done, index in enumerate(indices, start=1):
        sample: Sample = samples[index]
        mask = sample.mask.long()
        for part in pooled:
            log_q = sample.log_p[None].float()
            if part != "nothing":
                device = models[part].triple_penalty.scale.device
                log_q = models[part](log_q.to(device), sample.image[None].to(device)).cpu()
            for metrics in (mine[part], pooled[part]):
                metrics.update(log_q[0].argmax(0), mask)
        tell(done, len(indices))
    return {part: metrics.compute() for part, metrics in mine.items()}
