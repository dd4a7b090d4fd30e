"""Dynamic node linking: a pixel's neighbours in other frames are those on its trajectory along the optical flow.

    (i, j) is an edge in time  <=>  j = i + the flow from i's frame to j's frame at i

Each frame t gets a stack of the frames around it, brought onto it along the flow:

    stack[dt][z] = frame t + dt at (z + flow from t to t + dt at z),     dt = -before .. after

In the stack, every trajectory is a straight line. So the window of b12 and the patterns of b13 run over it as over a
rigid cube, and only the result at dt = 0 counts. Pixels whose flow is not reliable or leaves the image or the clip are
zero in the stack: zero probability or penalty adds nothing. Without a flow, the stacks are the rigid cubes themselves.

Shapes: B batch, C maps, T frames, R = before + 1 + after, H, W.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from deepmrf.flow import Flow, warp
from deepmrf.flow.clip import Link, fold, frames_at, unfold
from deepmrf.ops import linked
from deepmrf.ops.linked import Way
from deepmrf.ops.registry import needs_gradient
from deepmrf.ops.window import Reach

STACK_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Memory for stacks at a time, by device."""


def weigh(weights: Tensor) -> bool:
    """Do these weights of other frames count for anything, or may training change that?"""
    return torch.compiler.is_compiling() or needs_gradient(weights) or bool(weights.any())


class Links:
    """The links between the frames of a clip, as far as a window reaches; without trajectories, a rigid cube.

    wanted: the frames that have links, and get stacks; None for all.
    """

    def __init__(self, frames: int, trajectories: dict[int, Link] | None = None, wanted: slice | None = None) -> None:
        self.frames, self.trajectories = frames, trajectories
        self.wanted = range(frames)[wanted or slice(None)]

    @classmethod
    def along(cls, flow: Flow, dtype: torch.dtype, *reaches: Reach, wanted: slice | None = None) -> Links:
        """Links along the flow for windows with these reaches (before, after) in time."""
        frames = flow.shape[1]
        before, after = (min(max(reach[side] for reach in reaches), frames - 1) for side in (0, 1))
        trajectories = flow.trajectories(before, after, wanted)
        return cls(frames, {dt: (way.to(dtype), reliable) for dt, (way, reliable) in trajectories.items()}, wanted)

    def reach(self, reach: Reach) -> Reach:
        """A window's reach in time, cut to the length of the clip."""
        return min(reach[0], self.frames - 1), min(reach[1], self.frames - 1)

    def stack(self, maps: Tensor, reach: Reach, span: slice, keep: bool = False) -> Tensor:
        """maps (B, C, T, H, W) -> the stacks of the frames in `span`, (B * frames, C, R, H, W); dt = 0 is at `before`.

        keep: do not set unreliable pixels to zero. For features: no colour means "nothing", and q is zero there.
        """
        return torch.stack([self.layer(maps, dt, span, keep) for dt in range(-reach[0], reach[1] + 1)], 2)

    def layer(self, maps: Tensor, dt: int, span: slice, keep: bool = False) -> Tensor:
        """One layer of the stacks: what is dt frames away, (B * frames, C, H, W)."""
        layer = fold(frames_at(maps, span.start + dt, span.stop + dt))
        if dt and self.trajectories is not None:
            flow, reliable = self._link(dt, span)
            layer = warp(layer, flow)
            layer = layer if keep else torch.where(reliable, layer, 0)
        return layer

    def added(self, maps: Tensor, q: Tensor, weights: Tensor, reach: Reach) -> Tensor:
        """maps (B, L, T, H, W) of the wanted frames, plus weights[|dt| - 1] times q on the trajectory, over dt."""
        before, after = self.reach(reach)
        by_dt = {dt: weights[abs(dt) - 1] for dt in range(-before, after + 1) if dt}
        first = self.wanted.start

        def run(span: slice) -> Tensor:
            return self._add(fold(maps[:, :, span.start - first : span.stop - first]), q, by_dt, span)

        return self.over(q, q.shape[1] * (1 + len(by_dt)), run)

    def _add(self, maps: Tensor, q: Tensor, weights: Mapping[int, Tensor], span: slice) -> Tensor:
        """maps (B * frames, L, H, W) plus, over dt, weights[dt] times q (B, L, T, H, W) on the trajectory."""
        if self.trajectories is None:
            return sum((weight * self.layer(q, dt, span) for dt, weight in weights.items()), maps)
        ways = [
            Way(weight, fold(frames_at(q, span.start + dt, span.stop + dt)), *self._link(dt, span))
            for dt, weight in weights.items()
        ]
        return add_along(maps, ways)

    def _link(self, dt: int, span: slice) -> Link:
        """The flow (B * frames, 2, H, W) from the frames in `span` to those dt frames away, and its reliability."""
        assert self.trajectories is not None  # a rigid cube has none
        first = self.wanted.start
        flow, reliable = (fold(x[:, :, span.start - first : span.stop - first]) for x in self.trajectories[dt])
        return flow, reliable

    def over(self, maps: Tensor, channels: int, run: Callable[[slice], Tensor]) -> Tensor:
        """Call run(span) -> (B * frames, L, H, W) for a few wanted frames at a time; join the results, (B, L, T, H, W).

        channels: maps in the stack of one frame; as many frames go together as STACK_BYTES allows.
        """
        batch = maps.shape[0]
        frame_bytes = batch * channels * maps[0, 0, 0].numel() * maps.element_size()
        step = max(1, STACK_BYTES.get(maps.device.type, STACK_BYTES["cpu"]) // max(frame_bytes, 1))
        stop = self.wanted.stop
        spans = [slice(start, min(start + step, stop)) for start in range(self.wanted.start, stop, step)]
        results = [unfold(run(span), batch) for span in spans]
        return torch.cat(results, 2) if len(results) > 1 else results[0]


def add_along(maps: Tensor, ways: Sequence[Way]) -> Tensor:
    """maps (B, L, H, W) plus what the pixels on the trajectories add: the equation of ops/linked.py.

    Without gradients it may overwrite maps.
    """
    if linked.suits(maps, ways):
        return linked.add_linked(maps.contiguous(), ways)
    for way in ways:
        maps = torch.addcmul(maps, way.weight, torch.where(way.reliable, warp(way.maps, way.flow), 0))
    return maps
