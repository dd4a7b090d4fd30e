"""Boxes and boundaries of regions, which LA and BA compare.

A boundary pixel of a region lies in it and has one of its four neighbours outside; the image's frame is no boundary.
A predicted boundary against void is not judged, because the truth there is unknown. The edge of a true region against
void excuses a predicted boundary near it.

Shapes: C classes, H height, W width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
