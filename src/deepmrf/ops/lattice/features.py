"""Features of pixels for the Gaussian filter: position and colour, each divided by the width of its Gaussian.

The order of the axes decides where the simplices of the lattice lie, so it changes results slightly. It is
(row, column, .., colours) here, and (.., column, row, colours) with `reverse`: x before y, as some programs have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from deepmrf.ops.lattice import Lattice, build_lattice

MAX_CACHED_LATTICES = 8


def _widths(widths: float | Sequence[float], count: int, what: str) -> list[float]:
    """One width per axis, all of them positive."""
    values = [float(widths)] * count if isinstance(widths, (int, float)) else [float(w) for w in widths]
    if len(values) != count:
        raise ValueError(f"There are {count} axes of {what}, so {count} widths are needed, not {len(values)}.")
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
) -> Tensor:
    """Positions of the pixels of an image of this size over the widths (pixels) of its axes: (1, axes, N)."""
    steps = _widths(widths, len(size), "position")
    ranges = [torch.arange(n, dtype=dtype, device=device) / w for n, w in zip(size, steps, strict=True)]
    axes = torch.meshgrid(*ranges, indexing="ij")
    return torch.stack(axes[::-1] if reverse else axes).flatten(1)[None]


def bilateral_features(
    image: Tensor,
    position_widths: float | Sequence[float],
    colour_width: float | Sequence[float],
    *,
    reverse: bool = False,
) -> Tensor:
    """Position and colour of the pixels of image (B, F, *S); colour_width is in units of the image. (B, d, N)"""
    dtype = image.dtype if image.dtype == torch.float64 else torch.float32
    position = position_features(image.shape[2:], position_widths, reverse=reverse, dtype=dtype, device=image.device)
    colour = image.to(dtype).flatten(2)
    divisor = torch.tensor(_widths(colour_width, image.shape[1], "colour"), dtype=dtype, device=image.device)
    return torch.cat([position.expand(image.shape[0], -1, -1), colour / divisor[:, None]], dim=1)


@lru_cache(maxsize=MAX_CACHED_LATTICES)
def _position_lattice(
    size: tuple[int, ...], widths: tuple[float, ...], reverse: bool, dtype: torch.dtype, device: torch.device
) -> Lattice:
    with torch.inference_mode(False):
        return build_lattice(position_features(size, widths, reverse=reverse, dtype=dtype, device=device))


def position_lattice(
    size: Sequence[int],
    widths: float | Sequence[float],
    *,
    reverse: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Lattice:
    """The lattice of position_features, one image for any batch; the last few are cached."""
    axes = tuple(_widths(widths, len(size), "position"))
    return _position_lattice(tuple(size), axes, reverse, dtype, torch.device(device))
