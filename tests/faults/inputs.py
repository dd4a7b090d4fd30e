"""Damaged inputs: images, model folders and recipes, each read in its own process."""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from campaign import Part, call, deepmrf
from PIL import Image

from deepmrf import load
from deepmrf.training import recipe as recipes

ENDINGS = ("png", "jpg", "gif", "tif", "webp", "bmp", "ppm")
MODES = ("RGB", "L", "P", "RGBA", "CMYK", "1")
STRANGE_VALUES = (None, -1, 0, 3.5, 10**6, 10**12, 1e308, -1e308, float("nan"), "x", "", [], {}, True, [1, 2], {"a": 1})
ADDRESS_SPACE = 12 << 30
"""Bytes that a process which reads model folders of strangers may ask for."""


def damage(content: bytes, rng: random.Random) -> bytes:
    """Cut off, flip, blank out or repeat a part of a file."""
    changed = bytearray(content)
    start = rng.randrange(len(changed))
    end = min(len(changed), start + rng.choice((1, 4, 64, 1000)))
    match rng.randrange(5):
        case 0:
            return bytes(changed[:start])
        case 1:
            for _ in range(rng.choice((1, 8, 64))):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case 2:
            changed[start:end] = bytes(end - start)
        case 3:
            changed[start:end] = rng.randbytes(end - start)
        case 4:
            changed[start:start] = changed[start:end]
    return bytes(changed)


def write_images(folder: Path, count: int, seed: int) -> None:
    """Write small images of all kinds, damaged."""
    rng, values = random.Random(seed), np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while number < count:
        path = folder / f"{number:05}.{rng.choice(ENDINGS)}"
        try:
            Image.fromarray(values).convert(rng.choice(MODES)).save(path)
        except (OSError, ValueError):  # not every format has every mode
            path.unlink(missing_ok=True)
            continue
        path.write_bytes(damage(path.read_bytes(), rng))
        number += 1


def strange(tree: Any, rng: random.Random) -> Any:
    """The same tree of JSON with a strange value in one place, or without that place."""
    changed = copy.deepcopy(tree)
    node = changed
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        if rng.random() < 0.2:
            del node[key]
        else:
            node[key] = rng.choice(STRANGE_VALUES)
        return changed


def attempt(name: str, function: Callable[[], object], allowed: tuple[type[Exception], ...]) -> list[str]:
    """Call a function that may succeed, or fail with one line of these errors; return what else happened."""
    try:
        function()
    except allowed as error:
        if len(str(error).strip().splitlines()) == 1:
            return []
        return [f"{name}: {type(error).__name__} of {len(str(error).splitlines())} lines"]
    except Exception as error:
        return [f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}"]
    return []


def load_models(model: Path, target: Path, count: int, seed: int) -> list[str]:
    """Load model folders with a strange value in config.json, or damaged weights."""
    rng, failures = random.Random(seed), []
    config = json.loads((model / "config.json").read_text())
    for number in range(count):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(model, target)
        if number % 3:
            changed = strange(config, rng)
            (target / "config.json").write_text(json.dumps(changed))
            name = f"config {number} {next((f'{k}={v!r}' for k, v in changed.items() if config.get(k) != v), '')[:150]}"
        else:
            path = target / "model.safetensors"
            path.write_bytes(damage(path.read_bytes(), rng))
            name = f"weights {number}"
        allowed = (ValueError, OSError, TypeError, ImportError)
        failures += attempt(name, lambda: load(target, device="cpu"), allowed)
    return failures


def read_recipes(recipe: Path, folder: Path, count: int, seed: int) -> list[str]:
    """Read recipes with a strange value, or damaged text."""
    rng, failures, target = random.Random(seed), [], folder / "damaged.toml"
    content = recipe.read_bytes()
    tree = recipes.tomllib.loads(content.decode())
    for number in range(count):
        changed = strange(tree, rng)
        failures += attempt(
            f"recipe {number}", lambda changed=changed: recipes.recipe_from_dict(changed), (ValueError, OSError)
        )
        target.write_bytes(damage(content, rng))
        failures += attempt(f"text {number}", lambda: recipes.read_recipe(target), (ValueError, OSError))
    return failures


def damaged_images(part: Part, work: Path, count: int, seed: int) -> None:
    """Segment a folder of them: every one has a result or a sentence."""
    folder, report = work / "damaged", work / "damaged.json"
    write_images(folder, count, seed)
    outcome = deepmrf("predict", folder, "-o", work / "segmented", "-m", work / "model", "--json", report)
    problem = outcome.problem(0, 1)
    if not problem:
        content = json.loads(report.read_text())
        counted = len(content["images"]) + len(content["failed"])
        problem = "" if counted == count else f"{count} images, but {counted} in the report"
    part.add("predict", problem, outcome, cases=count)


def damaged_models(part: Part, work: Path, count: int, seed: int) -> None:
    """Load them in Python, with bounded memory."""
    limits = {resource.RLIMIT_AS: ADDRESS_SPACE}
    part.add_all(*call(load_models, work / "model", work / "loaded", count, seed, limits=limits), cases=count)


def damaged_recipes(part: Part, work: Path, count: int, seed: int) -> None:
    """Read them in Python."""
    part.add_all(*call(read_recipes, work / "recipe.toml", work, count // 2, seed), cases=count)
