"""Features of pixels for the Gaussian filter: position and colour, each divided by the width of its Gaussian.

The order of the axes decides where the simplices of the lattice lie, so it changes results slightly. It is
(row, column, .., colours) here, and (.., column, row, colours) with `reverse`: x before y, as some programs have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmrf.ops.lattice import Lattice, build_lattice
from deepmrf.ops.registry import forced

MAX_CACHED_LATTICES = 8


def _widths(widths: float | Sequence[float], count: int, what: str) -> list[float]:
    """One width per axis, all of them positive."""
    given = np.asarray(widths, dtype=np.float64)  # a number of NumPy is a number, too
    values = [float(w) for w in (given if given.ndim else [given] * count)]
    if len(values) != count:
        raise ValueError(f"There are {count} axes of {what}: give {count} widths, or one number, not {len(values)}.")
    if not all(0 < w < float("inf") for w in values):
        raise ValueError(f"The widths of {what} must be positive numbers, not {widths}.")
    return values


def position_features(
    size: Sequence[int],
    widths: float | Sequence[float],
    *,
    reverse: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    origin: Sequence[int] | None = None,
) -> Tensor:
    """Positions of an image's pixels over widths (pixels) of its axes, (1, axes, N); origin: of the first pixel."""
    steps = _widths(widths, len(size), "position")
    features = torch.empty(1, len(size), *size, dtype=dtype, device=device)
    _fill_positions(features, steps, reverse, origin)
    return features.flatten(2)


def _fill_positions(
    features: Tensor, widths: Sequence[float], reverse: bool, origin: Sequence[int] | None = None
) -> None:
    """The first axes of features (B, d, *S) become positions."""
    axes = len(widths)
    for axis, width in enumerate(widths):
        start, count = 0 if origin is None else origin[axis], features.shape[2 + axis]
        line = torch.arange(start, start + count, dtype=features.dtype, device=features.device) / width
        line = line.view(-1, *[1] * (axes - 1 - axis))
        target = features[:, axes - 1 - axis if reverse else axis]
        if features.device.type == "cpu":  # by numpy: PyTorch's threads would go on waiting and slow down those after
            target.numpy()[:] = line.numpy()
        else:
            target[:] = line


def bilateral_features(
    image: Tensor,
    position_widths: float | Sequence[float],
    colour_width: float | Sequence[float],
    *,
    reverse: bool = False,
) -> Tensor:
    """Position and colour of the pixels of image (B, F, *S); colour_width is in units of the image. (B, d, N)"""
    batch, channels, *size = image.shape
    dtype = image.dtype if image.dtype == torch.float64 else torch.float32
    image = image.detach().to(dtype) if image.is_floating_point() else image
    features = torch.empty(batch, len(size) + channels, *size, dtype=dtype, device=image.device)
    _fill_positions(features, _widths(position_widths, len(size), "position"), reverse)
    for channel, width in enumerate(_widths(colour_width, channels, "colour")):
        colour, target = image[:, channel], features[:, len(size) + channel]
        if features.device.type == "cpu":
            np.divide(colour.numpy(), width, out=target.numpy(), dtype=target.numpy().dtype)
        else:
            torch.div(colour, width, out=target)
    return features.flatten(2)


@lru_cache(maxsize=MAX_CACHED_LATTICES)
def _cached_lattice(
    size: tuple[int, ...], widths: tuple[float, ...], options: frozenset[tuple[str, Any]], implementation: str | None
) -> Lattice:
    """implementation: the one that is forced; a lattice that another one built is not for it."""
    with torch.inference_mode(False):
        return build_lattice(position_features(size, widths, **dict(options)))


def position_lattice(
    size: Sequence[int], widths: float | Sequence[float], *, origin: Sequence[int] | None = None, **options: Any
) -> Lattice:
    """The lattice of position_features with these options, one image for any batch; the last few are cached."""
    axes, start = tuple(_widths(widths, len(size), "position")), None if origin is None else tuple(origin)
    return _cached_lattice(tuple(size), axes, frozenset({"origin": start, **options}.items()), forced())
