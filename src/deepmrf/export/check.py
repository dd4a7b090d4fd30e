"""Compare an exported file with its model: run both on the same images."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepmrf.data.files import Bytes
from deepmrf.export.program import INPUT, frozen_copy, quiet
from deepmrf.models.parsing_network import DeepParsingNetwork

TOLERANCE = 1e-4
"""The largest difference of log-probabilities that an exported file may have."""
NEGLIGIBLE_PROBABILITY = 1e-6
"""Added to every probability first: far below it, float32 does not know a logarithm to four digits, and nobody asks."""
SIZES = ((360, 480), (273, 351))
"""Height and width of the images to compare on: none is the traced size, and the second is odd."""
MIN_PHOTO_SIDE = 64
"""Smaller photographs, in pixels, are refused."""
SMALL_SIZE = (9, 14)
"""Height and width of a small image: a trace may refuse what the model takes."""
TIMED_RUNS = 3

Runner = Callable[[Tensor], Tensor]
"""uint8 images (B, 3, H, W) -> log-probabilities (B, L, H, W)."""


@dataclass(frozen=True)
class Comparison:
    """A file compared with its model on one image."""

    height: int
    width: int
    difference: float
    """The largest difference between their log(p + NEGLIGIBLE_PROBABILITY)."""
    model_seconds: float
    """Time of the model: the fastest of three warm runs."""
    file_seconds: float
    """Time of the file, measured likewise."""


def runner(path: Path) -> Runner:
    """Load an exported file as a function: .onnx by onnxruntime on the CPU, .pt2 by torch.export."""
    if path.suffix.lower() == ".pt2":
        with quiet():
            program = torch.export.load(path).module()
        return lambda image: program(image)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda image: torch.from_numpy(session.run(None, {INPUT: image.numpy()})[0])


def compare(model: DeepParsingNetwork, path: Path, images: Sequence[Bytes]) -> list[Comparison]:
    """Run model and file on each uint8 RGB image (H, W, 3), and on a corner of the first one if the model takes that.

    NaN counts as an infinite difference, and so does a small image that the file refuses.
    """
    frozen_model, run = frozen_copy(model), runner(path)
    with torch.no_grad():
        corners = [image[: SMALL_SIZE[0], : SMALL_SIZE[1]] for image in images[:1]]
        small = [_small_comparison(frozen_model, run, image) for image in corners if _takes(frozen_model, image)]
        return [*small, *[_comparison(frozen_model, run, image) for image in images]]


def _comparison(model: Runner, run: Runner, image: Bytes) -> Comparison:
    expected, model_seconds = _timed(model, _batch(image))
    actual, file_seconds = _timed(run, _batch(image))
    height, width = image.shape[:2]
    return Comparison(height, width, _largest_difference(actual, expected), model_seconds, file_seconds)


def _small_comparison(model: Runner, run: Runner, image: Bytes) -> Comparison:
    try:
        return _comparison(model, run, image)
    except (RuntimeError, AssertionError):  # what programs raise that refuse a size
        height, width = image.shape[:2]
        return Comparison(height, width, math.inf, math.nan, math.nan)


def _takes(model: Runner, image: Bytes) -> bool:
    """Does the model take so small an image? A network of the user's own raises what it likes."""
    try:
        model(_batch(image))
    except Exception:
        return False
    return True


def _batch(image: Bytes) -> Tensor:
    """uint8 RGB (H, W, 3) -> (1, 3, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]


def _timed(run: Runner, image: Tensor) -> tuple[Tensor, float]:
    """(result, seconds of the fastest run). The first run of a size compiles kernels and is not timed."""
    result, seconds = run(image), []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        run(image)
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def _largest_difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    floor = torch.tensor(math.log(NEGLIGIBLE_PROBABILITY))
    difference = (torch.logaddexp(actual, floor) - torch.logaddexp(expected, floor)).abs()
    return float(difference.nan_to_num(nan=float("inf")).max())


def synthetic_images() -> list[Bytes]:
    """Images of smooth blobs, a hard edge and noise, uint8 RGB (H, W, 3)."""
    images = []
    for height, width in SIZES:
        generator = torch.Generator().manual_seed(0)
        blobs = torch.rand(1, 3, 6, 8, generator=generator)
        image = torch.nn.functional.interpolate(blobs, size=(height, width), mode="bicubic")[0]
        image[:, :, width // 3 :] = 1 - image[:, :, width // 3 :]
        image += 0.02 * torch.randn(3, height, width, generator=generator)
        images.append(image.clamp(0, 1).mul(255).byte().permute(1, 2, 0).numpy())
    return images


def centre_crops(image: Bytes, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Bytes]:
    """Return the centre of a photograph at each size, or as much of it as there is; all crops differ in size."""
    if min(image.shape[:2]) < MIN_PHOTO_SIDE:
        height, width = image.shape[:2]
        raise ValueError(f"An image of {width} x {height} is too small to compare on: give a photograph.")
    crops: list[Bytes] = []
    for size in sizes:
        height, width = (min(wanted, available) for wanted, available in zip(size, image.shape, strict=False))
        while any(crop.shape[:2] == (height, width) for crop in crops):
            height, width = height * 3 // 4, width * 3 // 4
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        crops.append(image[top : top + height, left : left + width])
    return crops
