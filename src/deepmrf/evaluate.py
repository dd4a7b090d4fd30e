"""Evaluation: predictors against a data set, with the paper's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepmrf.data.dataset import Dataset
from deepmrf.metrics import Scores, SegmentationMetrics
from deepmrf.predict import Predictor

Step = Callable[[int, int], None]
"""Told (images done, images in all)."""


def evaluate(
    predict: Predictor,
    data: Dataset,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
    share: tuple[int, int] = (0, 1),
) -> Scores:
    """Scores over all images of `data`; with several processes, `share` = (this one, how many) splits the images."""
    labels = data.labels
    metrics = SegmentationMetrics(len(labels), labels.ignore, labels.names).to(device)
    mine = range(share[0], len(data), share[1])
    for done, (image, mask) in enumerate(_pairs(data, mine), start=1):
        found = predict(image.to(device)).argmax(1)
        metrics.update(found, mask.to(device))
        if progress is not None:
            progress(done, len(mine))
    result: Scores = metrics.compute()
    return result


def _pairs(data: Dataset, indices: range) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Image (1, 3, H, W) uint8 and mask (1, H, W) of each labelled item."""
    for index in indices:
        image, mask = data.read(data[index])
        if mask is None:
            raise ValueError(f"{data[index].image} has no mask: evaluation needs labelled images.")
        yield torch.from_numpy(image).permute(2, 0, 1)[None], torch.from_numpy(mask)[None].long()
