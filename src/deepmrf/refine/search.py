"""Search, by cross-validation and within a budget of minutes, for the MRF that gains most.

    1. Every choice (kernel, gate), then the best one at other temperatures, learns briefly and is scored on the first
       fold alone.
    2. The best two learn on, in all folds side by side, ROUND_STEPS steps at a time; one of them drops out.
    3. The other goes on until the score of the images held out has not risen for PATIENCE rounds, or until the minutes
       are over but for what the final fit to all images needs.

The folds share no images, so each image is scored by an MRF that never saw it. Choosing by the same scores flatters
them a little: a few choices and rounds against thousands of labelled pixels in every image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from deepmrf.data.progress import Phases
from deepmrf.layers import MeanField
from deepmrf.refine.examples import Examples
from deepmrf.refine.learn import FitStage, Learner
from deepmrf.refine.settings import Choice, FitSettings
from deepmrf.refine.tally import Tally

ROUND_STEPS = 100
"""Steps of stage 3 between two scores."""
PATIENCE = 2
"""Rounds without a better score that end the search."""
MIN_GAIN = 5e-4
"""A score that is higher by less than this is no better: it is chance."""
FINALIST_MARGIN = 0.01
"""A second choice is a finalist if its first score is at most this much below that of the best."""
FINAL_ROUNDS = 2
"""Rounds after which the better finalist goes on alone."""
FIRST_SHARE = 0.4
"""The share of the minutes after which no further choice is tried."""
FIRST_PIXELS, ROUND_PIXELS = 2_000_000, 4_000_000
"""Pixels of a fold that are scored: when all choices are tried, and in each round. The report scores all of them."""

Ending = Literal["settled", "budget", "steps"]
"""Why a search ended: the score rose no more, the minutes were over, or the steps were given."""


@dataclass(frozen=True)
class Trial:
    """A choice and its scores on held-out images."""

    choice: Choice
    steps: int
    """Of stage 3."""
    score: float
    """mIoU of all images scored (of volumes, the foreground's mean Dice)."""
    before: float
    """The same of the predictions as they came."""
    fold_gains: tuple[float, ...]
    """Score less score before in each fold that was tried."""


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    choice: Choice
    steps: int
    models: list[dict[FitStage, MeanField]]
    """The MRFs of each fold after `steps` steps."""
    trials: tuple[Trial, ...]
    """The last scores of every choice, the best one first."""
    curve: tuple[tuple[int, float], ...]
    """(steps, score) of the best choice, round by round."""
    ending: Ending


@dataclass
class _Entrant:
    """A choice with the learners of its folds."""

    choice: Choice
    learners: dict[int, Learner] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    models: list[dict[FitStage, MeanField]] = field(default_factory=list)
    """Of each fold, when the score in all folds was best."""
    best: Trial | None = None
    """The best of the trials in all folds."""
    seconds: float = 0.0

    @property
    def last(self) -> Trial:
        return self.trials[-1]


class Search:
    """A search; `run` returns what it found."""

    def __init__(
        self,
        examples: Examples,
        folds: Sequence[Sequence[int]],
        settings: FitSettings,
        phases: Phases,
        clock: Callable[[], float],
        start: float,
    ) -> None:
        """clock: seconds, as time.monotonic tells them. start: when the minutes began."""
        self.examples, self.folds, self.settings, self.phases, self.clock = examples, folds, settings, phases, clock
        self.start, self.end = start, start + 60 * settings.minutes

    def run(self) -> Found:
        """Try all choices, and train the best until it gains no more."""
        entrants = self._first_trials()
        finalists = [e for e in entrants[:2] if e.last.score >= entrants[0].last.score - FINALIST_MARGIN]
        for entrant in entrants:
            if entrant not in finalists:
                entrant.learners.clear()  # frees their memory
        ending: Ending | None = None
        rounds = 0
        while ending is None:
            began, rounds = self.clock(), rounds + 1
            for entrant in finalists:
                self._train(entrant, range(len(self.folds)), self._steps(rounds), ROUND_PIXELS)
            seconds = self.clock() - began
            finalists.sort(key=lambda entrant: -_best(entrant).score)
            out_of_time = self.clock() + seconds / len(finalists) + self._final_seconds(finalists[0]) > self.end
            if rounds >= FINAL_ROUNDS or out_of_time or self.settings.contexts_steps or not self.settings.contexts:
                for entrant in finalists[1:]:
                    entrant.learners.clear()
                del finalists[1:]
            ending = self._ending(finalists[0], out_of_time) if len(finalists) == 1 else None
        winner = finalists[0]
        best = _best(winner)
        others = [_best(entrant) for entrant in entrants if entrant is not winner]
        others.sort(key=lambda trial: (-len(trial.fold_gains), -trial.score))
        curve = tuple((t.steps, t.score) for t in winner.trials if len(t.fold_gains) == len(self.folds))
        return Found(winner.choice, best.steps, winner.models, (best, *others), curve, ending)

    def _first_trials(self) -> list[_Entrant]:
        """Every choice after its first steps on the first fold, the best one first."""
        entrants: list[_Entrant] = []

        def enter(choices: Sequence[Choice]) -> None:
            for choice in choices:
                if entrants and self.clock() - self.start > FIRST_SHARE * (self.end - self.start):
                    return
                entrants.append(_Entrant(choice))
                self._train(entrants[-1], [0], self._steps(1), FIRST_PIXELS)

        choices = self.settings.choices()
        enter(choices)
        entrants.sort(key=lambda entrant: -entrant.last.score)
        enter(self.settings.temperatures(entrants[0].choice))
        return sorted(entrants, key=lambda entrant: -entrant.last.score)

    def _steps(self, rounds: int) -> int:
        """Steps of stage 3 after so many rounds."""
        if not self.settings.contexts:
            return 0
        return self.settings.contexts_steps or rounds * ROUND_STEPS

    def _ending(self, entrant: _Entrant, out_of_time: bool) -> Ending | None:
        """Why the search ends now; None if it goes on."""
        if self.settings.contexts_steps is not None or not self.settings.contexts:
            return "steps"
        best = _best(entrant)
        if entrant.last.steps - best.steps >= PATIENCE * ROUND_STEPS:
            return "settled"
        return "budget" if out_of_time else None

    def _final_seconds(self, entrant: _Entrant) -> float:
        """What the final fit and the scores of the report will take, about."""
        return 2 * entrant.seconds / len(entrant.learners)

    def _train(self, entrant: _Entrant, folds: Sequence[int], steps: int, max_pixels: int) -> None:
        """Train a choice up to so many steps in these folds, and score it."""
        began = self.clock()
        so_far = f" ({self._measure} {100 * entrant.last.score:.2f} so far)" if entrant.trials else ""
        for number in folds:
            name = f"{entrant.choice}{so_far}: fold {number + 1}, "
            learner = entrant.learners.get(number)
            if learner is None:
                others = [index for part in self.folds if part is not self.folds[number] for index in part]
                progress = self.phases(name + "triple penalty")
                learner = Learner(self.examples, others, self.settings, entrant.choice, progress)
                entrant.learners[number] = learner
            if steps > learner.steps:
                learner.learn_contexts(steps - learner.steps, self.phases(f"{name}label contexts, step {steps}"))
        trial = self._score(entrant, folds, steps, max_pixels)
        entrant.trials.append(trial)
        entrant.seconds += self.clock() - began
        in_all_folds = len(folds) == len(self.folds)
        if in_all_folds and (entrant.best is None or trial.score > entrant.best.score + MIN_GAIN):
            entrant.best = trial
            entrant.models = [entrant.learners[number].models() for number in folds]

    @property
    def _measure(self) -> str:
        return "Dice" if self.examples.dims == 3 else "mIoU"

    def _score(self, entrant: _Entrant, folds: Sequence[int], steps: int, max_pixels: int) -> Trial:
        before, after, gains = Tally(self.examples), Tally(self.examples), []
        for number in folds:
            fold_before, fold_after = Tally(self.examples), Tally(self.examples)
            for index in self._scored(number, max_pixels):
                example = self.examples[index]
                refined, given = entrant.learners[number].labels(index), example.log_p.float().argmax(0)
                for tally, labels in ((before, given), (fold_before, given), (after, refined), (fold_after, refined)):
                    tally.add(example, labels)
            gains.append(fold_after.value() - fold_before.value())
        return Trial(entrant.choice, steps, after.value(), before.value(), tuple(gains))

    def _scored(self, number: int, max_pixels: int) -> list[int]:
        """The images of a fold that are scored: all, or as many as have so many pixels."""
        order = np.random.default_rng([self.settings.seed, 2]).permutation(self.folds[number]).tolist()
        count, pixels = 0, 0
        while count < len(order) and (count == 0 or pixels < max_pixels):
            pixels += math.prod(self.examples[order[count]].mask.shape)
            count += 1
        return sorted(order[:count])


def _best(entrant: _Entrant) -> Trial:
    """The best trial in all folds, else the only one."""
    return entrant.best or entrant.last
