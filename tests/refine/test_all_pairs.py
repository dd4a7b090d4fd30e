"""One step of a dense CRF as a stage of a fit: its numbers are those that score best, by brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from deepmrf import MeanField
from deepmrf.evaluation.metrics import SegmentationMetrics
from deepmrf.refine import all_pairs
from deepmrf.refine.all_pairs import choose_all_pairs, set_all_pairs
from deepmrf.refine.examples import open_examples
from deepmrf.refine.fit import fit
from deepmrf.refine.learn import Learner
from deepmrf.refine.matching import match_files
from deepmrf.refine.settings import Choice, FitSettings

SETTINGS = FitSettings(window=5, contexts=2, context_size=3, folds=2, crop=16, batch=2, penalty_steps=3)


def write(root, noise, count=6):
    """Two squares of other colours on a ground, and noisy predictions of them."""
    random = np.random.default_rng(0)
    for name in ("P", "I", "M"):
        (root / name).mkdir()
    for number in range(count):
        mask = np.zeros((33, 41), np.uint8)
        for label in (1, 2):
            top, left = random.integers(0, 20, 2)
            mask[top : top + 12, left : left + 15] = label
        image = np.array([[40, 40, 40], [200, 60, 60], [60, 60, 220]])[mask] + random.integers(
            -25, 25, (*mask.shape, 3)
        )
        scores = np.eye(3)[mask].transpose(2, 0, 1) * 2 + noise * random.normal(size=(3, *mask.shape))
        np.save(root / "P" / f"p{number}.npy", scores.astype(np.float32))
        Image.fromarray(image.astype(np.uint8)).save(root / "I" / f"p{number}.png")
        Image.fromarray(mask).save(root / "M" / f"p{number}.png")
    return root / "P", root / "I", root / "M"


@pytest.fixture
def noisy(tmp_path):
    return write(tmp_path, noise=1.5)


def examples_of(folders):
    examples = open_examples(match_files(*folders)[0], folders[2])
    examples.read_all()
    return examples


def miou(mrf, examples, indices):
    """By the whole layer, without what is kept from setting to setting."""
    metrics = SegmentationMetrics(3, 255, examples.labels.names)
    for index in indices:
        example = examples[index]
        metrics.update(mrf(example.log_p[None].float(), example.image[None])[0].argmax(0), example.mask.long())
    return metrics.compute().miou


def layer(label_scaling=False):
    return SETTINGS.build(3, 0, None, Choice("global", label_scaling=label_scaling)).eval()


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_the_chosen_numbers_score_best(noisy, monkeypatch, temperature):
    monkeypatch.setattr(all_pairs, "COLOUR_WIDTHS", (0.2, 0.05))
    monkeypatch.setattr(all_pairs, "POSITION_WIDTHS", (10.0, 4.0))
    monkeypatch.setattr(all_pairs, "WEIGHTS", (1.0, 4.0))
    examples = examples_of(noisy)
    mrf, other = layer(), layer()
    mrf.temperature = other.temperature = temperature
    seen = []
    choose_all_pairs(mrf, examples, [0, 2, 3, 5], lambda done, total: seen.append((done, total)))
    tried = {}
    for position, colour, weight in itertools.product((10.0, 4.0), (0.2, 0.05), (0.0, 1.0, 4.0)):
        set_all_pairs(other, position, colour, weight)
        tried[position, colour, weight] = miou(other, examples, [0, 2, 3, 5])
    best_position = max((10.0, 4.0), key=lambda p: max(tried[p, 0.2, w] for w in (0.0, 1.0, 4.0)))
    expected = max(value for (position, *_), value in tried.items() if position == best_position)
    assert miou(mrf, examples, [0, 2, 3, 5]) == pytest.approx(expected, abs=2e-3)  # t is kept in half precision
    assert expected > tried[10.0, 0.2, 0.0] + 0.05
    assert mrf.triple_penalty.scale.item() < 0
    assert [done for done, _ in seen] == list(range(1, 13))  # two widths of positions, one more of colours
    assert {total for _, total in seen} == {12}


def test_perfect_predictions_get_no_weight(tmp_path):
    examples = examples_of(write(tmp_path, noise=0.0))
    mrf = layer()
    choose_all_pairs(mrf, examples, range(len(examples)))
    assert mrf.triple_penalty.scale.item() == 0
    example = examples[0]
    torch.testing.assert_close(
        mrf(example.log_p[None].float(), example.image[None])[0], example.log_p.float(), atol=1e-3, rtol=0
    )


def test_many_pixels_are_thinned_out(noisy, monkeypatch):
    examples = examples_of(noisy)
    assert all_pairs._some(examples, [0, 1, 2, 3, 4, 5]) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(all_pairs, "MAX_PIXELS", 33 * 41 * 2)
    assert all_pairs._some(examples, [0, 1, 2, 3, 4, 5]) == [0, 3]
    monkeypatch.setattr(all_pairs, "MAX_PIXELS", 1)
    assert all_pairs._some(examples, [4, 5]) == [4]


@pytest.mark.parametrize("kernel", ["distance", "gaussian", "global"])
@pytest.mark.parametrize("contexts", [0, 2])
def test_labels_of_each_stage_are_those_of_its_model(noisy, kernel, contexts):
    examples = examples_of(noisy)
    settings = replace(SETTINGS, contexts=contexts)
    learner = Learner(examples, [0, 1, 2], settings, Choice(kernel, label_scaling=True))
    if contexts:
        learner.learn_contexts(5)
    models = learner.models()
    example = examples[4]
    for stage, labels in zip(("label contexts", "triple penalty"), learner.labels(4), strict=True):
        mrf = models.get(stage, models["triple penalty"])
        expected = mrf(example.log_p[None].float(), example.image[None])[0].argmax(0)
        assert (labels == expected).float().mean() > 0.995  # t is kept in half precision


def test_a_fit_by_this_kernel_alone_gains_and_is_saved(noisy, tmp_path):
    report = fit(*noisy, replace(SETTINGS, window=None, kernel="global", contexts=0))
    assert report.stage == "triple penalty"
    assert report.after.miou > report.before.miou + 0.05
    assert report.search.choice.kernel == "global"
    report.save(tmp_path / "mrf")
    headings, rows = report.trials_table()
    assert headings[3:5] == ["mIoU before", "triple penalty"]
    assert rows[0][0].startswith("global, no gate")


def test_the_stage_that_gains_decides_between_kernels(noisy):
    """Contexts of a single step change little; the triple penalty alone of this kernel gains most."""
    settings = replace(SETTINGS, gate=False, temperature=1.0, label_scaling=False, contexts_steps=1, minutes=60)
    report = fit(*noisy, settings)
    assert {trial.choice.kernel for trial in report.search.trials} == {"distance", "gaussian", "global"}
    best = max(report.search.trials, key=lambda trial: max(trial.score, trial.penalty_score))
    assert report.search.choice == best.choice


@pytest.mark.parametrize(
    ("settings", "dims", "kernels"),
    [
        ({}, 2, ["distance", "global", "gaussian"]),
        ({}, 3, ["distance", "gaussian"]),
        ({"gate": True}, 2, ["distance", "gaussian"]),
        ({"kernel": "global"}, 2, ["global"]),
    ],
)
def test_kernels_that_are_tried(settings, dims, kernels):
    assert [choice.kernel for choice in FitSettings(**settings).kernels(dims)] == kernels


def test_a_gate_is_not_tried_with_all_pairs():
    assert not any(choice.gate for choice in FitSettings().variants(Choice("global", label_scaling=True)))
    with pytest.raises(ValueError, match="has no gate here"):
        FitSettings(kernel="global", gate=True)


def test_a_layer_of_all_pairs_has_no_window():
    mrf = FitSettings(window=5).build(3, 2, None, Choice("global"))
    assert isinstance(mrf, MeanField)
    assert mrf.triple_penalty.kernel == "global"
