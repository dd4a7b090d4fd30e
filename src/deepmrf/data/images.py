"""as_image: convert a path, a PIL image, a numpy array or a tensor to RGB (H, W, 3) of uint8."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from deepmrf.data.files import Bytes, read_image, to_rgb

RANGE_TOLERANCE = 1e-3
"""How far floats may leave [0, 1]: resizing and colour conversions overshoot a little."""

MAX_PIXELS_RESIZED = 1 << 24
"""Pixels that are shrunk together; larger images are shrunk in bands."""


def as_image(image: Any, max_pixels: int | None = None) -> Bytes:
    """Convert a path, PIL image, numpy array or tensor to RGB (H, W, 3) of uint8."""
    if isinstance(image, str | os.PathLike):
        return read_image(Path(image), max_pixels)
    if isinstance(image, Tensor):
        return _from_tensor(image)
    if isinstance(image, np.ndarray):
        return _from_array(image, "array")
    if isinstance(image, Image.Image):
        return to_rgb(image, Path("The image"))
    kind = type(image).__name__
    raise TypeError(f"An image is a path, a PIL image, a numpy array (H, W, 3) or a tensor (3, H, W), not a {kind}.")


def shrunk(image: Bytes, side: int) -> Bytes:
    """Return the image with at most `side` pixels on the longer side; itself if it is small enough."""
    height, width = image.shape[:2]
    factor = side / max(height, width)
    if factor >= 1:
        return image
    small = np.empty((max(1, round(height * factor)), max(1, round(width * factor)), 3), np.uint8)
    step = height / len(small)
    rows = max(1, int(MAX_PIXELS_RESIZED / (width * step)))
    for top in range(0, len(small), rows):  # Pillow needs more memory than the image has
        part = small[top : top + rows]
        above, below = top * step, (top + len(part)) * step
        first = max(0, math.floor(above - step))  # the filter reaches one step beyond the band
        band = Image.fromarray(image[first : math.ceil(below + step)])
        box = (0, above - first, width, min(below, height) - first)
        part[:] = np.asarray(band.resize((part.shape[1], len(part)), Image.Resampling.BILINEAR, box))
    return small


def _from_tensor(image: Tensor) -> Bytes:
    shape = tuple(image.shape)
    if image.dim() == 4 and shape[0] == 1:
        image = image[0]
    if image.dim() not in (2, 3) or (image.dim() == 3 and image.shape[0] not in (1, 3, 4)):
        remedy = "bring the channels forward with .permute(2, 0, 1)"
        if len(shape) == 4:
            remedy = "pass its images one by one"
        raise ValueError(f"The tensor has shape {shape}, an image has (3, H, W): {remedy}.")
    if image.dtype == torch.bfloat16:
        image = image.float()
    array = image.detach().cpu().numpy()
    return _from_array(array if array.ndim == 2 else array.transpose(1, 2, 0), "tensor")


def _from_array(array: NDArray[Any], kind: str) -> Bytes:
    shape = array.shape
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        moved = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        remedy = "bring the channels to the end with .transpose(1, 2, 0)" if moved else "pass (H, W) or (H, W, 3)"
        raise ValueError(f"The {kind} has shape {shape}, an image has (H, W, 3): {remedy}.")
    if array.dtype == np.bool_:
        image = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype == np.uint8:
        image = array
    elif array.dtype.kind == "u" and array.dtype.itemsize == 2:
        image = (array >> (8 if array.max() > 255 else 0)).astype(np.uint8)  # as in files
    elif array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= -RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE):
            raise ValueError(
                f"The {kind} holds floats from {low:.4g} to {high:.4g}, an image's are in [0, 1]: "
                "divide them, or pass bytes as uint8."
            )
        image = np.round(array.clip(0, 1) * 255).astype(np.uint8)
    else:
        raise TypeError(f"The {kind} holds {array.dtype}: pass uint8, uint16 or floats in [0, 1].")
    if image.shape[2] == 4:  # transparent becomes white, as in files
        alpha = image[..., 3:].astype(np.uint16)
        image = ((image[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    return np.ascontiguousarray(image if image.shape[2] == 3 else np.repeat(image, 3, axis=2))
