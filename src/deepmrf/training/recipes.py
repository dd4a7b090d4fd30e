"""The recipes that come with deepmrf, by name: deepmrf/recipes of an installed package, `recipes/` of a checkout.

A recipe in a subfolder has the folder in its name: baselines/fcn8s.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from deepmrf.data.spelling import did_you_mean
from deepmrf.training.recipe import RecipeError

PACKAGE = Path(__file__).parents[1]
SUFFIX = ".toml"


def recipe_folder() -> Path:
    """The folder of the bundled recipes."""
    folders = (PACKAGE / "recipes", PACKAGE.parents[1] / "recipes")
    return next((folder for folder in folders if folder.is_dir()), folders[0])


def bundled_recipes() -> dict[str, Path]:
    """The file of each bundled recipe by its name, such as "street" or "baselines/fcn8s"; subfolders come last."""
    folder = recipe_folder()
    paths = sorted(folder.rglob(f"*{SUFFIX}"), key=lambda path: (len(path.parts), path))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def find_recipe(name: str) -> Path:
    """The recipe of that name: a file of your own, or a bundled one."""
    path, bundled = Path(name), bundled_recipes()
    if path.is_file():
        return path
    if _bundled_name(name) in bundled:
        return bundled[_bundled_name(name)]
    guess = did_you_mean(name, bundled) or did_you_mean(path.stem, bundled)
    raise RecipeError(f"There is no recipe {name}{guess}: give a {SUFFIX} file, or one of {', '.join(bundled)}.")


def short_name(name: str) -> str:
    """A recipe's name without its path, but with the subfolder of a bundled one."""
    bundled = _bundled_name(name)
    return bundled if bundled in bundled_recipes() else Path(name).stem


def _bundled_name(name: str) -> str:
    """NAME of recipes/NAME.toml, which a reader of the documents types, also outside a checkout; else the same."""
    _, folder, rest = Path(name).as_posix().rpartition("recipes/")
    return rest.removesuffix(SUFFIX) if folder else name


def _first_comment(path: Path) -> list[str]:
    """The lines of the comment that a recipe begins with, without #."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#") for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]


def recipe_commands(path: Path) -> list[str]:
    """The commands in the comment that a recipe begins with: they fetch its data and weights, and train."""
    return [line.strip() for line in _first_comment(path) if line.startswith("   ")]


def describe_recipe(path: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = itertools.takewhile(lambda line: line.startswith(" ") and line[1:2] != " ", _first_comment(path))
    sentence, _, _ = "".join(lines).strip().partition(". ")
    return sentence.rstrip(".")
