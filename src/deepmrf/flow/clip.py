"""The flow of a clip in both directions, and the trajectories of its pixels over several frames.

Shapes: B batch, C channels, T frames, H, W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.flow.warping import compose, consistent, inside, warp
from deepmrf.ops import linked

Link = tuple[Tensor, Tensor]
"""(flow (B, 2, T, H, W), reliable (B, 1, T, H, W)) from every frame to the frame a fixed number of frames away."""


@dataclass(frozen=True)
class Flow:
    """The flows of B clips of T frames in both directions, and where they are reliable."""

    forward: Tensor
    """(B, 2, T - 1, H, W): from frame t to t + 1."""
    backward: Tensor
    """(B, 2, T - 1, H, W): from frame t + 1 to t."""
    forward_reliable: Tensor = None  # type: ignore[assignment]
    """(B, 1, T - 1, H, W) of bool; computed by `consistent` if None. Flow that leaves the image is never reliable."""
    backward_reliable: Tensor = None  # type: ignore[assignment]
    """(B, 1, T - 1, H, W) of bool: where backward is reliable."""

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
        flows = {"forward": forward.to(dtype), "backward": backward.to(dtype)}
        masks = {}
        for name, opposite in (("forward", "backward"), ("backward", "forward")):
            given = getattr(self, f"{name}_reliable")
            if given is None:
                reliable = consistent(fold(flows[name]), fold(flows[opposite]))
            elif given.shape != (forward.shape[0], 1, *forward.shape[2:]):
                raise ValueError(
                    f"{name}_reliable has shape {tuple(given.shape)} beside flows {tuple(forward.shape)}: "
                    "pass (B, 1, T - 1, H, W)."
                )
            else:
                reliable = fold(given).bool() & inside(fold(flows[name]))
            masks[f"{name}_reliable"] = unfold(reliable, forward.shape[0])
        for name, value in {**flows, **masks}.items():
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, T, H, W)."""
        batch, _, pairs, height, width = self.forward.shape
        return batch, pairs + 1, height, width

    def to(self, device: torch.device | str) -> Flow:
        """Move the flow to another device."""
        return _flow_of(*(getattr(self, field.name).to(device) for field in fields(self)))

    def cut(self, start: int, stop: int) -> Flow:
        """Return the flow of frames start .. stop - 1."""
        if not 0 <= start < stop <= self.shape[1]:
            raise ValueError(f"Frames {start} .. {stop - 1} are not in this clip: it has {self.shape[1]}, from 0 on.")
        return _flow_of(*(getattr(self, field.name)[:, :, start : stop - 1] for field in fields(self)))

    def crop(self, top: int, left: int, height: int, width: int) -> Flow:
        """Return the flow of a part of the image; flow that leaves this part is no longer reliable."""
        if min(top, left) < 0 or top + height > self.shape[2] or left + width > self.shape[3]:
            raise ValueError(f"{height} x {width} pixels at ({top}, {left}) are not all in {self.shape[2:]}.")
        rows, columns = slice(top, top + height), slice(left, left + width)
        return Flow(*(getattr(self, field.name)[..., rows, columns] for field in fields(self)))

    def flip(self) -> Flow:
        """Return the flow of the mirrored image, left and right exchanged."""
        sign = self.forward.new_tensor([-1.0, 1.0]).view(2, 1, 1, 1)
        masks = self.forward_reliable.flip(-1), self.backward_reliable.flip(-1)
        return Flow(self.forward.flip(-1) * sign, self.backward.flip(-1) * sign, *masks)

    def resize(self, height: int, width: int) -> Flow:
        """Return the flow of the resized image; reliability is computed anew."""
        batch, _, old_height, old_width = self.shape
        if (height, width) == (old_height, old_width):
            return self
        scale = self.forward.new_tensor([width / old_width, height / old_height]).view(2, 1, 1)
        flows = []
        for flow in (self.forward, self.backward):
            resized = functional.interpolate(fold(flow), (height, width), mode="bilinear", align_corners=False)
            flows.append(unfold(resized * scale, batch))
        return Flow(*flows)

    def trajectories(self, before: int, after: int, frames: slice | None = None) -> dict[int, Link]:
        """Link every frame t to frame t + step, for each step = -before .. after except 0: {step: link}.

        Where a trajectory is not reliable all the way, or the clip has no such frame, the flow is 0.
        frames: of these frames alone.
        """
        start, stop, _ = (frames or slice(None)).indices(self.shape[1])
        links: dict[int, Link] = {}
        for sign, reach in ((-1, before), (1, after)):
            if not reach:
                continue
            links[sign] = self._neighbour(sign, start, stop)
            for step in range(sign, sign * reach, sign):
                links[step + sign] = _follow(links[step], self._neighbour(sign, start + step, stop + step))
        return links

    def _neighbour(self, sign: int, start: int, stop: int) -> Link:
        """Return the link from the frames start .. stop - 1 to the next (sign 1) or to the previous one (sign -1)."""
        flow, reliable = (self.forward, self.forward_reliable) if sign > 0 else (self.backward, self.backward_reliable)
        shift = 0 if sign > 0 else -1  # the first frame has no previous one
        flow, reliable = (frames_at(x, start + shift, stop + shift) for x in (flow, reliable))
        return torch.where(reliable, flow, 0), reliable


def _follow(link: Link, neighbour: Link) -> Link:
    """Extend a link by the link to the neighbour from the frames that it leads to."""
    flow, reliable = (fold(x) for x in link)
    batch = link[0].shape[0]
    next_flow, next_reliable = (fold(x) for x in neighbour)
    if linked.suits_flow(flow, next_flow):
        extended, reliable = linked.follow(flow, reliable, next_flow, next_reliable)
        return unfold(extended, batch), unfold(reliable, batch)
    # Flow is interpolated between four pixels, and all four must be reliable.
    reliable = reliable & (warp(next_reliable.to(flow.dtype), flow) > 0.999)
    extended = compose(flow, next_flow)
    reliable = reliable & inside(extended)
    return unfold(torch.where(reliable, extended, 0), batch), unfold(reliable, batch)


def frames_at(maps: Tensor, start: int, stop: int) -> Tensor:
    """Frames start .. stop - 1 of maps (B, C, T, H, W), with zeros where the clip has no frame."""
    first, last = min(max(start, 0), maps.shape[2]), min(max(stop, 0), maps.shape[2])
    padding = (min(max(-start, 0), stop - start), min(max(stop - maps.shape[2], 0), stop - start))
    frames = maps[:, :, first:last]
    return functional.pad(frames, (0, 0, 0, 0, *padding)) if any(padding) else frames


def fold(maps: Tensor) -> Tensor:
    """(B, C, T, H, W) -> (B * T, C, H, W)."""
    return maps.transpose(1, 2).flatten(0, 1)


def unfold(maps: Tensor, batch: int) -> Tensor:
    """(B * T, C, H, W) -> (B, C, T, H, W)."""
    return maps.view(batch, maps.shape[0] // batch, *maps.shape[1:]).transpose(1, 2)


def join(flows: Sequence[Flow]) -> Flow:
    """Return the flow of a clip from those of its parts; each part begins with the last frame of the part before."""
    if not flows:
        raise ValueError("There is nothing to join: pass at least one flow.")
    return _flow_of(*(torch.cat([getattr(flow, field.name) for flow in flows], 2) for field in fields(Flow)))


def _flow_of(forward: Tensor, backward: Tensor, forward_reliable: Tensor, backward_reliable: Tensor) -> Flow:
    """Return a Flow of parts that were checked already."""
    flow = object.__new__(Flow)
    vars(flow).update(
        {
            **{"forward": forward, "backward": backward},
            **{"forward_reliable": forward_reliable, "backward_reliable": backward_reliable},
        }
    )
    return flow
