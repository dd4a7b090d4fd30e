"""Stages: which part of the model one runs, opens and steps, how fast, and how an average of it follows.

The paper's four: the network (b1 to b11), the triple penalty (b12), the label contexts (b13, b14), then all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from deepmrf.flow import Flow
from deepmrf.layers.inputs import check_temperature
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.training.recipe import Recipe, RecipeError, Stage
from deepmrf.unary.images import check_zoom


def plan(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages that run: those of the recipe, or all of them as one."""
    if recipe.strategy == "incremental":
        return recipe.stage
    parts = tuple(dict.fromkeys(part for stage in recipe.stage for part in stage.learn))
    steps = sum(stage.steps for stage in recipe.stage)
    return (replace(recipe.stage[0], name="all at once", learn=parts, steps=steps),)


def finisher(recipe: Recipe, model: DeepParsingNetwork) -> Callable[[DeepParsingNetwork], str] | None:
    """What gives a trained model the recipe's zoom and temperature, and says so; None where the recipe has neither.

    An error, before anything is trained, where the model cannot have them.
    """
    if not recipe.zoom and not recipe.temperature:
        return None
    if recipe.zoom and not hasattr(model.unary, "zoom"):
        raise RecipeError(f"zoom={recipe.zoom:g}: only the networks fast and strong can zoom; leave it out.")
    if recipe.temperature and model.mean_field is None:
        raise RecipeError(f"temperature={recipe.temperature:g} is the mean field's, and there is none: leave it out.")
    try:
        zoom = check_zoom(recipe.zoom or 1)
        temperature = check_temperature(recipe.temperature or 1)
    except ValueError as error:
        raise RecipeError(str(error)) from error

    def finish(trained: DeepParsingNetwork) -> str:
        changed = []
        if recipe.zoom:
            trained.unary.zoom = zoom  # type: ignore[assignment]
            changed.append(f"zoom {recipe.zoom:g}")
        if recipe.temperature and trained.mean_field is not None:
            trained.mean_field.temperature = temperature
            changed.append(f"temperature {recipe.temperature:g}")
        return ", ".join(changed)

    return finish


def uses_cache(stage: Stage) -> bool:
    """Can the network's output be computed once?"""
    return stage.cached and "unary" not in stage.learn


def keeps_penalty(model: DeepParsingNetwork, recipe: Recipe, stage: Stage) -> bool:
    """Can b12's output be computed once, too? Where only label contexts learn, and a mirrored image's is mirrored."""
    mrf = model.mean_field
    if mrf is None or mrf.iterations > 1 or mrf.dims != 2 or recipe.clips.frames > 1:
        return False
    return uses_cache(stage) and stage.learn == ("label_contexts",) and all(n % 2 for n in mrf.triple_penalty.window)


def over_clips(recipe: Recipe, stage: Stage) -> bool:
    """Does the stage see clips? The network alone learns from images."""
    return recipe.clips.frames > 1 and any(part != "unary" for part in stage.learn)


class Pass(nn.Module):
    """The part of the model that a stage runs."""

    def __init__(self, model: DeepParsingNetwork, stage: Stage, penalty: bool = False) -> None:
        """penalty: what comes first is log_p and b12's output t, as one tensor (B, 2 L, H, W)."""
        super().__init__()
        self.model, self.penalty = model, penalty
        self.whole = any(part != "unary" for part in stage.learn)
        self.cached = uses_cache(stage)
        self.fixed = "unary" not in stage.learn

    def forward(self, *inputs: Tensor) -> Tensor:
        """[log_p,] image [, the four tensors of a flow] -> log-probabilities; all of images, or all of clips."""
        if self.penalty and self.model.mean_field is not None:
            return self.model.mean_field.from_penalty(*inputs[0].chunk(2, 1))
        log_p, (image, *parts) = (inputs[0], inputs[1:]) if self.cached else (None, inputs)
        if not self.whole:
            return self.model.log_unary(image)
        if log_p is None:
            with torch.no_grad() if self.fixed else nullcontext():
                log_p = self.model.log_unary(image)
        return self.model.refined(log_p, image, Flow(*parts) if parts else None)


def prepare(model: DeepParsingNetwork, stage: Stage, seed: int, trained: bool = False) -> None:
    """Open what the stage learns, fix the rest, and give an MRF part that learns for the first time its start.

    trained: the MRF comes from an earlier run, so that none of its parts does.
    """
    mrf = model.mean_field
    parts = {"unary": model.unary}
    if mrf is not None:
        parts["triple_penalty"] = mrf.triple_penalty
        if mrf.label_contexts is not None:
            parts["label_contexts"] = mrf.label_contexts
    linked = [] if mrf is None or not mrf.triple_penalty.temporal else mrf.triple_penalty.over_time()
    if "links" in stage.learn and not linked:
        raise RecipeError(f"stage.{stage.name}.learn has links, but the model sees single images: set clips.frames.")
    for name in stage.learn:
        if name not in (*parts, "links"):
            raise RecipeError(f"stage.{stage.name}.learn has {name}, which the model lacks: see mean_field.contexts.")
    for name, part in parts.items():
        part.requires_grad_(name in stage.learn)
    for parameter in linked if "links" in stage.learn else []:
        parameter.requires_grad_(True)
    if mrf is None or trained:
        return
    if "label_contexts" not in stage.learn:
        # What it adds to every label alike, softmax takes away: an optimiser would only follow rounding errors.
        mrf.triple_penalty.shift.requires_grad_(False)
    contexts = mrf.label_contexts
    if contexts is None:
        return
    with torch.no_grad():
        if "triple_penalty" in stage.learn and "label_contexts" not in stage.learn:
            contexts.set_compatibility(torch.eye(contexts.labels))  # o14 = t: b12 alone
            mrf.triple_penalty.scale.zero_()  # and at first nothing
        elif "label_contexts" in stage.learn and bool((contexts.bias == 0).all()):
            generator = torch.Generator().manual_seed(seed)  # tell the K patterns apart
            noise = torch.randn(contexts.weight.shape, generator=generator) * 1e-2 / contexts.weight[0, 0].numel()
            contexts.weight.add_(noise.to(contexts.weight))


def optimiser_of(model: DeepParsingNetwork, stage: Stage) -> torch.optim.Optimizer:
    """Filters of the network decay; biases, norms and the MRF do not."""
    learned = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = []
    for prefix, rate in (("unary.encoder.", stage.rate * stage.encoder_rate), ("unary.", stage.rate)):
        mine = [p for n, p in learned if n.startswith(prefix)]
        learned = [(n, p) for n, p in learned if not n.startswith(prefix)]
        groups.append({"params": [p for p in mine if p.dim() > 1], "lr": rate, "weight_decay": stage.weight_decay})
        groups.append({"params": [p for p in mine if p.dim() <= 1], "lr": rate, "weight_decay": 0.0})
    groups.append({"params": [p for _, p in learned], "lr": stage.mrf_rate, "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    if stage.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=stage.rate, momentum=0.9)
    on_gpu = next(model.parameters()).is_cuda  # one launch for all of them
    return torch.optim.AdamW(groups, lr=stage.rate, fused=on_gpu)


def set_rates(optimiser: torch.optim.Optimizer, stage: Stage, step: int) -> None:
    """Each group's share of its full rate, which is the one it came with."""
    for group in optimiser.param_groups:
        group["lr"] = group.setdefault("full", group["lr"]) * rate_at(stage, step)


def rate_at(stage: Stage, step: int) -> float:
    """Share of the full rate at a step: up over the warm-up, then down to zero."""
    if step < stage.warmup:
        return (step + 1) / stage.warmup
    left = (stage.steps - step) / max(stage.steps - stage.warmup, 1)
    return float(left**stage.power)


def step_unless_bad(prepared: Any, optimiser: torch.optim.Optimizer, norm: Tensor) -> Tensor:
    """Step unless the gradient, of this norm, has something infinite or NaN in it; 1 if the step was left out, else 0.

    One such gradient would make every weight NaN. A fused optimiser is told on the GPU, so that nobody waits for it.
    """
    bad = (~torch.isfinite(norm)).float()
    if optimiser.defaults.get("fused"):
        optimiser.found_inf = bad  # type: ignore[attr-defined]
        prepared.step()
    elif not bad:
        prepared.step()
    return bad


def follower(average: nn.Module, model: nn.Module) -> Callable[[float], None]:
    """Moves the average a little towards the model, given how much of it stays; what is not learned is copied."""
    target = model.state_dict()
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    moving: list[tuple[Tensor, Tensor]] = []
    fixed: list[tuple[Tensor, Tensor]] = []
    for name, value in average.state_dict().items():
        (moving if name in learned else fixed).append((value, target[name]))

    @torch.no_grad()
    def follow(decay: float) -> None:
        # Hundreds of small tensors: one call each would take longer than the step itself on a GPU.
        if moving:
            torch._foreach_lerp_([a for a, _ in moving], [b for _, b in moving], 1 - decay)
        if fixed:
            torch._foreach_copy_([a for a, _ in fixed], [b for _, b in fixed])

    return follow
