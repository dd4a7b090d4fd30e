"""Volume, a small unary network for volumes: a 3-D U-Net.

    stride    1       2       4
    encoder   width   2 width 4 width     two 3 x 3 x 3 filters each, group norm, ReLU; maxima of 2 x 2 x 2 between
    decoder   width   2 width             upsampled coarser map beside the encoder's map, and two filters

Group norm does not depend on the batch. Cell i of stride s covers the voxels s i to s i + s - 1 for every size: sizes
are rounded up on the way down and cropped on the way up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepmrf.unary.network import Network

GROUPS = 8
"""Number of groups of channels in group norm."""


def _double(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions, each with group norm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        filters = nn.Conv3d(channels, outputs, 3, padding=1, bias=False)
        layers += [filters, nn.GroupNorm(GROUPS, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _enlarge(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Resize trilinearly to twice the size, cropped to `size`."""
    larger = functional.interpolate(maps, scale_factor=2, mode="trilinear", align_corners=False)
    return larger[..., : size[0], : size[1], : size[2]]


class Volume(Network):
    """volume (B, 1, D, H, W) of real numbers in any unit -> logits (B, L, D, H, W).

    labels: L. width: channels at full size, a multiple of 8; they double at each level. levels: number of strides.
    dropout: probability of dropping a channel before the last layer, while training. channels: of the volume.
    Each volume is first normalised to mean 0 and deviation 1.
    """

    name = "volume"

    def __init__(
        self, labels: int, *, width: int = 16, levels: int = 3, dropout: float = 0.1, channels: int = 1
    ) -> None:
        super().__init__(labels, dropout, width=width, levels=levels, channels=channels)
        if width % GROUPS:
            raise ValueError(f"width={width} must be a multiple of {GROUPS}: channels are normalised in groups.")
        widths = [width * 2**level for level in range(levels)]
        self.encoder = nn.ModuleList(_double(finer, own) for finer, own in pairwise([channels, *widths]))
        self.decoder = nn.ModuleList(_double(coarse + fine, fine) for fine, coarse in reversed(list(pairwise(widths))))
        self.classify = nn.Sequential(nn.Dropout3d(dropout), nn.Conv3d(width, labels, 1))

    def forward(self, volume: Tensor) -> Tensor:
        x = self._normalised(volume)
        maps: list[Tensor] = []
        for level, filters in enumerate(self.encoder):
            x = filters(x if level == 0 else functional.max_pool3d(x, 2, ceil_mode=True))
            maps.append(x)
        maps.pop()
        for filters in self.decoder:
            fine = maps.pop()
            x = filters(torch.cat([_enlarge(x, fine.shape[2:]), fine], 1))
        logits: Tensor = self.classify(x)
        return logits

    def _normalised(self, volume: Tensor) -> Tensor:
        if not isinstance(volume, Tensor):
            raise TypeError(f"volume is a {type(volume).__name__}: pass a torch.Tensor (torch.from_numpy makes one).")
        shape = tuple(volume.shape)
        if volume.dim() != 5 or volume.shape[1] != self.channels:
            remedy = "add axes with [None]" if volume.dim() < 5 else "pass such a batch"
            raise ValueError(f"volume must have shape (B, {self.channels}, D, H, W), but has {shape}: {remedy}.")
        if not volume.numel():
            raise ValueError(f"volume has shape {shape}, which holds no voxels: pass at least one along every axis.")
        if volume.is_complex() or volume.dtype == torch.bool:
            raise TypeError(f"volume is {volume.dtype}: pass real numbers.")
        weight = next(self.parameters())
        # In full precision: in half, intensities of thousands lose their last digits and their squares overflow.
        real = volume.to(torch.promote_types(weight.dtype, torch.float32))
        mean = real.mean((2, 3, 4), keepdim=True)
        deviation = (real - mean).square().mean((2, 3, 4), keepdim=True).sqrt()
        return ((real - mean) / deviation.clamp_min(1e-6)).to(weight.dtype)

    def load_imagenet(self, path: str | os.PathLike[str]) -> NoReturn:
        """Raise an error: there are no such weights for volumes."""
        raise ValueError(f"{path} cannot start a network for volumes: leave the ImageNet weights out.")
