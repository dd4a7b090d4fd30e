"""The paper's metrics: mIoU, tagging (TA), localisation (LA) and boundary accuracy (BA), accumulated over images.

    IoU   of class c: pixels that are c in truth and prediction / pixels that are c in either, summed over all images.
          mIoU is the mean over the classes that occur in truth or prediction. A class that is predicted but never true
          counts 0; a class that is neither is left out.
    TA    of class c: the share of images whose tag is right. An image is tagged c if at least `tag_pixels` of its
          pixels are c, in truth and prediction alike. The mean is over the objects that were ever tagged.
    LA    of class c: the mean IoU of the boxes around all of c's pixels, true and predicted, over the images that are
          truly tagged c; 0 where the prediction is not tagged c.
    BA    of class c: the mean, over the images where that box IoU is above 0.5, of the share of predicted boundary
          pixels within r of the true boundary; r = 0.0075 of the image's diagonal, at least one pixel.

A class called "background" is no object. TA, LA and BA are means over the objects, as the paper's are; mIoU is over all
classes, as the paper's is. Both means of all metrics are reported where there is a background.

Void pixels (`ignore`) never count: no prediction under void changes a score. regions.py defines boxes, boundaries
and LA by objects, of which objects of the background are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from deepmrf.data.colours import BACKGROUND
from deepmrf.data.files import VOID
from deepmrf.evaluation.regions import boundary_precision, box_iou, boxes, object_overlaps
from deepmrf.layers.inputs import check_count

TAG_PIXELS = 16
"""Pixels of a class that tag an image with it: fewer are stray pixels, not an object."""
LOCALISED_IOU = 0.5
"""Box IoU above which an object counts as correctly localised."""
PER_CLASS = ("iou", "accuracy", "ta", "la", "ba")
"""Metrics of each class, in the order of tables."""
OVER_OBJECTS = ("ta", "la", "ba", "la_objects")
"""Metrics whose means leave the background out."""


@dataclass
class Scores:
    """Scores in [0, 1]; NaN where a class gives nothing to measure. Means leave NaN out."""

    names: tuple[str, ...]
    miou: float
    """Mean of iou_per_class, background included."""
    pixel_accuracy: float
    """Share of pixels that are right."""
    mean_accuracy: float
    """Mean of accuracy_per_class."""
    ta: float
    """Mean of ta_per_class without background; la and ba alike."""
    la: float
    ba: float
    iou_per_class: tuple[float, ...]
    accuracy_per_class: tuple[float, ...]
    """Share of a class's true pixels that are right."""
    ta_per_class: tuple[float, ...]
    la_per_class: tuple[float, ...]
    ba_per_class: tuple[float, ...]
    images: int
    """Number of images."""
    la_objects: float = math.nan
    """Mean of la_objects_per_class without background."""
    la_objects_per_class: tuple[float, ...] = ()
    """LA by objects; empty where they were not measured."""

    def rows(self) -> list[tuple[str, float, float, float, float, float]]:
        """Return (class, IoU, accuracy, TA, LA, BA) of each class, and of "mean".

        Where there is a background, also of "mean of objects"; "mean" then includes the background.
        """
        columns = [getattr(self, f"{metric}_per_class") for metric in PER_CLASS]
        rows = [*zip(self.names, *columns, strict=True)]
        objects = object_classes(self.names)
        if len(objects) < len(self.names):
            rows.append(("mean of objects", *[mean([values[n] for n in objects]) for values in columns]))
        return [*rows, ("mean", *[mean(values) for values in columns])]

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON: None for NaN, per-class values by name.

        Where there is a background, "objects" and "with_background" hold the means without and with it.
        """
        by_object = ["la_objects"] if self.la_objects_per_class else []
        means = ["miou", "pixel_accuracy", "mean_accuracy", "ta", "la", "ba", *by_object]
        values: dict[str, Any] = {name: none_for_nan(getattr(self, name)) for name in means}
        values["images"] = self.images
        both = [row[1:] for row in self.rows()[len(self.names) :]]
        if len(both) == 2:
            keys = ("miou", "mean_accuracy", "ta", "la", "ba")
            for name, numbers in zip(("objects", "with_background"), both, strict=True):
                values[name] = dict(zip(keys, map(none_for_nan, numbers), strict=True))
        for metric in (*PER_CLASS, *by_object):
            per_class = zip(self.names, getattr(self, f"{metric}_per_class"), strict=True)
            values[f"{metric}_per_class"] = {name: none_for_nan(value) for name, value in per_class}
        return values


def object_classes(names: Sequence[str]) -> list[int]:
    """Return the classes that are objects: all but the background, or all if there is nothing else."""
    return [n for n, name in enumerate(names) if name.lower() != BACKGROUND] or [*range(len(names))]


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    numbers = [value for value in values if not math.isnan(value)]
    return math.fsum(numbers) / len(numbers) if numbers else math.nan


class SegmentationMetrics(Metric):
    """Scores over any number of images, in any number of processes, as a torchmetrics metric.

    labels: L; predictions and targets hold 0 .. L - 1. ignore: the target's id of void. names: one for each label.
    tag_pixels: see TA above. abstains: predictions may hold `ignore` for no label, which is never right.
    options: those of torchmetrics, such as process_group.
    """

    is_differentiable = False
    full_state_update = False
    confusion: Tensor
    right_tags: Tensor
    ever_tagged: Tensor
    box_sum: Tensor
    box_count: Tensor
    boundary_sum: Tensor
    boundary_count: Tensor
    object_sum: Tensor
    object_count: Tensor
    images: Tensor

    def __init__(
        self,
        labels: int,
        ignore: int = 255,
        names: Sequence[str] | None = None,
        *,
        tag_pixels: int = TAG_PIXELS,
        abstains: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_count("labels", labels)
        check_count("tag_pixels", tag_pixels)
        if 0 <= ignore < labels:
            raise ValueError(f"ignore={ignore} is one of the {labels} labels: pass an id that is none, such as 255.")
        if names is not None and len(names) != labels:
            raise ValueError(f"names holds {len(names)} names for {labels} labels: pass one per label.")
        self.names = tuple(names) if names is not None else tuple(str(index) for index in range(labels))
        self.labels, self.ignore, self.tag_pixels, self.abstains = labels, ignore, tag_pixels, abstains
        counts = torch.zeros(labels, labels + abstains, dtype=torch.int64)  # (true, predicted)
        self.add_state("confusion", counts, "sum")
        for name in ("right_tags", "ever_tagged", "box_count", "boundary_count", "object_count"):
            self.add_state(name, torch.zeros(labels, dtype=torch.int64), "sum")
        for name in ("box_sum", "boundary_sum", "object_sum"):
            self.add_state(name, torch.zeros(labels, dtype=torch.float64), "sum")
        self.add_state("images", torch.zeros((), dtype=torch.int64), "sum")

    def update(self, prediction: Tensor, target: Tensor, objects: Tensor | None = None) -> None:
        """Add images: label ids (B, H, W), or (H, W) for one.

        objects: for LA by objects, the number of each pixel's object, 0 for none; shaped as the others.
        """
        prediction, target = self._checked(prediction, target)
        numbers = [None] * len(target) if objects is None else objects.to(target).view_as(target)
        for image in zip(prediction, target, numbers, strict=True):
            self._add(*image)

    def compute(self) -> Scores:
        """Return the scores of all images so far, over all processes."""
        pairs = self.confusion.double().cpu()
        if not pairs.sum():
            raise ValueError("There is nothing to score: update the metrics with an image that is not all void first.")
        right, true, predicted = pairs.diagonal(), pairs.sum(1), pairs.sum(0)[: self.labels]
        per_class = {  # 0 / 0 is NaN: nothing to measure
            "iou": right / (true + predicted - right),
            "accuracy": right / true,
            "ta": torch.where(self.ever_tagged > 0, self.right_tags.double(), math.nan) / self.images,
            "la": self.box_sum / self.box_count,
            "ba": self.boundary_sum / self.boundary_count,
        }
        if self.object_count.any():
            per_class["la_objects"] = self.object_sum / self.object_count
        objects = object_classes(self.names)
        scores: dict[str, Any] = {f"{name}_per_class": tuple(values.tolist()) for name, values in per_class.items()}
        for name in OVER_OBJECTS:
            scores[name] = mean(per_class[name][objects].tolist()) if name in per_class else math.nan
        return Scores(
            names=self.names,
            miou=mean(scores["iou_per_class"]),
            pixel_accuracy=float(right.sum() / pairs.sum()),
            mean_accuracy=mean(scores["accuracy_per_class"]),
            images=int(self.images),
            **scores,
        )

    def _checked(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return both as (B, H, W) of int64 on this metric's device, ids in range."""
        check_label_ids("prediction", prediction)
        check_label_ids("target", target)
        if prediction.shape != target.shape or prediction.dim() not in (2, 3) or not prediction.numel():
            raise ValueError(
                f"prediction has shape {tuple(prediction.shape)} and target {tuple(target.shape)}: "
                "pass both as (B, H, W) or (H, W), of the same size."
            )
        height, width = target.shape[-2:]
        prediction = prediction.to(self.device, torch.int64).reshape(-1, height, width)
        target = target.to(self.device, torch.int64).reshape(-1, height, width)
        valid = target != self.ignore
        for name, ids in (("target", target), ("prediction", prediction)):
            named = valid if name == "target" or not self.abstains else valid & (ids != self.ignore)
            wrong = ids[named & ((ids < 0) | (ids >= self.labels))]
            if wrong.numel():
                raise ValueError(
                    f"{name} holds {int(wrong[0])}, but ids must be 0 .. {self.labels - 1}"
                    + (f", or {self.ignore} for void" if name == "target" else "")
                    + ": map your ids to these first."
                )
        return prediction, target

    def _add(self, prediction: Tensor, target: Tensor, objects: Tensor | None) -> None:
        """Add one image (H, W)."""
        valid, void = target != self.ignore, self.labels
        counts = confusion(prediction, target, self.labels, self.ignore, self.abstains)
        self.confusion += counts
        self.images += 1
        true_tag, tag = counts.sum(1) >= self.tag_pixels, counts.sum(0)[: self.labels] >= self.tag_pixels
        self.right_tags += true_tag == tag
        self.ever_tagged += true_tag | tag
        self.box_count += true_tag
        target, prediction = torch.where(valid, target, void), torch.where(valid, prediction, void)
        if objects is not None:
            self._add_objects(prediction, target, torch.where(valid, objects, 0))
        both = (true_tag & tag).nonzero()[:, 0]  # classes that have two boxes, (C,)
        if not len(both):
            return
        truth, regions = target == both[:, None, None], prediction == both[:, None, None]  # (C, H, W)
        overlap = box_iou(boxes(truth), boxes(regions))
        self.box_sum[both] += overlap
        localised = overlap > LOCALISED_IOU
        if localised.any():
            share = boundary_precision(truth[localised], regions[localised], valid)
            judged = ~share.isnan()
            self.boundary_sum[both[localised][judged]] += share[judged]
            self.boundary_count[both[localised][judged]] += 1

    def _add_objects(self, prediction: Tensor, target: Tensor, objects: Tensor) -> None:
        """Add the objects of one image (H, W) to LA by objects."""
        labels, overlaps = object_overlaps(prediction, target, objects, self.tag_pixels)
        counted = torch.isin(labels, torch.tensor(object_classes(self.names), device=labels.device))
        self.object_sum.index_add_(0, labels[counted], overlaps[counted])
        self.object_count += torch.bincount(labels[counted], minlength=self.labels)


def confusion(prediction: Tensor, target: Tensor, labels: int, ignore: int = VOID, abstains: bool = False) -> Tensor:
    """Pixels counted by (true label, predicted label), (L, L), void left out; maps of any shape.

    abstains: predictions may hold `ignore` for no label, counted in a last column, (L, L + 1).
    """
    valid, columns = target != ignore, labels + abstains
    predicted = prediction[valid].long()
    predicted = torch.where(predicted == ignore, labels, predicted) if abstains else predicted
    pairs = target[valid].long() * columns + predicted
    return torch.bincount(pairs, minlength=labels * columns).view(labels, columns)


def check_label_ids(name: str, ids: Tensor) -> None:
    """Raise a TypeError unless `ids` is a tensor of whole numbers."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        given = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{name} is {given}, but must hold label ids: pass an int tensor (logits.argmax(1)).")


def none_for_nan(value: float) -> float | None:
    """Return None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value
