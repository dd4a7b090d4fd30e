"""Checks of what users pass to the layers. Each error says in one sentence what to pass instead."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepmrf.ops.softmax import total, total_of_squares

MAX_SQUARES = 1e30
"""Squared distances of features up to this one leave float32 enough room for weights and sums."""
_AXES = {1: "W", 2: "H, W", 3: "D, H, W"}


def check_maps(name: str, maps: Tensor, channels: int | None, dims: int, meaning: str) -> None:
    """Require a tensor (B, channels, *S) with `dims` spatial axes and at least one pixel; None allows any channels."""
    if not isinstance(maps, Tensor):
        raise TypeError(f"{name} is a {type(maps).__name__}: pass a torch.Tensor (torch.from_numpy makes one).")
    expected = f"(B, {'L' if channels is None else channels}, {_AXES.get(dims, '*S')})"
    shape = tuple(maps.shape)
    if len(shape) != dims + 2:
        remedy = f"build the layer with dims={len(shape) - 2}"
        if len(shape) == dims + 1:
            remedy = "add the batch axis with [None]"
        elif len(shape) <= dims:
            remedy = f"it needs {dims} spatial axes (dims={dims})"
        raise ValueError(f"{name} must have shape {expected}, but has {shape}: {remedy}.")
    if channels is not None and shape[1] != channels and shape[-1] == channels:
        raise ValueError(
            f"{name} must have shape {expected}, but has {shape}: its {meaning} lie along the last axis; bring them "
            "forward with .movedim(-1, 1)."
        )
    if channels is not None and shape[1] != channels:
        raise ValueError(
            f"{name} must have shape {expected}, but has {shape}: axis 1 holds {shape[1]} {meaning}, "
            f"and the layer was built for {channels}; build it with {meaning}={shape[1]}."
        )
    if maps.numel() == 0 and channels != 0:
        raise ValueError(f"{name} has shape {shape}, which holds no pixels: pass at least one along every axis.")


def check_real(name: str, maps: Tensor) -> None:
    """Require floating-point numbers."""
    if not maps.is_floating_point():
        raise TypeError(f"{name} is {maps.dtype}, but must hold real numbers: pass {name}.float().")


def check_image(image: Tensor | None, like: Tensor, features: int, dims: int) -> Tensor:
    """Return the image's features (B, F, *S) that go with the label maps `like`; without features, an empty tensor."""
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
    expected = (like.shape[0], features, *like.shape[2:])
    if tuple(image.shape) != expected:
        raise ValueError(
            f"image has shape {tuple(image.shape)}, but the label maps need {expected}: "
            "batch and size must be the same, so resize one of them (torch.nn.functional.interpolate)."
        )
    if image.device != like.device:
        raise ValueError(f"image is on {image.device}, the label maps on {like.device}: move one with .to(device).")
    return image


def check_scores(log_p: Tensor, wait: bool = False) -> None:
    """Refuse NaN, +inf and pixels without a possible label in log-probabilities; -inf means "impossible".

    wait: look at numbers of an accelerator too. That waits for the device, so it is not for every call.
    """
    if torch.compiler.is_compiling() or (log_p.device.type != "cpu" and not wait):
        return
    result = total(log_p)  # one pass without a temporary tensor
    if math.isnan(result) or result == math.inf:
        raise ValueError("log_p holds NaN (or +inf): look for a division by zero or an overflow before this layer.")
    if result == -math.inf and bool((log_p.detach().amax(1) == -math.inf).any()):
        raise ValueError(
            "log_p is -inf for all labels of a pixel: give at least one of them a finite score, "
            "and 0 to all where nothing is known."
        )


def check_features(image: Tensor, wait: bool = False) -> None:
    """Refuse NaN, infinities and numbers whose squares overflow in the features of an image; wait: see check_scores."""
    if torch.compiler.is_compiling() or (image.device.type != "cpu" and not wait):
        return
    if not total_of_squares(image) < MAX_SQUARES:  # NaN fails, too
        raise ValueError(
            f"image holds NaN (or inf), or its squares add up to more than {MAX_SQUARES:g}: look for a division by "
            "zero or an overflow before this layer, or pass RGB in [0, 1]."
        )


def check_count(name: str, value: int) -> None:
    """Require a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number, at least 1.")


def check_iterations(value: int) -> int:
    """Return how often a step is repeated."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"iterations={value!r} must be at least 1: the paper uses one.")
    return value


def check_temperature(value: float) -> float:
    """Return the divisor of log-probabilities as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value <= 10:
        raise ValueError(f"temperature={value!r} must be a number from 0.1 to 10; 1 changes nothing.")
    return float(value)
