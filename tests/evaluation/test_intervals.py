"""Gains with their intervals: equal to a loop over samples, and honest about what cannot be known."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import synthetic
from deepmrf.data.folder import write_folder
from deepmrf.data.synthetic import LABELS
from deepmrf.evaluation.dice import mean_dice
from deepmrf.evaluation.evaluate import evaluate_parts
from deepmrf.evaluation.intervals import ImageConfusions, measure_dice_gain, measure_gain, tail_share
from deepmrf.evaluation.metrics import SegmentationMetrics
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model


def confusions(truths, predictions, labels=4):
    pairs = [t * labels + p for t, p in zip(truths, predictions, strict=True)]
    return [np.bincount(pair, minlength=labels**2).reshape(labels, labels) for pair in pairs]


def planted(images=40, pixels=400, wrong=(0.3, 0.2), seed=0, labels=4):
    """Matrices of two predictions that are wrong in these shares of the pixels, the errors of each image its own."""
    random = np.random.default_rng(seed)
    truths = random.integers(labels, size=(images, pixels))
    parts = []
    for share in wrong:
        errors = random.random(truths.shape) < share * random.uniform(0.5, 1.5, (images, 1))
        parts.append(confusions(truths, np.where(errors, (truths + 1) % labels, truths), labels))
    return parts


def miou(matrix):
    union = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    return np.mean([matrix[c, c] / union[c] for c in range(len(matrix)) if union[c]])


def test_it_is_the_loop_over_samples():
    before, after = planted(images=9)
    gain = measure_gain(before, after, draws=300, seed=5)
    repeats = np.random.default_rng(5).multinomial(9, [1 / 9] * 9, 300)
    loop, classes, ends = [], [], [tail_share(0.95, 9), 1 - tail_share(0.95, 9)]
    for times in repeats:
        sums = [sum(n * matrix for n, matrix in zip(times, part, strict=True)) for part in (before, after)]
        loop.append(miou(sums[1]) - miou(sums[0]))
        iou = [m[2, 2] / (m[2].sum() + m[:, 2].sum() - m[2, 2]) for m in sums]
        classes.append(iou[1] - iou[0])
    assert gain.miou.value == pytest.approx(miou(sum(after)) - miou(sum(before)))
    assert [gain.miou.low, gain.miou.high] == pytest.approx(np.quantile(loop, ends))
    interval = gain.iou_per_class[2]
    assert [interval.low, interval.high] == pytest.approx(np.quantile(classes, ends))
    assert gain.better + gain.worse <= gain.images == gain.stretches == 9


def test_stretches_are_the_loop_over_samples():
    """Two videos of 7 and 3 frames, and an image: stretches of 4 wrap around, a short video is one stretch."""
    before, after = planted(images=11)
    runs = [[10, 2, 4, 6, 8, 1, 3], [5, 7, 9]]
    gain = measure_gain(before, after, runs=runs, stretch=4, draws=300, seed=5)
    stretches = [[runs[0][(start + n) % 7] for n in range(4)] for start in range(7)] + [runs[1]] * 3 + [[0]]
    weights = np.array([1 / 4] * 7 + [1 / 3] * 3 + [1])
    assert gain.stretches == round(weights.sum()) == 4
    loop = []
    for times in np.random.default_rng(5).multinomial(4, weights / weights.sum(), 300):
        frames = [frame for n, stretch in zip(times, stretches, strict=True) for frame in stretch * n]
        loop.append(miou(sum(after[f] for f in frames)) - miou(sum(before[f] for f in frames)))
    assert [gain.miou.low, gain.miou.high] == pytest.approx(
        np.quantile(loop, [tail_share(0.95, 4), 1 - tail_share(0.95, 4)])
    )
    assert gain.stretch_frames == 4


def test_a_planted_gain_is_told_from_none():
    gain = measure_gain(*planted(wrong=(0.3, 0.2)))
    assert 0.05 < gain.miou.low < gain.miou.value < gain.miou.high
    assert gain.pixel_accuracy.value == pytest.approx(0.1, abs=0.03)
    assert gain.better > gain.worse
    loss = measure_gain(*planted(wrong=(0.2, 0.3)))
    assert loss.miou.high < 0
    chance = measure_gain(*planted(wrong=(0.2, 0.2)))
    assert chance.miou.low < 0 < chance.miou.high
    before, _ = planted()
    nothing = measure_gain(before, before)
    assert (nothing.miou.low, nothing.miou.value, nothing.miou.high, nothing.better, nothing.worse) == (0, 0, 0, 0, 0)


def test_the_interval_holds_the_true_gain_about_as_often_as_it_says():
    held = 0
    for seed in range(100):
        interval = measure_gain(*planted(30, 100, (0.3, 0.25), seed), draws=300).pixel_accuracy
        held += interval.low <= 0.05 <= interval.high
    assert 86 <= held <= 100


def test_few_images_widen_the_interval_as_students_t_does():
    """t of a table: 2.262 for 9 degrees of freedom, 1.984 for 99, 1.833 for 9 at 90 %."""
    for level, count, t in ((0.95, 10, 2.262), (0.95, 100, 1.984), (0.9, 10, 1.833)):
        tail = statistics.NormalDist().cdf(-t * math.sqrt(count / (count - 1)))
        assert tail_share(level, count) == pytest.approx(tail, rel=0.02)
    assert tail_share(0.95, 10**6) == pytest.approx(0.025, rel=1e-4)
    assert 0 <= tail_share(0.95, 2) < 0.001


def test_like_frames_widen_the_interval():
    """Ten copies of each image tell no more than one of each."""
    before, after = planted(images=20)
    alone = measure_gain(before, after)
    copies = [[matrix for matrix in part for _ in range(10)] for part in (before, after)]
    naive, honest = measure_gain(*copies), measure_gain(*copies, runs=[range(200)])
    width = [gain.miou.high - gain.miou.low for gain in (alone, naive, honest)]
    assert width[1] < 0.5 * width[0]
    assert width[2] == pytest.approx(width[0], rel=0.3)


@pytest.mark.filterwarnings("error")
def test_one_image_has_a_gain_but_no_interval():
    before, after = planted(images=1)
    for runs, times in ((None, 1), ([range(10)], 10)):  # a stretch is no more
        gain = measure_gain(before * times, after * times, runs=runs)
        assert gain.miou.value == pytest.approx(miou(after[0]) - miou(before[0]))
        assert math.isnan(gain.miou.low)
        assert not gain.miou.low > 0
        assert gain.to_dict()["low"] is None


@pytest.mark.filterwarnings("error")
def test_labels_that_are_absent_count_as_in_the_metrics():
    """Label 4 is nowhere, 3 is predicted once by the first, 2 is true in one image alone, and an image is void."""
    truths = [np.array([0, 0, 1, 1, 0, 1]), np.array([0, 1, 1, 2, 2, 2]), np.array([], int)]
    first = [np.array([0, 1, 1, 3, 0, 1]), np.array([0, 1, 0, 2, 2, 0]), np.array([], int)]
    second = [np.array([0, 0, 1, 1, 0, 1]), np.array([0, 1, 1, 2, 2, 0]), np.array([], int)]
    parts = [confusions(truths, labels, 5) for labels in (first, second)]
    gain = measure_gain(*parts, names="abcde")
    scores = []
    for labels in (first, second):
        metrics = SegmentationMetrics(5)
        for ids, truth in zip(labels[:2], truths[:2], strict=True):
            metrics.update(torch.from_numpy(ids)[None], torch.from_numpy(truth)[None])
        scores.append(metrics.compute())
    assert gain.miou.value == pytest.approx(scores[1].miou - scores[0].miou)
    assert gain.pixel_accuracy.value == pytest.approx(scores[1].pixel_accuracy - scores[0].pixel_accuracy)
    per_class = gain.to_dict()["iou_per_class"]
    assert per_class["e"] == per_class["d"] == {"gain": None, "low": None, "high": None}
    assert per_class["c"] == pytest.approx({"gain": 0.0, "low": 0.0, "high": 0.0})
    assert (gain.better, gain.worse) == (2, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"before": []}, r"before has shape \(0, 0, 0\)"),
        ({"before": np.ones((3, 2, 4))}, r"before has shape \(3, 2, 4\)"),
        ({"after": [np.eye(2)]}, "differ in their true labels"),
        ({"after": [np.eye(2), np.eye(2) * 2]}, "differ in their true labels"),
        ({"before": np.zeros((2, 2, 2)), "after": np.zeros((2, 2, 2))}, "nothing to score"),
        ({"names": ["a"]}, "1 names for 2 labels"),
        ({"runs": [[0, 1], [1]]}, "runs hold an image twice"),
        ({"runs": [[2]]}, "or none of the 2"),
        ({"level": 95}, "level=95 is no share"),
        ({"draws": 0}, "draws=0 must be"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(change, says):
    with pytest.raises(ValueError, match=says):
        measure_gain(**{"before": [np.eye(2)] * 2, "after": [np.eye(2)] * 2, **change})


def test_predictors_are_compared_on_each_image_and_frames_in_stretches():
    data = synthetic((16, 24), "val", count=2, frames=15)
    confusion = ImageConfusions(data)
    labels = len(data.labels)

    def predictor(label):
        return lambda image: torch.nn.functional.one_hot(torch.full((1, 16, 24), label), labels).movedim(-1, 1).float()

    scores = evaluate_parts({"a": predictor(0), "b": predictor(1)}, data, shows=[confusion.add])
    gain = confusion.gain("a", "b")
    assert gain.miou.value == pytest.approx(scores["b"].miou - scores["a"].miou)
    assert (gain.images, gain.stretches, gain.stretch_frames) == (30, 3, 10)
    assert gain.names == data.labels.names


def test_frames_spread_over_a_video_are_drawn_in_shorter_stretches():
    data = synthetic((16, 24), "val", count=2, frames=15)
    few = data.spread(6)
    confusion = ImageConfusions(few, len(few) / len(data))
    for item in few:
        labels = torch.zeros(16, 24, dtype=torch.uint8)
        confusion.add(item, torch.zeros(3, 16, 24), labels, {"a": labels})
    gain = confusion.gain("a", "a")
    assert (gain.stretches, gain.stretch_frames) == (3, 2)


def test_stages_print_the_gain_and_write_it(tmp_path):
    settings = {"window": 3, "contexts": 2, "context_size": 3}
    torch.manual_seed(0)
    write_model(DeepParsingNetwork.build("fast", LABELS, {"width": 8}, settings).eval(), tmp_path / "model")

    write_folder(synthetic((24, 32), "val", count=3, frames=3), tmp_path / "videos", "val")

    def evaluated(*words):
        data = f"folder:{tmp_path / 'videos'}"
        command = ["evaluate", str(tmp_path / "model"), "--data", data, "-o", str(tmp_path), *words]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        return result.output, json.loads((tmp_path / "scores.json").read_text())

    output, written = evaluated("--stages")
    gain, scores = written["gain"], written["scores"]
    assert gain["miou"] == pytest.approx(scores["whole model"]["miou"] - scores["network alone"]["miou"])
    assert gain["low"] <= gain["miou"] <= gain["high"]
    assert [*gain["iou_per_class"]] == [*LABELS.names]
    assert f"The MRF adds {100 * gain['miou']:+.2f} to mIoU, 95 % interval" in output
    assert f"{gain['better']} image" in output
    assert "alike, so the interval is over 3 stretches of up to 3 frames one after the other." in output
    output, written = evaluated()
    assert "gain" not in written
    assert "adds" not in output


def test_stray_pixels_of_a_rare_label_do_not_weigh_as_much_as_a_label():
    """Every image gets better; a label that one image shows gets a stray pixel in five others."""
    before = np.zeros((20, 3, 3), np.int64)
    before[:, 0, :2] = before[:, 1, 1::-1] = 80, 20
    before[0, 2] = 0, 30, 70
    after = before.copy()
    after[:, 0, :2] = after[:, 1, 1::-1] = 85, 15
    after[0, 2] = 0, 20, 80
    after[1:6, 0, 0] -= 1
    after[1:6, 0, 2] += 1
    gain = measure_gain(before, after)
    assert gain.better == 20
    assert gain.miou.value == pytest.approx(miou(after.sum(0)) - miou(before.sum(0)))
    assert 0 < gain.miou.low < gain.miou.value < gain.miou.high


def test_a_label_that_no_image_shows_counts_zero_where_it_is_predicted():
    before = np.stack([np.array([[50, 50, 0], [0, 100, 0], [0, 0, 0]])] * 12)
    after = np.stack([np.array([[90, 9, 1], [0, 100, 0], [0, 0, 0]])] * 12)
    gain = measure_gain(before, after)
    assert gain.miou.value == pytest.approx(miou(after.sum(0)) - miou(before.sum(0)))
    assert [gain.miou.low, gain.miou.high] == pytest.approx([gain.miou.value] * 2)


def test_pixels_without_a_label_are_wrong():
    metrics = SegmentationMetrics(2, abstains=True)
    target, prediction = torch.tensor([[0, 0, 0, 1, 1, 255]]), torch.tensor([[0, 0, 255, 1, 255, 255]])
    metrics.update(prediction, target)
    scores = metrics.compute()
    assert scores.pixel_accuracy == pytest.approx(3 / 5)
    assert scores.iou_per_class == pytest.approx((2 / 3, 1 / 2))
    counts = metrics.confusion[None]
    assert counts.shape == (1, 2, 3)
    gain = measure_gain(counts, np.array([[[3, 0], [0, 2]]]))
    assert gain.pixel_accuracy.value == pytest.approx(2 / 5)
    assert gain.miou.value == pytest.approx(1 - 7 / 12)
    with pytest.raises(ValueError, match="prediction holds 255"):
        SegmentationMetrics(2).update(prediction, target)


def test_the_gain_in_dice_is_the_loop_over_samples():
    random = np.random.default_rng(1)
    rows = random.random((7, 2))
    rows[2, 1] = math.nan
    before = {f"v{n}": tuple(row) for n, row in enumerate(rows)}
    after = {f"v{n}": tuple(row + 0.05 * random.random(2)) for n, row in enumerate(rows)}
    gain = measure_dice_gain(before, after, draws=200, seed=3)
    assert gain.value == pytest.approx(mean_dice(after) - mean_dice(before))
    loop = []
    for times in np.random.default_rng(3).multinomial(7, [1 / 7] * 7, 200):
        names = [(f"v{n}", copy) for n, count in enumerate(times) for copy in range(count)]
        parts = [mean_dice({str(name): dice[name[0]] for name in names}) for dice in (before, after)]
        loop.append(parts[1] - parts[0])
    tail = tail_share(0.95, 7)
    assert [gain.low, gain.high] == pytest.approx(np.nanquantile(loop, [tail, 1 - tail]))
    one = measure_dice_gain({"v0": (0.5,)}, {"v0": (0.7,)})
    assert one.value == pytest.approx(0.2)
    assert math.isnan(one.low)
