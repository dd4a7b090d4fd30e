"""The flow of a clip, both ways, and the trajectories of its pixels over several frames.

Shapes: B batch, C channels, T frames, H, W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.flow.warping import compose, consistent, inside, warp

Link = tuple[Tensor, Tensor]
"""(flow (B, 2, T, H, W), reliable (B, 1, T, H, W)) from every frame to one a fixed number of frames away."""


@dataclass(frozen=True)
class Flow:
    """The flows of B clips of T frames, both ways, and where they can be relied on."""

    forward: Tensor
    """(B, 2, T - 1, H, W): from frame t to t + 1."""
    backward: Tensor
    """(B, 2, T - 1, H, W): from frame t + 1 to t."""
    forward_reliable: Tensor | None = None
    """(B, 1, T - 1, H, W) of bool; None finds out by `consistent`. What leaves the picture is never reliable."""
    backward_reliable: Tensor | None = None
    """The same for backward."""

    def __post_init__(self) -> None:
        forward, backward = self.forward, self.backward
        if forward.dim() != 5 or forward.shape[1] != 2 or backward.shape != forward.shape:
            raise ValueError(
                f"forward has shape {tuple(forward.shape)} and backward {tuple(backward.shape)}: "
                "pass both as (B, 2, T - 1, H, W)."
            )
        if not forward.is_floating_point() or not backward.is_floating_point():
            raise TypeError(f"forward is {forward.dtype}, backward {backward.dtype}: pass flows in pixels as floats.")
        dtype = torch.promote_types(torch.promote_types(forward.dtype, backward.dtype), torch.float32)
        ways = {"forward": forward.to(dtype), "backward": backward.to(dtype)}
        found = {}
        for name, other in (("forward", "backward"), ("backward", "forward")):
            given = getattr(self, f"{name}_reliable")
            if given is None:
                sure = consistent(fold(ways[name]), fold(ways[other]))
            elif given.shape != (forward.shape[0], 1, *forward.shape[2:]):
                raise ValueError(
                    f"{name}_reliable has shape {tuple(given.shape)} beside flows {tuple(forward.shape)}: "
                    "pass (B, 1, T - 1, H, W)."
                )
            else:
                sure = fold(given).bool() & inside(fold(ways[name]))
            found[f"{name}_reliable"] = unfold(sure, forward.shape[0])
        for name, value in {**ways, **found}.items():
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, T, H, W)."""
        batch, _, pairs, height, width = self.forward.shape
        return batch, pairs + 1, height, width

    def to(self, device: torch.device | str) -> Flow:
        """The same on another device."""
        return Flow(*(getattr(self, field.name).to(device) for field in fields(self)))

    def cut(self, start: int, stop: int) -> Flow:
        """The flow of frames start .. stop - 1."""
        if not 0 <= start < stop <= self.shape[1]:
            raise ValueError(f"Frames {start} .. {stop - 1} are not in this clip: it has {self.shape[1]}, from 0 on.")
        return Flow(*(getattr(self, field.name)[:, :, start : stop - 1] for field in fields(self)))

    def crop(self, top: int, left: int, height: int, width: int) -> Flow:
        """The flow of a part of the picture; what leaves that part is no longer reliable."""
        if min(top, left) < 0 or top + height > self.shape[2] or left + width > self.shape[3]:
            raise ValueError(f"{height} x {width} pixels at ({top}, {left}) are not all in {self.shape[2:]}.")
        rows, columns = slice(top, top + height), slice(left, left + width)
        return Flow(*(getattr(self, field.name)[..., rows, columns] for field in fields(self)))

    def flip(self) -> Flow:
        """The flow of the picture in a mirror, left for right."""
        turn = self.forward.new_tensor([-1.0, 1.0]).view(2, 1, 1, 1)
        masks = [mask.flip(-1) for mask in (self.forward_reliable, self.backward_reliable) if mask is not None]
        return Flow(self.forward.flip(-1) * turn, self.backward.flip(-1) * turn, *masks)

    def resize(self, height: int, width: int) -> Flow:
        """The flow of the picture at another size; reliability is found out anew."""
        batch, _, tall, wide = self.shape
        scale = self.forward.new_tensor([width / wide, height / tall]).view(2, 1, 1)
        ways = []
        for way in (self.forward, self.backward):
            fresh = functional.interpolate(fold(way), (height, width), mode="bilinear", align_corners=False)
            ways.append(unfold(fresh * scale, batch))
        return Flow(*ways)

    def trajectories(self, before: int, after: int) -> dict[int, Link]:
        """By step: from every frame t to t + step, for step = -before .. after but 0, by following the flows between.

        Where a trajectory is not reliable all the way, or the clip has no such frame, the flow is 0.
        """
        found: dict[int, Link] = {}
        for sign, reach in ((-1, before), (1, after)):
            if reach:
                found[sign] = self._neighbour(sign)
            for step in range(2, reach + 1):
                found[sign * step] = _follow(found[sign * (step - 1)], found[sign], sign * (step - 1))
        return found

    def _neighbour(self, sign: int) -> Link:
        """From every frame to the next, or to the one before."""
        flow, sure = (self.forward, self.forward_reliable) if sign > 0 else (self.backward, self.backward_reliable)
        assert sure is not None  # found out when the flow was made
        flow = torch.where(sure, flow, 0)
        none = (0, 0, 0, 0, 0, 1) if sign > 0 else (0, 0, 0, 0, 1, 0)  # the last frame has no next
        return functional.pad(flow, none), functional.pad(sure, none)


def _follow(so_far: Link, neighbour: Link, step: int) -> Link:
    """so_far leads `step` frames away; go on to the neighbour from there."""
    flow, sure = (fold(x) for x in so_far)
    batch = so_far[0].shape[0]
    on, on_sure = (fold(frames_at(x, step, x.shape[2] + step)) for x in neighbour)
    # Between pixels all four must be reliable: the others' flows are of no use.
    sure = sure & (warp(on_sure.to(flow.dtype), flow) > 0.999)
    further = compose(flow, on)
    sure = sure & inside(further)
    return unfold(torch.where(sure, further, 0), batch), unfold(sure, batch)


def frames_at(maps: Tensor, start: int, stop: int) -> Tensor:
    """Frames start .. stop - 1 of maps (B, C, T, H, W), zeros where the clip has none."""
    first, last = min(max(start, 0), maps.shape[2]), min(max(stop, 0), maps.shape[2])
    border = (min(max(-start, 0), stop - start), min(max(stop - maps.shape[2], 0), stop - start))
    there = maps[:, :, first:last]
    return functional.pad(there, (0, 0, 0, 0, *border)) if any(border) else there


def fold(maps: Tensor) -> Tensor:
    """(B, C, T, H, W) -> (B * T, C, H, W)."""
    return maps.transpose(1, 2).flatten(0, 1)


def unfold(maps: Tensor, batch: int) -> Tensor:
    """(B * T, C, H, W) -> (B, C, T, H, W)."""
    return maps.view(batch, maps.shape[0] // batch, *maps.shape[1:]).transpose(1, 2)


def join(flows: Sequence[Flow]) -> Flow:
    """The flow of a clip from those of its parts, each of which begins with the last frame of the one before."""
    if not flows:
        raise ValueError("There is nothing to join: pass at least one flow.")
    return Flow(*(torch.cat([getattr(flow, field.name) for flow in flows], 2) for field in fields(Flow)))
