"""Inputs of a benchmark: a photograph, and labels that are smooth with edges, as a network gives them. Seeded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IMAGES = ("photo", "generated", "noise")
"""A photograph (generated where scikit-image is missing), coloured regions, or noise: the worst for a lattice."""
REGIONS = 6
"""Objects per image: each has its own colour, and the labels lean towards it."""


def _smooth(batch: int, channels: int, size: int, cells: int, generator: torch.Generator) -> Tensor:
    """Random maps that vary over size / cells pixels. (B, channels, size, size)"""
    coarse = torch.randn(batch, channels, cells, cells, generator=generator)
    return functional.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)


def photograph(size: int) -> Tensor | None:
    """scikit-image's astronaut at size x size (1, 3, size, size), or None where it is not installed."""
    try:
        from skimage.data import astronaut
    except ImportError:
        return None
    photo = torch.from_numpy(astronaut().copy()).permute(2, 0, 1)[None].float() / 255
    if size == photo.shape[-1]:
        return photo
    return functional.interpolate(photo, size=(size, size), mode="bilinear", antialias=True)


def make_inputs(batch: int, labels: int, size: int, seed: int, kind: str = "photo") -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, L, H, W) and an image (B, 3, H, W) in [0, 1] whose edges they roughly follow; float32."""
    generator = torch.Generator().manual_seed(seed)
    regions = _smooth(batch, REGIONS, size, 5, generator).argmax(1)  # (B, H, W)
    colours = torch.rand(REGIONS, 3, generator=generator)
    image = colours[regions].movedim(-1, 1).contiguous()
    image += 0.08 * _smooth(batch, 3, size, 9, generator) + 0.02 * torch.randn(image.shape, generator=generator)
    photo = photograph(size) if kind == "photo" else None
    if photo is not None:  # the colours of a real photograph cost a dense CRF's lattice more than a generated image's
        image = photo.expand(batch, -1, -1, -1).contiguous()
    elif kind == "noise":
        image = torch.rand(image.shape, generator=generator)
    log_p = torch.empty(batch, labels, size, size)
    for label in range(labels):  # one map at a time: the largest case fills most of the memory
        log_p[:, label] = _smooth(batch, 1, size, 12, generator)[:, 0]
        log_p[:, label] += 2.0 * (regions == label % REGIONS)
        log_p[:, label] += 0.3 * torch.randn(batch, size, size, generator=generator)
    log_p -= log_p.logsumexp(1, keepdim=True)
    return log_p, image.clamp_(0, 1)
