"""The models that ship: small, calibrated, documented, and right about a cat, an astronaut and streets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from skimage import data

import deepmrf
from deepmrf.data import open_data
from deepmrf.evaluation.evaluate import evaluate
from deepmrf.models.folder import check_config
from deepmrf.models.names import PRETRAINED, bundled, open_model
from deepmrf.predict.scales import predictor
from deepmrf.training.recipe import read_recipe

MODELS = ("animals", "camvid", "street")
DATA = Path(os.environ.get("DEEPMRF_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def test_these_ship():
    assert tuple(bundled()) == MODELS


@pytest.mark.parametrize("name", MODELS)
def test_small_and_documented(name):
    model = open_model(name)
    check_config(model.config())
    weights = PRETRAINED / name / "model.safetensors"
    assert weights.stat().st_size <= 12 << 20
    with safe_open(weights, "pt") as file:
        kinds = {file.get_tensor(key).dtype for key in file.keys() if file.get_tensor(key).dim() > 1}  # noqa: SIM118
    assert kinds == {torch.float16}
    scores = model.card.metrics["val"]
    stages = {
        "animals": {"unary", "triple penalty"},
        "camvid": {"unary", "label contexts"},
        "street": {"unary", "label contexts"},
    }
    assert stages[name] <= set(scores)
    assert model.mean_field.label_contexts is not None  # make demo and deepmrf explain show them
    assert model.card.metrics["seed"] == 0
    finished, alone = list(scores)[-2:]
    assert f"temperature {model.mean_field.temperature:g}" in finished
    assert alone == f"{finished}, network alone"
    assert scores[finished]["miou"] > scores[alone]["miou"]
    repository = Path(__file__).parents[2]
    recipe = {"camvid": "benchmarks/camvid-mixed.toml"}.get(name, f"recipes/{name}.toml")
    known = read_recipe(repository / recipe)
    assert (known.zoom or known.unary.options.get("zoom", 1)) == float(model.unary.zoom)
    if name == "street":  # the others' MRFs: benchmarks/held_out.py and choose_crf.py
        assert known.mean_field["kernel"] == model.mean_field.triple_penalty.kernel
        assert known.temperature == 0


def test_a_cat_is_a_cat_and_an_astronaut_a_person():
    segment = deepmrf.load("animals")
    for picture, label, least in ((data.chelsea(), "cat", 0.7), (data.astronaut(), "person", 0.3)):
        result = segment(picture)
        shares = {name: float(result[name].mean()) for name in result.names}
        assert shares[label] > least, shares
        others = [share for name, share in shares.items() if name not in (label, "background")]
        assert max(others) < 0.02, shares


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_the_mrf_changes_a_little(name):
    model = open_model(name)
    image = torch.from_numpy(data.astronaut()[:201, 100:363]).permute(2, 0, 1)[None]
    before, after = model.log_unary(image), model(image)
    assert after.shape == (1, len(model.labels), 201, 263)
    torch.testing.assert_close(after.exp().sum(1), torch.ones(1, 201, 263), rtol=0, atol=1e-4)
    assert 0 < float((before.argmax(1) != after.argmax(1)).float().mean()) < 0.2


@pytest.mark.parametrize(
    ("name", "data", "least", "least_pixels", "step"),
    [("camvid", "camvid", 0.6, 0.93, 25), ("street", "cityscapes", 0.4, 0.9, 66)],
)
def test_streets(name, data, least, least_pixels, step):
    if not (DATA / data).is_dir():
        pytest.skip(f"{data} is not here")
    frames = open_data(f"{data}:{DATA / data}", "val")
    some = frames.subset(list(frames)[::step])
    model = open_model(name)
    full, alone = (evaluate(predictor(part), some) for part in (model, model.log_unary))
    assert full.miou > least
    assert full.pixel_accuracy > max(alone.pixel_accuracy, least_pixels)
