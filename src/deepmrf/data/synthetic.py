"""synthetic: generated scenes that are hard for a pixel alone and easy for a Markov random field.

Figures stand on the ground with a hat above the head and a body below it; balls float above their shadow. Hat and body
have the same pattern, head and ball the same colour: only their surroundings tell them apart (label contexts). Colours
differ little compared with the noise, so that neighbours must be averaged (smoothness). The seed determines the scenes;
in a video everything moves by a few pixels per frame.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.files import Bytes
from deepmrf.data.folder import folder, write_folder
from deepmrf.data.labels import LabelSet

LABELS = LabelSet(
    names=("ground", "head", "hat", "body", "ball", "shadow"),
    colours=((128, 128, 112), (230, 180, 120), (60, 90, 200), (200, 60, 60), (250, 220, 60), (50, 50, 60)),
)
_GROUND, _HEAD, _HAT, _BODY, _BALL, _SHADOW = range(6)

# Hat and body, head and ball: the same colour, and the same stripes.
_PAINT = np.array([(120, 120, 112), (152, 138, 104), (150, 108, 112), (150, 108, 112), (152, 138, 104), (92, 92, 100)])
_STRIPES = np.array(
    [(0.0, 0.0), (0.9, 0.0), (0.0, 1.1), (0.0, 1.1), (0.9, 0.0), (0.0, 0.0)]
)  # radians per pixel, y and x

COUNTS = {"train": 200, "val": 50, "test": 50}
"""Scenes in each split."""


@dataclass(frozen=True)
class Thing:
    """A figure or a ball with its shadow, alone in its column of the image, so that nothing hides anything."""

    is_figure: bool
    size: float
    top: float
    lane: tuple[float, float]
    """The smallest and the largest x of its centre."""
    start: float
    speed: float

    def centre(self, frame: int) -> float:
        """Return its x in a frame; it turns round at the ends of its lane."""
        low, high = self.lane
        span = max(high - low, 1e-6)
        distance = (self.start + self.speed * frame) % (2 * span)
        return low + (distance if distance <= span else 2 * span - distance)


class SyntheticDataset(Dataset):
    """A Dataset that draws its images when they are read; the paths of its items name no files."""

    def __init__(self, items: Iterable[Item], size: tuple[int, int], noise: float, seed: tuple[int, int]) -> None:
        super().__init__(items, LABELS)
        self.size, self.noise, self.seed = size, noise, seed

    def _scene(self, item: Item) -> int:
        return int(item.sequence or item.name)

    def read_mask(self, item: Item) -> Bytes:
        things = _things(np.random.default_rng([*self.seed, self._scene(item)]), self.size)
        return _draw(things, item.frame, self.size)

    def read_image(self, item: Item) -> Bytes:
        return _paint(self.read_mask(item), self.noise, (*self.seed, self._scene(item)), item.frame)

    def missing(self) -> list[Path]:
        return []


def synthetic(
    size: tuple[int, int] = (64, 96),
    split: str = "train",
    count: int | None = None,
    frames: int = 1,
    noise: float = 35.0,
    seed: int = 0,
    to: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Generate `count` scenes of `size` (H, W); videos if `frames` is over 1.

    noise: standard deviation of the Gaussian noise, of 255. to: write images, masks and labels.json into this folder,
    and read them from there.
    """
    if split not in COUNTS:
        raise ValueError(f"The synthetic scenes have no split {split!r}; give one of {', '.join(COUNTS)}.")
    if len(size) != 2 or min(size) < 16:
        raise ValueError(f"Synthetic scenes of size {size} were asked for; give a height and a width of 16 or more.")
    count = COUNTS[split] if count is None else count
    if count < 1 or frames < 1 or noise < 0:
        raise ValueError(f"{count} scenes, {frames} frames, noise {noise} were asked for; give 1, 1 and 0 or more.")
    items = []
    for scene in range(count):
        for frame in range(frames):
            name = f"{scene:05d}/{frame:04d}" if frames > 1 else f"{scene:05d}"
            path = Path("synthetic", split, f"{name}.png")
            items.append(Item(name, path, path, f"{scene:05d}" if frames > 1 else "", frame))
    dataset = SyntheticDataset(items, (size[0], size[1]), noise, (seed, list(COUNTS).index(split)))
    return dataset if to is None else folder(write_folder(dataset, to, split), split)


def _things(rng: np.random.Generator, size: tuple[int, int]) -> list[Thing]:
    """Draw one thing per column at random: figure or ball, size, position and speed."""
    height, width = size
    columns = max(1, round(width / (0.55 * height)))
    column_width = width / columns
    things = []
    for column in range(columns):
        is_figure = bool(rng.random() < 0.6)
        thing_size = min(height * rng.uniform(0.6, 0.9), column_width * 1.5)
        half = 0.3 * thing_size
        low, high = column * column_width + half, (column + 1) * column_width - half
        span = max(high - low, 0.0)
        start, top = rng.uniform(0, max(2 * span, 1e-6)), rng.uniform(0.02, 0.98) * (height - thing_size)
        things.append(Thing(is_figure, thing_size, float(top), (low, low + span), float(start), rng.uniform(0.5, 2.5)))
    return things


def _draw(things: list[Thing], frame: int, size: tuple[int, int]) -> Bytes:
    """Draw the labels (H, W)."""
    mask = np.full(size, _GROUND, dtype=np.uint8)
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    for thing in things:
        # Distances from the thing's middle and top, in units of its height.
        across, down = (x - thing.centre(frame)) / thing.size, (y - thing.top) / thing.size
        if thing.is_figure:
            shoulders = 0.17 + 0.12 * (down - 0.5)
            mask[(down >= 0.5) & (down < 1) & (abs(across) < shoulders)] = _BODY
            mask[(across / 0.15) ** 2 + ((down - 0.36) / 0.17) ** 2 < 1] = _HEAD
            crown = (down >= 0) & (down < 0.25) & (abs(across) < 0.13)
            brim = (down >= 0.17) & (down < 0.25) & (abs(across) < 0.22)
            mask[crown | brim] = _HAT
        else:
            mask[(across / 0.22) ** 2 + ((down - 0.35) / 0.22) ** 2 < 1] = _BALL
            mask[(across / 0.28) ** 2 + ((down - 0.85) / 0.1) ** 2 < 1] = _SHADOW
    return mask


def _paint(mask: Bytes, noise: float, seed: tuple[int, ...], frame: int) -> Bytes:
    """Paint the image (H, W, 3): colour, faint stripes, light from one side, and new noise in every frame."""
    y, x = np.mgrid[: mask.shape[0], : mask.shape[1]]
    stripes = 6 * np.sin(_STRIPES[mask][..., 0] * y + _STRIPES[mask][..., 1] * x)
    tilt: NDArray[np.float64] = np.random.default_rng([*seed, 0]).uniform(-12, 12, 2)
    light = tilt[0] * (y / mask.shape[0] - 0.5) + tilt[1] * (x / mask.shape[1] - 0.5)
    grain = np.random.default_rng([*seed, frame + 1]).normal(0, noise, (*mask.shape, 3))
    image: Bytes = np.clip(_PAINT[mask] + (stripes + light)[..., None] + grain, 0, 255).round().astype(np.uint8)
    return image
