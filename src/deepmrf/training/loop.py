"""The training loop: the stages of a recipe one after the other, each a number of optimiser steps.

    scores = train(recipe, Path("runs/street"))
    scores = train(recipe, Path("runs/street"), resume=True)     # continues bit for bit where it stopped

A checkpoint is written every `save_every` steps, at the last step of a stage (before its evaluation, which may fail)
and after the evaluation. run.py lists the files of a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepmrf.data.extras import optional
from deepmrf.evaluation.evaluate import check_labelled
from deepmrf.training.batches import clip_source, stage_batches
from deepmrf.training.lock import folder_lock
from deepmrf.training.loss import class_weights, cross_entropy, lovasz
from deepmrf.training.memory import check_memory, rehearse
from deepmrf.training.optimiser import MovingAverage, NormStatistics, new_optimiser, set_rates, step_if_finite
from deepmrf.training.recipe import Recipe, Stage
from deepmrf.training.run import Message, Run, TrainProgress
from deepmrf.training.samples import Images, hold_out
from deepmrf.training.stages import (
    StageModel,
    caches_penalty,
    check_stages,
    finish,
    learns_from_the_start,
    planned_stages,
    prepare_stage,
)
from deepmrf.training.start import build_model, check_model_settings, check_run_folder, open_splits, with_own_network
from deepmrf.unary.own import OwnNetwork

if TYPE_CHECKING:
    from accelerate import Accelerator


def train(
    recipe: Recipe,
    folder: Path,
    resume: bool = False,
    *,
    network: OwnNetwork | None = None,
    message: Message = lambda _: None,
    progress: TrainProgress = lambda *_: None,
) -> dict[str, Any]:
    """Train by a recipe in `folder`; return the scores of every stage on the validation split.

    network: a network of your own instead of the recipe's: a module, wrapped where it takes normalised images; a
    function that builds it; or "package.module:function", which imports and runs that code.
    """
    if network is not None:
        recipe = with_own_network(recipe, network, message)
    check_run_folder(recipe, folder, resume)
    with _accelerator(recipe.precision) as accelerator:
        run = _new_run(recipe, folder, network, accelerator, message, progress)
        with folder_lock(folder) if accelerator.is_main_process else nullcontext():
            check_run_folder(recipe, folder, resume)  # another run may have come first
            return _run_stages(run, resume)


def _run_stages(run: Run, resume: bool) -> dict[str, Any]:
    """Train all stages that are not done, and save the model; return the scores of every stage."""
    run.open_folder()
    stages = planned_stages(run.recipe)
    first_stage, first_step, tensors = run.read_state() if resume else (0, 0, {})
    run.steps_done = sum(stage.steps for stage in stages[:first_stage])
    for index in range(first_stage, len(stages)):
        _train_stage(run, index, stages[index], first_step, tensors)
        first_step, tensors = 0, {}
    changes = finish(run.recipe, run.average)
    if changes:
        _add_scores(run, changes, network_too=True)
    run.save_model()
    run.accelerator.wait_for_everyone()
    return run.scores


@contextmanager
def _accelerator(precision: str) -> Iterator[Accelerator]:
    """Give an Accelerator; the next one may have another precision, unless the program has one of its own."""
    accelerate = optional("accelerate", "Training needs", "train")
    state = accelerate.state.AcceleratorState
    is_first = not state._shared_state
    try:
        yield accelerate.Accelerator(mixed_precision=precision)
    finally:
        if is_first:
            state._reset_state()


def _new_run(
    recipe: Recipe,
    folder: Path,
    network: OwnNetwork | None,
    accelerator: Accelerator,
    message: Message,
    progress: TrainProgress,
) -> Run:
    """Open the data, build the model and check both and the steps of all stages, before the folder is touched."""
    optional("accelerate", "Training needs", "train").utils.set_seed(recipe.seed)
    check_model_settings(recipe, network)
    data, val = open_splits(recipe)
    model = build_model(recipe, data, message, network).to(accelerator.device)
    stages = planned_stages(recipe)
    check_stages(recipe, model)
    check_memory(recipe, stages, model, accelerator.num_processes)
    video = recipe.clips.frames > 1
    check_labelled(val, video, lambda done, total: progress("reading validation images", done, total or 0, {}))
    labelled = data.subset(item for item in data if item.mask) if video else data  # other frames of clips lack labels
    parts = hold_out(labelled, recipe.data.held_out) if recipe.data.held_out else (labelled,)
    images, *held_out = [
        Images(part, lambda done, total: progress("reading images", done, total or 0, {})) for part in parts
    ]
    run = Run(
        recipe=recipe,
        folder=folder,
        model=model,
        average=deepcopy(model) if recipe.ema else model,
        accelerator=accelerator,
        images=images,
        held_out=held_out[0] if held_out else None,
        clips=clip_source(recipe, data, images, folder / "flow"),
        val=val,
        message=message,
        train_progress=progress,
        network=network,
    )
    if accelerator.device.type == "cuda":  # a step on a CPU takes too long, and its memory is larger
        rehearse(run, stages, lambda stage, log_q, target: _loss(run, stage, log_q, target, None))
    return run


def _train_stage(run: Run, index: int, stage: Stage, first_step: int, tensors: dict[str, Tensor]) -> None:
    """Train stage number `index` from `first_step` on. tensors: of the checkpoint to resume from, if any."""
    recipe, model = run.recipe, run.model
    prepare_stage(model, stage, recipe.seed, trained=bool(recipe.start))
    if tensors:
        run.load_models(tensors)
    _take_steps(run, index, stage, first_step, tensors)
    if recipe.ema:
        model.load_state_dict(run.average.state_dict())
    # The network alone shows what the MRF adds to a network that was trained with it.
    _add_scores(run, stage.name, network_too="unary" in stage.learn and len(stage.learn) > 1)
    run.accelerator.free_memory()
    run.save_state(index + 1, 0, None)


def _add_scores(run: Run, name: str, network_too: bool) -> None:
    run.scores[name] = run.evaluate(name)
    if network_too:
        name = f"{name}, network alone"
        run.scores[name] = run.evaluate(name, alone=True)


def _take_steps(run: Run, index: int, stage: Stage, first_step: int, tensors: dict[str, Tensor]) -> None:
    """Take the optimiser steps of a stage, with checkpoints and evaluations between them."""
    recipe, accelerator, model = run.recipe, run.accelerator, run.model
    if "unary" in stage.learn:
        run.cached_log_p, run.cached_clips = [], {}
    weights = None
    if stage.class_balance:
        weights = class_weights(run.images_of(stage).label_counts(), stage.class_balance).to(accelerator.device)
    optimiser = new_optimiser(model, stage)
    stage_model = StageModel(model, stage, caches_penalty(model, recipe, stage), recipe.compile)
    stage_model, prepared = accelerator.prepare(stage_model, optimiser)
    if tensors:
        run.load_optimiser(tensors, optimiser)
    if accelerator.device.type == "cuda":
        model.unary.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = MovingAverage(run.average, model) if recipe.ema else None
    norms = NormStatistics(model.unary) if learns_from_the_start(recipe, index) else None
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    skipped = torch.zeros((), device=accelerator.device)
    run.steps_done += first_step
    started, batches = time.time(), stage_batches(run, index, stage, first_step)
    for step in range(first_step, stage.steps):
        *inputs, target = next(batches)
        model.train()
        if "unary" not in stage.learn:
            model.unary.eval()  # a fixed network keeps its batch statistics and has no dropout
        set_rates(optimiser, stage, step)
        if norms is not None:
            norms.begin(step)
        with accelerator.autocast():
            log_q = stage_model(*inputs)
        loss = _loss(run, stage, log_q, target, weights)
        prepared.zero_grad()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(learned, recipe.clip or math.inf)
        skipped += step_if_finite(prepared, optimiser, norm)
        if average is not None:
            average.update(min(recipe.ema, (1 + step) / (10 + step)))
        done = step + 1
        run.steps_done += 1
        run.report(stage, step, loss, (done - first_step) / max(time.time() - started, 1e-9))
        if recipe.evaluate_every and done % recipe.evaluate_every == 0 and done < stage.steps:
            run.evaluate(f"{stage.name}, step {done}")
        if done % recipe.save_every == 0 or done == stage.steps:
            run.save_state(index, done, optimiser)
    if norms is not None:
        norms.end()
    if skipped:
        run.message(f"{int(skipped)} of the steps of stage {stage.name} had no finite gradient and were left out.")


def _loss(run: Run, stage: Stage, log_q: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
    """Return cross-entropy over the labelled pixels of all processes, plus the Lovász loss of this process."""
    ignore = run.images.data.labels.ignore
    total, count = cross_entropy(log_q.float(), target, weights, ignore)
    if run.accelerator.num_processes > 1:
        count = run.accelerator.reduce(count, "mean")  # gradients are averaged over processes, so counts are too
    loss = total / count.clamp_min(1.0)
    return loss + stage.lovasz * lovasz(log_q.float(), target, ignore) if stage.lovasz else loss
