"""Training samples of clips: from videos, or from single images that move.

A ClipSource gives a clip by its index: `fixed` is always the same, so that the network's output for its frames can be
cached; `fresh` is a new random view of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.files import VOID, Bytes
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.transforms import Augment
from deepmrf.flow import Flow, cached, estimate
from deepmrf.training.motion import moving_clip
from deepmrf.training.recipe import ClipsRecipe
from deepmrf.training.samples import Images, Samples, crop_corner, mask_tensor, padded

Clip = tuple[Bytes, Bytes, Flow | None]
"""Frames (T, H, W, 3), masks (T, H, W) with void where labels do not count, and the flow or None."""


class ClipSource(Protocol):
    """Clips by index."""

    def __len__(self) -> int:
        """Return the number of clips."""

    def keys(self, index: int) -> Sequence[Hashable]:
        """Return a key for each frame of a fixed clip; equal keys mean equal frames."""

    def fixed(self, index: int) -> Clip:
        """Return the clip at its own size, always the same."""

    def fresh(self, index: int, random: np.random.Generator) -> Clip:
        """Return a random view of the clip, of the size of a training crop."""


class Videos:
    """A clip around every labelled frame of a data set's sequences. Flows are cached in `folder`."""

    def __init__(self, data: Dataset, clips: ClipsRecipe, augment: Augment, folder: Path) -> None:
        self.data, self.recipe, self.augment, self.folder = data, clips, augment, folder
        self.clips = strided_clips(data, clips.frames, clips.stride)

    def __len__(self) -> int:
        return len(self.clips)

    def keys(self, index: int) -> Sequence[Hashable]:
        """Return the names of the frames."""
        return [item.name for item in self.clips[index]]

    def fixed(self, index: int) -> Clip:
        """Return the frames as they are, with their cached flow."""
        frames, masks = self.data.read_clip(self.clips[index])
        flow = None
        if self.recipe.flow == "dis":
            flow = cached(self.folder, [item.name for item in self.clips[index]], frames)
        return frames, _counted_labels(masks, self.recipe), flow

    def fresh(self, index: int, random: np.random.Generator) -> Clip:
        """Scale, mirror, crop and recolour all frames alike, then estimate their flow."""
        frames, masks = self.augment(random, *self.data.read_clip(self.clips[index]))
        return frames, _counted_labels(masks, self.recipe), estimate(frames) if self.recipe.flow == "dis" else None


def strided_clips(data: Dataset, frames: int, stride: int) -> list[tuple[Item, ...]]:
    """Return `frames` items, `stride` apart in their sequence, around each labelled item, which is at frames // 2."""
    reach = stride * frames
    indices = [reach + stride * (t - frames // 2) for t in range(frames)]
    return [tuple(clip[index] for index in indices) for clip in data.clips(2 * reach + 1)]


class Stills:
    """Clips of single labelled images that move: see motion.py. Estimated flows are cached in `folder`."""

    def __init__(self, images: Images, clips: ClipsRecipe, augment: Augment, seed: int, folder: Path) -> None:
        self.images, self.recipe, self.augment, self.seed, self.folder = images, clips, augment, seed, folder
        self.order = np.random.default_rng([seed, 2]).permutation(len(images))

    def __len__(self) -> int:
        return self.recipe.count or len(self.images)

    def keys(self, index: int) -> Sequence[Hashable]:
        """Return (index, t): no two clips share a frame."""
        return [(index, t) for t in range(self.recipe.frames)]

    def fixed(self, index: int) -> Clip:
        """Return a moving view of the image, of its own size; the index alone determines it."""
        random = np.random.default_rng([self.seed, 3, index])
        frames, masks, flow = self._moving(index, random, replace(self.augment, crop=None))
        if self.recipe.flow == "dis":
            flow = cached(self.folder, [f"still-{index}-{t}" for t in range(len(frames))], frames)
        return frames, masks, flow if self.recipe.flow != "none" else None

    def fresh(self, index: int, random: np.random.Generator) -> Clip:
        """Return another view that moves in another way."""
        assert self.augment.crop is not None  # a recipe always has one
        height, width = self.augment.crop
        margin = math.ceil(self.recipe.motion * self.recipe.frames / 2)  # so that picture, not void, moves in
        larger = replace(self.augment, crop=(height + 2 * margin, width + 2 * margin))
        frames, masks, flow = self._moving(index, random, larger)
        inner = (slice(None), slice(margin, margin + height), slice(margin, margin + width))
        frames, masks = np.ascontiguousarray(frames[inner]), np.ascontiguousarray(masks[inner])
        if self.recipe.flow == "dis":
            return frames, masks, estimate(frames)
        return frames, masks, flow.crop(margin, margin, height, width) if self.recipe.flow == "exact" else None

    def _moving(self, index: int, random: np.random.Generator, augment: Augment) -> tuple[Bytes, Bytes, Flow]:
        image, mask = self.images[int(self.order[index % len(self.order)])]
        (image,), (mask,) = augment(random, image[None], mask[None])
        recipe = self.recipe
        frames, masks, flow = moving_clip(random, image, mask, recipe.frames, recipe.motion, recipe.flicker)
        return frames, _counted_labels(masks, recipe), flow


def _counted_labels(masks: Bytes, recipe: ClipsRecipe) -> Bytes:
    """Make void the labels that the recipe leaves out: masks (T, H, W)."""
    if recipe.labelled == "all":
        return masks
    centre = len(masks) // 2
    counted = np.full_like(masks, VOID)
    counted[centre] = masks[centre]
    return counted


class ClipCrops(Samples):
    """[log_p (L, T, H, W),] frames (3, T, H, W) of uint8, [the four tensors of the flow,] masks (T, H, W).

    log_p: the network's output by the key of a frame. With it, samples are crops of fixed clips, otherwise fresh views.
    """

    def __init__(
        self,
        source: ClipSource,
        seed: Sequence[int],
        log_p: Mapping[Hashable, Tensor] | None,
        crop: tuple[int, int],
        flip: float,
        ignore: int = VOID,
    ) -> None:
        super().__init__(source, seed)
        self.source, self.log_p, self.crop, self.flip, self.ignore = source, log_p, crop, flip, ignore

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        index, random = self.pick(number)
        if self.log_p is None:
            frames, masks, flow = self.source.fresh(index, random)
            return _tensors(None, _frames_tensor(frames), masks, flow)
        frames, masks, flow = self.source.fixed(index)
        top, left = crop_corner(random, masks.shape[1:], self.crop)
        box = (slice(None), slice(top, top + self.crop[0]), slice(left, left + self.crop[1]))
        log_p = torch.stack([self.log_p[key][box] for key in self.source.keys(index)], 1).float()
        image, masks = _frames_tensor(frames[box]), masks[box]
        flow = flow.crop(top, left, *masks.shape[1:]) if flow is not None else None
        if random.random() < self.flip:
            log_p, image, masks = log_p.flip(-1), image.flip(-1), masks[..., ::-1]
            flow = flow.flip() if flow is not None else None
        return padded(_tensors(log_p, image, masks, flow), self.crop, self.ignore)


def _frames_tensor(frames: Bytes) -> Tensor:
    """(T, H, W, 3) -> (3, T, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(frames.transpose(3, 0, 1, 2)))


def _tensors(log_p: Tensor | None, image: Tensor, masks: Bytes, flow: Flow | None) -> tuple[Tensor, ...]:
    parts: list[Tensor] = [image] if log_p is None else [log_p, image]
    if flow is not None:
        parts += [flow.forward[0], flow.backward[0], flow.forward_reliable[0], flow.backward_reliable[0]]
    return (*parts, mask_tensor(masks))


def network_outputs(
    source: ClipSource, network: Callable[[Tensor], Tensor], progress: Progress = no_progress
) -> dict[Hashable, Tensor]:
    """Return network(frame (1, 3, H, W)) -> (L, H, W) of every frame of every fixed clip, in half precision, by key."""
    outputs: dict[Hashable, Tensor] = {}
    for index in range(len(source)):
        keys = source.keys(index)
        if not all(key in outputs for key in keys):
            image = _frames_tensor(source.fixed(index)[0])
            for t, key in enumerate(keys):
                if key not in outputs:
                    outputs[key] = network(image[None, :, t])[0].half().cpu()
        progress(index + 1, len(source))
    return outputs
