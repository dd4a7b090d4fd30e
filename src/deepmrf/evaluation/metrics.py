"""The paper's metrics: mIoU, tagging (TA), localisation (LA) and boundary accuracy (BA), accumulated over images.

    IoU   of class c: pixels that are c in truth and prediction / pixels that are c in either, summed over all images.
          mIoU is the mean over the classes that occur in truth or prediction; one that is predicted but never true
          counts 0, one that is neither is left out.
    TA    of class c: the share of images whose tag is right. An image is tagged c when at least `tag_pixels` of its
          pixels are c, in truth and prediction alike. The mean is over the classes that were ever tagged.
    LA    of class c: the mean IoU of the boxes around all of c's pixels, true and predicted, over the images that are
          truly tagged c; 0 where the prediction is not tagged c.
    BA    of class c: the mean, over the images where that box IoU is above 0.5, of the share of predicted boundary
          pixels within r of the true boundary; r = 0.0075 of the image's diagonal, at least one pixel.

    temporal consistency: the share of pixels whose label is that of the frame before, at the place where the optical
          flow finds them there (the nearest pixel); over the pixels with a reliable link. Flicker lowers it.

A boundary pixel of c is c and has one of its four neighbours in another class; the image's frame is no boundary.
Void pixels (`ignore`) never count: no prediction under void changes anything. A predicted boundary against void is not
judged, for nobody knows what is there; the edge of a true region against void does excuse a boundary near it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from deepmrf.flow import Flow, warp
from deepmrf.flow.clip import fold

TAG_PIXELS = 16
"""How many pixels of a class tag an image with it: a few stray ones are no object."""
LOCALISED = 0.5
"""The box IoU above which an object counts as correctly localised."""
TOLERANCE = 0.0075
"""How far a boundary may be off, as a share of the image's diagonal."""

COLUMNS = ("class", "IoU", "accuracy", "TA", "LA", "BA")
"""What the rows of Scores.rows() hold."""


@dataclass
class Scores:
    """What was measured, all in [0, 1]; NaN where a class gives nothing to measure. Means leave NaN out."""

    names: tuple[str, ...]
    miou: float
    """Mean of iou_per_class."""
    pixel_accuracy: float
    """The share of pixels that are right."""
    mean_accuracy: float
    """Mean of accuracy_per_class."""
    ta: float
    la: float
    ba: float
    iou_per_class: tuple[float, ...]
    accuracy_per_class: tuple[float, ...]
    """The share of a class's true pixels that are right."""
    ta_per_class: tuple[float, ...]
    la_per_class: tuple[float, ...]
    ba_per_class: tuple[float, ...]
    images: int
    """How many images were seen."""

    def rows(self) -> list[tuple[str, float, float, float, float, float]]:
        """One row per class and one for the mean, as in COLUMNS."""
        columns = (self.names, self.iou_per_class, self.accuracy_per_class)
        per_class = zip(*columns, self.ta_per_class, self.la_per_class, self.ba_per_class, strict=True)
        return [*per_class, ("mean", self.miou, self.mean_accuracy, self.ta, self.la, self.ba)]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: plain numbers, None for NaN, per-class values by name."""
        means = ("miou", "pixel_accuracy", "mean_accuracy", "ta", "la", "ba")
        made: dict[str, Any] = {name: _plain(getattr(self, name)) for name in means}
        made["images"] = self.images
        for kind in ("iou", "accuracy", "ta", "la", "ba"):
            values = getattr(self, f"{kind}_per_class")
            made[f"{kind}_per_class"] = {n: _plain(v) for n, v in zip(self.names, values, strict=True)}
        return made

    def __str__(self) -> str:
        """The rows in per cent, as a table; "-" where there is nothing to measure."""
        width = max(len(name) for name in (*self.names, "class"))
        lines = [f"{COLUMNS[0]:<{width}}" + "".join(f"{column:>10}" for column in COLUMNS[1:])]
        for name, *values in self.rows():
            cells = ["-" if math.isnan(v) else f"{100 * v:.1f}" for v in values]
            lines.append(f"{name:<{width}}" + "".join(f"{cell:>10}" for cell in cells))
        return "\n".join([*lines, f"pixel accuracy {100 * self.pixel_accuracy:.1f}, images {self.images}"])


class Counts(Metric):
    """The sums behind the scores, as a torchmetrics metric: over any number of processes, sums of sums are right."""

    is_differentiable = False
    full_state_update = False
    confusion: Tensor
    right_tags: Tensor
    ever_tagged: Tensor
    box_sum: Tensor
    box_count: Tensor
    boundary_sum: Tensor
    boundary_count: Tensor
    images: Tensor

    def __init__(self, labels: int, ignore: int, tag_pixels: int, **options: Any) -> None:
        super().__init__(**options)
        self.labels, self.ignore, self.tag_pixels = labels, ignore, tag_pixels
        self.add_state("confusion", torch.zeros(labels, labels, dtype=torch.int64), "sum")  # (true, predicted)
        for name in ("right_tags", "ever_tagged", "box_count", "boundary_count"):
            self.add_state(name, torch.zeros(labels, dtype=torch.int64), "sum")
        for name in ("box_sum", "boundary_sum"):
            self.add_state(name, torch.zeros(labels, dtype=torch.float64), "sum")
        self.add_state("images", torch.zeros((), dtype=torch.int64), "sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add images: label ids (B, H, W), or (H, W) for one."""
        prediction, target = self._checked(prediction, target)
        for one, truth in zip(prediction, target, strict=True):
            self._add(one, truth)

    def compute(self) -> dict[str, Tensor]:
        """Every sum, by name."""
        return {name: getattr(self, name) for name in self.metric_state}

    def _checked(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Both as (B, H, W) of int64 on this metric's device, ids in range."""
        for name, ids in (("prediction", prediction), ("target", target)):
            if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
                given = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
                raise TypeError(f"{name} is {given}, but must hold label ids: pass an int tensor (logits.argmax(1)).")
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
            wrong = ids[valid & ((ids < 0) | (ids >= self.labels))]
            if wrong.numel():
                raise ValueError(
                    f"{name} holds {int(wrong[0])}, but ids must be 0 .. {self.labels - 1}"
                    + (f", or {self.ignore} for void" if name == "target" else "")
                    + ": map your ids to these first."
                )
        return prediction, target

    def _add(self, prediction: Tensor, target: Tensor) -> None:
        """Add one image (H, W)."""
        valid, void = target != self.ignore, self.labels
        pairs = target[valid] * self.labels + prediction[valid]
        confusion = torch.bincount(pairs, minlength=self.labels**2).view(self.labels, self.labels)
        self.confusion += confusion
        self.images += 1
        true_tag, tag = confusion.sum(1) >= self.tag_pixels, confusion.sum(0) >= self.tag_pixels
        self.right_tags += true_tag == tag
        self.ever_tagged += true_tag | tag
        self.box_count += true_tag
        target, prediction = torch.where(valid, target, void), torch.where(valid, prediction, void)
        both = (true_tag & tag).nonzero()[:, 0]  # classes that have two boxes, (C,)
        if not len(both):
            return
        truth, found = target == both[:, None, None], prediction == both[:, None, None]  # (C, H, W)
        overlap = box_iou(boxes(truth), boxes(found))
        self.box_sum[both] += overlap
        localised = overlap > LOCALISED
        if localised.any():
            share = boundary_precision(truth[localised], found[localised], valid)
            judged = ~share.isnan()
            self.boundary_sum[both[localised][judged]] += share[judged]
            self.boundary_count[both[localised][judged]] += 1


class SegmentationMetrics:
    """Scores over any number of images, in any number of processes.

    labels: L; predictions and targets hold 0 .. L - 1. ignore: the target's void. names: of the classes, for tables.
    tag_pixels: see TA above. options: torchmetrics', such as process_group.
    """

    def __init__(
        self,
        labels: int,
        ignore: int = 255,
        names: Sequence[str] | None = None,
        *,
        tag_pixels: int = TAG_PIXELS,
        **options: Any,
    ) -> None:
        for name, value in (("labels", labels), ("tag_pixels", tag_pixels)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1.")
        if 0 <= ignore < labels:
            raise ValueError(f"ignore={ignore} is one of the {labels} labels: pass an id that is none, such as 255.")
        if names is not None and len(names) != labels:
            raise ValueError(f"names holds {len(names)} names for {labels} labels: pass one per label.")
        self.names = tuple(names) if names is not None else tuple(str(index) for index in range(labels))
        # Held, not inherited: torchmetrics takes what compute() returns apart, and cannot with a frozen dataclass.
        self.counts = Counts(labels, ignore, tag_pixels, **options)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add images: label ids (B, H, W), or (H, W) for one."""
        self.counts.update(prediction, target)

    def compute(self) -> Scores:
        """The scores of all images so far, of all processes."""
        return score(self.counts.compute(), self.names)

    def merge(self, other: SegmentationMetrics) -> None:
        """Add what another object has counted, of other images."""
        self.counts.merge_state(other.counts)

    def reset(self) -> None:
        """Forget all images."""
        self.counts.reset()

    def to(self, device: torch.device | str) -> SegmentationMetrics:
        """Count on that device."""
        self.counts.to(device)
        return self


class TemporalConsistency(Metric):
    """Temporal consistency over any number of clips, in any number of processes.

    ignore: a label that is void; pixels that are void in either frame do not count. options: torchmetrics'.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    agreeing: Tensor
    linked: Tensor

    def __init__(self, ignore: int = 255, **options: Any) -> None:
        super().__init__(**options)
        self.ignore = ignore
        for name in ("agreeing", "linked"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), "sum")

    def update(self, labels: Tensor, flow: Flow) -> None:
        """Add clips: label ids (B, T, H, W), or (T, H, W) for one, and the flow of the same frames."""
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
            given = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
            raise TypeError(f"labels is {given}, but must hold label ids: pass an int tensor (log_q.argmax(1)).")
        if not isinstance(flow, Flow):
            raise TypeError(f"flow is a {type(flow).__name__}: pass a deepmrf.flow.Flow, such as estimate(frames).")
        clips = labels[None] if labels.dim() == 3 else labels
        if tuple(clips.shape) != flow.shape:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)}, the flow is of clips {flow.shape}: pass label ids "
                "(B, T, H, W), or (T, H, W) for one clip, and the flow of the same frames."
            )
        flow = flow.to(self.device)
        assert flow.backward_reliable is not None  # found out when the flow was made
        ids = clips.to(self.device)[:, None]  # (B, 1, T, H, W)
        now, before = fold(ids[:, :, 1:]), fold(ids[:, :, :-1])
        way = fold(flow.backward)
        moved = warp(before.to(torch.float64), way.nan_to_num(), "nearest").round().to(now.dtype)
        counted = fold(flow.backward_reliable) & (now != self.ignore) & (moved != self.ignore)
        self.agreeing += (counted & (now == moved)).sum()
        self.linked += counted.sum()

    def compute(self) -> Tensor:
        """The share of linked pixels that agree, in [0, 1]; NaN if none is linked, as in clips of one frame."""
        return self.agreeing.double() / self.linked


def temporal_consistency(labels: Tensor, flow: Flow, ignore: int = 255) -> float:
    """TemporalConsistency of label ids (B, T, H, W) or (T, H, W)."""
    metric = TemporalConsistency(ignore).to(labels.device)
    metric.update(labels, flow)
    return float(metric.compute())


def score(counts: Mapping[str, Tensor], names: tuple[str, ...]) -> Scores:
    """From sums to scores."""
    sums = {name: tensor.double().cpu() for name, tensor in counts.items()}
    confusion, images = sums["confusion"], sums["images"]
    if not confusion.sum():
        raise ValueError("There is nothing to score: update the metrics with an image that is not all void first.")
    right, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    # 0 / 0 is NaN: nothing to measure.
    iou, accuracy = right / (true + predicted - right), right / true
    ta = torch.where(sums["ever_tagged"] > 0, sums["right_tags"], math.nan) / images
    la, ba = sums["box_sum"] / sums["box_count"], sums["boundary_sum"] / sums["boundary_count"]
    return Scores(
        names=names,
        miou=float(iou.nanmean()),
        pixel_accuracy=float(right.sum() / confusion.sum()),
        mean_accuracy=float(accuracy.nanmean()),
        ta=float(ta.nanmean()),
        la=float(la.nanmean()),
        ba=float(ba.nanmean()),
        iou_per_class=tuple(iou.tolist()),
        accuracy_per_class=tuple(accuracy.tolist()),
        ta_per_class=tuple(ta.tolist()),
        la_per_class=tuple(la.tolist()),
        ba_per_class=tuple(ba.tolist()),
        images=int(images),
    )


def boxes(regions: Tensor) -> Tensor:
    """Masks (C, H, W), none of them empty -> top, bottom, left, right (C, 4), the last two of each pair exclusive."""
    edges = []
    for axis in (2, 1):
        filled = regions.any(axis).byte()  # (C, H), then (C, W)
        edges += [filled.argmax(1), filled.shape[1] - filled.flip(1).argmax(1)]
    return torch.stack(edges, 1)


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Boxes (C, 4) -> their IoU (C,) in float64, counted in pixels."""
    top, left = torch.maximum(first[:, 0], second[:, 0]), torch.maximum(first[:, 2], second[:, 2])
    bottom, right = torch.minimum(first[:, 1], second[:, 1]), torch.minimum(first[:, 3], second[:, 3])
    shared = (bottom - top).clamp_min(0) * (right - left).clamp_min(0)
    area = [(box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) for box in (first, second)]
    return shared.double() / (area[0] + area[1] - shared)


def boundary_precision(truth: Tensor, found: Tensor, valid: Tensor) -> Tensor:
    """Regions (C, H, W) -> the share of predicted boundary pixels near the true boundary (C,), NaN if none are."""
    height, width = valid.shape
    # Where a neighbour is void, a true edge counts (the true contour is somewhere there), a predicted one does not.
    true_edge, edge = _edges(truth, torch.ones_like(valid)), _edges(found, valid)
    near = dilate(true_edge, max(1.0, TOLERANCE * math.hypot(height, width)))
    return (edge & near).sum((1, 2)).double() / edge.sum((1, 2))


def _edges(regions: Tensor, counted: Tensor) -> Tensor:
    """The pixels of each region (C, H, W) beside a pixel that is outside it and `counted` (H, W)."""
    outside = ~regions & counted
    edge = torch.zeros_like(regions)
    edge[:, 1:] |= outside[:, :-1]
    edge[:, :-1] |= outside[:, 1:]
    edge[:, :, 1:] |= outside[:, :, :-1]
    edge[:, :, :-1] |= outside[:, :, 1:]
    return edge & regions


def dilate(masks: Tensor, radius: float) -> Tensor:
    """Every pixel within `radius` of one that is set, in Euclidean distance: masks (C, H, W) of bool."""
    reach = math.floor(radius)
    height, width = masks.shape[-2:]
    rows, wide = masks.clone(), 0  # the mask dilated sideways by `wide`
    made = torch.zeros_like(masks)
    # A disc is a stack of rows; from its top inwards they only get wider, so each is the last one, widened.
    for dy in range(reach, -1, -1):
        while (wide + 1) ** 2 + dy**2 <= radius**2:
            wide += 1
            if wide < width:
                rows[..., wide:] |= masks[..., : width - wide]
                rows[..., : width - wide] |= masks[..., wide:]
        if dy < height:
            made[:, dy:] |= rows[:, : height - dy]
            made[:, : height - dy] |= rows[:, dy:]
    return made


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
