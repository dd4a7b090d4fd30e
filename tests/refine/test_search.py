"""The search for the best MRF: until the score stops rising, within its minutes, choosing by held-out images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from deepmrf.refine import search as searching
from deepmrf.refine.examples import open_examples
from deepmrf.refine.fit import fit
from deepmrf.refine.matching import match_files
from deepmrf.refine.search import Search, Trial
from deepmrf.refine.settings import Choice, FitSettings

SMALL = FitSettings(
    kernel="distance", gate=False, temperature=1.0, window=3, contexts=1, context_size=3, folds=2, crop=16, batch=2
)
SMALL = replace(SMALL, penalty_steps=3, label_scaling=False)


def write(root, maps):
    """Predictions, images and masks of (log_p, image, mask)."""
    for name in ("predictions", "images", "masks"):
        (root / name).mkdir()
    for number, (log_p, image, mask) in enumerate(maps):
        np.save(root / "predictions" / f"p{number}.npy", log_p)
        Image.fromarray(image).save(root / "images" / f"p{number}.png")
        Image.fromarray(mask).save(root / "masks" / f"p{number}.png")
    return root / "predictions", root / "images", root / "masks"


@pytest.fixture
def shifted(tmp_path):
    """Masks of stripes, and predictions that lie one pixel lower: only a pattern that looks down mends them."""
    random, maps = np.random.default_rng(0), []
    for _ in range(4):
        mask = np.repeat(random.integers(0, 2, (10, 1)), 24, 1).repeat(3, 0).astype(np.uint8)
        p = 0.6 * np.eye(2)[np.roll(mask, 1, axis=0)].transpose(2, 0, 1) + 0.2
        maps.append((np.log(p).astype(np.float32), random.integers(0, 255, (30, 24, 3), np.uint8), mask))
    return write(tmp_path, maps)


@pytest.fixture
def noise(tmp_path):
    random = np.random.default_rng(0)
    maps = [
        (random.normal(size=(3, 24, 24)).astype(np.float32), *parts)
        for parts in (
            (random.integers(0, 255, (24, 24, 3), np.uint8), np.repeat(np.arange(3), 8)[:, None].repeat(24, 1))
            for _ in range(4)
        )
    ]
    return write(tmp_path, [(log_p, image, mask.astype(np.uint8)) for log_p, image, mask in maps])


def scores_from(monkeypatch, curve):
    """Let the score after so many steps be that of a function; training takes no time."""

    def score(self, candidate, folds, steps):
        value = curve(candidate.choice, steps)
        return Trial(candidate.choice, steps, value, value, 0.5, (value - 0.5,) * len(folds))

    monkeypatch.setattr(Search, "_score", score)
    monkeypatch.setattr(searching.Learner, "learn_contexts", _count_steps)


def _count_steps(self, steps, _=None):
    self.steps += steps


def rising_scores_in_time(monkeypatch, each):
    """Let scores rise for ever, and each round of a fold take so many seconds; returns a list with the time."""
    seconds = [0.0]

    def take_time(self, steps, _=None):
        seconds[0] += each
        self.steps += steps

    scores_from(monkeypatch, lambda _, steps: 0.6 + steps / 100_000)
    monkeypatch.setattr(searching.Learner, "learn_contexts", take_time)
    return seconds


def open_search(folders, settings=SMALL, clock=lambda: 0.0):
    examples = open_examples(match_files(*folders)[0], folders[2])
    examples.read_all()
    return Search(examples, [[0, 1], [2, 3]], settings, lambda _: lambda *_: None, clock, clock())


def test_longer_training_gains_and_is_not_called_no_gain(shifted, monkeypatch):
    monkeypatch.setattr(searching, "ROUND_STEPS", 30)
    short = fit(*shifted, replace(SMALL, contexts_steps=1))
    assert short.stage == "nothing"
    assert short.verdict.startswith("No gain so far")
    assert "more may gain" in short.verdict
    long = fit(*shifted, replace(SMALL, contexts_rate=0.05))
    assert long.search.ending == "settled"
    assert long.stage == "label contexts"
    assert long.after.miou > long.before.miou + 0.1
    assert long.search.steps > 0
    assert long.search.curve[0][0] == searching.ROUND_STEPS


def test_noise_gains_nothing_and_the_report_says_so(noise):
    report = fit(*noise, SMALL)
    assert report.stage == "nothing"
    assert report.verdict.startswith("No gain: the predictions agree with the masks no more than by chance")
    log_p = torch.randn(1, 3, 9, 9).log_softmax(1)
    torch.testing.assert_close(report.mean_field(log_p, torch.rand(1, 3, 9, 9)), log_p)


def test_training_stops_where_the_score_does(shifted, monkeypatch):
    scores_from(monkeypatch, lambda _, steps: 0.6 + min(steps, 400) / 10_000 - 0.02 * (steps > 400))
    result = open_search(shifted).run()
    assert (result.steps, result.ending) == (400, "settled")
    assert [steps for steps, _ in result.curve] == [100, 200, 300, 400, 500, 600]
    assert result.trials[0].score == pytest.approx(0.64)


@pytest.mark.parametrize(("loss", "steps"), [(0.0095, 300), (0.011, 200), (0.021, 100)])
def test_the_last_round_with_nine_tenths_of_the_best_gain_is_taken(shifted, monkeypatch, loss, steps):
    """Before, the score is 0.5: the best round gains 0.2, and each later one `loss` less."""
    scores_from(monkeypatch, lambda _, steps: 0.7 - loss * (steps / 100 - 1))
    result = open_search(shifted).run()
    assert (result.steps, result.ending) == (steps, "settled")
    assert [steps for steps, _ in result.curve] == [100, 200, 300]


def test_of_equal_rounds_the_last_is_taken(shifted, monkeypatch):
    scores_from(monkeypatch, lambda _, steps: 0.6 + min(steps, 200) / 10_000)
    result = open_search(shifted).run()
    assert (result.steps, result.ending) == (400, "settled")


def test_the_best_choice_wins_and_all_are_listed(shifted, monkeypatch):
    def curve(choice, steps):
        kernel = 0.01 * (choice.kernel == "gaussian")
        return 0.6 + kernel + 0.001 * choice.gate - 0.05 * abs(choice.temperature - 1.3) + min(steps, 200) / 10_000

    scores_from(monkeypatch, curve)
    settings = replace(SMALL, kernel=None, gate=None, temperature=None)
    result = open_search(shifted, settings).run()
    assert {trial.choice for trial in result.trials} == {
        Choice("distance"),
        Choice("global"),
        *(Choice("gaussian", *variant) for variant in ((), (True,), (False, 0.7), (False, 1.4))),
    }
    assert result.choice == result.trials[0].choice == Choice("gaussian", False, 1.4)
    assert (result.steps, result.ending) == (400, "settled")
    assert [len(trial.fold_gains) for trial in result.trials] == [2, 2, 2, 2, 1, 1]
    given = open_search(shifted, replace(settings, kernel="gaussian", gate=False, temperature=2.0)).run()
    assert [trial.choice for trial in given.trials] == [Choice("gaussian", False, 2.0)]


def test_label_scaling_is_tried_and_left_out_where_it_costs(shifted, monkeypatch):
    settings = replace(SMALL, temperature=None, label_scaling=None)
    for gain in (0.01, -0.01):
        scores_from(monkeypatch, lambda choice, steps, gain=gain: 0.6 + gain * choice.label_scaling)
        phases = []
        search = open_search(shifted, settings)
        search.phases = lambda name, phases=phases: phases.append(name) or (lambda *_: None)
        result = search.run()
        assert {trial.choice.label_scaling for trial in result.trials} == {True, False}
        assert {trial.choice.temperature for trial in result.trials} == {1.0}
        assert result.choice.label_scaling == (gain > 0)
        assert any("label scaling" in name and "mIoU" in name and "so far" in name for name in phases) == (gain > 0)


@pytest.mark.parametrize(("minutes", "rounds"), [(1, 1), (5, 4), (10, 9)])
def test_the_minutes_bound_the_steps(shifted, monkeypatch, minutes, rounds):
    seconds = rising_scores_in_time(monkeypatch, 10.0)  # 20 a round, for two folds
    search = open_search(shifted, replace(SMALL, minutes=minutes), lambda: seconds[0])
    result = search.run()
    assert result.ending == "budget"
    assert result.steps == result.curve[-1][0]
    final = 10.0 * len(result.curve)
    assert seconds[0] + final <= 60 * minutes
    assert len(result.curve) >= rounds


@pytest.mark.parametrize(("minutes", "kernels", "choices"), [(2, 1, 1), (6, 2, 4), (7, 2, 5), (12, 3, 6)])
def test_few_minutes_try_fewer_choices(shifted, monkeypatch, minutes, kernels, choices):
    seconds = rising_scores_in_time(monkeypatch, 30.0)  # 60 a kernel, for two folds
    settings = replace(SMALL, kernel=None, gate=None, temperature=None, minutes=minutes)
    result = open_search(shifted, settings, lambda: seconds[0]).run()
    assert len({trial.choice.kernel for trial in result.trials}) == kernels
    assert len(result.trials) == choices
    assert len(result.untried) == (3 - kernels) + (3 - (choices - kernels))
    assert seconds[0] + 30 * len(result.curve) <= 60 * minutes


@pytest.fixture
def first_fold_compiles(monkeypatch):
    """Each fold takes 2 seconds, the first of all 40 more; returns a function that sets the curve, and the time."""
    seconds = [0.0]

    def take_time(self, steps, _=None):
        seconds[0] += 2.0 + 40.0 * (seconds[0] == 0)
        self.steps += steps

    def start(curve):
        scores_from(monkeypatch, curve)
        monkeypatch.setattr(searching.Learner, "learn_contexts", take_time)
        return lambda: seconds[0]

    return start


def settled(choice, steps):
    """Scores that do not rise; the Gaussian kernel is better, and without label scaling it is best."""
    return 0.6 + 0.1 * (choice.kernel == "gaussian") + 0.05 * (not choice.label_scaling)


def test_compiling_makes_no_choice_too_slow(shifted, first_fold_compiles):
    """44 seconds for the first kernel, of which 40 are no part of what the next one takes."""
    settings = replace(SMALL, kernel=None, gate=True, minutes=1.8)
    clock = first_fold_compiles(settled)
    result = open_search(shifted, settings, clock).run()
    assert [trial.choice.kernel for trial in result.trials] == ["gaussian", "distance"]
    assert (result.untried, result.ending) == ((), "settled")
    assert [steps for steps, _ in result.curve] == [100, 200, 300]
    assert clock() == 40 + 2 * 2 * 4  # the first kernel took one round: both were tried in the first half


def test_time_that_is_left_tries_what_was_left_out(shifted, first_fold_compiles):
    """The first half of the minutes is over with the first kernel."""
    settings = replace(SMALL, kernel=None, gate=True, label_scaling=None, minutes=1.4)
    clock = first_fold_compiles(settled)
    result = open_search(shifted, settings, clock).run()
    kernels = [(trial.choice.kernel, trial.choice.label_scaling) for trial in result.trials]
    assert kernels == [("gaussian", False), ("gaussian", True), ("distance", True)]
    assert result.choice == Choice("gaussian", True, 1.0, label_scaling=False)
    assert (result.untried, result.ending) == ((), "settled")
    assert [steps for steps, _ in result.curve] == [100, 200, 300]
    assert len(result.models) == 2
    assert clock() < 84


def test_a_kernel_that_is_tried_late_must_be_better(shifted, first_fold_compiles):
    """It is compared after as many steps, and in the end by what both reached."""

    def curve(choice, steps):
        late = choice.kernel == "gaussian"
        return 0.65 if late else 0.6 + min(steps, 300) / 3000  # 0.63 after the first round, 0.7 after the third

    settings = replace(SMALL, kernel=None, gate=True, minutes=1.6)
    result = open_search(shifted, settings, first_fold_compiles(curve)).run()
    assert [(trial.choice.kernel, trial.score) for trial in result.trials] == [("distance", 0.7), ("gaussian", 0.65)]
    assert [len(trial.fold_gains) for trial in result.trials] == [2, 2]


def test_only_choices_that_go_on_keep_what_they_have_cached(shifted, monkeypatch):
    scores_from(monkeypatch, lambda choice, _: 0.6 + 0.1 * (choice.kernel == "gaussian"))
    search = open_search(shifted, replace(SMALL, kernel=None, gate=None))
    result = search.run()
    assert len(search.candidates) == len(result.trials) == 4
    assert not any(candidate.learners for candidate in search.candidates)
