"""Learn an MRF from examples by the paper's stages 2 and 3, on random crops, with the network's output fixed.

Before them, each label gets a factor and a summand (layers/label_scaling.py). Stage 2 of kernel="global" tries numbers
on whole images instead (all_pairs.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.data.files import VOID
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.volumes import Spacing
from deepmrf.evaluation.dice import soft_dice, soft_iou
from deepmrf.layers import MeanField
from deepmrf.predict.tiles import spaced
from deepmrf.refine.all_pairs import choose_all_pairs
from deepmrf.refine.examples import MAX_BYTES_IN_MEMORY, Example, Examples
from deepmrf.refine.settings import Choice, FitSettings
from deepmrf.training.mean_field import Descent, Trust, learn_scaling, minimise, penalty_map, start_contexts
from deepmrf.training.samples import crop_corner, padded

FitStage = Literal["nothing", "label scaling", "triple penalty", "label contexts"]
"""How far an MRF was learned; each stage builds on the one before. "nothing" returns the predictions as they are."""
START_SCALE = 0.3
"""Where the triple penalty's factor starts, so that its widths have a gradient from the first step on."""
FOREGROUND_SHARE = 0.5
"""The share of a volume's crops that are placed on foreground, since most of a volume is background."""


class Learner:
    """Learns one MRF from some of the examples: stage 2 when it is made, stage 3 for as many steps as asked."""

    def __init__(
        self,
        examples: Examples,
        indices: Sequence[int],
        settings: FitSettings,
        choice: Choice,
        progress: Progress = no_progress,
    ) -> None:
        self.examples, self.indices, self.settings = examples, np.asarray(indices), settings
        self.trust = Trust().to(settings.device)
        """What is learned of the network's confidence serves both stages; stage 2 of kernel="global" does without."""
        self.crop_size = examples.crop_size(settings.crop)
        labels = len(examples.labels)
        self.scaling_alone = settings.build(labels, 0, examples.spacing, choice).to(settings.device)
        self._learn_scaling(progress)
        self.penalty_alone = copy.deepcopy(self.scaling_alone)
        self._learn_penalty(progress)
        self.mrf = self.penalty_alone
        self.steps = 0
        """Steps of stage 3 so far."""
        if settings.contexts:
            self.mrf = settings.build(labels, settings.contexts, examples.spacing, choice).to(settings.device)
            self._start_contexts()
        self.penalties: dict[int, Tensor] = {}
        self.bytes_left = MAX_BYTES_IN_MEMORY // 4  # for them; a few learners live at a time

    def models(self) -> dict[FitStage, MeanField]:
        """Copies of the MRF after each stage so far."""
        models: dict[FitStage, MeanField] = {}
        if self.scaling_alone.label_scaling is not None:
            models["label scaling"] = copy.deepcopy(self.scaling_alone)
        models["triple penalty"] = copy.deepcopy(self.penalty_alone)
        if self.settings.contexts:
            with self.descent.averaged():
                models["label contexts"] = copy.deepcopy(self.mrf)
        return {stage: model.eval().requires_grad_(False) for stage, model in models.items()}

    @torch.no_grad()
    def labels(self, index: int) -> tuple[Tensor, Tensor]:
        """The labels (*S) that the MRF as it is gives an example, and those of the triple penalty alone."""
        maps = self.examples[index].log_p, self._penalty(index)
        log_p, t = (values[None].float().to(self.settings.device) for values in maps)
        if not self.settings.contexts:
            labels = self.mrf.from_penalty(log_p, t)[0].argmax(0).cpu()
            return labels, labels
        with self.descent.averaged():
            labels = self.mrf.from_penalty(log_p, t)[0].argmax(0).cpu()
        alone = self.mrf.tempered(log_p) - self.penalty_alone.triple_penalty.scale * t  # `_start_contexts` moved it
        return labels, alone[0].argmax(0).cpu()

    def learn_contexts(self, steps: int, progress: Progress = no_progress) -> None:
        """Take more steps of stage 3, with the triple penalty fixed and computed once per example."""
        self.descent.run(self._contexts_loss, steps, progress)
        self.steps += steps

    def _learn_scaling(self, progress: Progress) -> None:
        """The factor and the summand of each label, from some pixels of every example."""
        if self.scaling_alone.label_scaling is not None:
            outputs = ((example.log_p, example.mask) for example in map(self.examples.__getitem__, self.indices))
            learn_scaling(self.scaling_alone, outputs, len(self.indices), VOID, progress)

    def _learn_penalty(self, progress: Progress) -> None:
        """Stage 2, for an MRF without label contexts."""
        mrf, random = self.penalty_alone, np.random.default_rng([self.settings.seed, 1])
        if mrf.triple_penalty.kernel == "global":
            choose_all_pairs(mrf, self.examples, self.indices.tolist(), progress)
            return
        agreement_costs_less = mrf.triple_penalty.kernel == "gaussian"  # differences cost more, of the other kernel
        with torch.no_grad():
            mrf.triple_penalty.scale.fill_(-START_SCALE if agreement_costs_less else START_SCALE)

        def loss() -> Tensor:
            batch = [self.examples[index] for index in self._draw(random)]
            log_p, image, mask = self._stack([crop(example, self.crop_size, random) for example in batch])
            scores = run_batch(mrf, log_p.float(), image, [example.spacing for example in batch])
            return self._loss(scores, mask, None if self.examples.dims == 2 else soft_dice)

        steps, rate = self.settings.penalty_steps, self.settings.penalty_rate
        minimise([mrf.triple_penalty, self.trust], loss, steps, rate, progress)

    def _start_contexts(self) -> None:
        """Start stage 3 where stage 2 ended: the same o14, with the factor of t moved into the patterns.

        Where stage 2 found little use for t, a tiny t would teach stage 3 nothing.
        """
        penalty, contexts = self.mrf.triple_penalty, self.mrf.label_contexts
        assert contexts is not None  # settings.contexts is not 0
        penalty.load_state_dict(self.penalty_alone.triple_penalty.state_dict())
        penalty.requires_grad_(False)
        if self.mrf.label_scaling is not None and self.scaling_alone.label_scaling is not None:
            self.mrf.label_scaling.load_state_dict(self.scaling_alone.label_scaling.state_dict())
            self.mrf.label_scaling.requires_grad_(False)
        contexts.set_compatibility(penalty.scale * torch.eye(contexts.labels, device=self.settings.device))
        penalty.shift.zero_()  # it moves all labels alike
        penalty.scale.fill_(1)
        start_contexts(contexts, self.settings.seed)
        self.descent = Descent([contexts, self.trust], self.settings.contexts_rate)
        self.random = np.random.default_rng([self.settings.seed + 1, 1])

    def _contexts_loss(self) -> Tensor:
        batch = self._draw(self.random)
        log_p, _, t, mask = self._stack(
            [crop(self.examples[i], self.crop_size, self.random, self._penalty(i)) for i in batch]
        )
        scores = self.mrf.from_penalty(log_p.float(), t.float())  # b13 to b15
        return self._loss(scores, mask, soft_iou if self.examples.dims == 2 else soft_dice)

    def _penalty(self, index: int) -> Tensor:
        """The triple penalty's output t (L, *S) of float16 for an example, cached as far as memory allows."""
        if index in self.penalties:
            return self.penalties[index]
        example = self.examples[index]
        with spaced(self.mrf, example.spacing):
            t = penalty_map(self.mrf, example.log_p, example.image)
        self.bytes_left -= t.nbytes
        if self.bytes_left >= 0:
            self.penalties[index] = t
        return t

    def _draw(self, random: np.random.Generator) -> list[int]:
        """The examples of one batch."""
        count = self.settings.batch
        indices: list[int] = random.choice(self.indices, count, replace=len(self.indices) < count).tolist()
        return indices

    def _stack(self, crops: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """One batch of each map: log_p, image, what else was cut, and the mask."""
        return [torch.stack(maps).to(self.settings.device) for maps in zip(*crops, strict=True)]

    def _loss(self, scores: Tensor, mask: Tensor, overlap: Callable[[Tensor, Tensor], Tensor] | None) -> Tensor:
        """Cross-entropy, and a soft form of the score that decides: cross-entropy alone gives rare labels away.

        Stage 2 of images does without: it has one factor for all labels, and stage 3 then ended lower.
        """
        scores = self.trust(scores)
        entropy = functional.cross_entropy(scores, mask.long(), ignore_index=VOID)
        return entropy if overlap is None else entropy + 1 - overlap(scores.softmax(1), mask)


def run_batch(mrf: MeanField, log_p: Tensor, image: Tensor, spacings: Sequence[Spacing | None]) -> Tensor:
    """Run the MRF on a batch in which each volume may have a spacing of its own."""
    if len(set(spacings)) == 1:
        with spaced(mrf, spacings[0]):
            return mrf(log_p, image)  # type: ignore[no-any-return]
    results = []
    for number, spacing in enumerate(spacings):
        with spaced(mrf, spacing):
            results.append(mrf(log_p[number : number + 1], image[number : number + 1]))
    return torch.cat(results)


def crop(example: Example, size: Sequence[int], random: np.random.Generator, *maps: Tensor) -> tuple[Tensor, ...]:
    """Cut the same part out of log_p, image, `maps` and mask, void beyond the image; mirror half of the images."""
    corner = _corner(example, size, random)
    slices = [slice(start, start + side) for start, side in zip(corner, size, strict=True)]
    region: tuple[EllipsisType | slice, ...] = (..., *slices)
    parts = [values[region] for values in (example.log_p, example.image, *maps, example.mask)]
    crops = padded(parts, size, VOID)
    mirrored = example.mask.dim() == 2 and random.random() < 0.5  # no volumes: a body's left and right differ
    return tuple(values.flip(-1) for values in crops) if mirrored else crops


def _corner(example: Example, size: Sequence[int], random: np.random.Generator) -> list[int]:
    """Where the crop starts along each axis."""
    shape, foreground = example.mask.shape, example.foreground
    corner = crop_corner(random, shape, size)
    if foreground is None or not len(foreground) or random.random() >= FOREGROUND_SHARE:
        return corner
    voxel = foreground[int(random.integers(len(foreground)))].tolist()
    corner = []
    for x, n, side in zip(voxel, shape, size, strict=True):  # a start from which `side` pixels include voxel x
        first, last = max(x - side + 1, 0), max(min(x, n - side), 0)
        corner.append(int(random.integers(min(first, last), last + 1)))
    return corner
