"""Batches of a stage: its samples, with the outputs of fixed parts of the model computed once per image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from deepmrf.data.dataset import Dataset
from deepmrf.training.clips import ClipCrops, ClipSource, Stills, Videos, network_outputs
from deepmrf.training.mean_field import calibrated_temperature, learn_scaling, penalty_map
from deepmrf.training.recipe import Recipe, Stage
from deepmrf.training.run import Run
from deepmrf.training.samples import CachedCrops, Crops, Images, Samples, mask_tensor, opencv_on_one_thread
from deepmrf.training.stages import caches_network, caches_penalty, uses_clips

BATCHES_READ_AHEAD = 4
"""Batches that each reading process prepares ahead."""


def stage_batches(run: Run, index: int, stage: Stage, first_step: int) -> Iterator[list[Tensor]]:
    """Yield the batches of stage number `index` on the run's device: inputs of StageModel, then the target."""
    accelerator, workers = run.accelerator, run.recipe.data.workers
    slots = range(accelerator.process_index, stage.batch, accelerator.num_processes)  # of this process
    loader = DataLoader(
        _samples(run, index, stage),
        batch_sampler=([step * stage.batch + slot for slot in slots] for step in range(first_step, stage.steps)),
        num_workers=workers,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # not the global one, whose state must not depend on how often a run was resumed
        prefetch_factor=BATCHES_READ_AHEAD if workers else None,
    )
    with opencv_on_one_thread():
        batches = iter(loader)  # starts the reading processes
    for batch in batches:
        *inputs, target = [part.to(accelerator.device, non_blocking=True) for part in batch]
        yield [*(part.float() if part.dtype == torch.float16 else part for part in inputs), target.long()]


def clip_source(recipe: Recipe, data: Dataset, images: Images, folder: Path) -> ClipSource | None:
    """Return the clips of a recipe; None for a recipe of images."""
    if recipe.clips.frames == 1:
        return None
    if recipe.clips.motion:
        return Stills(images, recipe.clips, recipe.augment.views(), recipe.seed, folder)
    return Videos(data, recipe.clips, recipe.augment.views(), folder)


def _samples(run: Run, index: int, stage: Stage) -> Samples:
    recipe, seed = run.recipe, (run.recipe.seed, index)
    crop, flip = recipe.augment.crop, recipe.augment.flip
    if run.clips is not None and uses_clips(recipe, stage):
        log_p = None
        if caches_network(stage):
            run.model.eval()
            progress, workers = run.progress("network's output"), recipe.data.workers
            log_p = run.cached_clips = run.cached_clips or network_outputs(
                run.clips, lambda frame: _log_unary(run, frame), workers, progress
            )
        return ClipCrops(run.clips, seed, log_p, crop, flip, run.images.data.labels.ignore)
    images = run.images_of(stage)
    if not caches_network(stage):
        return Crops(images, seed, recipe.augment.views())
    height, width = images.largest()
    if run.model.mean_field is None or run.model.mean_field.triple_penalty.size is None:
        crop = min(crop[0], height), min(crop[1], width)  # images have their own scale: no crop beyond them
    if images is run.held_out:
        _calibrate(run, images)
    maps = cached_penalties if caches_penalty(run.model, recipe, stage) else cached_outputs
    return CachedCrops(images, seed, maps(run, images), crop, flip)


def _calibrate(run: Run, images: Images) -> None:
    """Give the mean field the temperature, or the scaling of labels, that fits images which the network never saw."""
    outputs, ignore = cached_outputs(run, images), images.data.labels.ignore
    masks = [mask_tensor(images[index][1]) for index in range(len(images))]
    mean_fields = [model.mean_field for model in (run.model, run.average) if model.mean_field is not None]
    scalings = [mean_field.label_scaling for mean_field in mean_fields if mean_field.label_scaling is not None]
    if scalings:
        learn_scaling(mean_fields[0], zip(outputs, masks, strict=True), len(masks), ignore)
        scalings[-1].load_state_dict(scalings[0].state_dict())
        run.message("The scaling of labels was learned from the images held out.")
        return
    temperature = calibrated_temperature(outputs, masks, ignore)
    run.message(f"Temperature of the mean field, from the images held out: {temperature:g}.")
    for mean_field in mean_fields:
        mean_field.temperature = temperature


def cached_outputs(run: Run, images: Images) -> list[Tensor]:
    """Return the network's log-probabilities (L, H, W) of every image, in half precision."""
    progress = run.progress("network's output")
    run.model.eval()
    if run.cached_images is not images:
        run.cached_images, run.cached_log_p = images, []
    for index in range(len(run.cached_log_p), len(images)):
        run.cached_log_p.append(_log_unary(run, _image(images, index)[None])[0].half().cpu())
        progress(index + 1, len(images))
    return run.cached_log_p


def cached_penalties(run: Run, images: Images) -> list[Tensor]:
    """Return log-probabilities and b12's output t of every image, as one tensor (2 L, H, W) each."""
    progress, mrf = run.progress("triple penalty's output"), run.model.mean_field
    assert mrf is not None  # caches_penalty has checked it
    maps = []
    for index, log_p in enumerate(cached_outputs(run, images)):
        maps.append(torch.cat([log_p, penalty_map(mrf, log_p, _image(images, index))]))
        progress(index + 1, len(images))
    return maps


def _image(images: Images, index: int) -> Tensor:
    return torch.from_numpy(images[index][0]).permute(2, 0, 1)


def _log_unary(run: Run, image: Tensor) -> Tensor:
    with torch.no_grad(), run.accelerator.autocast():
        return run.model.log_unary(image.to(run.accelerator.device))
