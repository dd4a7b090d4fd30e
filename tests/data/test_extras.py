"""Optional packages: the table is that of pyproject.toml, and commands without them say one sentence."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data.extras import EXTRAS, optional

PROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text()
RECIPE = """
unary = {network = "vgg16", options = {channels = 8}}
data = {train = "synthetic:64"}
stage = [{name = "unary", learn = ["unary"], steps = 1, batch = 1}]
"""


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_table_is_that_of_the_project(extra):
    listed = re.search(rf"^{extra} = \[(.*?)\]", PROJECT, re.MULTILINE)[1]
    names = re.findall(r'"([\w-]+)', listed)
    assert sorted(EXTRAS[extra].packages.values()) == sorted(names)


def test_every_extra_but_that_of_developers_is_in_the_table():
    section = PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert {*re.findall(r"^(\w+) = \[", section, re.MULTILINE)} == {*EXTRAS, "dev"}


def test_a_package_that_is_there_is_returned():
    assert optional("numpy", "Numbers need", "train") is np


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"^Video files need av: pip install 'deepmrf\[video\]'$"):
        optional("av", "Video files need", "video")


def test_a_broken_package_says_why(monkeypatch, tmp_path):
    (tmp_path / "nibabel.py").write_text("raise ImportError('libz is missing')")
    monkeypatch.delitem(sys.modules, "nibabel", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"need nibabel, which cannot be imported \(libz is missing\): pip install"):
        optional("nibabel", "NIfTI volumes need", "volumes")


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("accelerate", ["train", "recipe.toml"], "train"),
        ("gradio", ["app", "--port", "0"], "app"),
        ("ray", ["predict", "frames", "--ray"], "ray"),
        ("av", ["predict", "frames", "-o", "out.mp4"], "video"),
        ("cv2", ["predict", "camera:0"], "video"),
        ("onnxscript", ["export", "animals", "-o", "model.onnx"], "export"),
        (
            "nibabel",
            ["refine", "--preset", "medical3d", "--predictions", "nii", "--images", "nii", "-o", "out"],
            "volumes",
        ),
    ],
)
def test_commands_without_their_extra_say_one_sentence(module, words, extra, monkeypatch, tmp_path):
    if extra == "export":
        pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    Path("recipe.toml").write_text(RECIPE)
    Path("nii").mkdir()
    Path("nii/a.nii.gz").touch()
    Path("frames").mkdir()
    Image.fromarray(np.zeros((8, 9, 3), np.uint8)).save("frames/0.png")
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code in (1, 2)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert re.search(rf"needs? [\w-]+: pip install 'deepmrf\[{extra}\]'", result.output), result.output
