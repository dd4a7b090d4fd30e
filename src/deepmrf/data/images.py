"""One image, however it is given: a path, a PIL image, a numpy array or a tensor becomes RGB (H, W, 3) of uint8."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.files import Bytes, read_image, to_rgb

SLACK = 1e-3
"""By how much floats may leave [0, 1]: resizing and colour conversions do so."""


def as_image(image: Any, max_pixels: int | None = None) -> Bytes:
    """A path, PIL image, numpy array or tensor as RGB (H, W, 3) of uint8."""
    if isinstance(image, str | os.PathLike):
        return read_image(Path(image), max_pixels)
    if isinstance(image, Tensor):
        return _from_tensor(image)
    if isinstance(image, np.ndarray):
        return _from_array(image, "array")
    if hasattr(image, "getbands") and hasattr(image, "convert"):
        return to_rgb(image, Path("The image"))
    kind = type(image).__name__
    raise TypeError(f"An image is a path, a PIL image, a numpy array (H, W, 3) or a tensor (3, H, W), not a {kind}.")


def _from_tensor(image: Tensor) -> Bytes:
    shape = tuple(image.shape)
    if image.dim() == 4 and shape[0] == 1:
        image = image[0]
    if image.dim() not in (2, 3) or (image.dim() == 3 and image.shape[0] not in (1, 3, 4)):
        more = "pass its images one by one" if len(shape) == 4 else "bring the channels forward with .permute(2, 0, 1)"
        raise ValueError(f"The tensor has shape {shape}, an image has (3, H, W): {more}.")
    if image.dtype == torch.bfloat16:
        image = image.float()
    array = image.detach().cpu().numpy()
    return _from_array(array if array.ndim == 2 else array.transpose(1, 2, 0), "tensor")


def _from_array(array: NDArray[Any], what: str) -> Bytes:
    shape = array.shape
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        moved = array.ndim == 3 and array.shape[0] in (1, 3, 4)
        remedy = "bring the channels to the end with .transpose(1, 2, 0)" if moved else "pass (H, W) or (H, W, 3)"
        raise ValueError(f"The {what} has shape {shape}, an image has (H, W, 3): {remedy}.")
    if array.dtype == np.bool_:
        made = array.astype(np.uint8) * np.uint8(255)
    elif array.dtype == np.uint8:
        made = array
    elif array.dtype.kind == "u" and array.dtype.itemsize == 2:
        made = (array >> (8 if array.max() > 255 else 0)).astype(np.uint8)  # as in files
    elif array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= -SLACK and high <= 1 + SLACK):
            raise ValueError(
                f"The {what} holds floats from {low:.4g} to {high:.4g}, an image's are in [0, 1]: "
                "divide them, or pass bytes as uint8."
            )
        made = np.round(array.clip(0, 1) * 255).astype(np.uint8)
    else:
        raise TypeError(f"The {what} holds {array.dtype}: pass uint8, uint16 or floats in [0, 1].")
    if made.shape[2] == 4:  # what is see-through becomes white, as in files
        alpha = made[..., 3:].astype(np.uint16)
        made = ((made[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
    return np.ascontiguousarray(made if made.shape[2] == 3 else np.repeat(made, 3, axis=2))
