"""Dynamic node linking: the neighbours of a pixel in time are those on its trajectory, not those at its own place.

    (i, j) is an edge in time  <=>  j = i + the way from i to j along the optical flow

Each frame t gets a stack of the frames around it, brought onto it along the flow:

    aligned[dt][z] = frame t + dt at (z + the flow from t to t + dt at z),     dt = -before .. after

Inside the stack every trajectory is a straight line, so the window of b12 and the patterns of b13 run over it as over a
rigid cube, and only the result of the stack's own frame, dt = 0, is kept. What is not reliable, leaves the picture or
the clip is zero in the stack: zero probability, or zero penalty, weighs nothing. Without a flow the stacks are the
rigid cubes themselves.

Shapes: B batch, C maps, T frames, R = before + 1 + after, H, W.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepmrf.flow import Flow, warp
from deepmrf.flow.clip import Link, fold, frames_at, unfold
from deepmrf.ops.window import Reach

STACK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Memory for the stacks of a few frames at a time."""


class Links:
    """What every frame of a clip is linked to, as far as a window reaches; None instead of a flow is the rigid cube."""

    def __init__(self, frames: int, trajectories: dict[int, Link] | None = None) -> None:
        self.frames, self.trajectories = frames, trajectories

    @classmethod
    def along(cls, flow: Flow, dtype: torch.dtype, *reaches: Reach) -> Links:
        """The links of a clip for windows that reach so far along time, (before, after)."""
        frames = flow.shape[1]
        before, after = (min(max(reach[side] for reach in reaches), frames - 1) for side in (0, 1))
        found = flow.trajectories(before, after)
        return cls(frames, {step: (way.to(dtype), sure) for step, (way, sure) in found.items()})

    def reach(self, reach: Reach) -> Reach:
        """A window's reach along time, cut to what the clip has."""
        return min(reach[0], self.frames - 1), min(reach[1], self.frames - 1)

    def stack(self, maps: Tensor, reach: Reach, span: slice, keep: bool = False) -> Tensor:
        """maps (B, C, T, H, W) -> the stacks of the frames in `span`, (B * frames, C, R, H, W); dt = 0 is at `before`.

        keep: leave what is not reliable as it is at the pixel's own place, instead of zero: for features, which have no
        zero and whose probability is zero there.
        """
        before, after = reach
        layers = []
        for step in range(-before, after + 1):
            near = fold(frames_at(maps, span.start + step, span.stop + step))
            if step and self.trajectories is not None:
                way, sure = (fold(x[:, :, span]) for x in self.trajectories[step])
                near = warp(near, way)
                near = near if keep else torch.where(sure, near, 0)
            layers.append(near)
        return torch.stack(layers, 2)

    def over(self, maps: Tensor, channels: int, run: Callable[[slice], Tensor]) -> Tensor:
        """run(span), (B * frames, L, H, W), for some frames at a time -> (B, L, T, H, W).

        channels: maps of a frame's stacks in all; as many frames go together as fit the memory set aside.
        """
        batch = maps.shape[0]
        each = batch * channels * maps[0, 0, 0].numel() * maps.element_size()
        step = max(1, STACK_BYTES.get(maps.device.type, STACK_BYTES["cpu"]) // max(each, 1))
        spans = [slice(start, min(start + step, self.frames)) for start in range(0, self.frames, step)]
        parts = [unfold(run(span), batch) for span in spans]
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]
