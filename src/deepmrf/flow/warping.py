"""Warp tensors along a flow, and test which flows are reliable.

Pixel j of one frame is at j + flow(j) in the other; flow holds (x, y) in pixels. A flow is not reliable at a pixel if
following it and then the flow back does not return to the pixel (it is hidden there, or the estimate is wrong), or if
it leaves the image.

Shapes: B batch, C channels, H, W.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops import linked


def warp(maps: Tensor, flow: Tensor, mode: Literal["bilinear", "nearest"] = "bilinear") -> Tensor:
    """Sample maps (B, C, H, W) at j + flow(j), flow (B, 2, H, W); outside the image its border is repeated."""
    if maps.dim() != 4 or flow.shape != (maps.shape[0], 2, *maps.shape[2:]):
        raise ValueError(f"maps {tuple(maps.shape)} and flow {tuple(flow.shape)}: pass (B, C, H, W) and (B, 2, H, W).")
    dtype = torch.promote_types(maps.dtype, torch.float32)  # half precision cannot count pixels
    size = flow.new_tensor([maps.shape[3], maps.shape[2]], dtype=dtype).view(2, 1, 1)
    grid = (2 * _destinations(flow.to(dtype)) + 1) / size - 1  # -1 .. 1 from edge to edge
    return functional.grid_sample(
        maps.to(dtype), grid.permute(0, 2, 3, 1), mode, padding_mode="border", align_corners=False
    ).to(maps.dtype)


def _destinations(flow: Tensor) -> Tensor:
    """j + flow(j), (B, 2, H, W)."""
    height, width = flow.shape[-2:]
    y = torch.arange(height, device=flow.device, dtype=flow.dtype)
    x = torch.arange(width, device=flow.device, dtype=flow.dtype)
    return torch.stack([flow[:, 0] + x, flow[:, 1] + y[:, None]], 1)


def inside(flow: Tensor) -> Tensor:
    """Return where j + flow(j) is in the image, at most half a pixel from a pixel's centre: (B, 1, H, W) of bool."""
    height, width = flow.shape[-2:]
    destinations = _destinations(flow)
    x, y = destinations[:, :1], destinations[:, 1:]
    return (x >= -0.5) & (x <= width - 0.5) & (y >= -0.5) & (y <= height - 0.5)


def compose(first: Tensor, second: Tensor) -> Tensor:
    """Return the flow (B, 2, H, W) from frame 0 to 2, given the flows from 0 to 1 and from 1 to 2."""
    return first + warp(second, first)


def consistent(forward: Tensor, backward: Tensor, share: float = 0.01, slack: float = 0.5) -> Tensor:
    """Return where a flow passes the forward-backward check, (B, 1, H, W) of bool (Sundaram et al., 2010).

    |forward(j) + backward(j + forward(j))|^2 <= slack + share * (the sum of both squared lengths), in squared pixels.
    False where the flow leaves the image or is unknown.
    """
    if linked.suits_flow(forward, backward):
        return linked.reliable(forward, backward, share, slack)
    back = warp(backward, forward)
    gap = (forward + back).square().sum(1, keepdim=True)
    length = (forward.square() + back.square()).sum(1, keepdim=True)
    return (gap <= slack + share * length) & inside(forward)
