"""Does an exported file say what the model says? Both are run on the same images, and the answers compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepmrf.data.files import Bytes
from deepmrf.export.program import INPUT, frozen, quiet
from deepmrf.models.parsing_network import DeepParsingNetwork

TOLERANCE = 1e-4
"""The largest difference of log-probabilities that an exported file may have."""
SIZES = ((360, 480), (273, 351))
"""Height and width of the images it is checked on; none is the traced one, and the second is odd."""
SMALLEST = 64
"""Pixels that either side of a photograph to compare on must have."""

Runner = Callable[[Tensor], Tensor]
"""uint8 images (B, 3, H, W) -> log-probabilities (B, L, H, W)."""


@dataclass(frozen=True)
class Comparison:
    """A file and its model on one image."""

    height: int
    width: int
    difference: float
    """The largest one between their log-probabilities."""
    model_seconds: float
    """What the model took: the fastest of three runs, warm."""
    file_seconds: float
    """What the file took, likewise."""


def runner(path: Path) -> Runner:
    """An exported file as a function: .onnx by onnxruntime on the CPU, .pt2 by torch.export."""
    if path.suffix.lower() == ".pt2":
        with quiet():
            program = torch.export.load(path).module()
        return lambda image: program(image)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda image: torch.from_numpy(session.run(None, {INPUT: image.numpy()})[0])


def compare(model: DeepParsingNetwork, path: Path, images: Sequence[Bytes]) -> list[Comparison]:
    """Run both on each image, RGB (H, W, 3) of uint8; NaN counts as infinitely far off."""
    still, run = frozen(model), runner(path)
    found = []
    with torch.no_grad():
        for image in images:
            one = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
            expected, model_seconds = _timed(still, one)
            actual, file_seconds = _timed(run, one)
            difference = _largest(actual, expected)
            height, width = image.shape[:2]
            found.append(Comparison(height, width, difference, model_seconds, file_seconds))
    return found


def _timed(run: Runner, image: Tensor) -> tuple[Tensor, float]:
    """What it answers, and its fastest time of three; the first call of a size compiles kernels and plans memory."""
    result, times = run(image), []
    for _ in range(3):
        start = time.perf_counter()
        run(image)
        times.append(time.perf_counter() - start)
    return result, min(times)


def _largest(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    # Impossible labels are -inf in both: no difference.
    apart = torch.where(actual == expected, 0.0, (actual - expected).abs())
    return float(apart.nan_to_num(nan=float("inf")).max())


def pictures(sizes: Sequence[tuple[int, int]] = SIZES, seed: int = 0) -> list[Bytes]:
    """Made-up images, RGB (H, W, 3): soft blobs, a hard edge, and noise."""
    made = []
    for height, width in sizes:
        generator = torch.Generator().manual_seed(seed)
        blobs = torch.rand(1, 3, 6, 8, generator=generator)
        image = torch.nn.functional.interpolate(blobs, size=(height, width), mode="bicubic")[0]
        image[:, :, width // 3 :] = 1 - image[:, :, width // 3 :]
        image += 0.02 * torch.randn(3, height, width, generator=generator)
        made.append(image.clamp(0, 1).mul(255).byte().permute(1, 2, 0).numpy())
    return made


def cut(image: Bytes, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Bytes]:
    """The middle of a photograph at each size, or as much of it as there is, but never twice the same."""
    if min(image.shape[:2]) < SMALLEST:
        height, width = image.shape[:2]
        raise ValueError(f"An image of {width} x {height} is too small to compare on: give a photograph.")
    made: list[Bytes] = []
    for wanted in sizes:
        height, width = (min(side, have) for side, have in zip(wanted, image.shape, strict=False))
        while any(one.shape[:2] == (height, width) for one in made):
            height, width = height * 3 // 4, width * 3 // 4
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        made.append(image[top : top + height, left : left + width])
    return made
