"""Temporal consistency, by hand and against loops over pixels."""

from __future__ import annotations

import math

import pytest
import torch

from deepmrf.evaluation.temporal import TemporalConsistency
from deepmrf.flow import Flow

VOID = 255


def consistency(labels, flow, ignore=VOID):
    metric = TemporalConsistency(ignore)
    metric.update(labels, flow)
    return float(metric.compute())


def steps(columns, reliable=None):
    """Two frames one row high: the flow back from the second, along x."""
    back = torch.zeros(1, 2, 1, 1, len(columns))
    back[0, 0, 0, 0] = torch.tensor(columns)
    sure = torch.ones_like(back[:, :1]) if reliable is None else torch.tensor(reliable).view(back[:, :1].shape)
    return Flow(torch.zeros_like(back), back, sure, sure)


def test_by_hand():
    labels = torch.tensor([[[0, 1, 1, 2, 2]], [[0, 0, 1, 1, 2]]])
    # Everything has moved one to the right; what enters at the left was not in the picture.
    assert consistency(labels, steps([-1.0] * 5)) == 4 / 4
    assert consistency(labels, steps([0.0] * 5)) == 3 / 5
    assert consistency(labels, steps([0.0] * 5, reliable=[True, True, False, False, True])) == 2 / 3
    # To the nearest pixel: 0.6 is one on, 0.4 is none.
    assert consistency(labels, steps([-0.4, -0.6, -0.6, -0.6, -0.6])) == 5 / 5
    # Void in either frame does not count.
    labels[0, 0, 1] = labels[1, 0, 4] = VOID
    assert consistency(labels, steps([0.0] * 5)) == 2 / 3
    assert consistency(labels, steps([0.0] * 5), ignore=2) == 2 / 3


def test_against_loops():
    labels = torch.randint(4, (2, 3, 6, 9)).repeat_interleave(2, 2)
    labels[torch.rand(labels.shape) < 0.1] = VOID
    ways, sure = 2 * torch.randn(2, 2, 2, 2, 12, 9), torch.rand(2, 2, 1, 2, 12, 9) < 0.7
    flow = Flow(*ways, *sure)
    agree = count = 0
    for b in range(2):
        for t in range(1, 3):
            for y in range(12):
                for x in range(9):
                    dx, dy = flow.backward[b, :, t - 1, y, x].tolist()
                    there = -0.5 <= x + dx <= 8.5 and -0.5 <= y + dy <= 11.5
                    if not there or not flow.backward_reliable[b, 0, t - 1, y, x]:
                        continue
                    now, then = labels[b, t, y, x], labels[b, t - 1, min(round(y + dy), 11), min(round(x + dx), 8)]
                    if now != VOID and then != VOID:
                        count += 1
                        agree += int(now == then)
    assert count > 100
    assert consistency(labels, flow) == pytest.approx(agree / count)
    parts = [TemporalConsistency(), TemporalConsistency()]
    for b, metric in enumerate(parts):
        for t in (0, 1):
            pair_flow = Flow(*(x[b : b + 1] for x in vars(flow).values())).cut(t, t + 2)
            metric.update(labels[b, t : t + 2].to(torch.uint8), pair_flow)
    parts[0].merge_state(parts[1])
    assert parts[0].compute().item() == pytest.approx(agree / count)


def test_one_frame_says_nothing_of_consistency():
    flow = Flow(torch.zeros(1, 2, 0, 4, 5), torch.zeros(1, 2, 0, 4, 5))
    assert math.isnan(consistency(torch.zeros(1, 4, 5, dtype=torch.int64), flow))


def test_unknown_flow_does_not_count():
    back = torch.zeros(1, 2, 1, 1, 4)
    back[..., 0], back[..., 1] = 1.666e9, math.nan
    labels = torch.tensor([[[1, 1, 0, 0]], [[0, 0, 0, 1]]])
    assert consistency(labels, Flow(torch.zeros_like(back), back)) == 1 / 2


def test_says_what_it_wants():
    flow = steps([0.0] * 5)
    with pytest.raises(TypeError, match=r"labels is torch\.float32, but must hold label ids"):
        consistency(torch.zeros(2, 1, 5), flow)
    with pytest.raises(ValueError, match=r"labels has shape \(3, 1, 5\), the flow is of clips \(1, 2, 1, 5\)"):
        consistency(torch.zeros(3, 1, 5, dtype=torch.int64), flow)
    with pytest.raises(TypeError, match=r"flow is a Tensor: pass a deepmrf\.flow\.Flow"):
        consistency(torch.zeros(2, 1, 5, dtype=torch.int64), torch.zeros(3))
