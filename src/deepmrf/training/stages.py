"""Stages: which parts of the model a stage learns, which it runs, and which outputs it caches.

The paper's four stages learn the network (b1 to b11), the triple penalty (b12), the label contexts (b13, b14), and then
all of them together. Whatever a stage does not learn stays as it is.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from deepmrf.flow import Flow
from deepmrf.layers.inputs import check_temperature
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.training.mean_field import start_contexts, start_penalty
from deepmrf.training.recipe import Recipe, RecipeError, Stage
from deepmrf.unary.network import check_zoom


def planned_stages(recipe: Recipe) -> tuple[Stage, ...]:
    """Return the stages that run: those of the recipe, or a single one that learns all their parts."""
    if recipe.strategy == "incremental":
        return recipe.stage
    parts = tuple(dict.fromkeys(part for stage in recipe.stage for part in stage.learn))
    steps = sum(stage.steps for stage in recipe.stage)
    return (replace(recipe.stage[0], name="all at once", learn=parts, steps=steps),)


def prepare_stage(model: DeepParsingNetwork, stage: Stage, seed: int, trained: bool = False) -> None:
    """Let the stage's parts learn, fix the others, and initialise a part of the MRF that learns for the first time.

    trained: the MRF comes from an earlier run, so that its parts are not initialised.
    """
    parts, links = _learnable(model, stage)
    for name, part in parts.items():
        part.requires_grad_(name in stage.learn)
    for parameter in links.get("trajectories", []):
        parameter.requires_grad_(False)
    for name in stage.learn:
        for parameter in links.get(name, []):
            parameter.requires_grad_(True)
    mrf = model.mean_field
    if mrf is not None and mrf.label_scaling is not None:
        mrf.label_scaling.requires_grad_(False)  # images held out teach it, before the stage
    if mrf is None or trained:
        return
    if "label_contexts" not in stage.learn:
        # The shift adds the same to every label, which softmax removes: an optimiser would follow rounding errors.
        mrf.triple_penalty.shift.requires_grad_(False)
    contexts = mrf.label_contexts
    if contexts is None:
        return
    if "triple_penalty" in stage.learn and "label_contexts" not in stage.learn:
        start_penalty(mrf)
    elif "label_contexts" in stage.learn and bool((contexts.bias == 0).all()):
        start_contexts(contexts, seed)


def _learnable(model: DeepParsingNetwork, stage: Stage) -> tuple[dict[str, nn.Module], dict[str, list[nn.Parameter]]]:
    """Return the model's parts and links by name; raise a RecipeError where it lacks what the stage learns."""
    mrf = model.mean_field
    parts: dict[str, nn.Module] = {"unary": model.unary}
    links: dict[str, list[nn.Parameter]] = {}
    if mrf is not None:
        parts["triple_penalty"] = mrf.triple_penalty
        if mrf.label_contexts is not None:
            parts["label_contexts"] = mrf.label_contexts
        if mrf.triple_penalty.temporal:
            links = {"links": mrf.over_time(), "trajectories": [mrf.trajectory_weights]}
    for name in stage.learn:
        if name in ("links", "trajectories") and not links:
            raise RecipeError(
                f"stage.{stage.name}.learn has {name}, but the model sees single images: set clips.frames."
            )
        if name not in (*parts, *links):
            raise RecipeError(f"stage.{stage.name}.learn has {name}, which the model lacks: see mean_field.contexts.")
    return parts, links


def learns_from_the_start(recipe: Recipe, index: int) -> bool:
    """Is stage number `index` the first in which a network learns that no training has taught these labels?

    Not where the network is compiled: it would be compiled anew at each step whose momentum is another.
    """
    stages = planned_stages(recipe)
    first = next((n for n, stage in enumerate(stages) if "unary" in stage.learn), None)
    return index == first and not (recipe.start or recipe.unary.start or recipe.compile)


def learns_mrf_alone(stage: Stage) -> bool:
    """Does the network stay as it is?"""
    return "unary" not in stage.learn


def caches_network(stage: Stage) -> bool:
    """Is the network's output computed once per image?"""
    return stage.cached and learns_mrf_alone(stage)


def caches_penalty(model: DeepParsingNetwork, recipe: Recipe, stage: Stage) -> bool:
    """Is b12's output, too, computed once per image?

    It must stay fixed (only label contexts learn) and be mirrored where the image is mirrored (odd windows).
    """
    mrf = model.mean_field
    if mrf is None or mrf.iterations > 1 or mrf.dims != 2 or recipe.clips.frames > 1:
        return False
    odd = all(size % 2 for size in mrf.triple_penalty.window)
    return caches_network(stage) and stage.learn == ("label_contexts",) and odd


def uses_clips(recipe: Recipe, stage: Stage) -> bool:
    """Does the stage see clips? A stage that learns the network alone sees images."""
    return recipe.clips.frames > 1 and any(part != "unary" for part in stage.learn)


class StageModel(nn.Module):
    """The part of the model that a stage runs."""

    def __init__(
        self, model: DeepParsingNetwork, stage: Stage, penalty_cached: bool = False, compiled: bool = False
    ) -> None:
        super().__init__()
        self.model, self.penalty_cached = model, penalty_cached
        self.log_unary = torch.compile(model.log_unary, dynamic=False) if compiled else model.log_unary
        self.network_cached = caches_network(stage)
        self.network_fixed = learns_mrf_alone(stage)
        self.network_alone = all(part == "unary" for part in stage.learn)

    def forward(self, *inputs: Tensor) -> Tensor:
        """[log_p,] image [, the four tensors of a flow] -> log-probabilities, all for images or all for clips.

        With penalty_cached, the first input is log_p and b12's output t, as one tensor (B, 2 L, H, W).
        """
        if self.penalty_cached and self.model.mean_field is not None:
            return self.model.mean_field.from_penalty(*inputs[0].chunk(2, 1))
        log_p, (image, *flow) = (inputs[0], inputs[1:]) if self.network_cached else (None, inputs)
        if self.network_alone:
            return self.log_unary(image)
        if log_p is None:
            with torch.no_grad() if self.network_fixed else nullcontext():
                log_p = self.log_unary(image)
        return self.model.refined(log_p, image, Flow(*flow) if flow else None)


def check_stages(recipe: Recipe, model: DeepParsingNetwork) -> None:
    """Raise a RecipeError, before anything is trained, if the model cannot do what the recipe asks for."""
    if recipe.zoom and not hasattr(model.unary, "zoom"):
        raise RecipeError(f"zoom={recipe.zoom:g}: only the networks fast and strong can zoom; leave it out.")
    if recipe.temperature and model.mean_field is None:
        raise RecipeError(f"temperature={recipe.temperature:g} is the mean field's, and there is none: leave it out.")
    scales_labels = model.mean_field is not None and model.mean_field.label_scaling is not None
    if scales_labels and not recipe.start and not recipe.data.held_out:
        raise RecipeError("mean_field.label_scaling learns from images that the network never saw: set data.held_out.")
    try:
        check_zoom(recipe.zoom or 1)
        check_temperature(recipe.temperature or 1)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    for stage in planned_stages(recipe):
        _learnable(model, stage)
    size = None if model.mean_field is None else model.mean_field.triple_penalty.size
    if size is not None and size != recipe.augment.crop:
        raise RecipeError(f"augment.crop={list(recipe.augment.crop)} must be mean_field.size={list(size)}.")


def finish(recipe: Recipe, model: DeepParsingNetwork) -> str:
    """Give a trained model the recipe's zoom and temperature; return which, or "" if the recipe has neither."""
    changes = []
    if recipe.zoom:
        model.unary.zoom = check_zoom(recipe.zoom)  # type: ignore[assignment]
        changes.append(f"zoom {recipe.zoom:g}")
    if recipe.temperature and model.mean_field is not None:
        model.mean_field.temperature = check_temperature(recipe.temperature)
        changes.append(f"temperature {recipe.temperature:g}")
    return ", ".join(changes)
