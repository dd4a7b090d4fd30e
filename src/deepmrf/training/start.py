"""What a training run starts from: its folder, its data, and its model.

The model is new, has a network that was trained before, or is a whole trained model. For clips, a mean field for images
is inflated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from deepmrf.data import open_data
from deepmrf.data.dataset import Dataset
from deepmrf.data.writing import check_folder
from deepmrf.models.names import from_folder, open_model
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.training.recipe import Recipe, RecipeError, from_dict

STATE, METRICS, RESOLVED = "state.safetensors", "metrics.json", "recipe.json"
"""The files of a run's folder."""


def check_run_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Can the recipe run in that folder, or go on there?"""
    check_folder(folder, "the run")
    if (folder / STATE).exists() and not resume:
        raise RecipeError(f"{folder} holds a run already: continue it with --resume, or choose another folder.")
    resolved = folder / RESOLVED
    if resume and resolved.exists():
        try:
            before = from_dict(json.loads(resolved.read_text(encoding="utf-8")))
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise RecipeError(f"{resolved} cannot be read ({reason}): put it back, or use a new folder.") from error
        if before != recipe:
            changed = [key for key, value in asdict(before).items() if asdict(recipe)[key] != value]
            raise RecipeError(
                f"{folder} was started with another recipe ({', '.join(changed)} differ): "
                "give the same recipe and --set as before, or use a new folder."
            )


def open_splits(recipe: Recipe) -> tuple[Dataset, Dataset]:
    """The images to learn from and those to measure on, of the same labels."""
    data = open_data(recipe.data.train, recipe.data.train_split)
    where = recipe.data.val or recipe.data.train
    val = open_data(where, recipe.data.val_split)
    if val.labels.names != data.labels.names:
        raise RecipeError(
            f"data.val={where!r} knows other labels ({len(val.labels)}) than data.train="
            f"{recipe.data.train!r} ({len(data.labels)}): give data of the same ones."
        )
    return data, val


def build(recipe: Recipe, data: Dataset, said: Callable[[str], None]) -> DeepParsingNetwork:
    """The model of a recipe for the labels of `data`; `said` is told where its weights come from."""
    model = _started(recipe, data, said) if recipe.start else _new(recipe, data, said)
    if recipe.clips.frames > 1 and model.mean_field is not None and model.mean_field.dims == 2:
        model = model.inflate(recipe.clips.window, recipe.clips.contexts)
    return model


def _started(recipe: Recipe, data: Dataset, said: Callable[[str], None]) -> DeepParsingNetwork:
    model = open_model(recipe.start)
    if model.labels.names != data.labels.names:
        raise RecipeError(
            f"start={recipe.start!r} knows other labels ({len(model.labels)}) than {recipe.data.train} "
            f"({len(data.labels)}): start from a model of the same ones."
        )
    said(f"Network and mean field from {recipe.start}.")
    return model


def _new(recipe: Recipe, data: Dataset, said: Callable[[str], None]) -> DeepParsingNetwork:
    learns_mrf = any(part != "unary" for stage in recipe.stage for part in stage.learn)
    try:
        mrf = dict(recipe.mean_field) if recipe.mean_field or learns_mrf else None
        model: DeepParsingNetwork = DeepParsingNetwork.build(
            recipe.unary.network, data.labels, dict(recipe.unary.options), mrf
        )
    except TypeError as error:  # an option the network or MeanField does not have
        raise RecipeError(f"unary.options or mean_field: {str(error).rstrip('.')}.") from error
    if recipe.unary.imagenet:
        path = Path(recipe.unary.imagenet)
        if not path.is_file():
            raise RecipeError(f"unary.imagenet: there is no file {path}; set it, or leave it empty to start at random.")
        said(str(model.unary.load_imagenet(path)))  # type: ignore[operator]
    if recipe.unary.start:
        place = Path(recipe.unary.start)
        start = from_folder(place) if place.is_dir() else open_model(recipe.unary.start)
        fitting = {
            name: value
            for name, value in start.unary.state_dict().items()
            if model.unary.state_dict().get(name, torch.empty(0)).shape == value.shape
        }
        missing = model.unary.load_state_dict(fitting, strict=False).missing_keys
        said(f"Network from {recipe.unary.start}; at random: {', '.join(missing) or 'nothing'}.")
    return model
