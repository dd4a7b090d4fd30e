"""Moved stills: their flow is what the pixels did, labels move along, and nothing moves too far."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepmrf.flow import warp
from deepmrf.flow.clip import fold
from deepmrf.training.motion import camera_path, moving_clip


def picture(height=61, width=83):
    """A smooth picture, which interpolation hardly changes, and a mask of two halves."""
    y, x = np.mgrid[:height, :width]
    image = np.stack([2 * x + 20, 2 * y + 40, 120 + 60 * np.sin(x / 9) * np.cos(y / 11)], -1).round().astype(np.uint8)
    return image, (x > width // 2).astype(np.uint8)


def test_following_the_flow_finds_the_same_colours_and_labels():
    image, mask = picture()
    frames, masks, flow = moving_clip(np.random.default_rng(0), image, mask, 4, 6.0)
    assert frames.shape == (4, 61, 83, 3)
    assert masks.shape == (4, 61, 83)
    assert flow.shape == (1, 4, 61, 83)
    assert (frames[0] != frames[1]).mean() > 0.3  # it does move
    colours = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float()
    ids = torch.from_numpy(masks)[None, None].float()
    for way, sure, source, target in (
        (flow.forward, flow.forward_reliable, slice(1, None), slice(None, -1)),
        (flow.backward, flow.backward_reliable, slice(None, -1), slice(1, None)),
    ):
        assert 0.7 < sure.float().mean() < 1
        sure = fold(sure)[:, 0]
        error = (warp(fold(colours[:, :, source]), fold(way)) - fold(colours[:, :, target])).abs().amax(1)
        assert error[sure][:, None].quantile(0.99) < 2.5  # of 255
        same = warp(fold(ids[:, :, source]), fold(way), "nearest") == fold(ids[:, :, target])
        assert same[:, 0][sure].float().mean() > 0.98  # but on the edge between the halves


@pytest.mark.parametrize("motion", [0.5, 3.0, 12.0])
def test_no_pixel_moves_farther_than_asked(motion):
    image, mask = picture()
    lengths = []
    for seed in range(20):
        flow = moving_clip(np.random.default_rng(seed), image, mask, 3, motion)[2]
        lengths.append(float(torch.linalg.vector_norm(flow.forward, dim=1).max()))
    assert max(lengths) <= motion * 1.05
    assert max(lengths) > motion * 0.5


def test_the_middle_frame_stays_and_outside_is_void():
    image, mask = picture()
    frames, masks, flow = moving_clip(np.random.default_rng(5), image, mask, 3, 16.0)
    assert np.abs(frames[1].astype(int) - image)[2:-2, 2:-2].max() < 12  # within half a pixel of the picture
    assert (masks[1] != 255).mean() > 0.95
    void = masks[[0, 2]] == 255
    assert void.any()
    assert not (flow.forward_reliable[0, 0, 0].numpy() & (masks[0] == 255)).any()
    assert not (flow.backward_reliable[0, 0, 1].numpy() & (masks[2] == 255)).any()


def test_flicker_changes_every_frame_by_itself_and_the_geometry_not():
    image, mask = picture()
    still = moving_clip(np.random.default_rng(1), image, mask, 3, 4.0)
    again = moving_clip(np.random.default_rng(1), image, mask, 3, 4.0)
    flicker = moving_clip(np.random.default_rng(1), image, mask, 3, 4.0, 1.0)
    assert (still[0] == again[0]).all()
    assert (still[1] == flicker[1]).all()
    assert torch.equal(still[2].forward, flicker[2].forward)
    change = [flicker[0][t].astype(float).mean() - still[0][t].astype(float).mean() for t in range(3)]
    assert len({round(c, 1) for c in change}) == 3


def test_one_frame_without_motion_is_a_clip_too():
    image, mask = picture(5, 7)
    frames, masks, flow = moving_clip(np.random.default_rng(0), image, mask, 1, 0.0)
    assert frames.shape == (1, 5, 7, 3)
    assert flow.shape == (1, 1, 5, 7)
    assert masks.shape == (1, 5, 7)
    assert camera_path(np.random.default_rng(0), (1, 1), 2, 0.0).shape == (2, 3, 3)


@pytest.mark.parametrize("wrong", [{"frames": 0}, {"motion": -1.0}, {"flicker": 20.0}, {"motion": float("nan")}])
def test_bad_settings_say_what_is_needed(wrong):
    settings = {"frames": 3, "motion": 4.0, "flicker": 0.0} | wrong
    with pytest.raises(ValueError, match="at least"):
        moving_clip(np.random.default_rng(0), *picture(), **settings)
    with pytest.raises(ValueError, match="uint8"):
        moving_clip(np.random.default_rng(0), np.zeros((4, 5, 3)), np.zeros((4, 5), np.uint8), 3, 1.0)
