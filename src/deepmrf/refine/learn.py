"""Learn an MRF from examples by the paper's stages 2 and 3, on random crops, with the network's output fixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.data.files import VOID
from deepmrf.data.progress import Phases, Progress, no_phases
from deepmrf.data.volumes import Spacing
from deepmrf.evaluation.dice import soft_dice
from deepmrf.layers import MeanField
from deepmrf.predict.tiles import spaced
from deepmrf.refine.crops import crop
from deepmrf.refine.examples import MAX_BYTES_IN_MEMORY, Examples
from deepmrf.refine.settings import FitSettings
from deepmrf.training.mean_field import Trust, minimise, penalty_map, start_contexts

FitStage = Literal["nothing", "triple penalty", "label contexts"]
"""How far an MRF was learned; each stage builds on the one before. "nothing" returns the predictions as they are."""


def learn(
    examples: Examples,
    indices: Sequence[int],
    settings: FitSettings,
    phases: Phases = no_phases,
    last: FitStage = "label contexts",
) -> dict[FitStage, MeanField]:
    """The MRF after each stage up to `last`, learned from the examples at `indices` alone."""
    teacher, labels = _Teacher(examples, indices, settings), len(examples.labels)
    penalty_alone = settings.build(labels, 0, examples.spacing).to(settings.device)  # o14 = t = 0
    teacher.teach_penalty(penalty_alone, phases("triple penalty"))
    models: dict[FitStage, MeanField] = {"triple penalty": penalty_alone}
    if settings.contexts and last == "label contexts":
        full = settings.build(labels, settings.contexts, examples.spacing).to(settings.device)
        full.triple_penalty.load_state_dict(penalty_alone.triple_penalty.state_dict())
        teacher.teach_contexts(full, phases("label contexts"))
        models["label contexts"] = full
    return models


class _Teacher:
    """Teaches MRFs from some of the examples; what it learns of the network's confidence serves both stages."""

    def __init__(self, examples: Examples, indices: Sequence[int], settings: FitSettings) -> None:
        self.examples, self.indices, self.settings = examples, np.asarray(indices), settings
        self.trust = Trust().to(settings.device)
        self.crop_size = examples.crop_size(settings.crop)

    def teach_penalty(self, mrf: MeanField, progress: Progress) -> None:
        """Stage 2, for an MRF without label contexts."""
        random = np.random.default_rng([self.settings.seed, 1])

        def loss() -> Tensor:
            batch = [self.examples[index] for index in self._draw(random)]
            log_p, image, mask = self._stack([crop(example, self.crop_size, random) for example in batch])
            return self._loss(run_batch(mrf, log_p.float(), image, [example.spacing for example in batch]), mask)

        steps, rate = self.settings.penalty_steps, self.settings.penalty_rate
        minimise([mrf.triple_penalty, self.trust], loss, steps, rate, progress)

    def teach_contexts(self, mrf: MeanField, progress: Progress) -> None:
        """Stage 3, with the triple penalty fixed and computed once per example."""
        contexts = mrf.label_contexts
        assert contexts is not None  # settings.contexts is not 0
        compatibility = torch.eye(contexts.labels, device=self.settings.device)  # o14 = t, as at the end of stage 2
        if mrf.dims == 3:
            # The same o14 with a larger t: where stage 2 found little use for t, a tiny t would teach stage 3 nothing.
            compatibility = mrf.triple_penalty.scale * compatibility
            with torch.no_grad():
                mrf.triple_penalty.scale.fill_(1)
        contexts.set_compatibility(compatibility)
        start_contexts(contexts, self.settings.seed)
        penalties = _Penalties(mrf, self.examples)
        random = np.random.default_rng([self.settings.seed + 1, 1])

        def loss() -> Tensor:
            log_p, _, mask, t = self._stack(
                [crop(self.examples[i], self.crop_size, random, penalties.get(i)) for i in self._draw(random)]
            )
            return self._loss(log_p.float() - contexts(t.float()), mask)  # b13 to b15

        minimise([contexts, self.trust], loss, self.settings.contexts_steps, self.settings.contexts_rate, progress)

    def _draw(self, random: np.random.Generator) -> list[int]:
        """The examples of one batch."""
        count = self.settings.batch
        indices: list[int] = random.choice(self.indices, count, replace=len(self.indices) < count).tolist()
        return indices

    def _stack(self, crops: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """One batch of each map: log_p, image, mask and what else was cut."""
        return [torch.stack(maps).to(self.settings.device) for maps in zip(*crops, strict=True)]

    def _loss(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Cross-entropy, and for volumes, which are judged by the Dice of their foreground, its soft form too."""
        scores = self.trust(scores)
        entropy = functional.cross_entropy(scores, mask.long(), ignore_index=VOID)
        return entropy if scores.dim() == 4 else entropy + 1 - soft_dice(scores.softmax(1), mask)


class _Penalties:
    """The triple penalty's output t for each example, cached as far as memory allows."""

    def __init__(self, mrf: MeanField, examples: Examples) -> None:
        self.mrf, self.examples = mrf, examples
        self.cached: dict[int, Tensor] = {}
        self.bytes_left = MAX_BYTES_IN_MEMORY

    def get(self, index: int) -> Tensor:
        """t (L, *S) of float16."""
        if index in self.cached:
            return self.cached[index]
        example = self.examples[index]
        with spaced(self.mrf, example.spacing):
            t = penalty_map(self.mrf, example.log_p, example.image)
        self.bytes_left -= t.nbytes
        if self.bytes_left >= 0:
            self.cached[index] = t
        return t


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
