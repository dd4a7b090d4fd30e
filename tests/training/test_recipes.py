"""Bundled recipes by name, in a checkout and in an installed package; errors about their data and weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data.publications import PUBLICATIONS
from deepmrf.data.weights import WEIGHTS
from deepmrf.training import recipes
from deepmrf.training.recipe import RecipeError, read_recipe
from deepmrf.training.recipes import bundled_recipes, describe_recipe, find_recipe, short_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes"
NAMES = sorted(path.relative_to(FOLDER).as_posix().removesuffix(".toml") for path in FOLDER.rglob("*.toml"))
BASELINES = [name for name in NAMES if name.startswith("baselines/")]


def type_in(*words):
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_recipes_of_a_checkout():
    assert sorted(bundled_recipes()) == NAMES
    assert find_recipe("street") == FOLDER / "street.toml"
    assert find_recipe("baselines/fcn8s") == FOLDER / "baselines" / "fcn8s.toml"
    assert list(bundled_recipes())[-1].count("/") == 1  # subfolders last


def test_the_recipes_of_an_installed_package(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "recipes", tmp_path / "deepmrf" / "recipes")
    monkeypatch.setattr(recipes, "PACKAGE", tmp_path / "deepmrf")
    monkeypatch.chdir(tmp_path)
    assert sorted(bundled_recipes()) == NAMES
    expected = tmp_path / "deepmrf" / "recipes" / "street.toml"
    assert find_recipe("street") == find_recipe("recipes/street.toml") == expected
    nested = tmp_path / "deepmrf" / "recipes" / "baselines" / "segnet.toml"
    assert find_recipe("baselines/segnet") == find_recipe("recipes/baselines/segnet.toml") == nested
    assert read_recipe(find_recipe("street")) == read_recipe(ROOT / "recipes" / "street.toml")


def test_the_wheel_holds_the_recipes():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'wheel\.force-include\]\nrecipes = "deepmrf/recipes"', project)
    assert '"recipes"' in re.search(r"targets\.sdist\]\ninclude = (.*)", project)[1]  # wheels are built from it


def test_a_file_comes_before_a_bundled_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("street").write_text("")
    assert find_recipe("street") == Path("street")


def test_an_unknown_recipe_names_the_known_ones():
    with pytest.raises(RecipeError, match=r"no recipe camvid-vgg \(did you mean camvid-vgg16\?\): .* animals, "):
        find_recipe("camvid-vgg")
    with pytest.raises(RecipeError, match=r"did you mean baselines/fcn8s\?"):
        find_recipe("baselines/fcn8")
    with pytest.raises(RecipeError, match="There is no recipe other/street"):
        find_recipe("other/street.toml")


def test_short_names_keep_the_subfolder_of_a_bundled_recipe():
    assert short_name("street") == short_name("recipes/street.toml") == "street"
    assert short_name("baselines/fcn8s") == short_name("recipes/baselines/fcn8s.toml") == "baselines/fcn8s"
    assert short_name("elsewhere/mine.toml") == "mine"


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_learn_as_long_and_from_the_same_views_as_the_papers_network(name):
    baseline, paper = (read_recipe(find_recipe(each)) for each in (name, "camvid-vgg16"))
    learning = [stage for stage in paper.stage if "unary" in stage.learn]
    keys = ("steps", "batch", "weight_decay", "warmup", "power", "optimiser")
    for ours, theirs in zip(baseline.stage, learning, strict=True):
        assert ours.learn == ("unary",)
        assert [getattr(ours, key) for key in keys] == [getattr(theirs, key) for key in keys]
        # The encoder's rate; SegNet's decoder has a larger one.
        assert ours.rate * ours.encoder_rate == pytest.approx(theirs.rate * theirs.encoder_rate)
    assert (baseline.augment, baseline.data, baseline.clip) == (paper.augment, paper.data, paper.clip)
    assert baseline.unary.imagenet == paper.unary.imagenet
    assert baseline.unary.network == Path(name).name
    assert not baseline.mean_field


def test_the_list_describes_every_recipe():
    code, text = type_in("train", "--list")  # without a recipe
    assert code == 0
    for name, path in bundled_recipes().items():
        assert re.search(rf"^{name} +{re.escape(describe_recipe(path))}$", text, re.MULTILINE)
        assert 20 < len(describe_recipe(path)) < 180
    assert f"The files are in {ROOT / 'recipes'}" in text


@pytest.mark.parametrize("name", NAMES)
def test_data_and_weights_of_a_recipe_can_be_fetched_to_where_it_expects_them(name):
    recipe, text = read_recipe(find_recipe(name)), find_recipe(name).read_text()
    kind, _, path = recipe.data.train.partition(":")
    assert kind in PUBLICATIONS
    assert path == f"data/{kind}"
    assert f"deepmrf data get {kind}" in text
    assert f"deepmrf train {name}" in text
    if recipe.unary.imagenet:
        weights = Path(recipe.unary.imagenet)
        assert weights.stem in WEIGHTS
        assert weights.parent == Path("weights")
        assert f"deepmrf data get {weights.stem}" in text


def test_errors_say_how_to_get_data_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    precision = ("--set", "precision=no")  # accelerate keeps that of the first run in a process
    code, text = type_in("train", "camvid-vgg16", *precision)
    assert code == 2
    assert text.strip().endswith("fetch it into data/camvid with: deepmrf data get camvid")
    code, text = type_in("train", "camvid-vgg16", *precision, "--set", "data.train=synthetic:64")
    assert code == 2
    assert text.strip().endswith("fetch it with: deepmrf data get vgg16_imagenet_features")
    code, text = type_in("train", "paper/camvid-3d", *precision, "--set", "data.train=synthetic:64")
    assert code == 2
    assert text.strip().endswith("no model runs/paper/camvid/model; train it first: deepmrf train paper/camvid")
