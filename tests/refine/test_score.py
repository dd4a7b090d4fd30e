"""Saved predictions against masks, in Python and by `deepmrf evaluate --masks`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.evaluation.dice import mean_dice
from deepmrf.refine.score import score

LABELS, COUNT, SIZE = 3, 4, (10, 12)


@pytest.fixture
def folders(tmp_path):
    """Masks; probabilities that are wrong in the first two rows; label maps that are wrong in the first."""
    for name in ("masks", "raw", "refined"):
        (tmp_path / name).mkdir()
    for number in range(COUNT):
        mask = np.random.default_rng(number).integers(0, LABELS, SIZE, dtype=np.uint8)
        mask[-1] = 255
        wrong = (np.where(mask == 255, 0, mask) + 1) % LABELS
        raw, refined = np.where(mask == 255, 0, mask), np.where(mask == 255, 0, mask)
        raw[:2], refined[:1] = wrong[:2], wrong[:1]
        Image.fromarray(mask).save(tmp_path / f"masks/{number}.png")
        np.save(tmp_path / f"raw/{number}.npy", np.eye(LABELS, dtype=np.float32)[raw].transpose(2, 0, 1))
        Image.fromarray(refined.astype(np.uint8)).save(tmp_path / f"refined/{number}.png")
    return tmp_path


def type_in(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_scores_and_gain_by_hand(folders):
    raw, refined = folders / "raw", folders / "refined"
    report = score([raw, refined], folders / "masks")
    right = {str(raw): 7 / 9, str(refined): 8 / 9}  # of ten rows, one is void
    for name, share in right.items():
        assert report.scores[name].pixel_accuracy == pytest.approx(share)
        assert report.scores[name].images == COUNT
    assert report.gain.pixel_accuracy.value == pytest.approx(1 / 9)
    assert report.gain.miou.value == pytest.approx(report.scores[str(refined)].miou - report.scores[str(raw)].miou)
    assert report.gain.better == COUNT
    assert report.notes == ()


def test_label_maps_need_not_show_the_last_label(folders):
    for path in (folders / "refined").iterdir():
        Image.fromarray(np.ones(SIZE, np.uint8)).save(path)
    report = score([folders / "raw", folders / "refined"], folders / "masks")
    assert [len(scores.names) for scores in report.scores.values()] == [LABELS, LABELS]
    alone = score([folders / "refined"], folders / "masks", labels=LABELS)
    assert alone.gain is None
    assert alone.scores[str(folders / "refined")].miou == report.scores[str(folders / "refined")].miou


def test_images_that_one_folder_lacks_are_left_out_of_both(folders):
    (folders / "raw/1.npy").unlink()
    report = score([folders / "raw", folders / "refined"], folders / "masks")
    assert {scores.images for scores in report.scores.values()} == {COUNT - 1}
    assert len(report.notes) == 1
    assert "have no prediction: 1" in report.notes[0]
    for number in (0, 2, 3):
        (folders / f"refined/{number}.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"No mask has a prediction in each of .*raw, .*refined"):
        score([folders / "raw", folders / "refined"], folders / "masks")


def test_the_command(folders):
    code, text = type_in(
        "evaluate", folders / "raw", folders / "refined", "--masks", folders / "masks", "-o", folders / "s"
    )
    assert code == 0, text
    assert f"{folders / 'refined'} adds +" in text
    assert "Did an MRF learn from these masks? Then it adds less to other images" in text
    assert "4 images of 4 better, 0 worse" in text
    facts = json.loads((folders / "s/scores.json").read_text())
    assert facts["scores"][str(folders / "raw")]["pixel_accuracy"] == pytest.approx(7 / 9)
    assert facts["gain"]["pixel_accuracy"]["gain"] == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("raw",), "Models are measured on --data, such as camvid:PATH; folders of predictions on --masks"),
        (("raw", "--data", "synthetic:24x32", "--labels", 3), "folders of predictions on --masks (and --labels)"),
        (("raw", "--masks", "masks", "--flip"), "--masks scores saved predictions: beside it, give --labels and --out"),
        (("nowhere", "--masks", "masks"), "nowhere"),
        (("raw", "--masks", "nowhere"), "nowhere does not exist; give the folder with the masks."),
        (("masks", "--masks", "raw"), "No name has a mask and a prediction in masks and raw"),
    ],
)
def test_what_cannot_be_scored_is_said_in_one_sentence(folders, monkeypatch, words, says):
    monkeypatch.chdir(folders)
    code, text = type_in("evaluate", *words)
    assert code == 2
    assert says in text
    assert len(text.strip().splitlines()) == 1


def drive(tmp_path, moves, count=40):
    """Masks with a road below and a block that moves a little from frame to frame, or jumps; two folders of label maps.

    In the first folder a whole column is wrong, in the second half of it, in stretches of ten frames.
    """
    random = np.random.default_rng(0)
    for name in ("masks", "first", "second"):
        (tmp_path / name).mkdir()
    for number in range(count):
        mask = np.zeros((24, 48), np.uint8)
        mask[14:] = 1
        left = number if moves else random.integers(0, 40)
        mask[random.integers(0, 10) if not moves else 6 :, left : left + 8] = 2
        first, second = mask.copy(), mask.copy()
        first[:, 0] = (mask[:, 0] + 1) % 3
        second[: 24 * (number // 10 % 2), 0] = first[: 24 * (number // 10 % 2), 0]
        for name, ids in (("masks", mask), ("first", first), ("second", second)):
            Image.fromarray(ids).save(tmp_path / name / f"a_{number:03}.png")
    return [tmp_path / "first", tmp_path / "second"], tmp_path / "masks"


@pytest.mark.parametrize("moves", [True, False], ids=["video", "photographs"])
def test_frames_of_a_video_are_drawn_in_stretches(tmp_path, moves):
    report = score(*drive(tmp_path, moves))
    assert (report.gain.stretches, report.gain.stretch_frames) == ((4, 10) if moves else (40, 1))


def test_pixels_that_a_label_map_leaves_out_are_wrong(tmp_path):
    for name in ("masks", "maps"):
        (tmp_path / name).mkdir()
    mask = np.zeros((8, 10), np.uint8)
    mask[4:] = 1
    for missing, right in ((0, 4), (1, 4)):
        maps = mask.copy()
        maps[mask == missing] = 255
        for name, ids in (("masks", mask), ("maps", maps)):
            Image.fromarray(ids).save(tmp_path / name / "0.png")
        report = score([tmp_path / "maps"], tmp_path / "masks", labels=2)
        scores = report.scores[str(tmp_path / "maps")]
        assert scores.pixel_accuracy == pytest.approx(right / 8)
        assert scores.iou_per_class == pytest.approx((0, 1) if missing == 0 else (1, 0))
        assert "50.0% of the labelled pixels have no label there" in report.notes[0]
    code, text = type_in("evaluate", tmp_path / "maps", "--masks", tmp_path / "masks", "--labels", 2)
    assert code == 0
    assert "count as wrong" in text


def test_volumes_have_dice_and_its_gain(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    random = np.random.default_rng(0)
    for name in ("masks", "raw", "refined"):
        (tmp_path / name).mkdir()
    for number in range(6):
        mask = np.zeros((9, 10, 8), np.uint8)
        mask[2:6, 3:7, 2:6] = 1
        mask[5:8, 1:4, 3:7] = 2
        nibabel.save(nibabel.Nifti1Image(mask, np.eye(4)), tmp_path / f"masks/v{number}.nii.gz")
        for name, share in (("raw", 0.2), ("refined", 0.1)):
            ids = np.where(random.random(mask.shape) < share, (mask + 1) % 3, mask)
            np.save(tmp_path / name / f"v{number}.npy", np.eye(3, dtype=np.float32)[ids].transpose(3, 0, 1, 2))
    folders = [tmp_path / "raw", tmp_path / "refined"]
    report = score(folders, tmp_path / "masks")
    raw, refined = (mean_dice(report.dice[str(folder)]) for folder in folders)
    assert report.dice_gain.value == pytest.approx(refined - raw)
    assert 0 < report.dice_gain.low < report.dice_gain.value < report.dice_gain.high
    assert report.gain.miou.low > 0
    code, text = type_in("evaluate", *folders, "--masks", tmp_path / "masks", "-o", tmp_path / "s")
    assert code == 0, text
    assert f"adds +{100 * (refined - raw):.2f} to the mean Dice" in text
    facts = json.loads((tmp_path / "s/scores.json").read_text())
    assert facts["dice"][str(folders[1])]["mean"] == pytest.approx(refined)
