"""The recipes that come with deepmrf, by name: deepmrf/recipes of an installed package, `recipes/` of a checkout."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from deepmrf.training.recipe import RecipeError

PACKAGE = Path(__file__).parents[1]
SUFFIX = ".toml"


def bundled_recipes() -> dict[str, Path]:
    """The file of each bundled recipe by its name, such as "street"."""
    folders = (PACKAGE / "recipes", PACKAGE.parents[1] / "recipes")
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def find_recipe(name: str) -> Path:
    """The recipe of that name: a file of your own, or a bundled one."""
    path, bundled = Path(name), bundled_recipes()
    if path.is_file():
        return path
    if name in bundled:
        return bundled[name]
    if path.parent.name == "recipes" and path.suffix == SUFFIX and path.stem in bundled:
        return bundled[path.stem]  # as a reader of the documents types it, outside a checkout
    near = get_close_matches(path.stem, bundled, 1)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise RecipeError(f"There is no recipe {name}: give a {SUFFIX} file, or one of {', '.join(bundled)}.{guess}")


def describe_recipe(path: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("#  "):  # a command, or the end of the comment
            break
        lines.append(line.removeprefix("# "))
    sentence, _, _ = " ".join(lines).partition(". ")
    return sentence.rstrip(".")
