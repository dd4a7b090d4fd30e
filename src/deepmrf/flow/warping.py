"""Warping along a flow, and which flows can be relied on.

Pixel j of one frame is found at j + flow(j) in the other; flow holds (x, y) in pixels. What does not come back to where
it left (it is hidden there, or the estimate is wrong) or leaves the picture is not reliable.

Shapes: B batch, C channels, H, W.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


def warp(maps: Tensor, flow: Tensor, mode: Literal["bilinear", "nearest"] = "bilinear") -> Tensor:
    """maps (B, C, H, W) seen along flow (B, 2, H, W): pixel j of the result is maps at j + flow(j). Differentiable.

    Outside the picture the pixel at its border is repeated; `inside` tells where that happened.
    """
    if maps.dim() != 4 or flow.shape != (maps.shape[0], 2, *maps.shape[2:]):
        raise ValueError(
            f"maps has shape {tuple(maps.shape)} and flow {tuple(flow.shape)}: pass (B, C, H, W) and (B, 2, H, W)."
        )
    dtype = torch.promote_types(maps.dtype, torch.float32)  # half numbers cannot count pixels
    size = flow.new_tensor([maps.shape[3], maps.shape[2]], dtype=dtype).view(2, 1, 1)
    grid = (2 * _places(flow.to(dtype)) + 1) / size - 1  # -1 .. 1 from edge to edge
    return functional.grid_sample(
        maps.to(dtype), grid.permute(0, 2, 3, 1), mode, padding_mode="border", align_corners=False
    ).to(maps.dtype)


def _places(flow: Tensor) -> Tensor:
    """j + flow(j), (B, 2, H, W)."""
    height, width = flow.shape[-2:]
    y = torch.arange(height, device=flow.device, dtype=flow.dtype)
    x = torch.arange(width, device=flow.device, dtype=flow.dtype)
    return torch.stack([flow[:, 0] + x, flow[:, 1] + y[:, None]], 1)


def inside(flow: Tensor) -> Tensor:
    """Where j + flow(j) is in the picture, whose edge is half a pixel around the outer pixels: (B, 1, H, W) of bool."""
    height, width = flow.shape[-2:]
    places = _places(flow)
    x, y = places[:, :1], places[:, 1:]
    return (x >= -0.5) & (x <= width - 0.5) & (y >= -0.5) & (y <= height - 0.5)


def compose(first: Tensor, second: Tensor) -> Tensor:
    """The flow (B, 2, H, W) from frame 0 to 2, from those from 0 to 1 and from 1 to 2."""
    return first + warp(second, first)


def consistent(forward: Tensor, backward: Tensor, share: float = 0.01, slack: float = 0.5) -> Tensor:
    """Where a flow is reliable: who follows it and then the flow back arrives where he started. (B, 1, H, W) of bool

    The gap may be `slack` + `share` * (the squared lengths of both), in squared pixels (Sundaram et al., 2010). False
    where the flow leaves the picture or is unknown.
    """
    back = warp(backward, forward)
    gap = (forward + back).square().sum(1, keepdim=True)
    length = (forward.square() + back.square()).sum(1, keepdim=True)
    return (gap <= slack + share * length) & inside(forward)
