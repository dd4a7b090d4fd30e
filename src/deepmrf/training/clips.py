"""Clips to train on: of videos, or of single images that are moved; and the samples a training step sees of them.

A source gives the same clip for the same number whenever it is asked (`fixed`), so that the network's output for its
frames can be kept, or a new random view of it (`fresh`).
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
from torch.nn import functional

from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.files import VOID, Bytes
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.transforms import Augment
from deepmrf.flow import Flow, cached, estimate
from deepmrf.training.motion import moved
from deepmrf.training.recipe import ClipsRecipe
from deepmrf.training.samples import Images, Order

Clip = tuple[Bytes, Bytes, Flow | None]
"""Frames (T, H, W, 3), masks (T, H, W), void where labels do not count, and the flow, if there is one."""


class Source(Protocol):
    """Where clips come from."""

    def __len__(self) -> int:
        """How many clips there are."""

    def keys(self, index: int) -> Sequence[Hashable]:
        """A name for each frame of a fixed clip; frames of one name are the same."""

    def fixed(self, index: int) -> Clip:
        """Always the same clip, at its own size."""

    def fresh(self, index: int, random: np.random.Generator) -> Clip:
        """A random view of it, of the size of a training crop."""


class Videos:
    """A clip around every labelled frame of a data set's sequences. Flows are kept in `folder`."""

    def __init__(self, data: Dataset, clips: ClipsRecipe, augment: Augment, folder: Path) -> None:
        self.data, self.recipe, self.augment, self.folder = data, clips, augment, folder
        self.clips = strided(data, clips.frames, clips.stride)

    def __len__(self) -> int:
        return len(self.clips)

    def keys(self, index: int) -> Sequence[Hashable]:
        """The frames' names."""
        return [item.name for item in self.clips[index]]

    def fixed(self, index: int) -> Clip:
        """The frames as they are, with the flow from the disk."""
        frames, masks = self.data.read_clip(self.clips[index])
        flow = None
        if self.recipe.flow == "dis":
            flow = cached(self.folder, [item.name for item in self.clips[index]], frames)
        return frames, _counted(masks, self.recipe), flow

    def fresh(self, index: int, random: np.random.Generator) -> Clip:
        """Scaled, mirrored, cut and recoloured, all frames alike; flow is estimated on what is then seen."""
        frames, masks = self.augment(random, *self.data.read_clip(self.clips[index]))
        return frames, _counted(masks, self.recipe), estimate(frames) if self.recipe.flow == "dis" else None


def strided(data: Dataset, frames: int, stride: int) -> list[tuple[Item, ...]]:
    """`frames` items, `stride` apart in their sequence, around each labelled one, which is at frames // 2."""
    reach = stride * frames
    places = [reach + stride * (t - frames // 2) for t in range(frames)]
    return [tuple(clip[place] for place in places) for clip in data.clips(2 * reach + 1)]


class Stills:
    """Clips of single labelled images that move: see data/motion.py. Estimated flows are kept in `folder`."""

    def __init__(self, images: Images, clips: ClipsRecipe, augment: Augment, seed: int, folder: Path) -> None:
        self.images, self.recipe, self.augment, self.seed, self.folder = images, clips, augment, seed, folder
        self.order = np.random.default_rng([seed, 2]).permutation(len(images))

    def __len__(self) -> int:
        return self.recipe.count or len(self.images)

    def keys(self, index: int) -> Sequence[Hashable]:
        """Every frame is of its own."""
        return [(index, t) for t in range(self.recipe.frames)]

    def fixed(self, index: int) -> Clip:
        """A random view of the image, of its own size, that moves; random, but always the same for one index."""
        random = np.random.default_rng([self.seed, 3, index])
        frames, masks, flow = self._moved(index, random, replace(self.augment, crop=None))
        if self.recipe.flow == "dis":
            flow = cached(self.folder, [f"still-{index}-{t}" for t in range(len(frames))], frames)
        return frames, masks, flow if self.recipe.flow != "none" else None

    def fresh(self, index: int, random: np.random.Generator) -> Clip:
        """Another view that moves in another way."""
        assert self.augment.crop is not None  # of a recipe, it has one
        height, width = self.augment.crop
        margin = math.ceil(self.recipe.motion * self.recipe.frames / 2)  # so that what moves in is the picture's, too
        larger = replace(self.augment, crop=(height + 2 * margin, width + 2 * margin))
        frames, masks, flow = self._moved(index, random, larger)
        inner = (slice(None), slice(margin, margin + height), slice(margin, margin + width))
        frames, masks = np.ascontiguousarray(frames[inner]), np.ascontiguousarray(masks[inner])
        if self.recipe.flow == "dis":
            return frames, masks, estimate(frames)
        return frames, masks, flow.crop(margin, margin, height, width) if self.recipe.flow == "exact" else None

    def _moved(self, index: int, random: np.random.Generator, augment: Augment) -> tuple[Bytes, Bytes, Flow]:
        image, mask = self.images[int(self.order[index % len(self.order)])]
        (image,), (mask,) = augment(random, image[None], mask[None])
        recipe = self.recipe
        frames, masks, flow = moved(random, image, mask, recipe.frames, recipe.motion, recipe.flicker)
        return frames, _counted(masks, recipe), flow


def _counted(masks: Bytes, recipe: ClipsRecipe) -> Bytes:
    """Masks (T, H, W) without the labels that a recipe leaves out."""
    if recipe.labelled == "all":
        return masks
    made = np.full_like(masks, VOID)
    made[len(masks) // 2] = masks[len(masks) // 2]
    return made


class ClipCrops(Order):
    """[log_p (L, T, H, W),] frames (3, T, H, W) uint8, [the four tensors of the flow,] masks (T, H, W).

    log_p: the network's output by a frame's key; with it, samples are crops of fixed clips, else fresh views.
    """

    def __init__(
        self,
        source: Source,
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
            return _tensors(None, _first(frames), masks, flow)
        frames, masks, flow = self.source.fixed(index)
        height, width = (min(a, b) for a, b in zip(self.crop, masks.shape[1:], strict=True))
        top, left = (int(random.integers(n - m + 1)) for n, m in zip(masks.shape[1:], (height, width), strict=True))
        place = (slice(None), slice(top, top + height), slice(left, left + width))
        log_p = torch.stack([self.log_p[key][place] for key in self.source.keys(index)], 1).float()
        image, masks = _first(frames[place]), masks[place]
        flow = flow.crop(top, left, height, width) if flow is not None else None
        if random.random() < self.flip:
            log_p, image, masks = log_p.flip(-1), image.flip(-1), masks[..., ::-1]
            flow = flow.flip() if flow is not None else None
        parts = _tensors(log_p, image, masks, flow)
        short = (0, self.crop[1] - width, 0, self.crop[0] - height)
        if not any(short):
            return parts
        # Smaller than the crop: padding is void and linked to nothing, so nothing is learned from it.
        values = (0,) * (len(parts) - 1) + (self.ignore,)
        return tuple(functional.pad(part, short, value=value) for part, value in zip(parts, values, strict=True))


def _first(frames: Bytes) -> Tensor:
    """(T, H, W, 3) -> (3, T, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(frames.transpose(3, 0, 1, 2)))


def _tensors(log_p: Tensor | None, image: Tensor, masks: Bytes, flow: Flow | None) -> tuple[Tensor, ...]:
    parts: list[Tensor] = [image] if log_p is None else [log_p, image]
    if flow is not None:
        assert flow.forward_reliable is not None  # found out when the flow was made
        assert flow.backward_reliable is not None
        parts += [flow.forward[0], flow.backward[0], flow.forward_reliable[0], flow.backward_reliable[0]]
    return (*parts, torch.from_numpy(np.ascontiguousarray(masks)).long())


def outputs(
    source: Source, network: Callable[[Tensor], Tensor], progress: Progress = no_progress
) -> dict[Hashable, Tensor]:
    """network(frame (1, 3, H, W)) -> (1, L, H, W) of every frame of every fixed clip, in half precision, by its key."""
    found: dict[Hashable, Tensor] = {}
    for index in range(len(source)):
        keys = source.keys(index)
        if not all(key in found for key in keys):
            image = _first(source.fixed(index)[0])
            for t, key in enumerate(keys):
                if key not in found:
                    found[key] = network(image[None, :, t])[0].half().cpu()
        progress(index + 1, len(source))
    return found
