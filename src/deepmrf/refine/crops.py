"""Random crops of examples: what one step of learning sees."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import numpy as np
from torch import Tensor
from torch.nn import functional

from deepmrf.data.files import VOID
from deepmrf.refine.examples import Example

FOREGROUND_SHARE = 0.5
"""The share of a volume's crops that are placed on foreground, since most of a volume is background."""


def crop(example: Example, size: Sequence[int], random: np.random.Generator, *maps: Tensor) -> tuple[Tensor, ...]:
    """Cut the same part out of log_p, image, mask and `maps`; pixels beyond the image are void.

    Half of the images are mirrored. Volumes are not: a body's left and right differ.
    """
    corner = _corner(example, size, random)
    region: tuple[EllipsisType | slice, ...] = (
        ...,
        *[slice(start, start + side) for start, side in zip(corner, size, strict=True)],
    )
    crops = [values[region] for values in (example.log_p, example.image, example.mask, *maps)]
    missing = [max(side - n, 0) for n, side in zip(example.mask.shape, size, strict=True)]
    if any(missing):
        border = [pixels for count in reversed(missing) for pixels in (0, count)]
        fill = (0, 0, VOID, *[0] * len(maps))
        crops = [functional.pad(values, border, value=v) for values, v in zip(crops, fill, strict=True)]
    mirrored = example.mask.dim() == 2 and random.random() < 0.5
    return tuple(values.flip(-1) for values in crops) if mirrored else tuple(crops)


def _corner(example: Example, size: Sequence[int], random: np.random.Generator) -> list[int]:
    """Where the crop starts along each axis."""
    shape, foreground = example.mask.shape, example.foreground
    corner = [int(random.integers(max(n - side, 0) + 1)) for n, side in zip(shape, size, strict=True)]
    if foreground is None or not len(foreground) or random.random() >= FOREGROUND_SHARE:
        return corner
    voxel = foreground[int(random.integers(len(foreground)))].tolist()
    return [_start_around(x, n, side, random) for x, n, side in zip(voxel, shape, size, strict=True)]


def _start_around(x: int, n: int, side: int, random: np.random.Generator) -> int:
    """A start, of an axis of n pixels, from which `side` pixels include pixel x."""
    first, last = max(x - side + 1, 0), max(min(x, n - side), 0)
    return int(random.integers(min(first, last), last + 1))
