"""`deepmrf refine` as a user types it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.cli.refine import PRESET_LINES
from deepmrf.layers.crf import PRESETS


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
    assert "0 refined, 3 there already" in type_in("--preset", "maskcut", *options)[1]


def test_the_help_lists_every_preset_with_its_settings():
    text = type_in("--help")[1]
    for name, settings in PRESETS.items():
        numbers = ["/".join(map(str, settings[key])) for key in ("smooth", "pairs")]
        assert PRESET_LINES[name][0] == ", ".join([*numbers, str(settings["iterations"])])
        assert f"{name}: {PRESET_LINES[name][0]}. {PRESET_LINES[name][1]}." in text
    assert set(PRESET_LINES) == set(PRESETS)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "Give either a folder that deepmrf fit wrote, or a preset, such as --preset voc."),
        (("somewhere", "--preset", "voc"), "Give either"),
        (("--preset", "magic"), "There is no preset 'magic': choose one of voc, irn, deeplab"),
        (("--preset", "medical3d"), "medical3d is for volumes"),
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
    assert text.strip() == f"The predictions show {shown} labels, but at least 2 are needed; check what they hold."


def test_masks_of_another_size_are_named(folders):
    path, _, options = folders
    Image.fromarray(np.eye(9, dtype=np.uint8) * 255).save(path / "masks" / "1.png")
    code, text = type_in("--preset", "voc", *options)
    assert code == 1
    assert "2 refined, 0 there already, 1 failed" in text
    assert "9 x 9 pixels but its image" in text
