"""Training samples of images: augmented crops, or crops beside the network's cached output.

A sample depends on (seed, stage, number of the sample) alone. So a resumed run continues exactly where it stopped, and
several processes see together what a single process would see.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset as TorchDataset

from deepmrf.data.dataset import Dataset
from deepmrf.data.files import Bytes
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.transforms import Augment

CACHE_BYTES = 6 << 30
"""Memory for decoded images; those beyond it are read each time."""
CHECKED_IMAGES = 100
"""Images that are read before training starts even if they do not fit into the cache."""
HELD_OUT_STRETCHES = 5
"""Stretches of the training images that are held out: neighbours, as frames of one video, mostly stay together."""
COUNTED_IMAGES = 2000
"""Images whose labels are counted for the weights of classes."""


class Images:
    """The labelled images of a data set, cached in memory as far as they fit."""

    def __init__(self, data: Dataset, progress: Progress = no_progress) -> None:
        """Read and so check every image that fits into the cache, and at least CHECKED_IMAGES."""
        self.data = data
        self.cached: list[tuple[Bytes, Bytes] | None] = [None] * len(data)
        bytes_left = CACHE_BYTES
        for index in range(len(data)):
            image, mask = self._read(index)
            bytes_left -= image.nbytes + mask.nbytes
            if bytes_left < 0 and index > CHECKED_IMAGES:
                break
            if bytes_left >= 0:
                self.cached[index] = image, mask
            progress(index + 1, len(data))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Bytes, Bytes]:
        """Return the image (H, W, 3) and its mask (H, W)."""
        return self.cached[index] or self._read(index)

    def largest(self) -> tuple[int, int]:
        """Return the largest height and the largest width of the cached images, or of the first."""
        sizes = [entry[1].shape for entry in self.cached if entry is not None] or [self[0][1].shape]
        return max(height for height, _ in sizes), max(width for _, width in sizes)

    def label_counts(self) -> Tensor:
        """Return the number of pixels of each label (L,) in the first COUNTED_IMAGES images."""
        counts = torch.zeros(256)
        for index in range(min(len(self), COUNTED_IMAGES)):
            counts += torch.bincount(mask_tensor(self[index][1]).flatten(), minlength=256)
        return counts[: len(self.data.labels)]

    def _read(self, index: int) -> tuple[Bytes, Bytes]:
        item = self.data[index]
        image, mask = self.data.read(item)
        if mask is None:
            raise ValueError(f"{item.image} has no mask: training needs one for every image.")
        return image, mask


def hold_out(data: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Split into the images for the network and those that are held out: stretches spread evenly over the data."""
    step, length = len(data) / HELD_OUT_STRETCHES, share * len(data) / HELD_OUT_STRETCHES
    starts = [(index + 0.5) * step - length / 2 for index in range(HELD_OUT_STRETCHES)]
    held = {index for start in starts for index in range(round(start), round(start + length))}
    parts = [[item for index, item in enumerate(data) if (index in held) == is_held] for is_held in (False, True)]
    if not parts[0] or not parts[1]:
        raise ValueError(f"{share:g} of {len(data)} images cannot be held out: give more images or another share.")
    return data.subset(parts[0]), data.subset(parts[1])


class Samples(TorchDataset[tuple[Tensor, ...]]):
    """Samples by number: sample n of a stage always shows the same image, cut the same way."""

    def __init__(self, images: Sized, seed: Sequence[int]) -> None:
        """images: images or clips, of which only the number counts here."""
        self.count, self.seed = len(images), list(seed)

    def pick(self, number: int) -> tuple[int, np.random.Generator]:
        """Return the index of the image, and the random numbers of the sample. Each epoch is shuffled anew."""
        epoch, position = divmod(number, self.count)
        order = np.random.default_rng([*self.seed, 0, epoch]).permutation(self.count)
        return int(order[position]), np.random.default_rng([*self.seed, 1, number])


class Crops(Samples):
    """Augmented crops: image (3, H, W) of uint8, mask (H, W)."""

    def __init__(self, images: Images, seed: Sequence[int], augment: Augment) -> None:
        super().__init__(images, seed)
        self.images, self.augment = images, augment

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        index, random = self.pick(number)
        image, mask = self.images[index]
        (image,), (mask,) = self.augment(random, image[None], mask[None])
        return image_tensor(image), mask_tensor(mask)


class CachedCrops(Samples):
    """Crops at the image's own scale beside cached maps (C, H, W), such as log_p: maps, image, mask.

    Maps in half precision stay so until they are on the GPU, because they are most of what a step moves there.
    """

    def __init__(
        self, images: Images, seed: Sequence[int], maps: Sequence[Tensor], crop: tuple[int, int], flip: float
    ) -> None:
        super().__init__(images, seed)
        self.images, self.maps, self.crop, self.flip = images, maps, crop, flip

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        index, random = self.pick(number)
        image, mask = self.images[index]
        top, left = crop_corner(random, mask.shape, self.crop)
        box = (slice(top, top + self.crop[0]), slice(left, left + self.crop[1]))
        parts = [self.maps[index][:, box[0], box[1]], image_tensor(image[box]), mask_tensor(mask[box])]
        if random.random() < self.flip:
            parts = [part.flip(-1) for part in parts]
        return padded(parts, self.crop, self.images.data.labels.ignore)


def crop_corner(random: np.random.Generator, size: Sequence[int], crop: Sequence[int]) -> list[int]:
    """Draw the first corner of a crop that lies in an image of this size, or covers a smaller one."""
    return [int(random.integers(max(n - m, 0) + 1)) for n, m in zip(size, crop, strict=True)]


def padded(parts: Sequence[Tensor], crop: Sequence[int], ignore: int) -> tuple[Tensor, ...]:
    """Pad what is smaller than the crop: maps with zeros, the mask, which is last, with void, which teaches nothing."""
    missing = [m - n for n, m in zip(parts[-1].shape[-len(crop) :], crop, strict=True)]
    if not any(missing):
        return tuple(parts)
    border = [pixels for count in reversed(missing) for pixels in (0, count)]
    *maps, mask = parts
    return (*[functional.pad(part, border) for part in maps], functional.pad(mask, border, value=ignore))


def image_tensor(image: Bytes) -> Tensor:
    """(H, W, 3) -> (3, H, W), and of a clip (T, H, W, 3) -> (3, T, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(image, -1, 0)))


def mask_tensor(mask: Bytes) -> Tensor:
    """Return label ids of any shape as uint8, an eighth of what the loss needs: they travel between processes."""
    return torch.from_numpy(np.ascontiguousarray(mask))


@contextmanager
def opencv_on_one_thread() -> Iterator[None]:
    """Keep OpenCV to one thread; processes that are forked meanwhile keep to it.

    By default, OpenCV takes a thread per core in each process. The setting must change before a fork: a forked process
    has none of its parent's threads, and waits for ever when OpenCV wants to end them there.
    """
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError:
        yield
        return
    threads = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(threads)
