"""Recipes: everything a training run is made of, as one TOML file read into frozen dataclasses.

    recipe = load("recipes/camvid-fast.toml", {"seed": "1", "stage.unary.steps": "500"})

Unknown keys and bad values are errors that name the key. `--set key=value` overrides: the key is a path into the file,
a stage is addressed by its name, and the value is written as in TOML (a bare word stands for a string).
"""

from __future__ import annotations

import dataclasses
import math
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PARTS = ("unary", "triple_penalty", "label_contexts", "links")
"""What a stage may learn. The links between frames, of clips, are a part of the triple penalty."""


@dataclass(frozen=True)
class DataRecipe:
    """Which images."""

    train: str
    """Data to learn from, as "camvid:PATH", "voc:PATH", "animals:PATH", "cityscapes:PATH", "folder:PATH", ..."""
    val: str = ""
    """Data to measure on; the training data's set if empty."""
    train_split: str = "train"
    """The split to learn from."""
    val_split: str = "val"
    """The split to measure on: never learned from."""
    workers: int = 2
    """Processes that read and augment images."""


@dataclass(frozen=True)
class UnaryRecipe:
    """Which network gives the unary term."""

    network: str = "fast"
    """"vgg16" (the paper's), "strong" or "fast"."""
    imagenet: str = ""
    """A safetensors file of ImageNet weights to start from; empty starts at random."""
    start: str = ""
    """A folder of an earlier model whose network to start from, e.g. after pre-training."""
    options: dict[str, Any] = field(default_factory=dict)
    """The network's own options."""


@dataclass(frozen=True)
class AugmentRecipe:
    """How training images vary."""

    crop: tuple[int, int] = (360, 480)
    """Height and width of a training crop."""
    scale: tuple[float, float] = (0.5, 2.0)
    """Images are resized by a random factor in this range."""
    flip: float = 0.5
    """How often an image is mirrored left to right."""
    colour: float = 0.3
    """Strength of random brightness, contrast and saturation; 0 for none."""


@dataclass(frozen=True)
class ClipsRecipe:
    """Clips instead of images, for a mean field over frames; stages that learn the network alone still see images."""

    frames: int = 1
    """Frames of a clip; 1 trains on images."""
    labelled: str = "centre"
    """Whose labels count: "centre" for those of the middle frame, "all" for every frame that has some."""
    flow: str = "dis"
    """What links frames: "dis" estimates optical flow, "exact" is the known flow of moved stills, "none" no flow."""
    stride: int = 1
    """Take every so manieth frame of a video."""
    motion: float = 0.0
    """Above 0, clips are made of single labelled images that move by up to so many pixels a frame."""
    flicker: float = 0.0
    """How much exposure, sharpness and noise of such frames differ. 1 is a bad camera; more gives a network that was
    trained on these very images something to get wrong."""
    count: int = 0
    """How many such clips there are where the network's output is kept; 0 for one per image."""
    window: int = 3
    """Frames that the triple penalty sees."""
    contexts: int = 3
    """Frames that the label contexts see."""


@dataclass(frozen=True)
class Stage:
    """One of the four stages: what it learns, for how long, how fast."""

    name: str
    """Any name; the paper's are unary, triple penalty, label contexts, joint."""
    learn: tuple[str, ...]
    """The parts that learn, of "unary", "triple_penalty", "label_contexts"; the rest is fixed. "links", for clips: only
    what other frames weigh in the triple penalty."""
    steps: int = 1000
    """Optimiser steps."""
    batch: int = 8
    """Images a step, over all processes."""
    rate: float = 1e-3
    """Learning rate of the network."""
    encoder_rate: float = 1.0
    """Times `rate`: of the network's encoder, which ImageNet taught and which should not forget it (fast, strong)."""
    mrf_rate: float = 1e-3
    """Learning rate of the triple penalty and label contexts."""
    optimiser: str = "adamw"
    """"adamw" or "sgd" (with momentum 0.9)."""
    weight_decay: float = 1e-4
    """Of the network's filters; the MRF has none."""
    warmup: int = 0
    """Steps over which rates rise from zero; they then fall to zero as a power of the steps left."""
    power: float = 0.9
    """That power."""
    cached: bool = True
    """Where the network is fixed: compute its output once per image instead of once per step."""
    class_balance: float = 0.0
    """Weight of a class in the loss: its frequency to the power of minus this, averaging 1."""
    lovasz: float = 0.0
    """Weight of the Lovász-softmax loss, which stands for mIoU, beside cross-entropy."""


@dataclass(frozen=True)
class Recipe:
    """A whole run."""

    data: DataRecipe
    stage: tuple[Stage, ...]
    unary: UnaryRecipe = UnaryRecipe()
    mean_field: dict[str, Any] = field(default_factory=dict)
    """MeanField's settings."""
    augment: AugmentRecipe = AugmentRecipe()
    clips: ClipsRecipe = ClipsRecipe()
    start: str = ""
    """A trained model to start from, with its network and its mean field: a folder, or the name of a bundled one."""
    zoom: float = 0.0
    """Of the finished model (fast, strong): outside training, its network sees images so many times larger. Having
    learned from random scales, it then finds small things better. 0 leaves it as it is."""
    temperature: float = 0.0
    """Of the finished model's mean field, for new images: see MeanField; `deepmrf calibrate` finds it. 0 leaves it."""
    strategy: str = "incremental"
    """"incremental" runs the stages one after the other; "joint" learns everything at once for as many steps."""
    seed: int = 0
    """Of weights, order, augmentation and dropout."""
    precision: str = "no"
    """Mixed precision: "no", "bf16" or "fp16"."""
    clip: float = 0.0
    """Largest norm of a gradient; 0 leaves gradients alone."""
    ema: float = 0.0
    """Decay of the moving average of the weights that is evaluated and saved; 0 for none."""
    save_every: int = 200
    """Steps between checkpoints."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the end of each stage."""


class RecipeError(ValueError):
    """A recipe that cannot be run, and why."""


def load(path: str | Path, overrides: dict[str, str] | None = None) -> Recipe:
    """Read a recipe file, apply the overrides, check all of it."""
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"There is no recipe {path}: pass a .toml file, such as one of the folder recipes.")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not text in UTF-8: save it so, or pass a .toml file.") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}.") from error
    for key, value in (overrides or {}).items():
        _override(tree, key, value)
    return from_dict(tree)


def from_dict(tree: dict[str, Any]) -> Recipe:
    """A checked recipe from plain values."""
    recipe = typing.cast(Recipe, _read(Recipe, tree, ""))
    names = [stage.name for stage in recipe.stage]
    if not names or len(set(names)) != len(names):
        raise RecipeError(f"stage needs at least one entry, and names of their own; these are {names}.")
    for stage in recipe.stage:
        for part in stage.learn:
            if part not in PARTS:
                raise RecipeError(f"stage.{stage.name}.learn has {part!r}: choose from {', '.join(PARTS)}.")
        if not stage.learn:
            raise RecipeError(f"stage.{stage.name}.learn is empty: name at least one of {', '.join(PARTS)}.")
        where = f"stage.{stage.name}"
        _check_numbers(stage, ("steps", "batch"), 1, where)
        _check_numbers(stage, ("rate", "encoder_rate", "mrf_rate", "weight_decay", "warmup", "power"), 0, where)
        _check_numbers(stage, ("class_balance", "lovasz"), 0, where)
        if stage.optimiser not in ("adamw", "sgd"):
            raise RecipeError(f"stage.{stage.name}.optimiser={stage.optimiser!r} must be 'adamw' or 'sgd'.")
    for key, choices in (("strategy", ("incremental", "joint")), ("precision", ("no", "bf16", "fp16"))):
        if getattr(recipe, key) not in choices:
            raise RecipeError(f"{key}={getattr(recipe, key)!r} must be one of {', '.join(choices)}.")
    if not recipe.start and "unary" not in tree:
        raise RecipeError("The recipe lacks unary: add it, or a trained model as start.")
    if recipe.start and (recipe.unary != UnaryRecipe() or recipe.mean_field):
        raise RecipeError(f"start={recipe.start!r} brings its network and mean field: leave unary and mean_field out.")
    _check_numbers(recipe, ("save_every",), 1)
    _check_numbers(recipe, ("clip", "evaluate_every"), 0)
    _check_numbers(recipe.data, ("workers",), 0, "data")
    if not 0 <= recipe.ema < 1:
        raise RecipeError(f"ema={recipe.ema} must be at least 0 and less than 1.")
    _check_clips(recipe.clips)
    return recipe


def _check_numbers(table: Any, keys: tuple[str, ...], least: int, where: str = "") -> None:
    for key in keys:
        value = getattr(table, key)
        if not least <= value < math.inf:  # nor is NaN
            finite = " and finite" if isinstance(value, float) else ""
            raise RecipeError(f"{_join(where, key)}={value} must be at least {least}{finite}.")


def _check_clips(clips: ClipsRecipe) -> None:
    for key, choices in (("labelled", ("centre", "all")), ("flow", ("dis", "exact", "none"))):
        if getattr(clips, key) not in choices:
            raise RecipeError(f"clips.{key}={getattr(clips, key)!r} must be one of {', '.join(choices)}.")
    _check_numbers(clips, ("frames", "stride", "window", "contexts"), 1, "clips")
    if clips.motion < 0 or clips.count < 0 or not 0 <= clips.flicker <= 10:
        raise RecipeError(
            f"clips.motion={clips.motion}, count={clips.count} and flicker={clips.flicker} must be at least 0, "
            "and flicker at most 10."
        )
    if clips.flow == "exact" and not clips.motion:
        raise RecipeError("clips.flow='exact' is the flow of moved stills: set clips.motion, or flow='dis'.")
    if clips.motion and clips.stride > 1:
        raise RecipeError(f"clips.stride={clips.stride} is for videos, clips.motion for stills: set one of them.")


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, for JSON."""
    return dataclasses.asdict(recipe)


def _override(tree: dict[str, Any], key: str, text: str) -> None:
    *path, last = key.split(".")
    place: Any = tree
    for step in path:
        if isinstance(place, list):
            matches = [entry for entry in place if entry.get("name", "").replace(" ", "_") == step]
            if not matches:
                names = ", ".join(str(entry.get("name")).replace(" ", "_") for entry in place)
                raise RecipeError(f"--set {key}: there is no stage {step!r}, only {names}.")
            place = matches[0]
        else:
            place = place.setdefault(step, {})
        if not isinstance(place, dict | list):
            raise RecipeError(f"--set {key}: {step!r} is a value, not a table.")
    if isinstance(place, list):
        raise RecipeError(f"--set {key}: name a stage and its key, as in stage.unary.steps=100.")
    try:
        place[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        place[last] = text


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`, or an error that names the key."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise RecipeError(f"{where} must be a table, but is {value!r}.")
        hints = typing.get_type_hints(kind)
        known = [f.name for f in dataclasses.fields(kind)]
        for key in value:
            if key not in known:
                raise RecipeError(f"Unknown key {_join(where, key)}: known ones are {', '.join(known)}.")
        for f in dataclasses.fields(kind):
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and f.name not in value:
                raise RecipeError(f"The recipe lacks {_join(where, f.name)}: add it.")
        read = {key: _read(hints[key], entry, _join(where, key)) for key, entry in value.items()}
        return kind(**read)  # type: ignore[operator]
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise RecipeError(f"{where} must be a list, but is {value!r}.")
        if arguments[-1] is Ellipsis:
            return tuple(_read(arguments[0], entry, f"{where}[{index}]") for index, entry in enumerate(value))
        if len(value) != len(arguments):
            raise RecipeError(f"{where} must hold {len(arguments)} values, but is {value!r}.")
        return tuple(_read(k, entry, where) for k, entry in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise RecipeError(f"{where} must be a table, but is {value!r}.")
        return value
    if origin in (typing.Union, types.UnionType):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecipeError(f"{where} must be of type {kind.__name__}, but is {value!r}.")
    return value


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
