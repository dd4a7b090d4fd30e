"""The model that a training run starts from: new, with a network that was trained before, or a whole trained model.

For clips, a mean field for images is inflated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from deepmrf.data.dataset import Dataset
from deepmrf.dpn import DeepParsingNetwork, load
from deepmrf.models import open_model
from deepmrf.recipe import Recipe, RecipeError


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
        raise RecipeError(f"unary.options or mean_field: {error}.") from error
    if recipe.unary.imagenet:
        path = Path(recipe.unary.imagenet)
        if not path.is_file():
            raise RecipeError(f"unary.imagenet: there is no file {path}; set it, or leave it empty to start at random.")
        said(str(model.unary.load_imagenet(path)))  # type: ignore[operator]
    if recipe.unary.start:
        start = load(Path(recipe.unary.start))
        fitting = {
            name: value
            for name, value in start.unary.state_dict().items()
            if model.unary.state_dict().get(name, torch.empty(0)).shape == value.shape
        }
        missing = model.unary.load_state_dict(fitting, strict=False).missing_keys
        said(f"Network from {recipe.unary.start}; at random: {', '.join(missing) or 'nothing'}.")
    return model
