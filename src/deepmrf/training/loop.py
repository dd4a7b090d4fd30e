"""Training: the paper's four stages as a list of Stage values and one loop.

A run lives in a folder: recipe.json (resolved), state.safetensors (where it is), metrics.json (each stage's scores),
model/ (the result) and TensorBoard's events. Started again with `resume`, it continues exactly.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader

from deepmrf.data.dataset import Dataset
from deepmrf.data.progress import Progress
from deepmrf.data.transforms import Augment
from deepmrf.data.writing import write_text
from deepmrf.evaluation.evaluate import check_labelled, evaluate
from deepmrf.evaluation.metrics import Scores
from deepmrf.evaluation.videos import VideoModel, evaluate_video
from deepmrf.models.parsing_network import Card, DeepParsingNetwork, write_model
from deepmrf.predict.scales import predictor
from deepmrf.training import checkpoint
from deepmrf.training.clips import ClipCrops, Source, Stills, Videos, outputs
from deepmrf.training.loss import cross_entropy, lovasz
from deepmrf.training.recipe import Recipe, Stage, to_dict
from deepmrf.training.samples import CachedCrops, Crops, Images, Order, Share, one_thread
from deepmrf.training.stages import (
    Pass,
    finisher,
    follower,
    keeps_penalty,
    optimiser_of,
    over_clips,
    plan,
    prepare,
    set_rates,
    step_unless_bad,
    uses_cache,
)
from deepmrf.training.start import METRICS, RESOLVED, STATE, build, check_run_folder, open_splits

PATIENCE = 3
"""How often in a row the loss may be found NaN, of every tenth step, before a run gives up."""


@dataclass
class Watch:
    """What a run tells whoever watches: override what you like."""

    said: Callable[[str], None] = lambda _: None
    """A sentence worth reading."""
    moved: Callable[[str, int, int, dict[str, float]], None] = lambda *_: None
    """(what, done, in all, numbers): after every step."""


@dataclass
class _Run:
    """A run's parts."""

    recipe: Recipe
    folder: Path
    model: DeepParsingNetwork
    average: DeepParsingNetwork
    """The moving average of the model, or the model itself."""
    accelerator: Accelerator
    train: Images
    val: Dataset
    watch: Watch
    clips: Source | None = None
    """What stages over clips learn from."""
    history: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, Any] = field(default_factory=dict)
    best: float = 0.0
    writer: Any = None
    """TensorBoard's, where it is installed."""
    lost: int = 0
    """How often in a row the loss that was looked at was NaN."""
    kept: list[Tensor] = field(default_factory=list)
    """The network's output of every training image, while the network stays as it is."""


def train(recipe: Recipe, folder: Path, resume: bool = False, watch: Watch | None = None) -> dict[str, Any]:
    """Run a recipe in `folder`. Returns the scores of every stage on the validation split."""
    watch = watch or Watch()
    check_run_folder(recipe, folder, resume)
    accelerator = Accelerator(mixed_precision=recipe.precision)
    set_seed(recipe.seed)
    torch.backends.cudnn.benchmark = True  # crops are of one size: the search for the fastest convolution pays
    data, val = open_splits(recipe)
    model = build(recipe, data, watch.said).to(accelerator.device)
    finish = finisher(recipe, model)
    check_labelled(val, recipe.clips.frames > 1, _progress(watch, "reading validation images"))
    # Beside a clip's labelled frame, others may lie that are not.
    labelled = data.subset(item for item in data if item.mask) if recipe.clips.frames > 1 else data
    images = Images(labelled, _progress(watch, "reading images"))
    average = deepcopy(model) if recipe.ema else model
    run = _Run(recipe, folder, model, average, accelerator, images, val, watch, _clips(recipe, data, images, folder))
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / RESOLVED, json.dumps(to_dict(recipe), indent=1) + "\n")
        run.writer = _writer(folder)
    stage_at, step_at, tensors = _restore(run) if resume else (0, 0, {})
    for index, stage in enumerate(plan(recipe)):
        if index >= stage_at:
            _run_stage(run, index, stage, step_at if index == stage_at else 0, tensors if index == stage_at else {})
    if finish is not None:
        changed = finish(average)
        for name in (changed, f"{changed}, network alone"):
            run.scores[name] = _evaluate(run, name, alone=name != changed)
    if accelerator.is_main_process:
        average.card = Card({"val": run.scores, "seed": recipe.seed}, to_dict(recipe))
        write_model(average, folder / "model")
        if run.writer is not None:
            run.writer.close()
    accelerator.wait_for_everyone()
    return run.scores


def _progress(watch: Watch, what: str) -> Progress:
    return lambda done, total: watch.moved(what, done, total or 0, {})


def _clips(recipe: Recipe, data: Dataset, images: Images, folder: Path) -> Source | None:
    if recipe.clips.frames == 1:
        return None
    if recipe.clips.motion:
        return Stills(images, recipe.clips, _augment(recipe), recipe.seed, folder / "flow")
    return Videos(data, recipe.clips, _augment(recipe), folder / "flow")


def _batches(run: _Run, index: int, stage: Stage, first: int) -> Iterator[list[Tensor]]:
    recipe, accelerator = run.recipe, run.accelerator
    seed = (recipe.seed, index)
    samples: Order
    if run.clips is not None and over_clips(recipe, stage):
        frames = outputs(run.clips, *_network(run)) if uses_cache(stage) else None
        ignore = run.train.data.labels.ignore
        samples = ClipCrops(run.clips, seed, frames, recipe.augment.crop, recipe.augment.flip, ignore)
    elif uses_cache(stage):
        kept = _penalties(run) if keeps_penalty(run.model, recipe, stage) else _cache(run)
        samples = CachedCrops(run.train, seed, kept, recipe.augment.crop, recipe.augment.flip)
    else:
        samples = Crops(run.train, seed, _augment(recipe))
    share = Share(stage.batch, range(first, stage.steps), accelerator.process_index, accelerator.num_processes)
    loader = DataLoader(
        samples,
        batch_sampler=share,
        num_workers=recipe.data.workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # of its own: the global one must not depend on how often a run was resumed
        prefetch_factor=4 if recipe.data.workers else None,
        worker_init_fn=one_thread,
    )
    for batch in loader:
        there = [part.to(accelerator.device, non_blocking=True) for part in batch]
        yield [part.float() if part.dtype == torch.float16 else part for part in there]


def _augment(recipe: Recipe) -> Augment:
    a = recipe.augment
    shift = a.colour
    return Augment(a.crop, a.scale, a.flip, brightness=shift, contrast=shift, saturation=shift, hue=shift / 10)


def _cache(run: _Run) -> list[Tensor]:
    """The network's log-probabilities of every training image, in half precision."""
    network, progress = _network(run)
    for index in range(len(run.kept), len(run.train)):
        image = torch.from_numpy(run.train[index][0]).permute(2, 0, 1)[None]
        run.kept.append(network(image)[0].half().cpu())
        progress(index + 1, len(run.train))
    return run.kept


def _penalties(run: _Run) -> list[Tensor]:
    """The same, and what b12 makes of it: (2 L, H, W) each."""
    mrf, device = run.model.mean_field, run.accelerator.device
    assert mrf is not None  # keeps_penalty asked
    both = []
    for index, log_p in enumerate(_cache(run)):
        known = log_p[None].to(device).float()
        image = torch.from_numpy(run.train[index][0]).permute(2, 0, 1)[None].to(device)
        with torch.no_grad():
            t = mrf.triple_penalty(mrf.belief(known), image if mrf.triple_penalty.features else None)
        both.append(torch.cat([log_p, t[0].half().cpu()]))
        run.watch.moved("triple penalty's output", index + 1, len(run.train), {})
    return both


def _network(run: _Run) -> tuple[Callable[[Tensor], Tensor], Progress]:
    """The fixed network from images to log-probabilities, and whom to tell how far it is."""
    run.model.eval()

    def network(image: Tensor) -> Tensor:
        with torch.no_grad(), run.accelerator.autocast():
            return run.model.log_unary(image.to(run.accelerator.device))

    return network, _progress(run.watch, "network's output")


def _run_stage(run: _Run, index: int, stage: Stage, first: int, tensors: dict[str, Tensor]) -> None:
    recipe, accelerator, model = run.recipe, run.accelerator, run.model
    prepare(model, stage, recipe.seed, bool(recipe.start))
    if tensors:
        _load_models(run, tensors)
    if "unary" in stage.learn:
        run.kept = []
    weights = _class_weights(run, stage)
    on_gpu = accelerator.device.type == "cuda"
    optimiser = optimiser_of(model, stage)
    wrapped, prepared = accelerator.prepare(Pass(model, stage, keeps_penalty(model, recipe, stage)), optimiser)
    if tensors:
        state = {n.removeprefix("optimiser."): t for n, t in tensors.items() if n.startswith("optimiser.")}
        checkpoint.restore_optimiser(optimiser, model, state)
        torch.set_rng_state(tensors["random"].cpu())
    if on_gpu:
        model.unary.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    follow = follower(run.average, model) if recipe.ema else None
    learned = [p for p in model.parameters() if p.requires_grad]
    left_out = torch.zeros((), device=accelerator.device)
    started, batches = time.time(), _batches(run, index, stage, first)
    for step in range(first, stage.steps):
        *inputs, target = next(batches)
        model.train()
        if "unary" not in stage.learn:
            model.unary.eval()  # a fixed network keeps its batch statistics and drops nothing
        set_rates(optimiser, stage, step)
        with accelerator.autocast():
            log_q = wrapped(*inputs)
        loss = _loss(log_q, target, weights, stage, run)
        prepared.zero_grad()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(learned, recipe.clip or math.inf)
        left_out += step_unless_bad(prepared, optimiser, norm)
        if follow is not None:
            follow(min(recipe.ema, (1 + step) / (10 + step)))
        _report(run, stage, step, loss, started, first)
        done = step + 1
        if recipe.evaluate_every and done % recipe.evaluate_every == 0 and done < stage.steps:
            _evaluate(run, f"{stage.name}, step {done}")
        if done % recipe.save_every == 0 or done == stage.steps:  # at the end, too: evaluation may fail
            _save_state(run, index, done, optimiser)
    if recipe.ema:
        model.load_state_dict(run.average.state_dict())
    if left_out:
        run.watch.said(f"{int(left_out)} of the steps of stage {stage.name} had no finite gradient and were left out.")
    run.scores[stage.name] = _evaluate(run, stage.name)
    if "unary" in stage.learn and len(stage.learn) > 1:  # what the MRF gives the network that learned to lean on it
        alone = f"{stage.name}, network alone"
        run.scores[alone] = _evaluate(run, alone, alone=True)
    accelerator.free_memory()
    _save_state(run, index + 1, 0, None)


def _class_weights(run: _Run, stage: Stage) -> Tensor | None:
    if not stage.class_balance:
        return None
    labels = run.train.data.labels
    counts = torch.zeros(256)
    for index in range(min(len(run.train), 2000)):
        counts += torch.bincount(torch.from_numpy(run.train[index][1]).flatten().long(), minlength=256)
    share = (counts[: len(labels)] / counts[: len(labels)].sum()).clamp_min(1e-5)
    weights = share**-stage.class_balance
    return (weights / weights.mean()).to(run.accelerator.device)


def _loss(log_q: Tensor, target: Tensor, weights: Tensor | None, stage: Stage, run: _Run) -> Tensor:
    """Cross-entropy over the labelled pixels of all processes together, and the Lovász loss of each batch."""
    ignore = run.train.data.labels.ignore
    total, count = cross_entropy(log_q.float(), target, weights, ignore)
    if run.accelerator.num_processes > 1:
        count = run.accelerator.reduce(count, "mean")  # gradients are averaged over processes, so counts are too
    loss = total / count.clamp_min(1.0)
    return loss + stage.lovasz * lovasz(log_q.float(), target, ignore) if stage.lovasz else loss


def _report(run: _Run, stage: Stage, step: int, loss: Tensor, started: float, first: int) -> None:
    last = step + 1 == stage.steps
    if step % 10 and not last:
        return
    value = float(loss.detach())
    run.lost = run.lost + 1 if value != value else 0
    if run.lost == PATIENCE:
        raise FloatingPointError(f"The loss of stage {stage.name} is NaN again at step {step}: lower its rate.")
    run.history.append({"stage": stage.name, "step": step, "loss": value})
    if run.writer is not None:
        run.writer.add_scalar(f"{stage.name}/loss", value, step)
    rate = (step + 1 - first) / max(time.time() - started, 1e-9)
    run.watch.moved(stage.name, step + 1, stage.steps, {"loss": value, "mIoU": run.best, "steps/s": rate})


def _evaluate(run: _Run, name: str, alone: bool = False) -> dict[str, Any]:
    accelerator = run.accelerator
    run.average.eval()
    guard: AbstractContextManager[Any] = accelerator.autocast()
    with guard:
        scores, found = _measure(run, name, alone)
    run.best = max(run.best, scores.miou)
    run.history.append({"stage": name, "miou": scores.miou})
    run.watch.said(f"{name}: mIoU {100 * scores.miou:.2f} on {run.recipe.data.val_split} ({len(run.val)} images).")
    if run.writer is not None:
        run.writer.add_scalar("mIoU", scores.miou, len(run.history))
        run.writer.flush()
    if accelerator.is_main_process:
        known = {**run.scores, name: found}
        write_text(run.folder / METRICS, json.dumps({"seed": run.recipe.seed, "val": known}, indent=1) + "\n")
    return found


def _measure(run: _Run, name: str, alone: bool) -> tuple[Scores, dict[str, Any]]:
    """The scores of the model, or of its network alone, on the validation split: of images, or of videos."""
    place = run.accelerator.device
    share = (run.accelerator.process_index, run.accelerator.num_processes)
    progress = _progress(run.watch, f"evaluating {name}")
    if run.clips is None:
        predict = predictor(run.average.log_unary if alone else run.average)
        scores = evaluate(predict, run.val, place, progress, share)
        return scores, scores.to_dict()
    mode: Literal["network", "rigid", "linked"]
    mode = "network" if alone else "rigid" if run.recipe.clips.flow == "none" else "linked"
    found = evaluate_video([VideoModel(name, run.average, mode)], run.val, place, progress, share)[name]
    return found.scores, found.to_dict()


def _save_state(run: _Run, stage: int, step: int, optimiser: torch.optim.Optimizer | None) -> None:
    if not run.accelerator.is_main_process:
        return
    tensors = {f"model.{n}": t for n, t in run.model.state_dict().items()}
    if run.recipe.ema:
        tensors |= {f"average.{n}": t for n, t in run.average.state_dict().items()}
    if optimiser is not None:
        state = checkpoint.optimiser_tensors(optimiser, run.model)
        tensors |= {f"optimiser.{n}": t for n, t in state.items()}
    tensors["random"] = torch.get_rng_state()
    facts = {"stage": stage, "step": step, "history": run.history, "scores": run.scores, "best": run.best}
    checkpoint.write_checkpoint(run.folder / STATE, tensors, facts)


def _restore(run: _Run) -> tuple[int, int, dict[str, Tensor]]:
    path = run.folder / STATE
    if not path.exists():
        return 0, 0, {}
    tensors, facts = checkpoint.read_checkpoint(path)
    run.history, run.scores, run.best = facts["history"], facts["scores"], facts["best"]
    _load_models(run, tensors)
    torch.set_rng_state(tensors["random"])
    run.watch.said(f"Continuing at stage {facts['stage'] + 1}, step {facts['step']}.")
    return facts["stage"], facts["step"], tensors if facts["step"] else {}


def _load_models(run: _Run, tensors: dict[str, Tensor]) -> None:
    for prefix, model in (("model.", run.model), ("average.", run.average)):
        mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if mine:
            model.load_state_dict(mine)


def _writer(folder: Path) -> Any:
    """Where TensorBoard's events go; None without it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))
