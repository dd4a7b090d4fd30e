"""`deepmrf models` as a user types it."""

from __future__ import annotations

import json
import math
import shutil

import pytest
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data.labels import ANIMALS, CAMVID, CITYSCAPES
from deepmrf.models.names import bundled, summarise


def type_in(*words, code=0):
    result = CliRunner().invoke(app, ["models", *words], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == code, result.output
    return result.output


def test_all_models():
    text = type_in()
    lines = text.splitlines()
    assert lines[0].split() == ["model", "classes", "mIoU", "scored", "on", "MB"]
    for name, line in zip(bundled(), lines[1:], strict=False):
        summary = summarise(name)
        assert line.split()[:3] == [name, str(len(summary.labels)), f"{100 * summary.miou:.2f}"]
    assert f"animals: {', '.join(ANIMALS.names)}." in lines
    assert f"camvid: {', '.join(CAMVID.names)}." in lines
    assert f"street: {', '.join(CITYSCAPES.names)}." in lines


def test_one_model():
    text = type_in("animals")
    assert "without the MRF (animals val, 180 images)" in text
    rows = [line.split() for line in text.splitlines()[-7:]]
    assert [row[0] for row in rows] == list(ANIMALS.names)
    assert rows[1][1:4] == ["1", f"{100 * summarise('animals').iou['cat']:.2f}", "#56b4e9"]


def test_json_for_programs():
    entries = json.loads(type_in("--json"))
    assert [entry["name"] for entry in entries] == bundled()
    assert entries[0]["names"] == list(ANIMALS.names)
    assert entries[0]["seconds"] is None
    assert json.loads(type_in("animals", "--json")) == entries[0]


@pytest.mark.usefixtures("plain_torch", "untaught")
def test_time_is_measured_here(monkeypatch):
    monkeypatch.setattr("deepmrf.cli.models.TIMED_SIDE", 64)
    monkeypatch.setattr("deepmrf.cli.models.TIMED_RUNS", 1)
    assert "seconds" in type_in("--time", "--device", "cpu").splitlines()[0]
    assert json.loads(type_in("animals", "--time", "--device", "cpu", "--json"))["seconds"] > 0
    assert "seconds per photograph of 64 x 64: " in type_in("animals", "--time", "--device", "cpu")


def test_a_model_that_is_not_there():
    assert "There is no model 'animal'" in type_in("animal", code=2)


@pytest.mark.parametrize(
    "stages",
    [
        [1],
        3,
        {"a": 3},
        *(
            {"a": {"miou": value, "images": value, "iou_per_class": {"cat": value}}}
            for value in ([1], "x", True, 10**400)
        ),
        *({"a": {"miou": value, "iou_per_class": value}} for value in (-1, 1.5, math.inf, math.nan, None)),
    ],
)
def test_odd_scores_are_as_if_they_were_missing(model_folder, tmp_path, stages):
    folder = shutil.copytree(model_folder, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "metrics": {"val": stages}}))
    assert "mIoU" not in type_in(str(folder))
    summary = summarise(folder)
    assert (summary.miou, summary.images, summary.iou) == (None, None, {})


def test_a_whole_number_is_a_score(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "whole")
    config = json.loads((folder / "config.json").read_text())
    scores = {"a": {"miou": 1, "images": 2, "iou_per_class": {"cat": 0, "dog": "x"}}}
    (folder / "config.json").write_text(json.dumps({**config, "metrics": {"val": scores}}))
    summary = summarise(folder)
    assert (summary.miou, summary.images, summary.iou) == (1.0, 2, {"cat": 0.0})
