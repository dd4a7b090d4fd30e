"""What a training run starts from: its folder, its data and its model.

The model is new, takes its network from an earlier model or from the user, or is a trained model. For clips, a mean
field for images is inflated.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from deepmrf.data import open_data
from deepmrf.data.dataset import Dataset
from deepmrf.data.files import shortened
from deepmrf.data.weights import WEIGHTS
from deepmrf.data.writing import check_folder
from deepmrf.layers import MeanField
from deepmrf.models.names import from_folder, open_model
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.models.schema import MEAN_FIELD, Setting, check_settings, network_schema, skeleton
from deepmrf.models.video_part import VideoPart
from deepmrf.training.recipe import Recipe, RecipeError, UnaryRecipe, recipe_from_dict
from deepmrf.training.recipes import bundled_recipes
from deepmrf.unary.own import OwnNetwork, code_name, own_network

STATE_FILE, METRICS_FILE, RECIPE_FILE = "state.safetensors", "metrics.json", "recipe.json"
"""Files of a run's folder."""
MIN_SHARE_FROM_START = 0.5
"""The share of a network's numbers that unary.start must give."""


def check_run_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Raise a RecipeError if the recipe cannot start in that folder, or cannot continue there."""
    check_folder(folder, "the run")
    if (folder / STATE_FILE).exists() and not resume:
        raise RecipeError(f"{folder} holds a run already: resume it (--resume), or choose another folder.")
    path = folder / RECIPE_FILE
    if not resume or not path.exists():
        return
    try:
        saved = recipe_from_dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise RecipeError(f"{path} cannot be read ({reason}): put it back, or use a new folder.") from error
    if saved != recipe:
        changed = [key for key, value in asdict(saved).items() if asdict(recipe)[key] != value]
        raise RecipeError(
            f"{folder} was started with another recipe ({', '.join(changed)} differ): "
            "give the same recipe and overrides as before, or use a new folder."
        )


def with_own_network(recipe: Recipe, network: OwnNetwork, message: Callable[[str], None]) -> Recipe:
    """Return the recipe with the user's network by name instead of its own, and without that one's settings."""
    if recipe.start:
        return recipe
    unary = recipe.unary
    if unary.options or unary.imagenet:
        message(f"unary.options and unary.imagenet are left out: they belong to the recipe's network {unary.network}.")
    return replace(recipe, unary=UnaryRecipe(network=code_name(network), start=unary.start))


def open_splits(recipe: Recipe) -> tuple[Dataset, Dataset]:
    """Open the images to learn from and those to measure on; both must have the same labels."""
    train = open_data(recipe.data.train, recipe.data.train_split)
    val_name = recipe.data.val or recipe.data.train
    val = open_data(val_name, recipe.data.val_split)
    names = f"data.val={val_name!r}", f"data.train={recipe.data.train!r}"
    val.labels.check_same(names[0], train.labels, names[1], "give data of the same labels")
    return train, val


def build_model(
    recipe: Recipe, data: Dataset, message: Callable[[str], None], network: OwnNetwork | None = None
) -> DeepParsingNetwork:
    """Build the model of a recipe for the labels of `data`; `message` gets the origin of its weights."""
    build = _trained_model if recipe.start else _new_model
    model = build(recipe, data, message, network)
    if isinstance(network, str):
        model.code = network
    if recipe.clips.frames > 1 and model.mean_field is not None and model.mean_field.dims == 2:
        model = model.inflate(recipe.clips.window, recipe.clips.contexts)
    return model


def with_video_part(recipe: Recipe, trained: DeepParsingNetwork, network: OwnNetwork | None) -> DeepParsingNetwork:
    """Return the model that the recipe starts from, with the links of the trained one; its card gains those of both."""
    model = open_model(recipe.start, network)
    earlier, model.video = model.video, VideoPart.of(trained.mean_field)
    model.video.allows_bfloat16 = earlier is not None and earlier.allows_bfloat16
    model.card.metrics = model.card.metrics | {"video": trained.card.metrics}
    model.card.recipe = model.card.recipe | {"video": trained.card.recipe}
    model.code = trained.code
    return model


def recipe_for_card(recipe: Recipe, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe for a model's card; "network" is that of the network, if it was trained before.

    earlier: the recipe on the card of the model that the network comes from.
    """
    network = earlier.get("network") or earlier
    if not network or any("unary" in stage.learn for stage in recipe.stage):
        return asdict(recipe)
    return asdict(recipe) | {"network": dict(network)}


def _trained_model(
    recipe: Recipe, data: Dataset, message: Callable[[str], None], network: OwnNetwork | None
) -> DeepParsingNetwork:
    _check_trained("start", recipe.start)
    model = open_model(recipe.start, network)
    remedy = "start from a model of the same labels"
    model.labels.check_same(f"start={recipe.start!r}", data.labels, recipe.data.train, remedy)
    if recipe.clips.attach and (model.mean_field is None or model.mean_field.dims != 2):
        raise RecipeError(f"clips.attach: start={recipe.start!r} must be a model for images with a mean field.")
    message(f"Network and mean field from {recipe.start}.")
    return model


def _check_trained(key: str, start: str) -> None:
    """Raise a RecipeError if the model to start from is that of a bundled recipe which has not run yet."""
    name = start.removeprefix("runs/").removesuffix("/model")
    if start == f"runs/{name}/model" and name in bundled_recipes() and not Path(start).exists():
        raise RecipeError(f"{key}: there is no model {start}; train it first: deepmrf train {name}")


def _new_model(
    recipe: Recipe, data: Dataset, message: Callable[[str], None], network: OwnNetwork | None
) -> DeepParsingNetwork:
    learns_mrf = any(part != "unary" for stage in recipe.stage for part in stage.learn)
    mrf = dict(recipe.mean_field) if recipe.mean_field or learns_mrf else None
    model: DeepParsingNetwork
    unary = recipe.unary
    try:
        if network is None:
            build = partial(DeepParsingNetwork.build, unary.network, data.labels, unary.options, mrf)
            skeleton(build)  # what is too large is never built
            model = build()
        else:
            mean_field = None if mrf is None else MeanField(len(data.labels), **mrf)
            model = DeepParsingNetwork(own_network(network), mean_field, data.labels)
            message(f"Network from {code_name(network)}.")
    except (TypeError, ValueError, RuntimeError) as error:
        key = "unary.network" if network_schema(unary.network) is None else "unary.options or mean_field"
        raise RecipeError(f"{key}: {str(error).rstrip('.')}.") from error
    if unary.imagenet:
        path = Path(unary.imagenet)
        if not path.is_file():
            remedy = f"fetch it with: deepmrf data get {path.stem}" if path.stem in WEIGHTS else "give one that exists"
            raise RecipeError(f"unary.imagenet: there is no file {path}; empty it to start at random, or {remedy}")
        message(str(model.unary.load_imagenet(path)))  # type: ignore[operator]
    if unary.start:
        folder = Path(unary.start)
        _check_trained("unary.start", unary.start)
        own = copy.deepcopy(network)
        start = from_folder(folder, own) if folder.is_dir() else open_model(unary.start, own)
        message(_start_network(model.unary, start.unary, unary.start))
        model.card.recipe = start.card.recipe
    return model


def _start_network(network: nn.Module, start: nn.Module, name: str) -> str:
    """Give the network those weights of another that fit; return a sentence on the others.

    Raise a RecipeError where few fit: a network that is mostly random is not what the recipe asks for.
    """
    own, given = network.state_dict(), start.state_dict()
    fitting = {key: value for key, value in given.items() if key in own and own[key].shape == value.shape}
    missing = [key for key in own if key not in fitting]
    if sum(own[key].numel() for key in fitting) < MIN_SHARE_FROM_START * sum(value.numel() for value in own.values()):
        options, wanted = (dict(getattr(part, "config", {})) for part in (network, start))
        differ = [f"{key}={value!r}" for key, value in wanted.items() if key != "labels" and options.get(key) != value]
        same = type(network) is type(start) and differ
        remedy = f"set unary.options {', '.join(differ)}" if same else "start from a model of the same network"
        raise RecipeError(
            f"unary.start={name!r}: only {len(fitting)} of {len(own)} tensors of the network fit; {remedy}."
        )
    network.load_state_dict(fitting, strict=False)
    return f"Network from {name}; at random: {shortened(missing) or 'nothing'}."


def check_model_settings(recipe: Recipe, network: OwnNetwork | None) -> None:
    """Raise a RecipeError that names a setting of the network or of the mean field which there is not, before data."""
    schema = network_schema(recipe.unary.network)
    try:  # the number of labels is the data's
        check_settings(recipe.mean_field, _without_labels(MEAN_FIELD), "mean_field")
        if network is None and schema is not None:
            check_settings(recipe.unary.options, _without_labels(schema), "unary.options")
    except ValueError as error:
        raise RecipeError(f"{error}.") from None


def _without_labels(schema: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: setting for name, setting in schema.items() if name != "labels"}
