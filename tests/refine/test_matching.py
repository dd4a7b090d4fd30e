"""Predictions, images and masks are matched by their names."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from deepmrf.refine.matching import match_files

L, H, W = 4, 9, 12


def test_what_is_missing_is_counted(tmp_path):
    for name in ("predictions", "images", "masks"):
        (tmp_path / name).mkdir()
    for kind, stems in (("images", "abcd"), ("masks", "abd")):
        for stem in stems:
            Image.fromarray(np.zeros((H, W), np.uint8)).save(tmp_path / kind / f"{stem}.png")
    for stem in "bce":
        np.save(tmp_path / "predictions" / f"{stem}.npy", np.zeros((L, H, W), np.float32))
    matched, notes = match_files(tmp_path / "predictions", tmp_path / "images", tmp_path / "masks")
    assert [files.stem for files in matched] == ["b"]
    assert notes == [
        "2 of the images have no prediction: a, d.",
        "1 of the predicted images have no mask: c.",
        "1 of the predictions have no image: e.",
    ]
    (tmp_path / "predictions" / "b.npy").unlink()
    with pytest.raises(FileNotFoundError, match="equal names"):
        match_files(tmp_path / "predictions", tmp_path / "images", tmp_path / "masks")


def test_numbered_frames_are_not_taken_for_labels(tmp_path):
    for name in ("predictions", "images"):
        (tmp_path / name).mkdir()
        for frame in range(3):
            Image.fromarray(np.zeros((H, W), np.uint8)).save(tmp_path / name / f"drive_{frame}.png")
    matched, notes = match_files(tmp_path / "predictions", tmp_path / "images")
    assert [files.stem for files in matched] == ["drive_0", "drive_1", "drive_2"]
    assert not notes


def test_label_maps_of_other_images_are_no_parts_of_a_prediction(tmp_path):
    for name, stems in (("predictions", ("a_0", "a_1")), ("images", ("a", "a_0", "a_1"))):
        (tmp_path / name).mkdir()
        for stem in stems:
            Image.fromarray(np.zeros((H, W), np.uint8)).save(tmp_path / name / f"{stem}.png")
    matched, notes = match_files(tmp_path / "predictions", tmp_path / "images")
    assert [files.stem for files in matched] == ["a_0", "a_1"]
    assert notes == ["1 of the images have no prediction: a."]


def test_masks_that_stand_for_images_are_called_masks(tmp_path):
    for name, stems in (("predictions", "bc"), ("masks", "ab")):
        (tmp_path / name).mkdir()
        for stem in stems:
            Image.fromarray(np.zeros((H, W), np.uint8)).save(tmp_path / name / f"{stem}.png")
    folders = tmp_path / "predictions", tmp_path / "masks", tmp_path / "masks"
    matched, notes = match_files(*folders)
    assert [(files.stem, files.image == files.mask) for files in matched] == [("b", True)]
    assert notes == ["1 of the masks have no prediction: a.", "1 of the predictions have no mask: c."]
    (tmp_path / "masks" / "b.png").unlink()
    needed = f"No name has a mask and a prediction in {folders[0]} and {folders[1]}; give them equal names."
    with pytest.raises(FileNotFoundError, match=re.escape(needed)):
        match_files(*folders)
