"""Dice by hand, and means that leave out what is not there."""

from __future__ import annotations

import math

import pytest
import torch

from deepmrf.data.files import VOID
from deepmrf.evaluation.dice import VolumeMetrics, dice_per_label, mean_dice, soft_dice, soft_iou, volume_dice
from deepmrf.evaluation.metrics import SegmentationMetrics


def test_by_hand():
    truth = torch.tensor([0, 0, 1, 1, 1, 2, VOID, VOID])
    predicted = torch.tensor([0, 1, 1, 1, 2, 2, 1, 2])
    # label 1: 2 in common, 3 true, 3 predicted -> 4 / 6; label 2: 1 in common, 1 true, 2 predicted -> 2 / 3
    assert volume_dice(predicted, truth, 3) == pytest.approx((2 / 3, 2 / 3))


def test_against_sets():
    random = torch.Generator().manual_seed(0)
    truth, predicted = (torch.randint(0, 4, (5, 6, 7), generator=random) for _ in range(2))
    for label, value in enumerate(volume_dice(predicted, truth, 4), start=1):
        a, b = (
            set((truth == label).flatten().nonzero()[:, 0].tolist()),
            set((predicted == label).flatten().nonzero()[:, 0].tolist()),
        )
        assert value == pytest.approx(2 * len(a & b) / (len(a) + len(b)))


def test_soft_dice_of_certain_probabilities_is_dice():
    truth, predicted = torch.randint(0, 3, (2, 3, 4, 5)), torch.randint(0, 3, (2, 3, 4, 5))
    truth[0, 0] = VOID
    q = torch.nn.functional.one_hot(predicted, 4).movedim(-1, 1).double()  # label 3 is nowhere and does not count
    assert float(soft_dice(q, truth)) == pytest.approx(sum(volume_dice(predicted, truth, 3)) / 2)
    nothing = torch.zeros_like(truth)
    assert float(soft_dice(q, nothing)) == 1  # no foreground, nothing to learn


def test_soft_iou_of_certain_probabilities_is_the_mean_iou():
    truth, predicted = torch.randint(0, 3, (2, 5, 7)), torch.randint(0, 4, (2, 5, 7))
    truth[0, 0] = VOID
    q = torch.nn.functional.one_hot(predicted, 4).movedim(-1, 1).double()  # label 3 is nowhere in truth: no mean
    known = truth != VOID
    ious = [
        float(((truth == label) & (predicted == label) & known).sum())
        / float((((truth == label) | (predicted == label)) & known).sum())
        for label in range(3)
    ]
    assert float(soft_iou(q, truth)) == pytest.approx(sum(ious) / 3)
    assert float(soft_iou(q, torch.full_like(truth, VOID))) == 1


def test_soft_dice_leads_towards_the_truth():
    logits, truth = torch.zeros(1, 3, 3, 4, 5, requires_grad=True), torch.randint(0, 3, (1, 3, 4, 5))
    soft_dice(logits.softmax(1), truth).backward()
    ahead = logits.grad.gather(1, truth[:, None])[truth[:, None] > 0]
    assert (ahead > 0).all()


def test_what_is_not_there_is_left_out():
    nowhere = torch.zeros(4, dtype=torch.int64)
    assert all(math.isnan(value) for value in volume_dice(nowhere, nowhere, 3))
    assert volume_dice(torch.tensor([1, 0]), torch.tensor([0, 0]), 2) == (0.0,)  # invented, and that counts
    scores = {"a": (0.5, math.nan), "b": (0.7, 0.2)}
    assert dice_per_label(scores) == pytest.approx([0.6, 0.2])
    assert mean_dice(scores) == pytest.approx(0.4)
    assert math.isnan(mean_dice({"a": (math.nan,)}))


def test_the_rest_is_what_pictures_get():
    volumes, pictures = VolumeMetrics(3, VOID, ("a", "b", "c")), SegmentationMetrics(3, VOID)
    for _ in range(2):
        predicted, truth = torch.randint(0, 3, (4, 5, 6)), torch.randint(0, 3, (4, 5, 6))
        truth[0, 0] = VOID
        volumes.update(predicted, truth)
        pictures.update(predicted, truth)
    of_volumes, of_pictures = volumes.compute(), pictures.compute()
    assert of_volumes.iou_per_class == of_pictures.iou_per_class
    assert of_volumes.pixel_accuracy == of_pictures.pixel_accuracy
    assert of_volumes.images == 2
    assert math.isnan(of_volumes.la)
    assert of_volumes.to_dict()["ba"] is None
