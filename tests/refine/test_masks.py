"""Plain masks as predictions: binary ones, label maps with a confidence, and masks that say nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from deepmrf.densecrf.utils import unary_from_labels
from deepmrf.refine.apply import refine
from deepmrf.refine.label_ids import BINARY
from deepmrf.refine.opening import open_preset
from deepmrf.refine.predictions import PredictionFolder, are_binary, open_prediction

SIZE = (24, 30)


@pytest.fixture
def folders(tmp_path):
    """Two images of a bright disc, whose masks are wrong in every tenth pixel, as labels 0 and 1."""
    random = np.random.default_rng(0)
    rows, columns = np.indices(SIZE)
    truth = ((rows - 12) ** 2 + (columns - 15) ** 2 < 64).astype(np.uint8)
    for name in ("masks", "images"):
        (tmp_path / name).mkdir()
    for stem in ("a", "b"):
        noisy = np.where(random.random(SIZE) < 0.1, 1 - truth, truth).astype(np.uint8)
        Image.fromarray(noisy).save(tmp_path / "masks" / f"{stem}.png")
        Image.fromarray(np.repeat(200 * truth[..., None] + 20, 3, 2)).save(tmp_path / "images" / f"{stem}.png")
    return tmp_path / "masks", tmp_path / "images", tmp_path / "out", truth


def scaled(masks, factor):
    """Multiply the masks' values, in place."""
    for path in masks.iterdir():
        Image.fromarray(np.asarray(Image.open(path)) * np.uint8(factor)).save(path)


def run(masks, images, out, gt_prob=0.7, preset="maskcut"):
    mrf, labels, label_ids = open_preset(preset, masks, images)
    return refine(mrf, labels, masks, images, out, label_ids=label_ids, gt_prob=gt_prob)


@pytest.mark.parametrize("factor", [1, 255])
def test_binary_masks_come_out_as_they_went_in(folders, factor):
    masks, images, out, truth = folders
    scaled(masks, factor)
    report = run(masks, images, out)
    assert report.done == ("a", "b")
    kind = "label ids" if factor == 1 else "binary masks of 0 and 255"
    assert report.kinds == (f"{kind}, right with probability 0.7",)
    for path in out.iterdir():
        picture = Image.open(path)
        assert picture.mode == ("P" if factor == 1 else "L")
        assert (np.asarray(picture) == factor * truth).mean() > 0.99


def test_gt_prob_is_the_one_of_pydensecrf(folders):
    files = PredictionFolder(folders[0]).find("a")
    ids = np.asarray(Image.open(files.path))
    for labels, gt_prob in ((2, 0.7), (4, 0.5)):
        energy = torch.from_numpy(unary_from_labels(ids, labels, gt_prob, zero_unsure=False)).view(labels, *SIZE)
        log_p = open_prediction(files, labels, gt_prob=gt_prob)[0].tensor()
        torch.testing.assert_close(log_p, -energy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("gt_prob", [0.0, 0.5, 1.0, -1.0, float("nan")])
def test_a_mask_that_is_surely_right_or_no_guess_at_all_is_refused(folders, gt_prob):
    with pytest.raises(ValueError, match=r"gt_prob=.* must lie above 0.5"):
        run(*folders[:3], gt_prob=gt_prob)
    assert not folders[2].exists()


def test_gt_prob_without_label_maps_is_noted(folders):
    masks, images, out, _ = folders
    for path in list(masks.iterdir()):
        np.save(path.with_suffix(".npy"), np.full((2, *SIZE), 0.5, np.float32))
        path.unlink()
    report = run(masks, images, out)
    assert report.kinds == ("probabilities",)
    assert report.notes == ("gt_prob=0.7 was not used: it is for label maps without a confidence of their own.",)


def test_arrays_of_true_and_false_are_masks(folders):
    masks, images, out, truth = folders
    for path in list(masks.iterdir()):
        np.save(path.with_suffix(".npy"), np.asarray(Image.open(path)) == 1)
        path.unlink()
    run(masks, images, out)
    assert (np.asarray(Image.open(out / "a.png")) == truth).mean() > 0.99


def test_one_empty_mask_stays_empty(folders):
    masks, images, out, _ = folders
    scaled(masks, 255)
    Image.fromarray(np.zeros(SIZE, np.uint8)).save(masks / "a.png")
    assert open_preset("maskcut", masks, images)[2] == BINARY
    run(masks, images, out)
    assert not np.asarray(Image.open(out / "a.png")).any()
    assert np.asarray(Image.open(out / "b.png")).any()


@pytest.mark.parametrize(("value", "shown"), [(0, "1 labels"), (255, "0 labels")])
def test_masks_of_one_value_are_refused(folders, value, shown):
    masks, images, out, _ = folders
    for path in masks.iterdir():
        Image.fromarray(np.full(SIZE, value, np.uint8)).save(path)
    with pytest.raises(ValueError, match=f"show {shown}, but at least 2 are needed"):
        run(masks, images, out)


def test_other_ids_or_arrays_beside_them_make_255_void(folders):
    masks, images, _, _ = folders
    scaled(masks, 255)
    files = [PredictionFolder(masks).find(stem) for stem in "ab"]
    assert are_binary(files)
    ids = np.zeros(SIZE, np.uint8)
    ids[0], ids[1] = 1, 255
    Image.fromarray(ids).save(masks / "b.png")
    assert not are_binary(files)
    assert open_preset("maskcut", masks, images)[2] is None


def test_a_mask_of_another_size_is_one_sentence(folders):
    masks, images, out, _ = folders
    Image.fromarray(np.eye(7, dtype=np.uint8)).save(masks / "a.png")
    report = run(masks, images, out)
    assert report.done == ("b",)
    assert "7 x 7 pixels but its image" in report.failed[0][1]
