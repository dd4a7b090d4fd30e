"""`deepmrf explain` as a user types it, and `deepmrf evaluate --pictures`."""

from __future__ import annotations

import json
import re
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import synthetic
from deepmrf.data.synthetic import LABELS
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("plain_torch")
DATA = "synthetic:24x32"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder "run" with a model in it, in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    settings = {"window": 3, "contexts": 2, "context_size": 3}
    write_model(DeepParsingNetwork.build("fast", LABELS, {"width": 8}, settings).eval(), tmp_path / "run")
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch):
    """Write empty files for figures."""

    def save(figure, path):
        for suffix in ("png", "svg"):
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(f".{suffix}").write_text(str(figure))
        return path.with_suffix(".png"), path.with_suffix(".svg")

    monkeypatch.setattr("deepmrf.evaluation.explain.save", save)


def type_in(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_pictures_of_data_chosen_pairs_and_pixel(run, undrawn):
    words = ("--data", DATA, "--pairs", "head:hat,body:head", "--pixel", "3,4", "-o", "out")
    result = type_in("explain", "run", *words)
    assert result.exit_code == 0, result.output
    assert "Wrote out/index.html, and 11 figures beside it as PNG and SVG." in result.output
    page = (run / "out" / "index.html").read_text()
    assert page.count("&quot;pixel&quot;: [3, 4]") == 3
    assert len(list((run / "out").glob("*.svg"))) == 11


def test_a_picture_that_lies_in_the_models_folder_is_shown(run, request):
    result = type_in("explain", "run", "-o", "out")
    assert result.exit_code == 0, result.output
    assert Image.open("out/compatibility.png").width > 500
    assert "--image FILE shows what its layers do" in result.output
    assert not (run / "out" / "steps-1.png").exists()
    request.getfixturevalue("undrawn")
    Image.fromarray(np.zeros((24, 32, 3), np.uint8)).save("run/example.jpg")
    assert type_in("explain", "run", "-o", "out").exit_code == 0
    assert (run / "out" / "steps-1.png").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data", DATA, "--image", "a.png"], "--data and --image are two ways to give pictures"),
        (["--pixel", "3;4"], "--pixel 3;4 is no pixel: write its column and row"),
        (["--pairs", "head:nose"], "The pair 'head:nose' has no label 'nose'"),
        (["--data", DATA, "--pixel", "32,0"], "is outside 00000: give a column below 32"),
        (["--image", "missing.png"], "missing.png"),
        (["--data", "folder:missing"], "missing"),
    ],
)
def test_what_cannot_be_done_is_one_line(run, words, says):
    result = type_in("explain", "run", "-o", "out", *words)
    assert result.exit_code == 2, result.output
    assert says in result.output
    assert len(result.output.splitlines()) == 1, result.output
    assert not (run / "out").exists()


def test_without_matplotlib_there_is_one_line(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = type_in("explain", "run", "-o", "out")
    assert result.exit_code == 2
    assert result.output.strip() == "deepmrf explain needs matplotlib: pip install 'deepmrf[figures]'"


def test_evaluate_shows_its_images(run):
    """The scores are the same with pictures, and the page has every image."""
    synthetic((24, 32), "val", 5, to="scenes")
    assert type_in("evaluate", "run", "--data", "folder:scenes", "-o", "plain").exit_code == 0
    result = type_in("evaluate", "run", "--data", "folder:scenes", "-o", "out", "--pictures", "seen")
    assert result.exit_code == 0, result.output
    assert "Wrote seen/index.html" in result.output
    assert "network alone" not in result.output
    plain, scores = (json.loads((run / name / "scores.json").read_text())["scores"] for name in ("plain", "out"))
    assert scores["whole model"] == plain["whole model"]
    names = re.findall(r"<figcaption>(\d+):", (run / "seen" / "index.html").read_text())
    assert {*names} == {f"{n:05d}" for n in range(5)}
    assert (
        "--objects and --pictures are for images"
        in type_in("evaluate", "run", "--data", DATA, "--video", "--pictures", "x").output
    )
