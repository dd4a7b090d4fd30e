"""Search, by cross-validation and within a budget of minutes, for the MRF that gains most.

    1. Each kernel learns briefly in all folds, if there is time in the first half of the minutes (FIRST_SHARE).
    2. So does the best of them with a gate and without label scaling: in the first fold, and where it is better there
       by VARIANT_MARGIN, in all.
    3. The winner goes on in all folds side by side, ROUND_STEPS steps at a time, until the score of the images held out
       has not risen for PATIENCE rounds, or until the minutes are over but for what the final fit to all images needs.
       The last round that was about as good as the best counts (SHARE_OF_GAIN).
    4. What there was no time for is tried in the minutes that are left. What is better than the winner was after as
       many steps goes on like it, and the better one of both wins.

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
from deepmrf.layers.triple_penalty import Kernel
from deepmrf.refine.examples import Examples
from deepmrf.refine.learn import FitStage, Learner
from deepmrf.refine.settings import Choice, FitSettings
from deepmrf.refine.tally import Tally, merged

ROUND_STEPS = 100
"""Steps of stage 3 between two scores."""
PATIENCE = 2
"""Rounds without a better score that end the search."""
MIN_GAIN = 5e-4
"""A score that is higher by less than this is no better: it is chance."""
SHARE_OF_GAIN = 0.9
"""Of the rounds with at least this share of the best round's gain, the last is taken: it has learned from most crops.

Scores differ by more than that from seed to seed. Images like those learned from gain from longer training when those
held out, of other times and places, no longer do.
"""
VARIANT_MARGIN = 0.005
"""A gate, no label scaling, or a temperature other than 1 must score better by this much to be preferred.

After the first steps, scores of one choice differ by as much from seed to seed.
"""
FIRST_SHARE = 0.5
"""The share of the minutes after which no further choice is tried before the winner goes on."""
TIMES_SLOWER: dict[Kernel, float] = {"distance": 1.0, "global": 1.0, "gaussian": 2.0}
"""About how long a kernel takes to learn, as a multiple of the first one's time."""
MAX_PIXELS = 4_000_000
"""Pixels of a fold that are scored in a round. The report scores all of them."""

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
    penalty_score: float
    """The same of the triple penalty alone."""
    before: float
    """The same of the predictions as they came."""
    fold_gains: tuple[float, ...]
    """Score less score before in each fold that was tried."""


@dataclass(frozen=True)
class SearchResult:
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
    untried: tuple[Choice, ...] = ()
    """Choices for which the minutes did not suffice."""


@dataclass
class _Candidate:
    """A choice with the learners of its folds."""

    choice: Choice
    learners: dict[int, Learner] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    models: list[dict[FitStage, MeanField]] = field(default_factory=list)
    """Of each fold, after `best`."""
    peak: Trial | None = None
    """The last trial in all folds that was better than those before."""
    best: Trial | None = None
    """The last trial in all folds that was about as good as the peak."""
    fold_seconds: dict[int, float] = field(default_factory=dict)
    """What each round took in its fastest fold, by its steps: in the very first fold, kernels are compiled, too."""

    @property
    def first(self) -> Trial:
        """The first trial in all folds, else the only one."""
        return max(self.trials, key=lambda trial: len(trial.fold_gains))

    @property
    def last(self) -> Trial:
        return self.trials[-1]

    @property
    def result(self) -> Trial:
        """The best trial in all folds, else the only one."""
        return self.best or self.last


class Search:
    """A search; `run` returns its result."""

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
        self.candidates: list[_Candidate] = []

    def run(self) -> SearchResult:
        """Try all choices, and train the best until it gains no more."""
        winner = self._try(self.settings.kernels(self.examples.dims)[0])
        while (choice := self._next(winner)) is not None:
            winner = self._try(choice, winner)
        ending = self._go_on(winner)
        while ending != "budget" and (choice := self._next(winner, settled=True)) is not None:
            better = self._try(choice, winner)
            if better is not winner:
                ending = self._go_on(better)
                winner = max(winner, better, key=lambda candidate: _rank(candidate.result))
        best = winner.result
        others = [candidate.result for candidate in self.candidates if candidate is not winner]
        others.sort(key=lambda trial: (-len(trial.fold_gains), -trial.score))
        curve = tuple((t.steps, t.score) for t in winner.trials if len(t.fold_gains) == len(self.folds))
        untried = tuple(self._untried(winner))
        return SearchResult(winner.choice, best.steps, winner.models, (best, *others), curve, ending, untried)

    def _untried(self, winner: _Candidate) -> list[Choice]:
        """The kernels that were not tried, and then what the winner's kernel was not tried with."""
        kernels = self.settings.kernels(self.examples.dims)
        plain = next(choice for choice in kernels if choice.kernel == winner.choice.kernel)
        tried = [candidate.choice for candidate in self.candidates]
        return [choice for choice in (*kernels, *self.settings.variants(plain)) if choice not in tried]

    def _next(self, winner: _Candidate, settled: bool = False) -> Choice | None:
        """The next choice for which there is time; settled: all the time is free but for what the final fit needs."""
        folds = len(self.folds)
        for choice in self._untried(winner):
            is_variant = choice.kernel == winner.choice.kernel
            slower = 1.0 if is_variant else TIMES_SLOWER[choice.kernel]
            seconds = slower * (winner if is_variant else self.candidates[0]).fold_seconds[self._steps(1)]
            if settled:
                end, needed = self.end, folds * seconds + max(2 * seconds, self._final_seconds(winner))
            else:
                end, needed = self.start + FIRST_SHARE * (self.end - self.start), seconds * (1 if is_variant else folds)
            if self.clock() + needed <= end:
                return choice
        return None

    def _try(self, choice: Choice, winner: _Candidate | None = None) -> _Candidate:
        """Train a choice for a round; return the better one of it and the winner so far.

        A variant of the winner's kernel learns in all folds only if it is better in the first one.
        """
        rival = _Candidate(choice)
        self.candidates.append(rival)
        if winner is not None and choice.kernel == winner.choice.kernel:
            self._train(rival, [0], self._steps(1))
            if rival.last.fold_gains[0] <= winner.first.fold_gains[0] + VARIANT_MARGIN:
                rival.learners.clear()
                return winner
        self._train_in_all_folds(rival, 1)
        if winner is None:
            return rival
        better, worse = (rival, winner) if _rank(rival.first) > _rank(winner.first) else (winner, rival)
        worse.learners.clear()  # with what they have cached
        return better

    def _go_on(self, candidate: _Candidate) -> Ending:
        """Train a choice for more rounds, until it gains no more or the time is over; returns why it ended."""
        rounds = 1
        while (ending := self._ending(candidate)) is None:
            rounds += 1
            self._train_in_all_folds(candidate, rounds)
        candidate.learners.clear()
        return ending

    def _steps(self, rounds: int) -> int:
        """Steps of stage 3 after so many rounds."""
        if not self.settings.contexts:
            return 0
        return self.settings.contexts_steps or rounds * ROUND_STEPS

    def _ending(self, candidate: _Candidate) -> Ending | None:
        """Why the search ends now; None if it goes on."""
        if self.settings.contexts_steps is not None or not self.settings.contexts:
            return "steps"
        assert candidate.peak is not None  # a round in all folds is done
        if candidate.last.steps - candidate.peak.steps >= PATIENCE * ROUND_STEPS:
            return "settled"
        needed = len(self.folds) * candidate.fold_seconds[candidate.last.steps] + self._final_seconds(candidate)
        return "budget" if self.clock() + needed > self.end else None

    def _final_seconds(self, candidate: _Candidate) -> float:
        """About what the final fit and the scores of the report take."""
        return 2 * sum(candidate.fold_seconds.values())

    def _train_in_all_folds(self, candidate: _Candidate, rounds: int) -> None:
        """Train a choice up to so many rounds; keep its MRFs if they are about as good as any before."""
        folds = range(len(self.folds))
        self._train(candidate, folds, self._steps(rounds))
        if candidate.peak is None or candidate.last.score > candidate.peak.score + MIN_GAIN:
            candidate.peak = candidate.last
        peak = candidate.peak
        tolerance = max(MIN_GAIN, (1 - SHARE_OF_GAIN) * (peak.score - peak.before))
        if candidate.last.score > peak.score - tolerance:
            candidate.best = candidate.last
            candidate.models = [candidate.learners[number].models() for number in folds]

    def _train(self, candidate: _Candidate, folds: Sequence[int], steps: int) -> None:
        """Train a choice up to so many steps in these folds, and score it."""
        measure = "Dice" if self.examples.dims == 3 else "mIoU"
        so_far = f" ({measure} {100 * candidate.last.score:.2f} so far)" if candidate.trials else ""
        seconds = []
        for number in folds:
            learner = candidate.learners.get(number)
            if learner is not None and learner.steps == steps:
                continue  # the first fold of a variant
            began, name = self.clock(), f"{candidate.choice}{so_far}: fold {number + 1}, "
            if learner is None:
                others = [index for part in self.folds if part is not self.folds[number] for index in part]
                progress = self.phases(name + "triple penalty")
                learner = Learner(self.examples, others, self.settings, candidate.choice, progress)
                candidate.learners[number] = learner
            if steps > learner.steps:
                learner.learn_contexts(steps - learner.steps, self.phases(f"{name}label contexts, step {steps}"))
            seconds.append(self.clock() - began)
        began = self.clock()
        candidate.trials.append(self._score(candidate, folds, steps))
        candidate.fold_seconds[steps] = min(seconds) + (self.clock() - began) / len(folds)

    def _score(self, candidate: _Candidate, folds: Sequence[int], steps: int) -> Trial:
        before, after, alone = ([Tally(self.examples) for _ in folds] for _ in range(3))
        for place, number in enumerate(folds):
            for index in self._scored(number):
                example = self.examples[index]
                labels, penalty_labels = candidate.learners[number].labels(index)
                before[place].add(example, example.log_p.float().argmax(0))
                after[place].add(example, labels)
                alone[place].add(example, penalty_labels)
        gains = tuple(tally.value() - other.value() for tally, other in zip(after, before, strict=True))
        score, penalty_score, score_before = (merged(tallies).value() for tallies in (after, alone, before))
        return Trial(candidate.choice, steps, score, penalty_score, score_before, gains)

    def _scored(self, number: int) -> list[int]:
        """The images of a fold that are scored: all, or as many as have so many pixels."""
        order = np.random.default_rng([self.settings.seed, 2]).permutation(self.folds[number]).tolist()
        count, pixels = 0, 0
        while count < len(order) and (count == 0 or pixels < MAX_PIXELS):
            pixels += math.prod(self.examples[order[count]].mask.shape)
            count += 1
        return sorted(order[:count])


def _rank(trial: Trial) -> float:
    """By what choices are compared: their better stage."""
    choice = trial.choice
    return max(trial.score, trial.penalty_score) - VARIANT_MARGIN * (choice.gate + (choice.temperature != 1))
