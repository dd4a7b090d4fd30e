"""Check that the steps of all stages fit into memory, before the first one is taken.

`check_memory` compares what a step certainly takes with what the machine has. On a GPU, `rehearse` also takes the step
of every stage once, on zeros and on a copy of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.models.schema import count_bytes
from deepmrf.training.recipe import Recipe, RecipeError, Stage
from deepmrf.training.run import Run
from deepmrf.training.stages import StageModel, caches_network, caches_penalty, prepare_stage, uses_clips

GIB = 2**30
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says how much memory a container may use."""


def check_memory(recipe: Recipe, stages: Sequence[Stage], model: DeepParsingNetwork, processes: int) -> None:
    """Raise a RecipeError where the batches of a stage cannot be divided or cannot fit into memory.

    Counted are images, masks, the output and its gradient, and the weights: the least that a step takes.
    """
    device = next(model.parameters()).device
    available = memory_bytes(device)
    weights = count_bytes(model.state_dict())
    for stage in stages:
        if stage.batch % processes:
            raise RecipeError(
                f"stage.{stage.name}.batch={stage.batch} does not divide among {processes} processes: "
                "use a multiple of it."
            )
        frames = recipe.clips.frames if uses_clips(recipe, stage) else 1
        pixels = stage.batch // processes * frames * recipe.augment.crop[0] * recipe.augment.crop[1]
        needed = weights + pixels * (3 + 8 + 2 * 4 * len(model.labels))
        if needed > available:
            raise RecipeError(f"{_sizes(recipe, stage)} takes at least {needed / GIB:,.0f} GiB, and {_has(device)}.")


def memory_bytes(device: torch.device) -> int:
    """The memory of a device, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not hasattr(os, "sysconf"):  # Windows
        return 2**63
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return total


def rehearse(run: Run, stages: Sequence[Stage], loss: Callable[[Stage, Tensor, Tensor], Tensor]) -> None:
    """Take the step of every stage on zeros; raise a RecipeError where the memory does not suffice."""
    device = run.accelerator.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for stage in stages:
            try:
                _take_step(run, stage, loss)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    return  # the first step itself will show it, with real images
                raise RecipeError(f"{_sizes(run.recipe, stage)} takes more memory than {_has(device)}.") from None
            finally:
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def _take_step(run: Run, stage: Stage, loss: Callable[[Stage, Tensor, Tensor], Tensor]) -> None:
    recipe, device = run.recipe, run.accelerator.device
    try:
        model = deepcopy(run.model)  # takes the place of the optimiser's first moments
    except (TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return  # a network of the user's own that cannot be copied
    prepare_stage(model, stage, recipe.seed, trained=bool(recipe.start))
    for part in (model, model.mean_field):
        if part is not None:
            part.check_values = False  # zeros prove nothing
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moments = [torch.empty_like(parameter) for parameter in learned if stage.optimiser == "adamw"]
    if device.type == "cuda":
        model.unary.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch, size = stage.batch // run.accelerator.num_processes, recipe.augment.crop
    clips = uses_clips(recipe, stage)
    shape = (recipe.clips.frames, *size) if clips else size
    inputs = [torch.zeros(batch, 3, *shape, dtype=torch.uint8, device=device)]
    penalty_cached = caches_penalty(model, recipe, stage)
    if caches_network(stage):
        inputs.insert(0, torch.zeros(batch, (1 + penalty_cached) * len(model.labels), *shape, device=device))
    if clips and recipe.clips.flow != "none":
        pairs = (recipe.clips.frames - 1, *size)
        inputs += [torch.zeros(batch, 2, *pairs, device=device) for _ in range(2)]
        inputs += [torch.ones(batch, 1, *pairs, dtype=torch.bool, device=device) for _ in range(2)]
    model.train()
    with run.accelerator.autocast():
        log_q = StageModel(model, stage, penalty_cached)(*inputs)
    loss(stage, log_q, torch.zeros(batch, *shape, dtype=torch.long, device=device)).backward()  # type: ignore[no-untyped-call]
    del moments


def is_out_of_memory(error: BaseException) -> bool:
    """Is this what PyTorch or Python raise where there is no memory left?"""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)


def _sizes(recipe: Recipe, stage: Stage) -> str:
    frames = f", clips.frames={recipe.clips.frames}" if uses_clips(recipe, stage) else ""
    return f"stage.{stage.name}.batch={stage.batch} with augment.crop={list(recipe.augment.crop)}{frames}"


def _has(device: torch.device) -> str:
    owner = f"the GPU {device}" if device.type == "cuda" else "this machine"
    return f"{owner} has {memory_bytes(device) / GIB:,.0f} GiB: make the batch or the crop smaller"
