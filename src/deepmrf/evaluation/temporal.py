"""Temporal consistency: the share of pixels that have the same label as in the frame before. Flicker lowers it.

    consistency = pixels whose label equals that at x + flow(x) in the frame before / pixels with a reliable link

x + flow(x) is rounded to the nearest pixel. Pixels that are void in either frame do not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from deepmrf.evaluation.metrics import check_label_ids
from deepmrf.flow import Flow, warp
from deepmrf.flow.clip import fold


class TemporalConsistency(Metric):
    """Temporal consistency over any number of clips, in any number of processes.

    ignore: the id of void. options: those of torchmetrics.
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
        check_label_ids("labels", labels)
        if not isinstance(flow, Flow):
            raise TypeError(f"flow is a {type(flow).__name__}: pass a deepmrf.flow.Flow, such as estimate(frames).")
        clips = labels[None] if labels.dim() == 3 else labels
        if tuple(clips.shape) != flow.shape:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)}, the flow is of clips {flow.shape}: pass label ids "
                "(B, T, H, W), or (T, H, W) for one clip, and the flow of the same frames."
            )
        flow = flow.to(self.device)
        ids = clips.to(self.device)[:, None]  # (B, 1, T, H, W)
        current, previous = fold(ids[:, :, 1:]), fold(ids[:, :, :-1])
        warped = warp(previous.to(torch.float64), fold(flow.backward).nan_to_num(), "nearest")
        previous = warped.round().to(current.dtype)
        linked = fold(flow.backward_reliable) & (current != self.ignore) & (previous != self.ignore)
        self.agreeing += (linked & (current == previous)).sum()
        self.linked += linked.sum()

    def compute(self) -> Tensor:
        """Return the share of linked pixels that agree, in [0, 1]; NaN if none is linked, as in clips of one frame."""
        return self.agreeing.double() / self.linked
