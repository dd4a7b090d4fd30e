"""Recipes: all settings of a training run, as one TOML file read into frozen dataclasses.

    recipe = read_recipe("recipes/street.toml", {"seed": "1", "stage.unary.steps": "500"})

Unknown keys and bad values are errors that name the key. The second argument overrides values of the file: a key is a
path into the file, with stages by their names; a value is written as in TOML (a bare word stands for a string).
"""

from __future__ import annotations

import dataclasses
import math
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepmrf.data.spelling import did_you_mean
from deepmrf.data.transforms import Augment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PARTS = ("unary", "triple_penalty", "label_contexts", "links", "trajectories")
"""Parts of the model that a stage may learn. Links between the frames of clips, and the trajectories among them, belong
to the triple penalty."""
MAX_WHOLE_NUMBER = 2**31 - 1
MAX_WORKERS = 256
MAX_FRAMES = 255
"""The most frames that windows and patterns may span."""


@dataclass(frozen=True)
class DataRecipe:
    """The images to learn from and to measure on."""

    train: str
    """Data to learn from, as "camvid:PATH", "voc:PATH", "animals:PATH", "cityscapes:PATH", "folder:PATH", ..."""
    val: str = ""
    """Data to measure on; empty for the same data as `train`."""
    train_split: str = "train"
    """The split to learn from."""
    val_split: str = "val"
    """The split to measure on; nothing is learned from it."""
    held_out: float = 0.0
    """Share of the training images that the network never learns from. Stages that learn the MRF alone learn from
    these, on which the network errs as it does on new images. They lie in five stretches; 0 for none."""
    workers: int = 2
    """Number of processes that read and augment images."""


@dataclass(frozen=True)
class UnaryRecipe:
    """The network of the unary term."""

    network: str = "fast"
    """"vgg16" (the paper's), "strong", "fast", or a baseline: "fcn8s", "segnet", "dilation8", "deeplab"."""
    imagenet: str = ""
    """A safetensors file of ImageNet weights to start from; empty starts at random."""
    start: str = ""
    """Folder of an earlier model whose network to start from, for example after pre-training."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the network."""


@dataclass(frozen=True)
class AugmentRecipe:
    """How training images vary."""

    crop: tuple[int, int] = (360, 480)
    """Height and width of a training crop."""
    scale: tuple[float, float] = (0.5, 2.0)
    """Images are resized by a random factor in this range."""
    flip: float = 0.5
    """Probability that an image is mirrored left to right."""
    colour: float = 0.3
    """Strength of random brightness, contrast and saturation; 0 for none."""

    def views(self) -> Augment:
        """Return what makes random views of images."""
        share = self.colour
        return Augment(self.crop, self.scale, self.flip, share, share, share, hue=share / 10)


@dataclass(frozen=True)
class ClipsRecipe:
    """Clips instead of images, for a mean field over frames. Stages that learn the network alone still see images."""

    frames: int = 1
    """Frames of a clip; 1 trains on images."""
    labelled: str = "centre"
    """Which labels count: "centre" for those of the middle frame, "all" for those of every frame."""
    flow: str = "dis"
    """What links frames: "dis" estimates optical flow, "exact" is the known flow of moving stills, "none" no flow."""
    stride: int = 1
    """Step between the frames of a clip, in frames of the video."""
    motion: float = 0.0
    """Above 0, clips are made of single labelled images that move by up to this many pixels per frame."""
    flicker: float = 0.0
    """How much exposure, sharpness and noise differ between such frames. 1 is a bad camera; with more, even a network
    that was trained on these images makes errors."""
    count: int = 0
    """Number of such clips where the network's output is cached; 0 for one per image."""
    window: int = 3
    """Number of frames that the triple penalty sees."""
    contexts: int = 3
    """Number of frames that the label contexts see."""
    attach: bool = False
    """Save the model that the recipe starts from, with the links that were learned as its part for video."""


@dataclass(frozen=True)
class Stage:
    """A stage of training: what it learns, for how many steps, at which rates."""

    name: str
    """Any name; the paper's stages are unary, triple penalty, label contexts and joint."""
    learn: tuple[str, ...]
    """The parts that learn, of "unary", "triple_penalty" and "label_contexts"; the rest is fixed. For clips, "links"
    learns only the weights of other frames in the triple penalty, and "trajectories" of these only the weights of the
    pixels on the same trajectory: windows of other frames then stay out, which is many times as fast."""
    steps: int = 1000
    """Number of optimiser steps."""
    batch: int = 8
    """Images per step, over all processes."""
    rate: float = 1e-3
    """Learning rate of the network."""
    encoder_rate: float = 1.0
    """Learning rate of a pretrained encoder (fast, strong, fcn8s, segnet), as a share of `rate`."""
    mrf_rate: float = 1e-3
    """Learning rate of the triple penalty and label contexts."""
    optimiser: str = "adamw"
    """"adamw" or "sgd" (with momentum 0.9)."""
    weight_decay: float = 1e-4
    """Weight decay of the network's filters; the MRF has none."""
    warmup: int = 0
    """Steps over which rates rise from 0; they then fall to 0."""
    epsilon: float = 1e-8
    """AdamW's epsilon: parameters whose gradients are smaller move less. For an MRF, 1e-3 keeps the weights of rare
    pairs of labels from learning single images."""
    power: float = 0.9
    """Rates fall as this power of the share of steps left."""
    held_out: bool = True
    """If it learns the MRF alone, learn from the images of `data.held_out`; if false, from those of the network."""
    cached: bool = True
    """If the network is fixed, compute its output once per image instead of once per step."""
    class_balance: float = 0.0
    """Weight of a class in the loss: its frequency to the power of minus this number; weights average 1."""
    lovasz: float = 0.0
    """Weight of the Lovász-softmax loss, which approximates mIoU, beside cross-entropy."""


@dataclass(frozen=True)
class Recipe:
    """A training run."""

    data: DataRecipe
    stage: tuple[Stage, ...]
    unary: UnaryRecipe = UnaryRecipe()
    mean_field: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of MeanField."""
    augment: AugmentRecipe = AugmentRecipe()
    clips: ClipsRecipe = ClipsRecipe()
    start: str = ""
    """A trained model whose network and mean field to start from: its folder, or the name of a bundled model."""
    zoom: float = 0.0
    """Enlargement of images before the network of the trained model (fast, strong); finds small things better. 0 for
    none."""
    temperature: float = 0.0
    """Temperature of the trained model's mean field: see evaluation/calibration.py. 0 leaves it as it is."""
    strategy: str = "incremental"
    """"incremental" runs the stages one after the other; "joint" learns everything at once for as many steps."""
    seed: int = 0
    """Seed of weights, order, augmentation and dropout."""
    precision: str = "no"
    """Mixed precision: "no", "bf16" or "fp16"."""
    compile: bool = False
    """Compile the network for training (torch.compile): a minute at first, then faster steps. For GPUs."""
    clip: float = 0.0
    """Largest norm of a gradient; 0 leaves gradients alone."""
    ema: float = 0.0
    """Decay of the moving average of the weights, which is evaluated and saved; 0 for none."""
    save_every: int = 200
    """Steps between checkpoints."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the end of each stage."""


class RecipeError(ValueError):
    """A recipe that cannot run."""


def read_recipe(path: str | Path, overrides: dict[str, str] | None = None) -> Recipe:
    """Read a recipe file, apply the overrides and check the result."""
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"There is no recipe {path}: pass a .toml file.")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not text in UTF-8: save it so, or pass a .toml file.") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise RecipeError(f"{path} is not valid TOML: {str(error).splitlines()[0].rstrip('.')}.") from error
    for key, value in (overrides or {}).items():
        _override(tree, key, value)
    return recipe_from_dict(tree)


def recipe_from_dict(tree: dict[str, Any]) -> Recipe:
    """Return the recipe of plain values, checked."""
    recipe = typing.cast(Recipe, _converted(Recipe, tree, ""))
    names = [stage.name for stage in recipe.stage]
    if not names or len(set(names)) != len(names):
        raise RecipeError(f"stage needs at least one entry, and names of their own; these are {names}.")
    for stage in recipe.stage:
        _check_stage(stage)
    _check_choices(recipe, {"strategy": ("incremental", "joint"), "precision": ("no", "bf16", "fp16")})
    if not recipe.start and "unary" not in tree:
        raise RecipeError("The recipe lacks unary: add it, or a trained model as start.")
    if recipe.start and (recipe.unary != UnaryRecipe() or recipe.mean_field):
        raise RecipeError(f"start={recipe.start!r} brings its network and mean field: leave unary and mean_field out.")
    _check_numbers(recipe, ("save_every",), 1)
    _check_numbers(recipe, ("clip", "evaluate_every", "seed"), 0)
    _check_numbers(recipe.data, ("workers",), 0, "data", MAX_WORKERS)
    if not 0 <= recipe.data.held_out < 1:
        raise RecipeError(f"data.held_out={recipe.data.held_out} must be at least 0 and less than 1.")
    if recipe.data.held_out and recipe.clips.frames > 1:
        raise RecipeError("data.held_out is for images: leave it out where clips.frames is above 1.")
    if not 0 <= recipe.ema < 1:
        raise RecipeError(f"ema={recipe.ema} must be at least 0 and less than 1.")
    _check_clips(recipe.clips)
    if recipe.clips.attach:
        _check_attach(recipe)
    if not 0 <= recipe.augment.colour <= 1:
        raise RecipeError(f"augment.colour={recipe.augment.colour} must be 0 to 1.")
    try:
        recipe.augment.views()
    except ValueError as error:
        raise RecipeError(f"augment: {error}") from error
    return recipe


def _check_stage(stage: Stage) -> None:
    table = f"stage.{stage.name}"
    for part in stage.learn:
        if part not in PARTS:
            raise RecipeError(f"{table}.learn has {part!r}: choose from {', '.join(PARTS)}.")
    if not stage.learn:
        raise RecipeError(f"{table}.learn is empty: name at least one of {', '.join(PARTS)}.")
    _check_numbers(stage, ("steps", "batch"), 1, table)
    _check_numbers(stage, ("rate", "encoder_rate", "mrf_rate", "weight_decay", "epsilon", "warmup", "power"), 0, table)
    _check_numbers(stage, ("class_balance", "lovasz"), 0, table)
    _check_choices(stage, {"optimiser": ("adamw", "sgd")}, table)


def _check_numbers(
    values: Any, keys: tuple[str, ...], least: int, table: str = "", most: int = MAX_WHOLE_NUMBER
) -> None:
    for key in keys:
        value = getattr(values, key)
        if not least <= value < math.inf:  # NaN fails, too
            finite = " and finite" if isinstance(value, float) else ""
            raise RecipeError(f"{_join(table, key)}={value} must be at least {least}{finite}.")
        if isinstance(value, int) and value > most:
            raise RecipeError(f"{_join(table, key)} must be at most {most}.")


def _check_choices(values: Any, choices: dict[str, tuple[str, ...]], table: str = "") -> None:
    for key, allowed in choices.items():
        if getattr(values, key) not in allowed:
            raise RecipeError(f"{_join(table, key)}={getattr(values, key)!r} must be one of {', '.join(allowed)}.")


def _check_clips(clips: ClipsRecipe) -> None:
    _check_choices(clips, {"labelled": ("centre", "all"), "flow": ("dis", "exact", "none")}, "clips")
    _check_numbers(clips, ("frames", "stride"), 1, "clips")
    _check_numbers(clips, ("window", "contexts"), 1, "clips", MAX_FRAMES)
    if not 0 <= clips.motion < math.inf or not 0 <= clips.count < MAX_WHOLE_NUMBER or not 0 <= clips.flicker <= 10:
        raise RecipeError(
            f"clips.motion={clips.motion}, count={clips.count} and flicker={clips.flicker} must be at least 0, "
            "and flicker at most 10."
        )
    if clips.flow == "exact" and not clips.motion:
        raise RecipeError("clips.flow='exact' is the flow of moving stills: set clips.motion, or flow='dis'.")
    if clips.motion and clips.stride > 1:
        raise RecipeError(f"clips.stride={clips.stride} is for videos, clips.motion for stills: set one of them.")


def _check_attach(recipe: Recipe) -> None:
    """Raise a RecipeError where a recipe changes more than links, so that the model for images would be another."""
    learned = {part for stage in recipe.stage for part in stage.learn}
    clips = recipe.clips
    if not recipe.start or not learned <= {"links", "trajectories"} or recipe.zoom or clips.contexts > 1:
        raise RecipeError(
            "clips.attach gives a trained model links alone: set start, let stages learn links or trajectories, set "
            "clips.contexts = 1, and leave zoom out."
        )
    if min(clips.frames, clips.window) < 2:
        raise RecipeError(f"clips.attach needs clips: clips.frames={clips.frames}, window={clips.window} must be > 1.")


def _override(tree: dict[str, Any], key: str, text: str) -> None:
    """Set the value at `key`, such as stage.unary.steps, to `text`, read as TOML."""
    *path, last = key.split(".")
    node: Any = tree
    for name in path:
        if isinstance(node, list):
            stages = {str(entry.get("name", "")).replace(" ", "_"): entry for entry in node}
            if name not in stages:
                raise RecipeError(f"{key}: there is no stage {name!r}, only {', '.join(stages)}.")
            node = stages[name]
        else:
            node = node.setdefault(name, {})
        if not isinstance(node, dict) and not (isinstance(node, list) and all(isinstance(e, dict) for e in node)):
            raise RecipeError(f"{key}: {name!r} is a value, not a table.")
    if isinstance(node, list):
        raise RecipeError(f"{key}: name a stage and its key, as in stage.unary.steps=100.")
    try:
        node[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        node[last] = text
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{key} cannot be read: {str(error).splitlines()[0].rstrip('.')}.") from error


def _converted(kind: Any, value: Any, key: str) -> Any:
    """Return `value` as a `kind`; raise a RecipeError that names the key where it is no such thing."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _table(kind, value, key)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise RecipeError(f"{key} must be a list, but is {value!r}.")
        if arguments[-1] is Ellipsis:
            names = [entry.get("name") if isinstance(entry, dict) else None for entry in value]
            keys = [f"{key}.{name}" if isinstance(name, str) else f"{key}[{index}]" for index, name in enumerate(names)]
            return tuple(_converted(arguments[0], entry, at) for at, entry in zip(keys, value, strict=True))
        if len(value) != len(arguments):
            raise RecipeError(f"{key} must hold {len(arguments)} values, but is {value!r}.")
        return tuple(_converted(argument, entry, key) for argument, entry in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise RecipeError(f"{key} must be a table, but is {value!r}.")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < sys.float_info.max else math.inf if value > 0 else -math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RecipeError(f"{key} must be of type {kind.__name__}, but is {value!r}.")
    return value


def _table(kind: Any, value: Any, table: str) -> Any:
    """Return a TOML table as a dataclass."""
    if not isinstance(value, dict):
        raise RecipeError(f"{table} must be a table, but is {value!r}.")
    types, fields = typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            guess = did_you_mean(key, fields)
            raise RecipeError(f"Unknown key {_join(table, key)}{guess}: known ones are {', '.join(fields)}.")
    for name, entry in fields.items():
        required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if required and name not in value:
            raise RecipeError(f"The recipe lacks {_join(table, name)}: add it.")
    return kind(**{key: _converted(types[key], entry, _join(table, key)) for key, entry in value.items()})


def _join(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key
