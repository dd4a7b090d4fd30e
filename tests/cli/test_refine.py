"""`deepmrf refine` as a user types it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image, ImageFilter
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.cli.refine import PRESET_FIELDS
from deepmrf.layers.crf import PRESETS
from deepmrf.refine.opening import PARAMETERS, preset_values


def type_in(*words):
    done = CliRunner().invoke(app, ["refine", *map(str, words)], env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", done.output)


@pytest.fixture
def folders(tmp_path):
    """Masks of 0 and 255 with holes, their images, and the options that name both."""
    truth = np.zeros((40, 50), np.uint8)
    truth[8:32, 10:40] = 255
    for name in ("masks", "images"):
        (tmp_path / name).mkdir()
    for number in range(3):
        mask = truth.copy()
        mask[12 + number : 15 + number, 20:23] = 0
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
        Image.fromarray(np.repeat(truth[..., None] // 2 + 40, 3, 2)).save(tmp_path / "images" / f"{number}.jpg")
    options = ("--predictions", tmp_path / "masks", "--images", tmp_path / "images", "-o", tmp_path / "out")
    return tmp_path, truth, options


def test_a_folder_of_masks(folders):
    path, truth, options = folders
    code, text = type_in("--preset", "maskcut", *options, "--gt-prob", 0.7, "--workers", 2)
    assert code == 0, text
    assert "3 refined, 0 there already, 0 failed" in text
    assert "read as binary masks of 0 and 255, right with probability 0.7." in text
    for file in (path / "out").iterdir():
        assert set(np.unique(np.asarray(Image.open(file)))) == {0, 255}
        assert (np.asarray(Image.open(file)) == truth).mean() > 0.99
    again = type_in("--preset", "maskcut", *options)[1]
    assert "0 refined, 3 there already" in again
    assert "--overwrite does it again" in again


def test_the_help_says_what_every_preset_is_for():
    text = type_in("--help")[1]
    for name, field in PRESET_FIELDS.items():
        assert f"{name}: {field}." in text
    assert list(PRESET_FIELDS) == list(PRESETS)


@pytest.mark.parametrize("word", ["list", "help"])
def test_a_table_of_presets_with_the_meaning_of_its_rows(word):
    code, text = type_in("--preset", word)  # without the options that are required else
    assert code == 0
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:7]}
    assert list(lines) == list(PARAMETERS)
    for column, (_name, settings) in enumerate(PRESETS.items()):
        numbers = [*settings["smooth"], *settings["pairs"], settings["iterations"]]
        assert [float(lines[key][column]) for key in PARAMETERS] == numbers
    for key, meaning in PARAMETERS.items():
        assert f"{key:<14}  {meaning}" in text


def test_set_changes_the_numbers_of_a_preset(folders):
    path, _, options = folders
    assert type_in("--preset", "voc", *options, "--probabilities", "npy")[0] == 0
    usual = np.load(path / "out" / "0.npy")
    values = preset_values("voc")
    same = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    assert type_in("--preset", "voc", *options, "--probabilities", "npy", "--overwrite", *same)[0] == 0
    assert np.array_equal(np.load(path / "out" / "0.npy"), usual)
    changed = ("--set", "appearance=0.001", "--set", "smoothness=0", "--set", "iterations=1")
    assert type_in("--preset", "voc", *options, "--overwrite", *changed)[0] == 0
    for number in range(3):  # such a CRF changes nothing
        mask = np.asarray(Image.open(path / "masks" / f"{number}.png"))
        assert np.array_equal(np.asarray(Image.open(path / "out" / f"{number}.png")), mask)


def save_soft(path, truth, blur=2.0):
    for number in range(3):
        mask = Image.fromarray(truth).filter(ImageFilter.GaussianBlur(blur))
        mask.save(path / "masks" / f"{number}.png")


def test_grey_masks_are_soft_masks(folders):
    path, truth, options = folders
    save_soft(path, truth)
    code, text = type_in("--preset", "saliency", *options)
    assert code == 0, text
    assert "read as soft masks, grey is the probability of the foreground." in text
    for file in (path / "out").iterdir():
        assert Image.open(file).mode == "L"
        result = np.asarray(Image.open(file))
        assert set(np.unique(result)) == {0, 255}
        assert (result == truth).mean() > 0.99
    text = type_in("--preset", "voc", *options, "--overwrite", "--gt-prob", 0.9)[1]
    assert "grey is the probability of the foreground, right with probability 0.9 at most." in text


def test_what_grey_masks_are_can_be_said(folders):
    path, truth, options = folders
    assert "read as soft masks" in type_in("--preset", "saliency", *options, "--soft-mask")[1]  # of 0 and 255 alone
    for number in range(3):
        Image.fromarray((truth > 0).astype(np.uint8) * 3).save(path / "masks" / f"{number}.png")
    text = type_in("--preset", "saliency", *options, "--no-soft-mask", "--overwrite")[1]
    assert "read as label ids" in text
    (path / "labels.json").write_text('{"names": ["ground", "thing"]}')
    save_soft(path, truth)
    words = ("--labels", path / "labels.json", "--soft-mask", "--overwrite")
    assert type_in("--preset", "saliency", *options, *words)[0] == 0
    assert set(np.unique(np.asarray(Image.open(path / "out" / "0.png")))) == {0, 1}
    (path / "labels.json").write_text('{"names": ["ground", "thing", "other"]}')
    assert "Soft masks have two labels" in type_in("--preset", "saliency", *options, *words)[1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "Give either a folder that deepmrf fit wrote, or a preset, such as --preset voc."),
        (("somewhere", "--preset", "voc"), "Give either"),
        (("--preset", "magic"), "There is no preset 'magic': choose one of voc, irn, deeplab"),
        (("--preset", "medical3d"), "medical3d is for volumes"),
        (("--preset", "voc", "--set", "color_width=5"), "no parameter 'color_width': choose from smooth_width, smooth"),
        (("--preset", "voc", "--set", "colour_width"), "--set colour_width has no value: write --set key=value"),
        (("--preset", "voc", "--set", "colour_width=red"), "--set colour_width=red is no number"),
        (("--preset", "voc", "--set", "colour_width=0.05"), "colour_width=0.05 is below 1, and it is of 255"),
        (("--preset", "voc", "--set", "iterations=1.5"), "iterations=1.5 must be a whole number"),
        (("--preset", "voc", "--set", "appearance=-1"), "appearance=-1 must be at least 0"),
        (("--preset", "voc", "--set", "position_width=0"), "position_width=0.0 must be positive"),
        (("somewhere", "--set", "iterations=2"), "--set is for a preset"),
        (("--preset", "voc", "--gt-prob", 0), "gt_prob=0.0 must lie above 0.5"),
        (("--preset", "voc", "--gt-prob", 1), "gt_prob=1.0 must lie above 0.5"),
        (("--preset", "voc", "--workers", 0), "workers=0 must be at least 1"),
        (("--preset", "voc", "--probabilities", "txt"), "probabilities='txt' is unknown"),
    ],
)
def test_bad_words_give_one_sentence(folders, words, why):
    path, _, options = folders
    code, text = type_in(*words, *options)
    assert code == 2
    assert why in text
    assert len(text.strip().splitlines()) == 1
    assert not (path / "out").exists()


@pytest.mark.parametrize(("value", "shown"), [(0, 1), (255, 0)])
def test_empty_masks_give_one_sentence(folders, value, shown):
    path, truth, options = folders
    for file in (path / "masks").iterdir():
        Image.fromarray(np.full_like(truth, value)).save(file)
    code, text = type_in("--preset", "voc", *options)
    assert code == 2
    assert (
        text.strip()
        == f"The predictions show {shown} labels, but at least 2 are needed; give a labels.json that names all labels."
    )


def test_labels_painted_for_the_eye_ask_for_their_ids(folders):
    path, truth, options = folders
    painted = truth.copy()
    painted[:5], painted[35:] = 85, 170
    for number in range(3):
        Image.fromarray(painted).save(path / "masks" / f"{number}.png")
    code, text = type_in("--preset", "voc", *options)
    assert code == 2
    assert 'give a labels.json with "ids": [0, 85, 170, 255] and as many "names"' in text
    (path / "labels.json").write_text('{"names": ["a", "b", "c", "d"], "ids": [0, 85, 170, 255]}')
    assert type_in("--preset", "voc", *options, "--labels", path / "labels.json")[0] == 0


def test_masks_of_another_size_are_named(folders):
    path, _, options = folders
    Image.fromarray(np.eye(9, dtype=np.uint8) * 255).save(path / "masks" / "1.png")
    code, text = type_in("--preset", "voc", *options)
    assert code == 1
    assert "2 refined, 0 there already, 1 failed" in text
    assert "9 x 9 pixels but its image" in text


def test_pipes_are_skipped_with_a_sentence(folders, pipe):
    path, _, options = folders
    (path / "masks" / "0.png").unlink()
    (path / "images" / "1.jpg").unlink()
    pipe(path / "masks" / "0.npy")
    pipe(path / "images" / "1.jpg")
    code, text = type_in("--preset", "maskcut", *options)
    assert code == 1
    assert "0.npy cannot be read as an array (it is no regular file)" in text
    assert "1.jpg cannot be read as an image (it is no regular file)" in text
    assert "1 refined, 0 there already, 2 failed" in text


def test_ctrl_c_is_one_sentence(folders, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("deepmrf.refine.apply.refine_image", interrupt)
    code, text = type_in("--preset", "maskcut", *folders[2])
    assert code == 130
    assert text.strip() == "Interrupted: what is written is complete, and the same command goes on from here."


def test_a_reason_that_many_share_stands_once_with_their_names(folders):
    path, _, options = folders
    for name, size in (("0", 9), ("1", 9), ("2", 8)):
        Image.fromarray(np.eye(size, dtype=np.uint8) * 255).save(path / "masks" / f"{name}.png")
    code, text = type_in("--preset", "maskcut", *options)
    assert code == 1
    assert text.count("9 x 9 pixels but its image") == text.count("8 x 8 pixels but its image") == 1
    assert "(likewise 1)" in " ".join(text.split())


def test_many_failures_are_counted(folders, monkeypatch):
    path, _, options = folders
    monkeypatch.setattr("deepmrf.cli.console.MAX_FAILURES_SHOWN", 1)
    for name in ("0", "1"):
        Image.fromarray(np.eye(9, dtype=np.uint8) * 255).save(path / "masks" / f"{name}.png")
    code, text = type_in("--preset", "maskcut", *options)
    assert code == 1
    assert text.count("9 x 9 pixels but its image") == 1
    assert "... and 1 more." in text


def test_overlays_are_for_pictures(folders):
    path, _, options = folders
    assert type_in("--preset", "maskcut", *options, "--overlays")[0] == 0
    assert sorted(file.name for file in (path / "out").glob("*_overlay.jpg")) == [f"{n}_overlay.jpg" for n in range(3)]
    nibabel = pytest.importorskip("nibabel")
    for name in ("scans", "volumes"):
        (path / name).mkdir()
        values = np.arange(210).reshape(5, 6, 7) % 2
        nibabel.save(nibabel.Nifti1Image(values.astype(np.uint8), np.eye(4)), path / name / "a.nii.gz")
    words = ("--predictions", path / "volumes", "--images", path / "scans", "-o", path / "refined", "--overlays")
    code, text = type_in("--preset", "medical3d", *words)
    assert code == 2
    assert text.strip() == f"Overlays are for pictures, and {path / 'scans'} holds volumes: leave overlays out."
    assert not (path / "refined").exists()


def test_a_label_that_is_lost_is_named_in_the_last_line(folders):
    """Masks of a third label, two pixels wide, on images that show nothing there."""
    path, truth, options = folders
    for number in range(3):
        mask = (truth > 0).astype(np.uint8)
        mask[2:4, 2:4] = 2
        Image.fromarray(mask).save(path / "masks" / f"{number}.png")
    text = type_in("--preset", "voc", *options)[1]
    assert text.splitlines()[-1] == (
        "label 2 lost all its pixels: look at the results, or learn an MRF by deepmrf fit."
    )
    assert "look at" not in type_in("--preset", "voc", *options)[1]  # what was done earlier is not counted
