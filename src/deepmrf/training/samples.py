"""What a training step sees: crops of images, or whole images with the network's cached output.

Every sample is a function of (seed, stage, step, place in the batch) alone, so that a run continues exactly where it
was stopped, and several processes see together what one would see.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence, Sized
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from deepmrf.data.dataset import Dataset
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.transforms import Augment

Pair = tuple[NDArray[np.uint8], NDArray[np.uint8]]
MEMORY = 6 << 30
"""Images that fit into this many bytes are read once and kept."""


class Images:
    """The labelled images of a data set, kept in memory where they fit."""

    def __init__(self, data: Dataset, progress: Progress = no_progress) -> None:
        """Reads (and so checks) every image before training starts if they fit into memory, else the first few."""
        self.data = data
        self.kept: list[Pair | None] = [None] * len(data)
        room = MEMORY
        for index in range(len(data)):
            pair = self._read(index)
            room -= pair[0].nbytes + pair[1].nbytes
            if room < 0 and index > 100:
                break
            if room >= 0:
                self.kept[index] = pair
            progress(index + 1, len(data))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Pair:
        kept = self.kept[index]
        return kept if kept is not None else self._read(index)

    def _read(self, index: int) -> Pair:
        item = self.data[index]
        image, mask = self.data.read(item)
        if mask is None:
            raise ValueError(f"{item.image} has no mask: training needs one for every image.")
        return image, mask


class Order(TorchDataset[tuple[Tensor, ...]]):
    """Samples by number: the n-th sample of a stage is always the same image, cut the same way."""

    def __init__(self, shown: Sized, seed: Sequence[int]) -> None:
        """shown: the images or clips, of which only the number counts."""
        self.count, self.seed = len(shown), list(seed)

    def pick(self, number: int) -> tuple[int, np.random.Generator]:
        """Which image the sample shows, and the randomness it may use: each epoch shuffles anew."""
        epoch, place = divmod(number, self.count)
        order = np.random.default_rng([*self.seed, 0, epoch]).permutation(self.count)
        return int(order[place]), np.random.default_rng([*self.seed, 1, number])


class Crops(Order):
    """Augmented crops: image (3, H, W) uint8, mask (H, W)."""

    def __init__(self, images: Images, seed: Sequence[int], augment: Augment) -> None:
        super().__init__(images, seed)
        self.images, self.augment = images, augment

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        index, random = self.pick(number)
        image, mask = self.images[index]
        cut, cut_mask = self.augment(random, image[None], mask[None])
        return _chw(cut[0]), torch.from_numpy(np.ascontiguousarray(cut_mask[0])).long()


class CachedCrops(Order):
    """Crops at the image's own scale beside what was computed before, such as log_p (L, H, W): that, image, mask.

    What was kept in half precision stays so on its way to the GPU: it is most of what a step moves.
    """

    def __init__(
        self, images: Images, seed: Sequence[int], log_p: Sequence[Tensor], crop: tuple[int, int], flip: float
    ) -> None:
        super().__init__(images, seed)
        self.images, self.log_p, self.crop, self.flip = images, log_p, crop, flip

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        index, random = self.pick(number)
        image, mask = self.images[index]
        height, width = self.crop
        top = int(random.integers(max(image.shape[0] - height, 0) + 1))
        left = int(random.integers(max(image.shape[1] - width, 0) + 1))
        place = (slice(top, top + height), slice(left, left + width))
        parts = [
            self.log_p[index][(slice(None), *place)],
            _chw(image[place]),
            torch.from_numpy(np.ascontiguousarray(mask[place])).long(),
        ]
        if random.random() < self.flip:
            parts = [part.flip(-1) for part in parts]
        short = (height - parts[2].shape[0], width - parts[2].shape[1])
        if any(short):  # smaller than the crop: padding is void, so nothing is learned from it
            border = (0, short[1], 0, short[0])
            values = (0.0, 0, self.images.data.labels.ignore)
            parts = [torch.nn.functional.pad(p, border, value=v) for p, v in zip(parts, values, strict=True)]
        return parts[0], parts[1], parts[2]


class Share(torch.utils.data.Sampler[list[int]]):
    """The sample numbers of one process, a batch at a time, from a given step on."""

    def __init__(self, batch: int, steps: range, process: int, processes: int) -> None:
        if batch % processes:
            raise ValueError(f"A batch of {batch} does not divide among {processes} processes: use a multiple of it.")
        self.batch, self.steps, self.process, self.processes = batch, steps, process, processes

    def __iter__(self):  # type: ignore[no-untyped-def]
        for step in self.steps:
            yield [step * self.batch + slot for slot in range(self.process, self.batch, self.processes)]

    def __len__(self) -> int:
        return len(self.steps)


def _chw(image: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


def one_thread(_: int) -> None:
    """For a process that reads images: OpenCV must not start as many threads in each as the machine has cores."""
    with suppress(ImportError):
        importlib.import_module("cv2").setNumThreads(1)
