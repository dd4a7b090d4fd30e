"""LA by objects, where a data set numbers its objects (instances): boxes around objects, not around classes.

The box of each true object is compared with those of the predicted regions of its class, connected by their sides; the
best IoU counts, and 0 if there is none. A predicted region may be the best of several objects, and then fits none well.
Objects and regions of fewer than `min_pixels` pixels are left out, and so are objects of the background.

Shapes: N objects, R regions, H height, W width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepmrf.evaluation.regions import box_edges, box_iou
from deepmrf.predict.regions import find_regions


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
