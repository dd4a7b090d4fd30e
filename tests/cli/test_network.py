"""Commands around a network of the user's own, as typed: a module in the current folder, named by --network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import deepmrf
from deepmrf.cli import app
from deepmrf.data.synthetic import LABELS

DATA = "synthetic:24x32"
CODE = f"""
from torch import nn
from deepmrf.unary import wrap

def build():
    return wrap(nn.Conv2d(3, {len(LABELS)}, 3, padding=1), {len(LABELS)})
"""
RECIPE = f"""
[data]
train = "{DATA}"
workers = 0
[unary]
network = "fast"
options = {{width = 8}}
[mean_field]
window = 3
contexts = 2
context_size = 3
[augment]
crop = [24, 32]
[[stage]]
name = "unary"
learn = ["unary"]
steps = 2
batch = 2
[[stage]]
name = "label contexts"
learn = ["label_contexts"]
steps = 2
batch = 2
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A current folder with mynet.py, a recipe and an image; the model is saved/, around mynet's network."""
    monkeypatch.chdir(tmp_path)
    Path("mynet.py").write_text(CODE)
    Path("recipe.toml").write_text(RECIPE)
    Image.fromarray(np.zeros((24, 32, 3), np.uint8)).save("a.png")
    path = list(sys.path)
    yield
    assert sys.path == path
    sys.modules.pop("mynet", None)


@pytest.fixture
def saved(here):
    scope: dict = {}
    exec(CODE, scope)
    mean_field = deepmrf.MeanField(len(LABELS), window=3, contexts=2, context_size=3)
    deepmrf.DeepParsingNetwork(scope["build"](), mean_field, LABELS).save_pretrained("saved")


def type_in(line):
    result = CliRunner().invoke(app, line.split(), env={"COLUMNS": "200"})
    return result.exit_code, result.output


COMMANDS = {
    "predict": ("predict a.png --model saved", "segmented/a.png"),
    "evaluate": (f"evaluate saved --data {DATA} -o scores", "scores/scores.json"),
    "calibrate": (f"calibrate saved --data {DATA} -t 1 -t 2 -o calibrated", "calibrated/config.json"),
    "export": ("export saved -o model.pt2", "model.pt2"),
}


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_take_the_network(name):
    line, path = COMMANDS[name]
    code, output = type_in(line)
    assert code == 2
    assert len(output.splitlines()) == 1
    assert "saved was saved around a network of your own" in output
    assert "--network MODULE:FUNCTION, which imports and runs your code." in output
    code, output = type_in(f"{line} --network mynet:build")
    assert code == 0, output
    assert Path(path).is_file()
    if name == "calibrate":
        code, output = type_in("predict a.png --model calibrated")
        assert "--network mynet:build" in output  # the name is saved
    code, output = type_in(f"{line} --network mynet:bild")
    assert (code, len(output.splitlines())) == (2, 1)
    assert "did you mean mynet:build" in output


def test_train_takes_the_network():
    line = "train recipe.toml -o run --network mynet:build"
    code, output = type_in(line)
    assert code == 0, output
    assert "unary.options and unary.imagenet are left out" in output
    assert json.loads(Path("run/recipe.json").read_text())["unary"]["network"] == "mynet:build"
    assert json.loads(Path("run/model/config.json").read_text())["unary"]["source"] == {"code": "mynet:build"}
    assert type_in(f"{line} --resume")[0] == 0
    assert type_in("evaluate run/model --data " + DATA)[0] == 2
    assert type_in(f"evaluate run/model run/model --data {DATA} --network mynet:build")[0] == 0
    code, output = type_in("train recipe.toml -o other --network nonet:build")
    assert code == 2
    assert "no module nonet" in output
