"""Training samples of clips: from videos, or from single images that move.

A ClipSource gives a clip by its index: `fixed` is always the same, so that the network's output for its frames can be
cached; `fresh` is a new random view of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.files import VOID, Bytes
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.transforms import Augment
from deepmrf.flow import Flow, cached, estimate
from deepmrf.training.motion import moving_clip
from deepmrf.training.recipe import ClipsRecipe
from deepmrf.training.samples import (
    Images,
    Samples,
    crop_corner,
    image_tensor,
    mask_tensor,
    opencv_on_one_thread,
    padded,
)

Clip = tuple[Bytes, Bytes, Flow | None]
"""Frames (T, H, W, 3), masks (T, H, W) with void where labels do not count, and the flow or None."""


class ClipSource(ABC):
    """Clips by index. Estimated flows of fixed clips are cached in `folder`."""

    def __init__(self, clips: ClipsRecipe, augment: Augment, folder: Path) -> None:
        self.recipe, self.augment, self.folder = clips, augment, folder

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of clips."""

    @abstractmethod
    def names(self, index: int) -> Sequence[str]:
        """Return a name for each frame of a fixed clip; equal names mean equal frames."""

    @abstractmethod
    def fixed(self, index: int) -> Clip:
        """Return the clip at its own size, always the same."""

    @abstractmethod
    def fresh(self, index: int, random: np.random.Generator) -> Clip:
        """Return a random view of the clip, of the size of a training crop."""

    def _clip(self, frames: Bytes, masks: Bytes, exact: Flow | None, names: Sequence[str] | None = None) -> Clip:
        """Return the clip with the labels and the flow of the recipe. names: for the cache of estimated flows."""
        if self.recipe.labelled == "centre":
            others = np.arange(len(masks)) != len(masks) // 2
            masks = np.where(others[:, None, None], np.uint8(VOID), masks)
        if self.recipe.flow == "dis":
            return frames, masks, estimate(frames) if names is None else cached(self.folder, names, frames)
        return frames, masks, exact if self.recipe.flow == "exact" else None


class Videos(ClipSource):
    """A clip around every labelled frame of a data set's sequences."""

    def __init__(self, data: Dataset, clips: ClipsRecipe, augment: Augment, folder: Path) -> None:
        super().__init__(clips, augment, folder)
        self.data, self.clips = data, strided_clips(data, clips.frames, clips.stride)

    def __len__(self) -> int:
        return len(self.clips)

    def names(self, index: int) -> Sequence[str]:
        return [item.name for item in self.clips[index]]

    def fixed(self, index: int) -> Clip:
        """Return the frames as they are."""
        return self._clip(*self.data.read_clip(self.clips[index]), None, self.names(index))

    def fresh(self, index: int, random: np.random.Generator) -> Clip:
        """Scale, mirror, crop and recolour all frames alike."""
        return self._clip(*self.augment(random, *self.data.read_clip(self.clips[index])), None)


def strided_clips(data: Dataset, frames: int, stride: int) -> list[tuple[Item, ...]]:
    """Return `frames` items, `stride` apart in their sequence, around each labelled item, which is at frames // 2."""
    reach = stride * frames
    indices = [reach + stride * (t - frames // 2) for t in range(frames)]
    return [tuple(clip[index] for index in indices) for clip in data.clips(2 * reach + 1)]


class Stills(ClipSource):
    """Clips of single labelled images that move: see motion.py."""

    def __init__(self, images: Images, clips: ClipsRecipe, augment: Augment, seed: int, folder: Path) -> None:
        super().__init__(clips, augment, folder)
        self.images, self.seed = images, seed
        self.order = np.random.default_rng([seed, 2]).permutation(len(images))

    def __len__(self) -> int:
        return self.recipe.count or len(self.images)

    def names(self, index: int) -> Sequence[str]:
        """Return names of which no two clips share any."""
        return [f"still-{index}-{t}" for t in range(self.recipe.frames)]

    def fixed(self, index: int) -> Clip:
        """Return a moving view of the image, of its own size; the index alone determines it."""
        random = np.random.default_rng([self.seed, 3, index])
        return self._clip(*self._moving(index, random, replace(self.augment, crop=None)), self.names(index))

    def fresh(self, index: int, random: np.random.Generator) -> Clip:
        """Return another view that moves in another way."""
        assert self.augment.crop is not None  # a recipe always has one
        height, width = self.augment.crop
        margin = math.ceil(self.recipe.motion * self.recipe.frames / 2)  # so that picture, not void, moves in
        larger = replace(self.augment, crop=(height + 2 * margin, width + 2 * margin))
        frames, masks, flow = self._moving(index, random, larger)
        inner = (slice(None), slice(margin, margin + height), slice(margin, margin + width))
        frames, masks = np.ascontiguousarray(frames[inner]), np.ascontiguousarray(masks[inner])
        return self._clip(frames, masks, flow.crop(margin, margin, height, width))

    def _moving(self, index: int, random: np.random.Generator, augment: Augment) -> tuple[Bytes, Bytes, Flow]:
        image, mask = self.images[int(self.order[index % len(self.order)])]
        (image,), (mask,) = augment(random, image[None], mask[None])
        return moving_clip(random, image, mask, self.recipe.frames, self.recipe.motion, self.recipe.flicker)


class ClipCrops(Samples):
    """[log_p (L, T, H, W),] frames (3, T, H, W) of uint8, [the four tensors of the flow,] masks (T, H, W).

    log_p: the network's output by the name of a frame. With it, samples are crops of fixed clips, else fresh views.
    """

    def __init__(
        self,
        source: ClipSource,
        seed: Sequence[int],
        log_p: Mapping[str, Tensor] | None,
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
            return _tensors(None, image_tensor(frames), masks, flow)
        frames, masks, flow = self.source.fixed(index)
        top, left = crop_corner(random, masks.shape[1:], self.crop)
        box = (slice(None), slice(top, top + self.crop[0]), slice(left, left + self.crop[1]))
        log_p = torch.stack([self.log_p[name][box] for name in self.source.names(index)], 1).float()
        image, masks = image_tensor(frames[box]), masks[box]
        flow = flow.crop(top, left, *masks.shape[1:]) if flow is not None else None
        if random.random() < self.flip:
            log_p, image, masks = log_p.flip(-1), image.flip(-1), masks[..., ::-1]
            flow = flow.flip() if flow is not None else None
        return padded(_tensors(log_p, image, masks, flow), self.crop, self.ignore)


def _tensors(log_p: Tensor | None, image: Tensor, masks: Bytes, flow: Flow | None) -> tuple[Tensor, ...]:
    parts: list[Tensor] = [image] if log_p is None else [log_p, image]
    if flow is not None:
        parts += [flow.forward[0], flow.backward[0], flow.forward_reliable[0], flow.backward_reliable[0]]
    return (*parts, mask_tensor(masks))


class _FixedFrames(TorchDataset[Tensor]):
    """The frames (3, T, H, W) of each fixed clip."""

    def __init__(self, source: ClipSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Tensor:
        return image_tensor(self.source.fixed(index)[0])


def network_outputs(
    source: ClipSource, network: Callable[[Tensor], Tensor], workers: int = 0, progress: Progress = no_progress
) -> dict[str, Tensor]:
    """Return network(frame (1, 3, H, W)) -> (L, H, W) of every frame of the fixed clips, in half precision, by name.

    workers: processes that read clips, or make them, while the network computes.
    """
    outputs: dict[str, Tensor] = {}
    with opencv_on_one_thread():
        clips = iter(
            DataLoader(_FixedFrames(source), batch_size=None, num_workers=workers, generator=torch.Generator())
        )
    for index, clip in enumerate(clips):
        for name, frame in zip(source.names(index), clip.unbind(1), strict=True):
            if name not in outputs:
                outputs[name] = network(frame[None])[0].half().cpu()
        progress(index + 1, len(source))
    return outputs
