"""Boxes and boundaries of regions, by hand, and dilation against distances."""

from __future__ import annotations

import pytest
import torch

from deepmrf.evaluation.regions import boundary_precision, box_iou, boxes, dilate


def test_boxes_and_their_overlap():
    masks = torch.zeros(2, 6, 8, dtype=torch.bool)
    masks[0, 1, 2] = masks[0, 4, 3] = True
    masks[1, 3:, 3:] = True
    assert boxes(masks).tolist() == [[1, 5, 2, 4], [3, 6, 3, 8]]
    assert box_iou(boxes(masks[:1]), boxes(masks[1:])).tolist() == [2 / (8 + 15 - 2)]
    assert box_iou(torch.tensor([[0, 1, 0, 1]]), torch.tensor([[2, 3, 2, 3]])).tolist() == [0]


@pytest.mark.parametrize("radius", [0.5, 1.0, 1.5, 2.3, 4.5, 30.0])
def test_dilation_is_euclidean(radius):
    masks = torch.rand(2, 13, 17) < 0.03
    places = torch.cartesian_prod(torch.arange(13), torch.arange(17)).double()
    for mask, dilated in zip(masks, dilate(masks, radius), strict=True):
        near = (torch.cdist(places, mask.nonzero().double()) <= radius + 1e-9).any(1)
        assert torch.equal(dilated, near.view(13, 17))


def test_boundary_by_hand():
    truth = torch.zeros(1, 3, 9, dtype=torch.bool)
    truth[..., :3] = True  # its boundary is column 2
    prediction = torch.zeros_like(truth)
    # columns 2, 3 and 4; and what sticks out below a 0
    prediction[:, 0, :3] = prediction[:, 1, :4] = prediction[:, 2, :5] = True
    valid = torch.ones(3, 9, dtype=torch.bool)
    # (0, 2), (1, 3) and (2, 4) end rows; (2, 4) also has 0 above, (1, 3) too, (2, 3) does not: r = 1 reaches column 3
    assert boundary_precision(truth, prediction, valid).tolist() == [2 / 3]
    valid[1, 4] = valid[0, 3] = False  # (1, 3) now ends against void everywhere: it is not judged
    assert boundary_precision(truth, prediction, valid).tolist() == [0.0]
    assert boundary_precision(truth, torch.ones_like(truth), valid).isnan().all()  # no boundary at all
