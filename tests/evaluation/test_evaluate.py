"""Data without labels: evaluation says what it needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from deepmrf.data import LabelSet, synthetic
from deepmrf.data.dataset import Dataset, Item
from deepmrf.evaluation.evaluate import check_labelled, evaluate
from deepmrf.evaluation.videos import VideoModel, evaluate_video
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.scales import predictor


@pytest.fixture(scope="module")
def data():
    return synthetic((32, 40), "val", count=2, frames=15)


def without_masks(data):
    bare = data.subset(replace(item, mask=None) for item in data)
    bare.read_image, bare.read_mask = data.read_image, lambda item: None
    return bare


def all_void(data):
    void = data.subset(data)
    void.read_image = data.read_image  # which asks for the mask, too
    void.read_mask = lambda item: np.full((32, 40), 255, dtype=np.uint8)
    return void


@pytest.mark.filterwarnings("error")
def test_without_labels_there_is_nothing_to_measure(data):
    network = DeepParsingNetwork.build("fast", data.labels, {"width": 8}, None).eval()
    part = VideoModel("network", network, "network")
    with pytest.raises(ValueError, match="None of these 30 images has a mask"):
        evaluate_video([part], without_masks(data))
    with pytest.raises(ValueError, match="No pixel of these images has a label"):
        evaluate_video([part], all_void(data[:2]))
    with pytest.raises(ValueError, match="No pixel of these images has a label"):
        evaluate(predictor(network), all_void(data[:2]))


def test_void_may_have_any_id_in_the_masks(data, tmp_path):
    """Masks are read with void as 255, whatever id the label set gives it."""
    labels = LabelSet(("a", "b"), ignore=7)
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / "x.png")
    Image.fromarray(np.array([[0] * 6, [0] * 6, [1] * 6, [7] * 6], np.uint8)).save(tmp_path / "mask.png")
    masked = Dataset([Item("x", tmp_path / "x.png", tmp_path / "mask.png")], labels)
    zeros = predictor(lambda image: torch.tensor([0.0, -9.0]).view(1, 2, 1, 1).expand(1, 2, *image.shape[2:]))
    assert evaluate(zeros, masked).pixel_accuracy == pytest.approx(2 / 3)


def test_data_is_checked_before_it_is_measured(data):
    calls = []
    check_labelled(data, progress=lambda *numbers: calls.append(numbers))
    assert calls[-1] == (30, 30)
    for frames, says in ((False, "has no mask: evaluation needs"), (True, "No pixel of these images has a label")):
        with pytest.raises(ValueError, match=says):
            check_labelled(without_masks(data), frames)
        with pytest.raises(ValueError, match="No pixel of these images has a label"):
            check_labelled(all_void(data), frames)
