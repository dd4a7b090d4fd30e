"""Checks of what users pass to the layers: shapes, numbers and units. Errors say in one sentence what to pass instead.

A layer can compute with images as bytes or normalised, and with probabilities or energies, but what comes out is
silently wrong. An InputWarning tells of what is all but certain: dark, plain and odd images, untrained networks, other
features than RGB and volumes in any unit pass in silence. A look at numbers waits for the device, so MeanField looks
for units at its first call alone (`MeanField.check_values`), at some of the pixels.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import dataclass
from types import FrameType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.flow import Flow
from deepmrf.ops.softmax import total, total_of_squares

MAX_SQUARES = 1e30
"""Squared distances of features up to this one leave float32 enough room for weights and sums."""
_AXES = {1: "W", 2: "H, W", 3: "D, H, W"}
MAX_PIXELS = 4096
"""Pixels that are looked at, of the first image of a batch."""
MIN_PIXELS = 16
"""Fewer prove nothing."""
MIN_LEVELS = 32
"""Different values of a byte that must occur before an image counts as 8-bit."""
MAX_OFF_LEVEL = 0.2
"""How far 255 times a value may lie from a whole number: float16 rounds by 0.06."""
HARMLESS_RANGE = (-0.5, 1.5)
"""Values of RGB images in [0, 1] after augmentation."""
MIN_BYTE_PEAK = 128
"""Images of floats, resized so that they hold fractions, count as bytes if their largest value is above this."""
MAX_OFF_RANGE = 0.03
"""How far from black and white, in parts of white, the darkest and brightest values of a channel may lie where an image
without the levels of bytes is taken for a normalised one."""
SWITCH = "check_values = False on the layer turns this warning off"


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
    """Refuse NaN, +inf and pixels whose labels are all -inf; wait: look at an accelerator's numbers, too."""
    if torch.compiler.is_compiling() or (log_p.device.type != "cpu" and not wait):
        return
    result = total(log_p)  # one pass without a temporary tensor
    if math.isnan(result) or result == math.inf:
        raise ValueError("log_p holds NaN (or +inf): look for a division by zero or an overflow before this layer.")
    if result == -math.inf and bool((log_p.detach().amax(1) == -math.inf).any()):
        raise ValueError("log_p is -inf for all labels of a pixel: give one a finite score, or 0 to all of them.")


def check_features(image: Tensor, wait: bool = False) -> None:
    """Refuse NaN, infinities and numbers whose squares overflow in the features of an image; wait: see check_scores."""
    if torch.compiler.is_compiling() or (image.device.type != "cpu" and not wait):
        return
    if not total_of_squares(image) < MAX_SQUARES:  # NaN fails, too
        raise ValueError(
            f"image holds NaN (or inf), or its squares add up to more than {MAX_SQUARES:g}: look for a division by "
            "zero or an overflow before this layer, or pass RGB in [0, 1]."
        )


def check_count(name: str, value: int, least: int = 1) -> int:
    """Return a whole number that is at least so large."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number, at least {least}.")
    return value


def check_temperature(value: float) -> float:
    """Return the divisor of log-probabilities as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.1 <= value <= 10:
        raise ValueError(f"temperature={value!r} must be a number from 0.1 to 10; 1 changes nothing.")
    return float(value)


class InputWarning(UserWarning):
    """An input that is most likely in another unit than the layer expects."""


@dataclass(frozen=True)
class Unit:
    """A unit of RGB images other than [0, 1]: what was done to bytes / 255."""

    description: str
    mean: tuple[float, float, float]
    """Subtracted first."""
    std: tuple[float, float, float]
    """Divided by."""
    narrow_width: float
    """Colour widths of Gaussian kernels below this one were not chosen for this unit."""
    remedy: str


_BYTES, _RAW = (1 / 255,) * 3, "pass the image before its normalisation, in [0, 1] or as uint8"
BYTES = Unit("bytes as floats", (0.0, 0.0, 0.0), _BYTES, 1.0, "pass image / 255, or the image as uint8")
UNITS = (
    BYTES,
    Unit("normalised by ImageNet's mean and std", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 0.12, _RAW),
    Unit("normalised by CLIP's mean and std", (0.4815, 0.4578, 0.4082), (0.2686, 0.2613, 0.2758), 0.12, _RAW),
    Unit("normalised to [-1, 1]", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 0.06, _RAW),
    Unit("bytes minus their mean", (122.679 / 255, 116.669 / 255, 104.007 / 255), _BYTES, 1.0, _RAW),
    Unit("bytes minus their mean", (104.007 / 255, 116.669 / 255, 122.679 / 255), _BYTES, 1.0, _RAW),
)
"""Units that are recognised; the last two are Caffe's, of RGB and of BGR."""


def readable(*tensors: Tensor) -> bool:
    """Do the tensors hold numbers that may be looked at? Not while something traces, compiles or captures."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack():
        return False
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta for tensor in tensors):
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def warn_of_scores(log_p: Tensor, sigmoid: bool) -> None:
    """Warn where log_p (B, L, *S) holds probabilities or energies instead of log-probabilities or logits."""
    values = _sample(log_p)
    if sigmoid:
        if values.max() > 1e-3:
            _warn(
                f"log_p holds values up to {values.max():.3g}, but logarithms of probabilities are at most 0: pass "
                "torch.nn.functional.logsigmoid(logits), or build the layer with unary='softmax'"
            )
    elif sums_to_one(values, log_p.dtype):
        _warn("log_p holds probabilities, which sum to 1: pass their logarithm, or the network's logits")
    elif values.min() >= 0 and sums_to_one(np.exp(-values), log_p.dtype):
        _warn("log_p holds energies, -ln p: pass their negative")


def warn_of_logits(name: str, logits: Tensor) -> None:
    """Warn where the network `name` returns probabilities (B, L, *S) instead of logits."""
    if sums_to_one(_sample(logits), logits.dtype):
        _warn(
            f"{name} returns probabilities, which sum to 1: let it return logits, without its last softmax", switch=""
        )


def warn_of_image(image: Tensor, colour_width: float | None) -> None:
    """Warn where an RGB image (B, 3, *S) of floats is not in [0, 1]; colour_width: of a Gaussian kernel, or None."""
    values = _sample(image)
    low, high = float(values.min()), float(values.max())
    harmless = low >= HARMLESS_RANGE[0] and high <= HARMLESS_RANGE[1]
    if harmless or values.shape[1] < MIN_PIXELS or not np.isfinite(values).all():
        return
    units = [unit for unit in UNITS if _is_8_bit(values, unit)] + [BYTES] * _is_resized_8_bit(values)
    units += [unit for unit in UNITS if _fills_range(values, unit)]
    if units and (colour_width is None or colour_width < units[0].narrow_width):
        _warn(
            f"image holds values from {low:.3g} to {high:.3g} and seems to be {units[0].description}, where RGB in "
            f"[0, 1] is meant: {units[0].remedy}"
        )


def sums_to_one(values: NDArray[np.float64], dtype: torch.dtype) -> bool:
    """Are (L, N) probabilities of at least two labels?"""
    if values.shape[0] < 2 or values.shape[1] < MIN_PIXELS or values.min() < 0 or values.max() > 1.01:
        return False
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 2e-2
    return bool(np.abs(values.sum(0) - 1).max() < tolerance)


def _is_8_bit(values: NDArray[np.float64], unit: Unit) -> bool:
    """Are all values (3, N) bytes in this unit, and many of them different?"""
    levels = 255 * (values * np.array(unit.std)[:, None] + np.array(unit.mean)[:, None])
    whole = np.round(levels)
    if np.abs(levels - whole).max() > MAX_OFF_LEVEL or whole.min() < 0 or whole.max() > 255:
        return False
    return len(np.unique(whole)) >= MIN_LEVELS


def _is_resized_8_bit(values: NDArray[np.float64]) -> bool:
    """Do all channels lie in 0 to 255, and reach far beyond 1?"""
    peaks = values.max(1)
    return bool(values.min() >= 0 and MIN_BYTE_PEAK < peaks.max() <= 255.5 and peaks.min() > 16)


def _fills_range(values: NDArray[np.float64], unit: Unit) -> bool:
    """Does each channel (3, N) reach from black to white of this unit, and no further?

    Resized and generated images are seldom whole numbers of levels. Other features hardly ever fill three ranges that
    differ; a range that all channels share, such as [-1, 1], is also that of tanh, of positions and of normals.
    """
    if len(set(unit.mean)) == 1:
        return False
    shares = values * np.array(unit.std)[:, None] + np.array(unit.mean)[:, None]
    off = np.stack([shares.min(1), shares.max(1) - 1])
    return bool(np.abs(off).max() <= MAX_OFF_RANGE)


def _sample(maps: Tensor) -> NDArray[np.float64]:
    """Some pixels (C, N) of the first image of a batch (B, C, *S)."""
    pixels = maps.detach()[0].flatten(1)
    step = -(-pixels.shape[1] // MAX_PIXELS)
    values: NDArray[np.float64] = pixels[:, ::step].cpu().double().numpy()
    return values


def _warn(message: str, switch: str = SWITCH) -> None:
    """Warn at the line of the program that called PyTorch and deepmrf."""
    frame: FrameType | None = sys._getframe(1)
    level = 2  # of the frame above this one
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in ("deepmrf", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{message} ({switch})." if switch else f"{message}.", InputWarning, stacklevel=level)


def check_flow(flow: Flow, log_p: Tensor, dims: int, kernel: str) -> None:
    """Raise an error unless this is the flow of the clip log_p (B, L, T, H, W), for a layer that can link frames."""
    if not isinstance(flow, Flow):
        raise TypeError(f"flow is a {type(flow).__name__}: pass a deepmrf.flow.Flow, such as estimate(frames).")
    if dims != 3 or kernel in ("learned", "global"):
        raise ValueError(
            f"flow is for clips (dims=3) and kernels 'distance' and 'gaussian', but dims={dims}, kernel={kernel!r}: "
            "build the layer so, or `inflate` a trained one."
        )
    expected = (log_p.shape[0], *log_p.shape[2:])
    if flow.shape != expected:
        raise ValueError(f"flow has (B, T, H, W) = {flow.shape}, log_p {expected}: estimate it on the same frames.")
    if flow.forward.device != log_p.device:
        raise ValueError(f"flow is on {flow.forward.device}, log_p on {log_p.device}: move one with .to(device).")


def check_frames(frames: slice, log_p: Tensor, dims: int) -> None:
    """Raise a ValueError unless these are some frames in a row of the clip log_p (B, L, T, H, W)."""
    start, stop, step = frames.indices(log_p.shape[2])
    if dims != 3 or step != 1 or start >= stop:
        raise ValueError(
            f"frames={frames} of log_p {tuple(log_p.shape)} with dims={dims}: choose some frames in a row of a clip "
            "(dims=3)."
        )
