"""Learning an MRF for a network's saved predictions: the paper's stages 2 and 3 with the network left as it is.

    report = fit("predictions", "images", "masks", FitSettings())
    save_mrf(report, "mrf")

Stage 2 learns the triple penalty with the label contexts out of the way (o14 = t), stage 3 the label contexts with the
triple penalty fixed, so that t is computed once per image. Both are judged by cross-validation: every image is scored
by an MRF that never saw it, and what is kept is the stage that scores best, or nothing where neither gains.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from deepmrf import checkpoint
from deepmrf.data.dataset import lookup_table
from deepmrf.data.files import VOID, DataError, read_image, read_mask
from deepmrf.data.folder import read_labels
from deepmrf.data.labels import LabelSet, distinct_colours
from deepmrf.layers import MeanField
from deepmrf.layers.triple_penalty import Kernel
from deepmrf.metrics import Scores, SegmentationMetrics
from deepmrf.predictions import Folder, Trio, check_size, count_labels, match, read_with_kind

CONFIG, WEIGHTS, FORMAT = "config.json", "model.safetensors", 1
MARGIN = 5e-4
"""A stage must raise the mIoU by this much over what it builds on: less is chance, and costs time."""
MEMORY = 4 << 30
"""Bytes of predictions and images that are kept in memory; what is beyond is read again when needed."""

Progress = Callable[[str, int, int], None]
"""Told (what is being done, done, in all)."""
Part = Literal["nothing", "triple penalty", "label contexts"]


@dataclass(frozen=True)
class FitSettings:
    """How an MRF is learned. The defaults take minutes for a hundred images on two cores."""

    window: int = 21
    """Of the triple penalty, in pixels."""
    kernel: Kernel = "gaussian"
    contexts: int = 3
    """Patterns per label; 0 learns the triple penalty alone."""
    context_size: int = 7
    folds: int = 3
    crop: int = 128
    """Side of the square crops that are learned from."""
    batch: int = 2
    penalty_steps: int = 60
    contexts_steps: int = 120
    penalty_rate: float = 0.15
    contexts_rate: float = 5e-3
    labels: int | None = None
    """How many there are, where neither labels.json nor the predictions tell."""
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        least = {"window": 2, "contexts": 0, "context_size": 1, "folds": 2, "crop": 16, "batch": 1}
        for name, bound in {**least, "penalty_steps": 1, "contexts_steps": 1}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < bound:
                raise ValueError(f"{name}={value!r} must be a whole number, at least {bound}.")
        for name in ("penalty_rate", "contexts_rate"):
            if not 0 < getattr(self, name) < 10:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0 and below 10.")
        if self.kernel not in ("gaussian", "distance"):
            raise ValueError(f"kernel={self.kernel!r} is not for images of any size: choose 'gaussian' or 'distance'.")

    def build(self, labels: int, contexts: int) -> MeanField:
        """An MRF that still returns its input."""
        gaussian = self.kernel == "gaussian"
        return MeanField(
            labels,
            window=self.window,
            kernel=self.kernel,
            gate=not gaussian,
            smoothness=gaussian,
            normalize=gaussian,
            contexts=contexts,
            context_size=self.context_size,
        )


@dataclass(frozen=True)
class Fold:
    """The scores of images that were held out."""

    held_out: tuple[str, ...]
    scores: dict[Part, Scores]
    """"nothing" is the network as it came."""


@dataclass(frozen=True)
class FitReport:
    """A fitted MRF and what cross-validation says of it."""

    mean_field: MeanField
    """Learned from all images."""
    kept: Part
    """How far it goes; "nothing" returns the predictions as they are."""
    labels: LabelSet
    scores: dict[Part, Scores]
    """Over all images, each scored by an MRF that had not seen it."""
    folds: tuple[Fold, ...]
    settings: FitSettings
    kind: str
    """What the predictions were taken for."""
    notes: tuple[str, ...] = field(default=())
    """Files that were left out, a sentence each."""

    @property
    def before(self) -> Scores:
        """The network as it came."""
        return self.scores["nothing"]

    @property
    def after(self) -> Scores:
        """What was kept."""
        return self.scores[self.kept]

    @property
    def verdict(self) -> str:
        """What came of it, in a sentence."""
        before = self.before
        count = f"{before.images} images, each held out once"
        if self.kept == "nothing":
            tried = ", ".join(f"{part} {100 * s.miou:.2f}" for part, s in self.scores.items() if part != "nothing")
            return (
                f"No gain: mIoU is {100 * before.miou:.2f} without and no better with an MRF ({tried}; {count}), "
                "so what is saved returns the predictions unchanged."
            )
        change = f"mIoU {100 * before.miou:.2f} to {100 * self.after.miou:.2f}"
        accuracy = f"pixel accuracy {100 * before.pixel_accuracy:.2f} to {100 * self.after.pixel_accuracy:.2f}"
        contexts = self.scores.get("label contexts")
        without = ""
        if self.kept == "triple penalty" and contexts is not None:
            without = f"; label contexts gave {100 * contexts.miou:.2f} and were left out"
        return f"{change}, {accuracy} ({count}){without}."

    def to_dict(self) -> dict[str, Any]:
        """The measurements, for JSON."""
        return {
            "kept": self.kept,
            "cross_validation": {part: scores.to_dict() for part, scores in self.scores.items()},
            "folds": [
                {"held_out": list(f.held_out), "scores": {part: s.to_dict() for part, s in f.scores.items()}}
                for f in self.folds
            ],
        }


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


def save_mrf(report: FitReport, folder: Folder) -> Path:
    """Write config.json (settings, labels, scores) and model.safetensors."""
    top = Path(folder)
    top.mkdir(parents=True, exist_ok=True)
    config = {
        "format": FORMAT,
        "mean_field": report.mean_field.settings,
        "labels": report.labels.to_dict(),
        "metrics": report.to_dict(),
        "settings": asdict(report.settings),
    }
    checkpoint.write(top / WEIGHTS, dict(report.mean_field.state_dict()), {"format": FORMAT})
    checkpoint.write_text(top / CONFIG, json.dumps(config, indent=1) + "\n")
    return top


def load_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json that `save_mrf` wrote, checked."""
    path = Path(folder) / CONFIG
    if not path.is_file() or not (Path(folder) / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG} and {WEIGHTS}; give a folder written by deepmrf fit.")
    try:
        config = json.loads(path.read_text())
        known = isinstance(config, dict) and config.get("mean_field") and "unary" not in config
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"{path} does not describe an MRF alone; give a folder written by deepmrf fit.")
    if config.get("format", 0) > FORMAT:
        raise ValueError(f"{path} has format {config['format']}, newer than this deepmrf reads: upgrade it.")
    found: dict[str, Any] = config
    return found


def load_mrf(folder: str | os.PathLike[str]) -> MeanField:
    """The MRF that `save_mrf` wrote."""
    mrf = MeanField(**load_config(folder)["mean_field"])
    mrf.load_state_dict(load_file(Path(folder) / WEIGHTS))
    return mrf.eval().requires_grad_(False)
