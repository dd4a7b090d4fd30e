"""Clips as samples: which frames, whose labels, and that crops and mirrors change frames, output and flow alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from deepmrf.data import synthetic
from deepmrf.data.dataset import Dataset
from deepmrf.data.transforms import Augment
from deepmrf.flow import Flow, estimate, warp
from deepmrf.training.clips import ClipCrops, Stills, Videos, network_outputs, strided_clips
from deepmrf.training.recipe import ClipsRecipe
from deepmrf.training.samples import Images

AUGMENT = Augment((20, 28), (0.8, 1.25))
STILLS = ClipsRecipe(frames=3, motion=4.0, flow="exact", labelled="all")


def video(frames=5, count=2):
    return synthetic((32, 44), count=count, frames=frames, noise=4.0)


def network(image):
    """Stands for one: a fixed function of the colours."""
    return torch.stack([image[0].float().mean(0), image[0, 0].float()])[None] / 255


@pytest.mark.parametrize(
    ("frames", "stride", "expected"),
    [(3, 1, (1, 2, 3)), (3, 2, (0, 2, 4)), (2, 2, (0, 2)), (5, 2, (0, 0, 2, 4, 4)), (1, 3, (2,))],
)
def test_clips_at_a_stride_are_around_their_labelled_frame(frames, stride, expected):
    clip = strided_clips(video(), frames, stride)[2]
    assert tuple(item.frame for item in clip) == expected


def test_videos_keep_their_flow_on_disk_and_the_labels_that_count(tmp_path):
    source = Videos(video(), ClipsRecipe(frames=3), AUGMENT, tmp_path / "flow")
    assert len(source) == 10
    frames, masks, flow = source.fixed(2)
    expected, truth = source.data.read_clip(source.clips[2])
    assert (frames == expected).all()
    assert (masks[[0, 2]] == 255).all()
    assert (masks[1] == truth[1]).all()
    assert len(list((tmp_path / "flow").iterdir())) == 2
    torch.testing.assert_close(flow.forward, estimate(expected).forward, rtol=0, atol=0.02)  # half precision
    every = Videos(video(), ClipsRecipe(frames=3, labelled="all", flow="none"), AUGMENT, tmp_path)
    assert (every.fixed(2)[1] == truth).all()
    assert every.fixed(2)[2] is None


def test_frames_without_labels_are_void_but_there(tmp_path):
    full = video()
    sparse = Dataset.subset(full, [replace(i, mask=None) if i.frame != 2 else i for i in full])
    sparse.read_image = full.read_image  # which asks for the mask, too
    sparse.read_mask = lambda item: full.read_mask(item) if item.mask else None
    source = Videos(sparse, ClipsRecipe(frames=3, labelled="all", flow="none"), AUGMENT, tmp_path)
    assert len(source) == 2
    frames, masks, _ = source.fixed(0)
    assert [bool((mask == 255).all()) for mask in masks] == [True, False, True]
    assert (frames[0] != frames[1]).any()


def test_a_networks_output_is_kept_once_per_frame(tmp_path):
    source = Videos(video(), ClipsRecipe(frames=3), AUGMENT, tmp_path)
    calls = []
    outputs = network_outputs(source, lambda image: calls.append(1) or network(image))
    assert len(calls) == len(outputs) == 10  # frames are in up to three clips


@pytest.mark.parametrize("flow", ["exact", "dis", "none"])
def test_stills_are_the_same_whenever_asked_and_fresh_ones_differ(tmp_path, flow):
    images = Images(synthetic((32, 44), count=3))
    source = Stills(images, replace(STILLS, flow=flow, count=5), AUGMENT, 7, tmp_path)
    assert len(source) == 5
    first, again, fourth = source.fixed(0), source.fixed(0), source.fixed(3)
    assert (first[0] == again[0]).all()
    assert first[0].shape == (3, 32, 44, 3)
    assert (first[0] != fourth[0]).any()  # of the same image
    assert (first[2] is None) == (flow == "none")
    assert (flow == "dis") == any(tmp_path.iterdir())
    views = [source.fresh(0, np.random.default_rng(n)) for n in (0, 1)]
    for frames, masks, way in views:
        assert frames.shape == (3, 20, 28, 3)
        assert masks.shape == (3, 20, 28)
        assert way is None or way.shape == (1, 3, 20, 28)
    assert (views[0][0] != views[1][0]).any()


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_a_cached_crop_shows_the_same_place_everywhere(tmp_path, flip):
    """The output is a function of the colours, and the flow leads to them: both must hold in every crop."""
    y, x = np.mgrid[:32, :44]
    smooth = np.stack([5 * x + 20, 6 * y + 40, 3 * x + 2 * y], -1).astype(np.uint8)
    plain = Augment((20, 28), (1.0, 1.0), brightness=0, contrast=0, saturation=0, hue=0)
    source = Stills([(smooth, (x > y).astype(np.uint8))] * 2, STILLS, plain, 0, tmp_path)
    crops = ClipCrops(source, (0, 1), network_outputs(source, network), (20, 28), flip)
    places = set()
    for number in range(4):
        log_p, image, *flow, masks = crops[number]
        assert image.shape == (3, 3, 20, 28)
        assert masks.shape == (3, 20, 28)
        expected = torch.stack([network(image[None, :, t])[0] for t in range(3)], 1)
        torch.testing.assert_close(log_p, expected, rtol=0, atol=1e-3)
        way = Flow(*[part[None] for part in flow])
        sure = way.forward_reliable[0, 0, 0]
        assert sure.float().mean() > 0.6
        colours = image[None].float()
        error = (warp(colours[:, :, 1], way.forward[:, :, 0]) - colours[:, :, 0])[0].abs().amax(0)[sure]
        assert error.quantile(0.9) < 2.5  # a pixel's way is worth 5 or 6
        places.add(int(image.sum()))
    assert len(places) == 4
    twice = ClipCrops(source, (0, 1), network_outputs(source, network), (20, 28), flip)[3]
    assert all(torch.equal(a, b) for a, b in zip(twice, crops[3], strict=True))


def test_clips_smaller_than_the_crop_are_padded_with_void(tmp_path):
    source = Stills(Images(synthetic((32, 44), count=2)), STILLS, AUGMENT, 0, tmp_path)
    crops = ClipCrops(source, (0, 1), network_outputs(source, network), (40, 48), 0.0)
    log_p, image, forward, _, sure, _, masks = crops[0]
    assert log_p.shape == (2, 3, 40, 48)
    assert image.shape == (3, 3, 40, 48)
    assert forward.shape == (2, 2, 40, 48)
    assert (masks[:, 32:] == 255).all()
    assert (masks[:, :, 44:] == 255).all()
    assert not sure[..., 44:].any()


def test_fresh_crops_need_no_output(tmp_path):
    source = Videos(video(), ClipsRecipe(frames=3), AUGMENT, tmp_path)
    image, *flow, masks = ClipCrops(source, (0, 1), None, (20, 28), 0.5)[0]
    assert image.shape == (3, 3, 20, 28)
    assert len(flow) == 4
    assert masks.shape == (3, 20, 28)
    assert not any(tmp_path.iterdir())
