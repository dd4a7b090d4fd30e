"""Prediction: from images to label probabilities, by small functions that compose.

A predictor maps an image (1, 3, H, W) of uint8 to probabilities (1, L, H, W). `scaled`, `mirrored` and `averaged` take
predictors and return predictors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

Predictor = Callable[[Tensor], Tensor]


def predictor(model: nn.Module) -> Predictor:
    """A model that returns log-probabilities, as a predictor."""

    @torch.inference_mode()
    def predict(image: Tensor) -> Tensor:
        probabilities: Tensor = model(image).float().exp()
        return probabilities

    return predict


def scaled(predict: Predictor, scales: Sequence[float]) -> Predictor:
    """The average over the image resized by each factor."""
    if not scales or any(not 0.1 <= s <= 8 for s in scales):
        raise ValueError(f"scales={list(scales)} must be factors between 0.1 and 8, such as 0.75 1 1.25.")

    def over_scales(image: Tensor) -> Tensor:
        size = image.shape[2:]
        total: Tensor | None = None
        for scale in scales:
            resized = image
            if scale != 1:
                target = [max(1, round(n * scale)) for n in size]
                real = functional.interpolate(image.float(), target, mode="bilinear", antialias=scale < 1)
                resized = real.round().clamp(0, 255).to(torch.uint8)
            found = predict(resized)
            if found.shape[2:] != size:
                found = functional.interpolate(found, size, mode="bilinear")
            total = found if total is None else total + found
        assert total is not None  # scales is not empty
        return total / len(scales)

    return over_scales


def mirrored(predict: Predictor) -> Predictor:
    """The average over the image and its mirror image."""

    def both_ways(image: Tensor) -> Tensor:
        return (predict(image) + predict(image.flip(-1)).flip(-1)) / 2

    return both_ways


def averaged(predictors: Sequence[Predictor]) -> Predictor:
    """The average over several models."""

    def together(image: Tensor) -> Tensor:
        return torch.stack([predict(image) for predict in predictors]).mean(0)

    return predictors[0] if len(predictors) == 1 else together
