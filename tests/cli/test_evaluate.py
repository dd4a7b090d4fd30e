"""`deepmrf evaluate` as a user types it: which models it takes, and what it says of the rest."""

from __future__ import annotations

import errno
import json
import os

import pytest
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import synthetic
from deepmrf.data.folder import write_folder
from deepmrf.data.synthetic import LABELS
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model

DATA = "synthetic:24x32"


@pytest.fixture
def run(tmp_path):
    """The folder of a run, with its model in it."""
    settings = {"window": 3, "contexts": 2, "context_size": 3}
    write_model(DeepParsingNetwork.build("fast", LABELS, {"width": 8}, settings).eval(), tmp_path / "run" / "model")
    return tmp_path / "run"


def type_in(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words: object) -> str:
    """The one line that a command ends with."""
    result = type_in("evaluate", *words)
    assert result.exit_code == 2, result.output
    assert len(result.output.splitlines()) == 1, result.output
    return result.output.strip()


def test_the_folder_of_a_run_will_do(run, tmp_path):
    assert type_in("evaluate", run, "--data", DATA, "-o", tmp_path / "a").exit_code == 0
    assert type_in("evaluate", run / "model", "--data", DATA, "-o", tmp_path / "b").exit_code == 0
    a, b = ((tmp_path / name / "scores.csv").read_text() for name in "ab")
    assert a == b


def test_a_folder_goes_before_a_bundled_model_of_its_name(run, monkeypatch):
    monkeypatch.chdir(run)
    (run / "model").rename(run / "street")
    for name in ("./street", "street"):
        assert type_in("evaluate", name, "--data", DATA).exit_code == 0, "the bundled one knows other labels"


def test_a_folder_without_a_model_does_not_hide_a_bundled_one(tmp_path, monkeypatch):
    """CamVid's data often lie in a folder `camvid`."""
    (tmp_path / "camvid" / "val").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "other labels than" in refused("camvid", "--data", DATA)  # so it was found


def test_a_few_images_are_spread_over_the_split(run, tmp_path):
    result = type_in("evaluate", run, "--data", DATA, "--images", 3, "-o", tmp_path / "a")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "a" / "scores.json").read_text())["scores"]["whole model"]["images"] == 3
    assert "--images" in refused(run, "--data", DATA, "--images", 3, "--video")
    data = synthetic((16, 16), "val", 7)
    assert [item.name for item in data.spread(3)] == [data[index].name for index in (0, 2, 4)]
    assert len(data.spread(99)) == 7


def test_damaged_models_are_named(run):
    weights, config = run / "model" / "model.safetensors", run / "model" / "config.json"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"The model in {run / 'model'} cannot be used" in refused(run / "model", "--data", DATA)
    config.write_text("{}")
    assert f"The model in {run / 'model'} cannot be used" in refused(run / "model", "--data", DATA)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--video", "--flip"], "--scales, --flip, --stages, --objects and --pictures are for images"),
        (["--device", "foo"], "device='foo' is unknown"),
        (["--device", "cuda"], "finds no GPU here"),
        (["-o", __file__], "is a file: give a folder for the scores."),
        (["-o", f"{__file__}/new"], "is a file: give a folder for the scores."),
    ],
)
def test_what_cannot_be_done_is_one_line_before_anything_is_measured(run, words, says):
    assert says in refused(run, "--data", DATA, *words)


def test_other_labels_are_one_line(model_folder):
    assert "knows other labels" in refused(model_folder, "--data", DATA)


@pytest.mark.filterwarnings("error::UserWarning")
def test_videos_without_masks_are_told_so(run, tmp_path):
    write_folder(synthetic((24, 32), "val", count=1, frames=3), tmp_path / "video", "val")
    for mask in (tmp_path / "video" / "masks").rglob("*.png"):
        mask.unlink()
    result = type_in("evaluate", run, "--data", f"folder:{tmp_path / 'video'}", "--video")
    assert result.exit_code == 2
    says = "None of these 3 images has a mask: evaluation needs labelled images."
    assert result.output.splitlines()[-1] == says


def test_a_pipe_among_the_images_is_one_line(run, tmp_path, pipe):
    write_folder(synthetic((24, 32), "val", count=2), tmp_path / "data", "val")
    image = next((tmp_path / "data" / "images").rglob("*.png"))
    image.unlink()
    pipe(image)
    assert "(it is no regular file)" in refused(run, "--data", f"folder:{tmp_path / 'data'}")


def test_a_full_disk_is_noticed_first_and_one_that_fills_up_loses_no_table(run, tmp_path, full_disk, monkeypatch):
    scores = tmp_path / "scores"
    with full_disk():
        says = f"{tmp_path} cannot be written into (File too large): give another folder for the scores."
        assert refused(run, "--data", DATA, "-o", scores) == says

    def fills_up(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fills_up)
        result = type_in("evaluate", run, "--data", DATA, "-o", scores)
    assert result.exit_code == 2
    assert "mIoU" in result.output
    assert f"No space left on device: '{scores / 'scores.json'}'" in result.output.splitlines()[-1]
    assert not list(scores.iterdir())


def test_so_few_images_come_with_a_warning(run):
    result = type_in("evaluate", run, "--data", DATA, "--images", 4, "--stages")
    assert result.exit_code == 0, result.output
    assert "These images are few" in result.output


def test_a_log_says_how_far_the_work_is(run, monkeypatch):
    monkeypatch.setattr("deepmrf.cli.console.SECONDS_BETWEEN_LINES", 0)
    result = type_in("evaluate", run, "--data", DATA, "--images", 4)
    assert "4 of 4" in result.stderr
    assert "4 of 4" not in result.stdout
