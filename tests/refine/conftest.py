"""Folders of predictions, images and masks, and commands as they are typed."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app


@pytest.fixture
def folders(tmp_path):
    """Predictions, images and masks: four images of three stripes, with label maps for predictions."""
    for name in ("predictions", "images", "masks"):
        (tmp_path / name).mkdir()
    mask = np.repeat(np.arange(3).repeat([7, 7, 6])[:, None], 26, axis=1).astype(np.uint8)
    for number in range(4):
        for name, values in (("predictions", mask), ("masks", mask), ("images", 80 * mask + number)):
            Image.fromarray(values).save(tmp_path / name / f"{number}.png")
    return tmp_path / "predictions", tmp_path / "images", tmp_path / "masks"


@pytest.fixture
def options(folders):
    """The folders as options of the command fit; the first four are for refine, too."""
    predictions, images, masks = folders
    return ["--predictions", predictions, "--images", images, "--masks", masks]


@pytest.fixture(scope="session")
def type_in():
    """type_in("fit", ...) -> exit code, output without colours."""

    def run(*words):
        done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "TERM": "dumb"})
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", done.output)

    return run
