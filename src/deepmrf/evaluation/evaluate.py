"""Predictors against a data set of labelled images, with the paper's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.progress import Progress, no_progress
from deepmrf.evaluation.metrics import Scores, SegmentationMetrics
from deepmrf.predict.scales import Predictor

Show = Callable[[Item, Tensor, Tensor, dict[str, Tensor]], None]
"""Called with an item, its image (3, H, W) of uint8, its mask (H, W), and the labels (H, W) of each predictor."""
NO_LABELS = "No pixel of these images has a label: give a split with labelled images."


def evaluate(
    predict: Predictor,
    data: Dataset,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
    share: tuple[int, int] = (0, 1),
) -> Scores:
    """Return the scores over all images of `data`.

    share: (index of this process, number of processes); each process takes its share of the images.
    """
    return evaluate_parts({"": predict}, data, device, progress, share)[""]


def evaluate_parts(
    parts: Mapping[str, Predictor],
    data: Dataset,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
    share: tuple[int, int] = (0, 1),
    objects: bool = False,
    shows: Sequence[Show] = (),
) -> dict[str, Scores]:
    """Return the scores of each of several predictors, by name; each image is read once.

    objects: measure LA by objects, too. shows: called with the labels of each image. The rest is as in `evaluate`.
    """
    if objects and not any(item.objects for item in data):
        raise ValueError(
            "No image of this data has its objects numbered: give VOC with SegmentationObject, or Cityscapes with "
            "gtFine's instanceIds files."
        )
    metrics = {name: new_metrics(data, device) for name in parts}
    shared = data[share[0] :: share[1]]
    for done, (item, image, mask) in enumerate(labelled_images(shared), start=1):
        labels = {name: predict(image.to(device)).argmax(1) for name, predict in parts.items()}
        numbers = data.read_objects(item) if objects else None
        for name, ids in labels.items():
            metrics[name].update(ids, mask.to(device), None if numbers is None else torch.from_numpy(numbers)[None])
        for show in shows:
            show(item, image[0], mask[0], {name: ids[0].cpu() for name, ids in labels.items()})
        progress(done, len(shared))
    return {name: computed(values) for name, values in metrics.items()}


def new_metrics(data: Dataset, device: torch.device | str) -> SegmentationMetrics:
    """Return metrics for the labels of `data`."""
    labels = data.labels
    return SegmentationMetrics(len(labels), labels.ignore, labels.names).to(device)


def computed(metrics: SegmentationMetrics) -> Scores:
    """Return the scores; raise a ValueError that tells the owner of the data if no pixel had a label."""
    try:
        return metrics.compute()
    except ValueError:
        raise ValueError(NO_LABELS) from None


def check_labelled(data: Dataset, video: bool = False, progress: Progress = no_progress) -> None:
    """Read all of `data`; raise a ValueError for what evaluation could not use, before anything is trained.

    video: the images are frames, of which some may lack labels.
    """
    labelled = False
    for done, item in enumerate(data, start=1):
        mask = data.read(item)[1]
        if mask is None and not video:
            raise _no_mask(item)
        labelled = labelled or (mask is not None and bool((mask < len(data.labels)).any()))
        progress(done, len(data))
    if not labelled:
        raise ValueError(NO_LABELS)


def labelled_images(data: Dataset) -> Iterator[tuple[Item, Tensor, Tensor]]:
    """Yield each item with its image (1, 3, H, W) of uint8 and its mask (1, H, W)."""
    for item in data:
        image, mask = data.read(item)
        if mask is None:
            raise _no_mask(item)
        yield item, torch.from_numpy(image).permute(2, 0, 1)[None], torch.from_numpy(mask)[None].long()


def _no_mask(item: Item) -> ValueError:
    return ValueError(f"{item.image} has no mask: evaluation needs labelled images.")
