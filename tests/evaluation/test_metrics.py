"""The metrics, by hand, against loops over pixels, under void, and over several processes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap

import pytest
import torch

from deepmrf.data import VOC
from deepmrf.evaluation.metrics import SegmentationMetrics, mean, object_classes

VOID = 255


def scored(prediction, target, labels, **options):
    metrics = SegmentationMetrics(labels, **{"tag_pixels": 1, **options})
    metrics.update(prediction, target)
    return metrics.compute()


def same(a, b):
    """Equal numbers, NaN equal to NaN."""
    return a == pytest.approx(b, nan_ok=True, rel=1e-12)


def blobs(*shape, labels, void=0.0):
    """Label maps of a few rectangles, as real ones have regions; a share of the pixels void."""
    ids = torch.zeros(shape, dtype=torch.int64)
    for image in ids:
        for _ in range(2 * labels):
            top, left = int(torch.randint(shape[1], ())), int(torch.randint(shape[2], ()))
            high, wide = int(torch.randint(2, 9, ())), int(torch.randint(2, 9, ()))
            image[top : top + high, left : left + wide] = int(torch.randint(labels, ()))
    ids[torch.rand(shape) < void] = VOID
    return ids


def naive(predictions, targets, labels, tag_pixels):
    """Every definition of the module's docstring as loops over pixels, in Python's own numbers."""
    inter, union, true, right, total = [0] * labels, [0] * labels, [0] * labels, 0, 0
    tags, ever = [[] for _ in range(labels)], [False] * labels
    la, ba = [[] for _ in range(labels)], [[] for _ in range(labels)]
    for prediction, target in zip(predictions.tolist(), targets.tolist(), strict=True):
        height, width = len(target), len(target[0])
        pixels = [(y, x) for y in range(height) for x in range(width) if target[y][x] != VOID]
        total += len(pixels)
        right += sum(prediction[y][x] == target[y][x] for y, x in pixels)
        for c in range(labels):
            truth = {(y, x) for y, x in pixels if target[y][x] == c}
            predicted = {(y, x) for y, x in pixels if prediction[y][x] == c}
            inter[c] += len(truth & predicted)
            union[c] += len(truth | predicted)
            true[c] += len(truth)
            tagged = len(truth) >= tag_pixels, len(predicted) >= tag_pixels
            ever[c] |= any(tagged)
            tags[c].append(tagged[0] == tagged[1])
            if not tagged[0]:
                continue
            if not tagged[1]:
                la[c].append(0.0)
                continue
            cells = [
                {
                    (y, x)
                    for y in range(min(y for y, _ in region), max(y for y, _ in region) + 1)
                    for x in range(min(x for _, x in region), max(x for _, x in region) + 1)
                }
                for region in (truth, predicted)
            ]
            la[c].append(len(cells[0] & cells[1]) / len(cells[0] | cells[1]))
            if la[c][-1] <= 0.5:
                continue
            inside = {(y, x) for y in range(height) for x in range(width)}
            around = ((0, 1), (1, 0), (0, -1), (-1, 0))
            true_edge = [(y, x) for y, x in truth if any((y + a, x + b) in inside - truth for a, b in around)]
            edge = [(y, x) for y, x in predicted if any((y + a, x + b) in set(pixels) - predicted for a, b in around)]
            radius = max(1.0, 0.0075 * math.hypot(height, width))
            near = [any(math.hypot(y - v, x - u) <= radius for v, u in true_edge) for y, x in edge]
            if near:
                ba[c].append(sum(near) / len(near))

    def mean(values):
        return sum(values) / len(values) if values else math.nan

    return {
        "iou": [i / u if u else math.nan for i, u in zip(inter, union, strict=True)],
        "accuracy": [i / t if t else math.nan for i, t in zip(inter, true, strict=True)],
        "ta": [mean(t) if e else math.nan for t, e in zip(tags, ever, strict=True)],
        "la": [mean(values) for values in la],
        "ba": [mean(values) for values in ba],
        "pixels": right / total,
    }


def test_by_hand():
    target = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, VOID]])
    prediction = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1], [2, 0, 0, 1]])
    scores = scored(prediction, target, 4)
    # class 0: six in both, and one more in each. class 1: three of four. class 2: predicted once. class 3: nowhere.
    assert same(scores.iou_per_class, (6 / 8, 3 / 4, 0, math.nan))
    assert same(scores.miou, (6 / 8 + 3 / 4 + 0) / 3)
    assert same(scores.accuracy_per_class, (6 / 7, 3 / 4, math.nan, math.nan))
    assert same(scores.pixel_accuracy, 9 / 11)
    assert same(scores.ta_per_class, (1, 1, 0, math.nan))
    assert same(scores.ta, 2 / 3)
    # boxes: class 0 has 3 x 3 in both. class 1 has 2 x 2 in both, the predicted pixel under void left out
    assert same(scores.la_per_class, (1, 1, math.nan, math.nan))
    # boundaries of class 1, r = 1: all three predicted pixels are beside a 0 that is not void, and on true ones or next
    assert same(scores.ba_per_class[1], 1)
    assert scores.images == 1


@pytest.mark.parametrize("tag_pixels", [1, 5])
@pytest.mark.parametrize("void", [0.0, 0.1])
def test_equal_to_loops_over_pixels(tag_pixels, void):
    target = blobs(4, 21, 26, labels=4, void=void)
    prediction = torch.where(torch.rand(target.shape) < 0.02, blobs(4, 21, 26, labels=4), target.where(target < 4, 1))
    prediction[1] = prediction[1].roll(2, 1)
    expected = naive(prediction, target, 6, tag_pixels)
    scores = scored(prediction, target, 6, tag_pixels=tag_pixels)
    for kind in ("iou", "accuracy", "ta", "la", "ba"):
        assert same(getattr(scores, f"{kind}_per_class"), tuple(expected[kind])), kind
    assert same(scores.pixel_accuracy, expected["pixels"])
    for key, kind in (("miou", "iou"), ("mean_accuracy", "accuracy"), ("ta", "ta"), ("la", "la"), ("ba", "ba")):
        values = [v for v in expected[kind] if not math.isnan(v)]
        assert same(getattr(scores, key), sum(values) / len(values)), key
    assert 0 < scores.ba < 1


def test_predictions_under_void_change_nothing():
    target = blobs(3, 30, 40, labels=5, void=0.2)
    target[:, 10:15] = VOID
    prediction = blobs(3, 30, 40, labels=5)
    other = torch.where(target == VOID, torch.randint(0, 250, target.shape), prediction)  # not even ids
    assert scored(prediction, target, 5).to_dict() == scored(other, target, 5).to_dict()


def test_perfect_predictions_score_one():
    target = blobs(2, 40, 50, labels=4)
    scores = scored(target, target, 4)
    assert (scores.miou, scores.pixel_accuracy, scores.mean_accuracy) == (1, 1, 1)
    assert (scores.ta, scores.la, scores.ba) == (1, 1, 1)


def test_absent_classes():
    target, prediction = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    assert same(scored(prediction, target, 3).iou_per_class, (1, math.nan, math.nan))
    assert scored(prediction, target, 3).miou == 1  # absent from both: left out
    prediction[0, 0] = 1
    assert same(scored(prediction, target, 3).iou_per_class, (15 / 16, 0, math.nan))
    assert same(scored(prediction, target, 3).miou, 15 / 32)  # predicted, never true: counts 0
    assert same(scored(prediction, target, 3, tag_pixels=2).ta, 1.0)  # one stray pixel is no tag


def test_missing_objects_localise_at_zero():
    target = torch.zeros(6, 6, dtype=torch.uint8)
    target[2:4, 2:4] = 1
    scores = scored(torch.zeros_like(target), target, 2)
    assert scores.la_per_class == (1.0, 0.0)
    assert math.isnan(scores.ba_per_class[1])


def test_batches_images_and_merged_processes_are_the_same():
    target, prediction = blobs(6, 30, 40, labels=5, void=0.05), blobs(6, 30, 40, labels=5)
    prediction = torch.where(torch.rand(target.shape) < 0.9, target.where(target < 5, 0), prediction)
    expected = scored(prediction, target, 5).to_dict()
    one_by_one = SegmentationMetrics(5, tag_pixels=1)
    for image in range(6):
        one_by_one.update(prediction[image], target[image])
    parts = [SegmentationMetrics(5, tag_pixels=1) for _ in range(2)]
    for part, images in zip(parts, (slice(0, 4), slice(4, 6)), strict=True):
        part.update(prediction[images], target[images])
    parts[0].merge_state(parts[1])
    for values in (one_by_one.compute().to_dict(), parts[0].compute().to_dict()):
        for name, value in expected.items():
            assert values[name] == pytest.approx(value), name


def test_without_images_there_is_nothing_to_score():
    with pytest.warns(UserWarning, match="before the ``update``"), pytest.raises(ValueError, match="nothing to score"):
        SegmentationMetrics(5).compute()


PROCESS = """
    import json, sys, torch
    from deepmrf.evaluation.metrics import SegmentationMetrics
    rank, file = int(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
    torch.manual_seed(0)
    target = torch.randint(0, 4, (5, 3, 4)).repeat_interleave(6, 1).repeat_interleave(6, 2)
    prediction = torch.where(torch.rand(target.shape) < 0.95, target, 0)
    shared, alone = SegmentationMetrics(4), SegmentationMetrics(4, sync_on_compute=False)
    shared.update(prediction[rank::2], target[rank::2])  # three images and two
    alone.update(prediction, target)
    print(json.dumps([shared.compute().to_dict(), alone.compute().to_dict()]))
    torch.distributed.destroy_process_group()
"""


def test_two_real_processes(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in started:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        shared, alone = json.loads(output.splitlines()[-1])
        assert shared["images"] == 5
        for name, value in alone.items():
            assert shared[name] == pytest.approx(value), name


def test_scores_for_tables_and_json():
    target, prediction = torch.zeros(4, 4, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    target[0] = 1
    scores = scored(prediction, target, 3, names=("sky", "road", "cow"))
    rows = scores.rows()
    assert [row[0] for row in rows] == ["sky", "road", "cow", "mean"]
    assert all(len(row) == 6 for row in rows)
    assert rows[-1][1] == 0.375
    values = scores.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["iou_per_class"] == {"sky": 0.75, "road": 0.0, "cow": None}


PAPER = {
    # Table 5 (a), VOC 2012 val: the twenty objects, and the mean as printed
    "TA": "98.8 97.9 98.4 97.7 96.1 98.6 95.2 96.8 90.1 97.5 95.7 96.7 96.3 98.1 93.3 96.1 98.7 92.2 97.4 96.3 96.4",
    "LA": "81.7 76.3 75.5 70.3 54.4 86.4 70.6 85.6 51.8 79.6 57.1 83.3 79.2 80.0 74.1 53.1 79.1 68.4 76.3 58.8 72.1",
    "BA": "95.9 83.9 96.9 92.6 93.8 94.0 95.7 95.6 89.5 93.3 91.4 95.2 94.2 92.7 94.5 90.4 94.8 90.5 93.7 96.6 93.3",
}
PAPER_IOU = "84.8 37.5 80.7 66.3 67.5 84.2 76.4 81.5 33.8 65.8 50.4 76.8 67.1 74.9 81.1 48.3 75.9 41.8 76.6 60.4 67.8"


def test_the_papers_means_are_over_objects_but_for_miou():
    for text in PAPER.values():
        *objects, printed = map(float, text.split())
        with_background = (99.0, *objects)
        assert len(with_background) == len(VOC.names)
        over_objects = mean([with_background[n] for n in object_classes(VOC.names)])
        assert round(over_objects, 1) == printed
        assert round(mean(with_background), 1) != printed
    *objects, printed = map(float, PAPER_IOU.split())
    assert round(mean(objects), 1) != printed  # so background is among them: 67.8 needs 92
    assert round(mean([92.0, *objects]), 1) == printed


def test_both_means_where_there_is_a_background():
    names = ("Background", "cat", "dog")
    target = torch.zeros(1, 12, 16, dtype=torch.int64)
    target[:, 2:8, 2:8], target[:, 4:10, 9:14] = 1, 2
    prediction = target.roll(1, 2)
    scores, plain = (scored(prediction, target, 3, names=each) for each in (names, None))
    for metric in ("ta", "la", "ba"):
        values = getattr(scores, f"{metric}_per_class")
        assert same(getattr(scores, metric), sum(values[1:]) / 2)
        assert same(getattr(plain, metric), sum(values) / 3)
    assert scores.miou == plain.miou
    assert [row[0] for row in scores.rows()[3:]] == ["mean of objects", "mean"]
    assert scores.rows()[-1] == plain.rows()[-1]
    assert same(scores.rows()[3][1], sum(scores.iou_per_class[1:]) / 2)
    values = scores.to_dict()
    assert values["with_background"]["la"] == plain.la
    assert values["objects"]["la"] == values["la"] == scores.la
    assert "objects" not in plain.to_dict()
    only = scored(prediction.clamp_max(0), target.clamp_max(0), 1, names=("background",))
    assert only.ta == 1


@pytest.mark.parametrize(
    ("prediction", "target", "error", "message"),
    [
        (torch.zeros(4, 4).long(), torch.full((4, 4), 9), ValueError, "target holds 9, but ids must be 0 .. 2, or 255"),
        (torch.full((4, 4), 3), torch.zeros(4, 4).long(), ValueError, "prediction holds 3"),
        (torch.full((4, 4), -1), torch.zeros(4, 4).long(), ValueError, "prediction holds -1"),
        (torch.full((4, 4), 255), torch.zeros(4, 4).long(), ValueError, "prediction holds 255"),
        (torch.zeros(4, 5).long(), torch.zeros(4, 4).long(), ValueError, "of the same size"),
        (torch.zeros(1, 3, 4, 4).long(), torch.zeros(1, 3, 4, 4).long(), ValueError, r"\(B, H, W\) or \(H, W\)"),
        (torch.zeros(4, 4), torch.zeros(4, 4).long(), TypeError, "prediction is torch.float32.*argmax"),
        ([[0]], torch.zeros(1, 1).long(), TypeError, "prediction is list"),
    ],
    ids=["target id", "id", "negative", "void predicted", "sizes", "axes", "logits", "list"],
)
def test_errors_say_what_to_do(prediction, target, error, message):
    metrics = SegmentationMetrics(3)
    with pytest.raises(error, match=message):
        metrics.update(prediction, target)


def test_constructor_errors():
    with pytest.raises(ValueError, match="labels=0"):
        SegmentationMetrics(0)
    with pytest.raises(ValueError, match="is one of the 300 labels"):
        SegmentationMetrics(300)
    with pytest.raises(ValueError, match="2 names for 3 labels"):
        SegmentationMetrics(3, names=["a", "b"])
