import sys

import numpy as np
import pytest

from deepmrf.data import Augment
from deepmrf.data.transforms import PADDING

STILL = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}


@pytest.fixture(params=["cv2", "pillow"])
def backend(request, monkeypatch):
    if request.param == "cv2":
        pytest.importorskip("cv2")
    else:
        monkeypatch.setitem(sys.modules, "cv2", None)  # makes `import cv2` fail
    return request.param


def blocks(frames=1, height=48, width=64):
    """A clip of large squares whose colour is ten times their id in the mask, so that the two can be compared."""
    rows, columns = np.mgrid[:height, :width] // 16
    mask = np.stack([(rows * 4 + columns + frame) % 16 for frame in range(frames)]).astype(np.uint8)
    return np.repeat(mask[..., None] * 10, 3, axis=-1).astype(np.uint8), mask


def rng(seed=0):
    return np.random.default_rng(seed)


def test_nothing_asked_nothing_done(backend):
    images, masks = blocks(2)
    out, out_masks = Augment(scale=(1, 1), flip=0, **STILL)(rng(), images, masks)
    np.testing.assert_array_equal(out, images)
    np.testing.assert_array_equal(out_masks, masks)


def test_flip(backend):
    images, masks = blocks()
    out, out_masks = Augment(scale=(1, 1), flip=1, **STILL)(rng(), images, masks)
    np.testing.assert_array_equal(out, images[:, :, ::-1])
    np.testing.assert_array_equal(out_masks, masks[:, :, ::-1])
    assert out.flags.c_contiguous


@pytest.mark.parametrize("seed", range(12))
def test_image_and_mask_stay_together(backend, seed):
    images, masks = blocks()
    out, out_masks = Augment(crop=(40, 40), **STILL)(rng(seed), images, masks)
    assert out.shape == (1, 40, 40, 3)
    assert out_masks.shape == (1, 40, 40)
    inside = out_masks != 255
    assert inside.any()
    agree = np.abs(out[..., 0].astype(int) - 10 * out_masks.astype(int)) <= 5
    # Interpolation mixes colours within a pixel or two of an edge only, and edges are 16 scaled pixels apart.
    assert agree[inside].mean() > 0.6
    flat = np.ones_like(inside)
    for axis in (1, 2):
        for shift in (-3, -2, -1, 1, 2, 3):
            flat &= np.roll(out_masks, shift, axis) == out_masks
    flat[:, :3] = flat[:, -3:] = flat[:, :, :3] = flat[:, :, -3:] = False
    assert agree[flat & inside].all()


def test_all_frames_get_the_same_view(backend):
    images, masks = blocks(1)
    clip, clip_masks = np.repeat(images, 4, axis=0), np.repeat(masks, 4, axis=0)
    out, out_masks = Augment(crop=(32, 32))(rng(3), clip, clip_masks)
    for frame in range(1, 4):
        np.testing.assert_array_equal(out[frame], out[0])
        np.testing.assert_array_equal(out_masks[frame], out_masks[0])


def test_rng_decides(backend):
    images, masks = blocks(2)
    augment = Augment(crop=(32, 32))
    first, again, other = (augment(rng(seed), images, masks) for seed in (1, 1, 2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[0] != other[0]).any()


def test_outside_is_void(backend):
    images, masks = blocks()
    out, out_masks = Augment(crop=(60, 80), scale=(0.5, 0.5))(rng(), images, masks)
    void = out_masks == 255
    assert (~void).sum() == 24 * 32
    np.testing.assert_array_equal(out[void], np.broadcast_to(PADDING, (void.sum(), 3)))
    corners = {tuple(np.argwhere(Augment(crop=(60, 80))(rng(s), images, masks)[1][0] != 255)[0]) for s in range(8)}
    assert len(corners) > 2  # it lies anywhere in the padding


def test_backends_see_the_same(monkeypatch):
    pytest.importorskip("cv2")
    smooth = np.mgrid[:48, :64].sum(0)[None, ..., None].repeat(3, -1).astype(np.uint8)
    masks = blocks()[1]
    for seed in range(6):
        with monkeypatch.context() as patch:
            fast, fast_masks = Augment(crop=(40, 40))(rng(seed), smooth, masks)
            patch.setitem(sys.modules, "cv2", None)
            slow, slow_masks = Augment(crop=(40, 40))(rng(seed), smooth, masks)
        np.testing.assert_array_equal(fast_masks, slow_masks)
        assert np.abs(fast.astype(int) - slow.astype(int)).max() <= 3


def test_colours_shift_but_the_mask_does_not(backend):
    images, masks = blocks()
    images[...] = (200, 100, 50)
    out, out_masks = Augment(scale=(1, 1), flip=0, brightness=0.5, contrast=0, saturation=0, hue=0)(
        rng(), images, masks
    )
    np.testing.assert_array_equal(out_masks, masks)
    ratio = out[0, 0, 0] / (200, 100, 50)
    assert ratio.std() < 0.01
    assert abs(ratio[0] - 1) > 0.02
    grey = np.full_like(images, 90)
    recoloured, _ = Augment(scale=(1, 1), brightness=0, contrast=0, saturation=1, hue=0.5)(rng(), grey, masks)
    assert np.abs(recoloured.astype(int) - 90).max() <= 1  # grey has neither hue nor saturation


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"crop": (0, 5)}, "crop is"),
        ({"scale": (2, 1)}, "scale is"),
        ({"scale": (0, 1)}, "scale is"),
        ({"flip": 2}, "flip is 2; give a value of 0 to 1"),
        ({"hue": 0.6}, "hue is 0.6"),
        ({"brightness": -0.1}, "brightness is"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Augment(**settings)


def test_bad_clips():
    images, masks = blocks()
    with pytest.raises(ValueError, match=r"give \(T, H, W, 3\)"):
        Augment()(rng(), images[0], masks[0])
    with pytest.raises(ValueError, match="masks"):
        Augment()(rng(), images, masks[:, 1:])
    with pytest.raises(ValueError, match="of float32 and uint8"):
        Augment()(rng(), images.astype(np.float32), masks)
