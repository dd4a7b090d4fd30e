"""Boxes and boundaries of regions, which LA and BA compare; boxes of objects, where a data set numbers them.

A boundary pixel of a region lies in it and has one of its four neighbours outside; the image's frame is no boundary.
A predicted boundary against void is not judged, because the truth there is unknown. The edge of a true region against
void excuses a predicted boundary near it.

LA by objects: the box of each true object is compared with those of the predicted regions of its class, connected by
their sides; the best IoU counts, and 0 if there is none. A predicted region may be the best of several objects, and
then fits none well. Objects and regions of fewer than `min_pixels` pixels are left out.

Shapes: C classes, N objects, R regions, H height, W width.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from deepmrf.predict.regions import find_regions

BOUNDARY_TOLERANCE = 0.0075
"""Distance by which a boundary may be off, as a share of the image's diagonal."""


def boxes(regions: Tensor) -> Tensor:
    """Masks (C, H, W), none of them empty -> boxes (C, 4): top, bottom, left, right; bottom and right are exclusive."""
    return box_edges(regions.any(2), regions.any(1))


def box_edges(rows: Tensor, columns: Tensor) -> Tensor:
    """Rows (C, H) and columns (C, W) that a region reaches -> boxes (C, 4)."""
    edges = []
    for filled in (rows.byte(), columns.byte()):
        edges += [filled.argmax(1), filled.shape[1] - filled.flip(1).argmax(1)]
    return torch.stack(edges, 1)


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Boxes (C, 4) -> their IoU (C,) in float64, counted in pixels."""
    top, left = torch.maximum(first[:, 0], second[:, 0]), torch.maximum(first[:, 2], second[:, 2])
    bottom, right = torch.minimum(first[:, 1], second[:, 1]), torch.minimum(first[:, 3], second[:, 3])
    shared = (bottom - top).clamp_min(0) * (right - left).clamp_min(0)
    area = [(box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2]) for box in (first, second)]
    return shared.double() / (area[0] + area[1] - shared)


def boundary_precision(truth: Tensor, prediction: Tensor, valid: Tensor) -> Tensor:
    """Regions (C, H, W) -> the share (C,) of predicted boundary pixels near the true boundary; NaN without any."""
    height, width = valid.shape
    true_edge, edge = _edges(truth, torch.ones_like(valid)), _edges(prediction, valid)
    near = dilate(true_edge, max(1.0, BOUNDARY_TOLERANCE * math.hypot(height, width)))
    return (edge & near).sum((1, 2)).double() / edge.sum((1, 2))


def _edges(regions: Tensor, counted: Tensor) -> Tensor:
    """Return the pixels of each region (C, H, W) beside a pixel that is outside it and `counted` (H, W)."""
    outside = ~regions & counted
    edge = torch.zeros_like(regions)
    edge[:, 1:] |= outside[:, :-1]
    edge[:, :-1] |= outside[:, 1:]
    edge[:, :, 1:] |= outside[:, :, :-1]
    edge[:, :, :-1] |= outside[:, :, 1:]
    return edge & regions


def dilate(masks: Tensor, radius: float) -> Tensor:
    """Set every pixel within `radius` of a set pixel, in Euclidean distance: masks (C, H, W) of bool."""
    reach = math.floor(radius)
    height, width = masks.shape[-2:]
    rows, reach_x = masks.clone(), 0  # the masks dilated sideways by `reach_x`
    dilated = torch.zeros_like(masks)
    # A disc is a stack of rows; from its top inwards they only get wider, so each is the last one, widened.
    for dy in range(reach, -1, -1):
        while (reach_x + 1) ** 2 + dy**2 <= radius**2:
            reach_x += 1
            if reach_x < width:
                rows[..., reach_x:] |= masks[..., : width - reach_x]
                rows[..., : width - reach_x] |= masks[..., reach_x:]
        if dy < height:
            dilated[:, dy:] |= rows[:, : height - dy]
            dilated[:, : height - dy] |= rows[:, dy:]
    return dilated


def object_overlaps(prediction: Tensor, target: Tensor, objects: Tensor, min_pixels: int) -> tuple[Tensor, Tensor]:
    """Return the label (N,) and the best box IoU (N,) of each object.

    prediction, target: label ids (H, W), the same id in both where the truth is void. objects (H, W): the number of
    each pixel's object, 0 for none.
    """
    numbered = torch.cat([objects.new_zeros(1), objects.flatten()])  # 0 is a number in any case
    objects = torch.unique(numbered, return_inverse=True)[1][1:].view_as(objects)
    areas = torch.bincount(objects.flatten())
    areas[0] = 0
    numbers = (areas >= min_pixels).nonzero()[:, 0]  # (N,)
    first = torch.full_like(areas, objects.numel())
    first.scatter_reduce_(0, objects.flatten(), torch.arange(objects.numel(), device=first.device), "amin")
    labels = target.flatten()[first[numbers]]  # an object has one label
    regions = find_regions(prediction.cpu().numpy())
    region_map = np.repeat(regions.run_regions, regions.run_lengths).reshape(prediction.shape)
    region_labels, sizes = (torch.from_numpy(part).to(target.device) for part in (regions.labels, regions.areas))
    region_boxes = numbered_boxes(torch.from_numpy(region_map).to(target.device), len(sizes))
    overlaps = target.new_zeros(len(numbers), dtype=torch.float64)
    for index, box in enumerate(numbered_boxes(objects, len(areas))[numbers]):
        candidates = region_boxes[(region_labels == labels[index]) & (sizes >= min_pixels)]  # (R, 4)
        if len(candidates):
            overlaps[index] = box_iou(box.expand_as(candidates), candidates).max()
    return labels, overlaps


def numbered_boxes(numbers: Tensor, count: int) -> Tensor:
    """Return the boxes (count, 4) around the pixels of each number 0 .. count - 1 in a map (H, W)."""
    height, width = numbers.shape
    rows = torch.zeros(count, height, dtype=torch.bool, device=numbers.device)
    columns = torch.zeros(count, width, dtype=torch.bool, device=numbers.device)
    rows[numbers, torch.arange(height, device=numbers.device)[:, None]] = True
    columns[numbers, torch.arange(width, device=numbers.device)] = True
    return box_edges(rows, columns)
