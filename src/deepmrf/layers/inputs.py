"""What the layers accept: one check per kind of input, one sentence per error, each saying what to pass instead."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_AXES = {1: "W", 2: "H, W", 3: "D, H, W"}


def check_maps(name: str, maps: Tensor, channels: int, dims: int, meaning: str) -> None:
    """`maps` is a real tensor (B, channels, *S) with `dims` spatial axes and at least one pixel."""
    if not isinstance(maps, Tensor):
        raise TypeError(f"{name} is a {type(maps).__name__}: pass a torch.Tensor (torch.from_numpy makes one).")
    wanted = f"(B, {channels}, {_AXES.get(dims, '*S')})"
    shape = tuple(maps.shape)
    if maps.dim() != dims + 2:
        remedy = (
            "add the batch axis with [None]"
            if maps.dim() == dims + 1
            else f"build the layer with dims={len(shape) - 2}"
        )
        if maps.dim() < dims + 1:
            remedy = f"it needs {dims} spatial axes (dims={dims})"
        raise ValueError(f"{name} must have shape {wanted}, but has {shape}: {remedy}.")
    if maps.shape[1] != channels:
        raise ValueError(
            f"{name} must have shape {wanted}, but has {shape}: axis 1 holds {maps.shape[1]} {meaning}, "
            f"and the layer was built for {channels}; build it with {meaning}={maps.shape[1]}."
        )
    if maps.numel() == 0 and channels > 0:
        raise ValueError(f"{name} has shape {shape}, which holds no pixels: pass at least one along every axis.")


def check_real(name: str, maps: Tensor) -> None:
    """`maps` holds floating-point numbers."""
    if not maps.is_floating_point():
        raise TypeError(f"{name} is {maps.dtype}, but must hold real numbers: pass {name}.float().")


def check_image(image: Tensor | None, like: Tensor, features: int, dims: int) -> Tensor:
    """The image's features (B, F, *S) beside maps `like`; None stands for no features where none are needed."""
    if image is None:
        if features:
            raise ValueError(
                f"The layer was built with features={features}: pass the image (B, {features}, ...), "
                "or build it with features=0 to use positions alone."
            )
        return like.new_empty(like.shape[0], 0, *like.shape[2:])
    check_maps("image", image, features, dims, "features")
    if not image.is_floating_point() and image.dtype != torch.uint8:
        raise TypeError(f"image is {image.dtype}: pass floats (RGB in [0, 1]) or uint8.")
    expected: Sequence[int] = (like.shape[0], features, *like.shape[2:])
    if tuple(image.shape) != tuple(expected):
        raise ValueError(
            f"image has shape {tuple(image.shape)}, but the label maps beside it want {tuple(expected)}: "
            "batch and size must be the same, so resize one of them."
        )
    if image.device != like.device:
        raise ValueError(f"image is on {image.device}, the label maps on {like.device}: move one with .to(device).")
    return image


def check_finite(name: str, maps: Tensor, either_way: bool = False) -> None:
    """No NaN and no +inf in `maps`, nor -inf if `either_way`.

    Looks only on the CPU: on an accelerator it would wait for the device at every call.
    """
    if torch.compiler.is_compiling() or maps.device.type != "cpu":
        return
    # One pass without a temporary; log-probabilities of -inf are fine, they mean "impossible".
    wide = torch.float32 if maps.dtype in (torch.float16, torch.bfloat16) else maps.dtype
    total = float(maps.detach().sum(dtype=wide))
    if math.isnan(total) or total == math.inf or (either_way and total == -math.inf):
        sign = "" if either_way else "+"
        raise ValueError(
            f"{name} holds NaN (or {sign}inf): look for a division by zero or an overflow before this layer."
        )


def check_iterations(value: int) -> int:
    """`value`, how often a step is repeated."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"iterations={value!r} must be at least 1: the paper uses one.")
    return value


def check_temperature(value: float) -> float:
    """`value`, what log-probabilities are divided by, as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value <= 10:
        raise ValueError(f"temperature={value!r} must be a number from 0.1 to 10; 1 changes nothing.")
    return float(value)
