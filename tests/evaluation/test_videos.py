"""Videos in order: streamed results are those of the whole sequence, and nothing grows with its length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepmrf.data import synthetic
from deepmrf.data.dataset import Dataset, Item
from deepmrf.evaluation import videos
from deepmrf.evaluation.metrics import SegmentationMetrics
from deepmrf.evaluation.temporal import TemporalConsistency
from deepmrf.evaluation.videos import VideoModel, evaluate_video, video_models
from deepmrf.flow import estimate
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.frames import frame_reach


@pytest.fixture(scope="module")
def data():
    return synthetic((32, 40), "val", count=2, frames=15)


@pytest.fixture(scope="module")
def models(data):
    torch.manual_seed(0)
    flat = DeepParsingNetwork.build(
        "fast", data.labels, {"width": 8}, {"window": 5, "kernel": "gaussian", "contexts": 2, "context_size": 3}
    ).eval()
    with torch.no_grad():
        for parameter in flat.mean_field.parameters():
            parameter.add_(torch.randn_like(parameter))
    deep = flat.inflate()
    with torch.no_grad():
        deep.mean_field.triple_penalty.frame_weights.fill_(1.0)
        deep.mean_field.label_contexts.weight.add_(torch.randn_like(deep.mean_field.label_contexts.weight))
    return {"flat": flat, "deep": deep}


@torch.no_grad()
def test_streamed_scores_are_those_of_whole_sequences(data, models):
    parts = video_models(models)
    assert [p.name for p in parts] == ["network alone", "flat, frame by frame", "deep, 3-D rigid", "deep, 3-D linked"]
    assert [p.reach() for p in parts] == [0, 0, 2, 2]
    calls = []
    result = evaluate_video(parts, data, progress=lambda *numbers: calls.append(numbers))
    assert calls[-1] == (30, 30)
    wholes = [data.read_clip(items) for items in data.sequences()]
    for part in parts:
        scores, consistency = SegmentationMetrics(len(data.labels)), TemporalConsistency()
        for frames, masks in wholes:
            clip, flow = torch.from_numpy(frames).permute(3, 0, 1, 2)[None], estimate(frames)
            labels = part(part.model.log_unary(clip), clip, flow).argmax(1)[0]
            scores.update(labels, torch.from_numpy(masks))
            consistency.update(labels, flow)
        assert result[part.name].scores.miou == pytest.approx(scores.compute().miou, abs=2e-4), part.name
        assert result[part.name].consistency == pytest.approx(float(consistency.compute()), abs=2e-3), part.name
    assert len({result[part.name].consistency for part in parts}) == 4


@torch.no_grad()
@pytest.mark.parametrize(("normalize", "reach"), [(False, 2), (True, 4)])
def test_a_frame_sees_all_that_can_change_it(data, normalize, reach):
    """A normalised penalty divides at a neighbour by what the neighbour's own window holds."""
    settings = {"window": 5, "kernel": "gaussian", "gate": False, "contexts": 0, "normalize": normalize}
    model = DeepParsingNetwork.build("fast", data.labels, {"width": 8}, settings).eval().inflate(5)
    model.mean_field.triple_penalty.frame_weights.fill_(1.0)
    model.mean_field.triple_penalty.scale.fill_(-5.0)
    part = VideoModel("deep", model, "rigid")
    assert part.reach() == frame_reach(model.mean_field) == reach
    assert VideoModel("deep", model, "network").reach() == 0
    frames = torch.from_numpy(data.read_clip(next(data.sequences()))[0]).permute(3, 0, 1, 2)[None]
    log_p = (torch.randn(1, len(data.labels), *frames.shape[2:]) * 3).log_softmax(1)
    expected = part(log_p, frames, None)[:, :, 7]

    def error(around):
        near = slice(7 - around, 7 + around + 1)
        return float((part(log_p[:, :, near], frames[:, :, near], None)[:, :, around] - expected).abs().max())

    assert error(reach) < 1e-5
    assert error(reach - 1) > 1e-3


def test_memory_does_not_grow_with_the_sequence(models, monkeypatch):
    """Frames in memory at any time, counted where windows are handed out."""
    frame_counts = []
    windows = videos.windows

    def counted(*arguments):
        for window in windows(*arguments):
            frame_counts.append(len(window.frames))
            yield window

    monkeypatch.setattr(videos, "windows", counted)
    evaluate_video([VideoModel("deep", models["deep"], "linked")], synthetic((16, 16), "val", count=1, frames=40))
    assert len(frame_counts) == 4
    assert max(frame_counts) == videos.FRAMES_AT_A_TIME + 4


def test_sequences_are_in_order_and_broken_where_frames_are_missing(tmp_path):
    def item(sequence, frame):
        return Item(f"{sequence}{frame}", tmp_path, tmp_path, sequence, frame)

    numbers = [5, 1, 3, 21, 23, 2, 4]
    items = [*[item("a", n) for n in numbers], item("", 0), item("b", 9)]
    data = Dataset(items, synthetic().labels)
    result = sorted([item.frame for item in sequence] for sequence in data.sequences())
    assert result == [[0], [1, 2, 3, 4, 5], [9], [21, 23]]


def test_single_images_have_scores_but_no_consistency(models):
    result = evaluate_video(video_models({"flat": models["flat"]}), synthetic((32, 40), "val", count=3))
    assert result["flat, frame by frame"].scores.images == 3
    assert np.isnan(result["flat, frame by frame"].consistency)
    assert result["flat, frame by frame"].to_dict()["temporal_consistency"] is None


def test_frames_without_labels_count_for_consistency_alone(data, models):
    sparse = data.subset(replace(i, mask=None) if i.frame % 5 else i for i in data)
    sparse.read_image = data.read_image  # which asks for the mask, too
    sparse.read_mask = lambda item: data.read_mask(item) if item.mask else None
    part = VideoModel("flat", models["flat"], "rigid")
    result, full = evaluate_video([part], sparse)["flat"], evaluate_video([part], data)["flat"]
    assert result.scores.images == 6
    assert result.consistency == full.consistency


def test_two_processes_share_the_sequences(data, models):
    part = VideoModel("flat", models["flat"], "rigid")
    halves = [evaluate_video([part], data, share=(n, 2))["flat"] for n in (0, 1)]
    assert [half.scores.images for half in halves] == [15, 15]


def test_a_frame_of_another_size_is_named(models):
    data = synthetic((32, 40), "val", count=1, frames=3)
    original = synthetic((32, 40), "val", count=1, frames=3)
    data.read_image = lambda item: original.read_image(item)[:, : 40 - item.frame].copy()
    data.read_mask = lambda item: original.read_mask(item)[:, : 40 - item.frame].copy()
    with pytest.raises(ValueError, match="one size"):
        evaluate_video([VideoModel("flat", models["flat"], "rigid")], data)
