"""What is wrong with a run is said before it starts, in one sentence, and costs none of its steps."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import synthetic
from deepmrf.data.folder import write_folder
from deepmrf.models.parsing_network import read_model
from deepmrf.training import checkpoint
from deepmrf.training import loop as train
from deepmrf.training.recipe import RecipeError, read_recipe, recipe_from_dict
from deepmrf.training.run import Run

RECIPE = """
ema = 0.9

[data]
train = "folder:DATA"
workers = 0

[unary]
network = "fast"
options = { width = 8, dropout = 0.1 }

[mean_field]
kernel = "gaussian"
window = 5
contexts = 0

[augment]
crop = [24, 32]

[[stage]]
name = "unary"
learn = ["unary"]
steps = 3
batch = 2

[[stage]]
name = "mrf"
learn = ["triple_penalty"]
steps = 2
batch = 2
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        write_folder(synthetic((24, 32), split, count=2), tmp_path / "data", split)
    return tmp_path / "data"


@pytest.fixture
def recipe(tmp_path: Path, data: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("DATA", str(data)))
    return path


def type_in(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words: object) -> str:
    """The one sentence that a command ends with."""
    result = type_in(*words)
    assert result.exit_code == 2, result.output
    last = result.output.strip().splitlines()[-1]
    assert "Traceback" not in result.output
    return last


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("save_every=0", "save_every=0 must be at least 1."),
        ("clip=-1", "clip=-1.0 must be at least 0 and finite."),
        ("clip=nan", "clip=nan must be at least 0 and finite."),
        ("evaluate_every=-1", "evaluate_every=-1 must be at least 0."),
        ("ema=1.5", "ema=1.5 must be at least 0 and less than 1."),
        ("ema=1", "ema=1.0 must be at least 0 and less than 1."),
        ("ema=-1", "ema=-1.0 must be at least 0 and less than 1."),
        ("ema=nan", "ema=nan must be at least 0 and less than 1."),
        ("data.workers=-1", "data.workers=-1 must be at least 0."),
        ("augment.colour=2", "augment.colour=2.0 must be 0 to 1."),
        ("augment.flip=-1", "augment: flip is -1.0; give a value of 0 to 1."),
        ("augment.crop=[0, 5]", "augment: crop is (0, 5); give a height and a width of 1 or more, or None."),
        ("stage.unary.warmup=-5", "stage.unary.warmup=-5 must be at least 0."),
        *[
            (f"stage.mrf.{key}={value}", f"stage.mrf.{key}={value} must be at least 0 and finite.")
            for key in ("rate", "encoder_rate", "mrf_rate", "weight_decay", "power", "class_balance", "lovasz")
            for value in ("-0.5", "inf")
        ],
    ],
)
def test_numbers_out_of_range_are_named(recipe, setting, says):
    key, _, value = setting.partition("=")
    with pytest.raises(RecipeError) as raised:
        read_recipe(recipe, {key: value})
    assert str(raised.value) == says


def test_the_least_numbers_are_taken(recipe):
    least = {"save_every": "1", "clip": "0", "ema": "0", "data.workers": "0", "stage.unary.warmup": "0"}
    loaded = read_recipe(recipe, {**least, "stage.unary.rate": "0", "stage.unary.weight_decay": "0"})
    assert (loaded.save_every, loaded.clip, loaded.ema, loaded.stage[0].rate) == (1, 0.0, 0.0, 0.0)


def test_validation_data_of_other_labels_is_refused(recipe, data, tmp_path):
    """As many labels, of other names."""
    write_folder(synthetic((24, 32), "val", count=1), tmp_path / "other", "val")
    described = json.loads((tmp_path / "other" / "labels.json").read_text())
    described["names"] = described["names"][::-1]
    (tmp_path / "other" / "labels.json").write_text(json.dumps(described))
    says = refused("train", recipe, "-o", tmp_path / "run", "--set", f"data.val=folder:{tmp_path / 'other'}")
    assert "data.val=" in says
    assert "knows other labels than data.train=" in says
    assert "(label 0 is " in says
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("damage", "says"),
    [("id", "77"), ("void", "No pixel of these images has a label"), ("size", "make the mask as large as the image")],
)
def test_bad_validation_data_is_found_before_training(recipe, data, tmp_path, damage, says):
    for path in (data / "masks" / "val").iterdir() if damage == "void" else [*(data / "masks" / "val").iterdir()][-1:]:
        mask = np.full((24, 32), {"id": 77, "void": 255, "size": 0}[damage], dtype=np.uint8)
        Image.fromarray(mask[:-1] if damage == "size" else mask).save(path)
    assert says in refused("train", recipe, "-o", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_validation_images_without_masks_are_found_before_training(recipe, data, tmp_path):
    for path in (data / "masks" / "val").iterdir():
        path.unlink()
    assert "has no mask: evaluation needs labelled images." in refused("train", recipe, "-o", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_evaluation_that_fails_costs_no_steps(recipe, tmp_path, monkeypatch):
    settings = read_recipe(recipe)
    train.train(settings, tmp_path / "whole")
    real = Run.evaluate

    for stage, (last, steps) in enumerate([("unary", 3), ("mrf", 2)]):

        def broken(run, name, alone=False, last=last):
            if name == last:
                raise OSError("The disk is gone.")
            return real(run, name, alone)

        monkeypatch.setattr(Run, "evaluate", broken)
        with pytest.raises(OSError, match="gone"):
            train.train(settings, tmp_path / "cut", resume=stage > 0)
        facts = checkpoint.read_checkpoint(tmp_path / "cut" / "state.safetensors")[1]
        assert (facts["stage"], facts["step"]) == (stage, steps)
    monkeypatch.setattr(Run, "evaluate", real)
    scores = train.train(settings, tmp_path / "cut", resume=True)
    assert list(scores) == ["unary", "mrf"]
    expected = read_model(tmp_path / "whole" / "model").state_dict()
    for name, value in read_model(tmp_path / "cut" / "model").state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_the_command_printed_after_ctrl_c_continues_the_run(recipe, tmp_path, monkeypatch):
    real = Run.evaluate

    def interrupted(*_):
        raise KeyboardInterrupt

    out = tmp_path / "a run"
    monkeypatch.setattr(Run, "evaluate", interrupted)
    says = refused("train", recipe, "-o", out, "--set", "seed=3", "--set", "unary.options={width = 8}")
    monkeypatch.setattr(Run, "evaluate", real)
    first, _, command = says.partition(": ")
    assert first == "Interrupted, continue with"
    name, *words = shlex.split(command)
    assert name == "deepmrf"
    assert "give the same recipe and overrides as before, or use a new folder" in refused(*words[:5])
    result = type_in(*words)
    assert result.exit_code == 0, result.output
    assert json.loads((out / "recipe.json").read_text())["seed"] == 3
    assert (out / "model" / "config.json").is_file()


def test_a_full_disk_points_to_a_checkpoint_only_if_there_is_one(recipe, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_checkpoint", full)
        assert refused("train", recipe, "-o", tmp_path / "none") == "Stopped, the disk is full."
    monkeypatch.setattr(Run, "evaluate", full)
    says = refused("train", recipe, "-o", tmp_path / "one")
    assert says.startswith("Stopped, the disk is full; the last good checkpoint is in ")
    assert says.endswith(f"continue with: deepmrf train {recipe} -o {tmp_path / 'one'} --resume")


@pytest.mark.parametrize("below", ["", "new"])
def test_a_file_is_no_place_for_a_run(recipe, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    assert refused("train", recipe, "-o", file / below) == f"{file} is a file: give a folder for the run."
    assert file.read_text() == "mine"


def test_files_that_cannot_be_read_are_named(recipe, tmp_path):
    out = tmp_path / "run"
    train.train(read_recipe(recipe), out)
    words = ("train", recipe, "-o", out, "--resume")
    state = (out / "state.safetensors").read_bytes()
    (out / "state.safetensors").write_bytes(state[:1000])
    assert f"{out / 'state.safetensors'} is no whole checkpoint" in refused(*words)
    for text in (b"{", b"{}", b"[]", b"\xff\xfe"):
        (out / "recipe.json").write_bytes(text)
        says = refused(*words)
        assert says.startswith(f"{out / 'recipe.json'} cannot be read (")
        assert says.endswith("): put it back, or use a new folder.")
    recipe.write_bytes(recipe.read_bytes() + "\n# é".encode("latin-1"))
    assert refused(*words) == f"{recipe} is not text in UTF-8: save it so, or pass a .toml file."


@pytest.mark.parametrize(
    ("setting", "says"), [("mean_field.window=x", "or null."), ("unary.options.a=1", "zoom, lite, mirror.")]
)
def test_sentences_end_with_one_full_stop(recipe, tmp_path, setting, says):
    result = type_in("train", recipe, "-o", tmp_path / "run", "--set", setting)
    assert result.exit_code == 2
    assert result.output.strip().endswith(says)


BIG = "1" + 400 * "0"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("mean_field.context_size=100000", "mean_field.context_size=100000 must be a whole number from 1 to 255"),
        ("mean_field.gate={}", "mean_field.gate={} must be true or false."),
        ("mean_field.spacing=[1.0, nan]", "mean_field.spacing=[1.0, nan] must be a list"),
        (f"mean_field.spacing=[{BIG}, 1]", "mean_field.spacing=[1000"),
        ("mean_field.iterations=1000000", "mean_field.iterations=1000000 must be a whole number from 1 to 100."),
        ("mean_field.labels=3", "mean_field has no setting 'labels'"),
        ("unary.options.width='8'", "unary.options.width='8' must be a whole number from 1 to 1024."),
        ("unary.options.dropout=[]", "unary.options.dropout=[] must be a number from 0 to 1."),
        ("unary.options={width = 1024, levels = 8}", "unary.options has no setting 'levels'"),
        ("unary.network=fats", "There is no unary network 'fats'"),
        ("stage.mrf.learn=['label_contexts']", "stage.mrf.learn has label_contexts, which the model lacks"),
        (
            "mean_field={kernel = 'learned', window = 3, size = [24, 30]}",
            "augment.crop=[24, 32] must be mean_field",
        ),
        (f"clip={BIG}", "clip=inf must be at least 0 and finite."),
        (f"stage.mrf.steps={BIG}", "stage.mrf.steps must be at most 2147483647."),
        (f"seed={20 * BIG}", "seed cannot be read: Exceeds the limit"),
        (f"seed={5000 * '['}", "seed cannot be read: "),
        ("seed=-1", "seed=-1 must be at least 0."),
        ("data.workers=100000", "data.workers must be at most 256."),
        ("clips.motion=nan", "clips.motion=nan, "),
        ("clips.window=1000000", "clips.window must be at most 255."),
    ],
)
def test_absurd_values_are_one_sentence_before_the_first_step(recipe, tmp_path, setting, says):
    text = refused("train", recipe, "-o", tmp_path / "run", "--set", setting)
    assert says in text
    assert len(text) < 700
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_cannot_be_read_is_named(recipe):
    for line in (f"seed = {20 * BIG}", f"seed = {5000 * '['}", "seed ="):
        recipe.write_text(f"{line}\n{RECIPE}")
        assert refused("train", recipe).startswith(f"{recipe} is not valid TOML: ")


def test_a_folder_in_use_is_refused_and_untouched(recipe, tmp_path, monkeypatch):
    """The lock is taken before the first file of a run is written."""

    def locked(*_):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("deepmrf.training.lock._lock", locked)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("1234")
    assert "is used by another training (process 1234)" in refused("train", recipe, "-o", tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_network_to_start_from_may_be_a_run_or_damaged(recipe, tmp_path):
    train.train(read_recipe(recipe), tmp_path / "first")
    words = ("train", recipe, "-o", tmp_path / "run", "--set", f"unary.start={tmp_path / 'first'}")
    weights = tmp_path / "first" / "model" / "model.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-100])
    assert "cannot be used" in refused(*words)
    weights.write_bytes(intact)
    result = type_in(*words)
    assert result.exit_code == 0, result.output
    text = refused("train", recipe, "-o", tmp_path / "other", "--set", "unary.start=street")
    assert "unary.start='street': only " in text
    assert "tensors of the network fit; set unary.options " in text
    assert "lite=2" in text


def test_a_misspelt_setting_is_named_before_data_that_are_not_there(tmp_path):
    tree = {
        "data": {"train": f"folder:{tmp_path / 'nowhere'}"},
        "unary": {"network": "fast"},
        "mean_field": {"windw": 5},
        "stage": [{"name": "unary", "learn": ["unary"]}],
    }
    with pytest.raises(RecipeError, match=r"mean_field has no setting 'windw' \(did you mean window\?\)"):
        train.train(recipe_from_dict(tree), tmp_path / "run")
    assert not (tmp_path / "run").exists()
