"""Predictors: from images to label probabilities, by small functions that compose.

`scaled`, `mirrored`, `averaged` and `tiled` take predictors and return predictors. `tiled_labels` and
`enlarged_labels` give labels and their confidence for images whose probabilities would not fit into memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from deepmrf.data.progress import Progress, no_progress
from deepmrf.layers import MeanField
from deepmrf.ops.softmax import total
from deepmrf.predict.tiles import square_tiles

Model = Callable[[Tensor], Tensor]
"""Images (B, 3, H, W) -> log-probabilities (B, L, H, W)."""
Predictor = Callable[[Tensor], Tensor]
"""Images (B, 3, H, W) of uint8 -> probabilities (B, L, H, W)."""

NETWORK_MARGIN = 128
"""Pixels that a tile sees beyond the MRF's reach, for the network. Networks see farther, some (through their image-wide
mean) everything, but what lies 128 pixels away counts for little; the MRF's part is exact."""
TILE_GRID = 32
"""Tiles begin at multiples of this, so that a network at stride 2 to 32 puts its cells where it would in the image."""
MAX_DENOMINATOR = 16
"""Of a scale as a fraction: tiles at 0.9, which is 9 / 10, begin at multiples of 10."""
MAX_ENLARGED_NUMBERS = 2**24
"""Probabilities that `enlarged_labels` has in memory at a time."""


def predictor(model: Model) -> Predictor:
    """A model as a predictor."""

    @torch.inference_mode()
    def predict(image: Tensor) -> Tensor:
        return probabilities_of(model(image))

    return predict


def probabilities_of(log_q: Tensor) -> Tensor:
    """Return exp(log_q) in float32. NaN is refused: it would silently become the first label."""
    probabilities = log_q.float().exp()
    if math.isnan(total(probabilities)):
        place = log_q.device
        remedy = "look for what divides by zero or overflows" if place.type == "cpu" else "compute it on the CPU"
        raise ValueError(f"The model returned NaN for an image on {place}: {remedy}.")
    return probabilities


def resized(image: Tensor, size: Sequence[int]) -> Tensor:
    """An image of uint8 at another size, as uint8."""
    smaller = size[0] < image.shape[2] or size[1] < image.shape[3]
    real = functional.interpolate(image.float(), list(size), mode="bilinear", antialias=smaller)
    return real.round_().clamp_(0, 255).to(torch.uint8)


def scaled(predict: Predictor, scales: Sequence[float]) -> Predictor:
    """The average over the image resized by each factor."""
    if not scales or any(not 0.1 <= s <= 8 for s in scales):
        raise ValueError(f"scales={list(scales)} must be factors between 0.1 and 8, such as 0.75 1 1.25.")

    def at_scale(scale: float, image: Tensor) -> Tensor:
        size = image.shape[2:]
        scaled_size = [max(1, round(n * scale)) for n in size]
        probabilities = predict(image if scale == 1 else resized(image, scaled_size))
        if probabilities.shape[2:] == size:
            return probabilities
        return functional.interpolate(probabilities, size, mode="bilinear")

    return averaged([partial(at_scale, scale) for scale in scales])


def mirrored(predict: Predictor) -> Predictor:
    """The average over the image and its mirror image."""
    return averaged([predict, lambda image: predict(image.flip(-1)).flip(-1)])


def averaged(predictors: Sequence[Predictor]) -> Predictor:
    """The average over several predictors, such as those of several models."""

    def together(image: Tensor) -> Tensor:
        total = predictors[0](image)
        for predict in predictors[1:]:
            total = total + predict(image)
        return total / len(predictors)

    return predictors[0] if len(predictors) == 1 else together


def combined(models: Sequence[Model], scales: Sequence[float], flip: bool) -> Predictor:
    """The average over models, scales and, with `flip`, mirror images."""
    predict = scaled(averaged([predictor(model) for model in models]), scales)
    return mirrored(predict) if flip else predict


def margin(
    mean_fields: Sequence[MeanField | None], scales: Sequence[float] = (1.0,), network: int = NETWORK_MARGIN
) -> int:
    """What each tile must see around it, in pixels: the farthest reach and the network's, at the smallest scale."""
    farthest = max((max(map(max, mrf.reach()[-2:])) for mrf in mean_fields if mrf is not None), default=0)
    return math.ceil((farthest + network) / min(1.0, *scales))


def grid(mean_fields: Sequence[MeanField | None], zooms: Sequence[Fraction] = (), scales: Sequence[float] = ()) -> int:
    """Tiles begin at multiples of this: of TILE_GRID, at all scales and zooms too, and of the contexts' stride."""
    factors = [Fraction(scale).limit_denominator(MAX_DENOMINATOR) for scale in scales or (1.0,)]
    zooms = [zoom * factor for zoom in zooms or (Fraction(1),) for factor in factors] + factors
    contexts = [mrf.label_contexts for mrf in mean_fields if mrf is not None]
    strides = [layer.stride for layer in contexts if layer is not None]
    return math.lcm(TILE_GRID, *[TILE_GRID * zoom.denominator for zoom in zooms], *strides)


def tiled(predict: Predictor, tile: int, margin: int, step: int = TILE_GRID) -> Predictor:
    """Compute images larger than a tile in tiles, each with `margin` pixels around it."""

    def in_parts(image: Tensor) -> Tensor:
        height, width = image.shape[2:]
        if max(height, width) <= tile:
            return predict(image)
        joined: Tensor | None = None
        for part in square_tiles((height, width), tile, margin, step):
            probabilities = predict(image[(slice(None), slice(None), *part.outer)])
            if joined is None:
                joined = probabilities.new_empty(*probabilities.shape[:2], height, width)
            joined[(slice(None), slice(None), *part.inner)] = probabilities[(slice(None), slice(None), *part.cut)]
        assert joined is not None  # an image has a pixel
        return joined

    return in_parts


Labels = tuple[NDArray[np.uint8], NDArray[np.float16]]


def tiled_labels(
    predict: Predictor,
    image: NDArray[np.uint8],
    tile: int,
    margin: int,
    *,
    step: int = TILE_GRID,
    device: torch.device | str = "cpu",
    probabilities: NDArray[np.float32] | None = None,
    progress: Progress = no_progress,
) -> Labels:
    """(labels, confidence) (H, W) of an image (H, W, 3) of any size: three bytes a pixel, however many labels.

    confidence: the probability of the label. probabilities (L, H, W), if given, is filled too. progress: of tiles.
    """
    height, width = image.shape[:2]
    labels, confidence = np.empty((height, width), np.uint8), np.empty((height, width), np.float16)
    parts = list(square_tiles((height, width), tile, margin, step))
    for number, part in enumerate(parts, 1):
        piece = torch.from_numpy(np.ascontiguousarray(image[part.outer].transpose(2, 0, 1)))[None]
        values = predict(piece.to(device))[0][(slice(None), *part.cut)]  # (L, h, w)
        labels[part.inner], confidence[part.inner] = _best(values)
        if probabilities is not None:
            probabilities[(slice(None), *part.inner)] = values.cpu().numpy()
        progress(number, len(parts))
    return labels, confidence


def enlarged_labels(probabilities: Tensor, height: int, width: int) -> Labels:
    """(labels, confidence) (H, W) of probabilities (L, h, w) enlarged bilinearly, a band of rows at a time."""
    if probabilities.shape[1:] == (height, width):
        return _best(probabilities)
    labels, confidence = np.empty((height, width), np.uint8), np.empty((height, width), np.float16)
    last = probabilities.shape[1] - 1
    band = max(1, MAX_ENLARGED_NUMBERS // (len(probabilities) * width))
    for top in range(0, height, band):
        rows = slice(top, min(top + band, height))
        target = torch.arange(rows.start, rows.stop, device=probabilities.device)
        source = ((target + 0.5) * probabilities.shape[1] / height - 0.5).clamp(0, last)
        above = source.long()
        weight = (source - above)[:, None]
        between = probabilities[:, above] * (1 - weight) + probabilities[:, (above + 1).clamp_max(last)] * weight
        enlarged = functional.interpolate(between[None], (len(source), width), mode="bilinear")[0]
        labels[rows], confidence[rows] = _best(enlarged)
    return labels, confidence


def enlarged_probabilities(probabilities: Tensor, height: int, width: int) -> NDArray[np.float32]:
    """Probabilities (L, h, w) enlarged bilinearly to (L, H, W)."""
    if probabilities.shape[1:] != (height, width):
        probabilities = functional.interpolate(probabilities[None], (height, width), mode="bilinear")[0]
    array: NDArray[np.float32] = probabilities.float().cpu().numpy()
    return array


def _best(probabilities: Tensor) -> Labels:
    best = probabilities.max(0)
    return best.indices.to(torch.uint8).cpu().numpy(), best.values.half().cpu().numpy()
