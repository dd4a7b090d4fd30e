"""The other ways to do it: what a user would write or install instead of this library.

direct_loop   b12 as its equation stands, one offset of the window at a time
unfolded_crf  a CRF inside a window in plain PyTorch, after the idea of ConvCRF (Teichmann and Cipolla, 2018)
pydensecrf    dense CRF on the permutohedral lattice (Kraehenbuehl and Koltun, 2011), the usual package, CPU only

Box sums in plain PyTorch, the fourth peer, are this library's own fallback: deepmrf.ops.use("torch").
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from deepmrf.ops.window import offsets, overlap, reaches

APPEARANCE, COLOUR_WIDTH, POSITION_WIDTH = 10.0, 13 / 255, 80.0
SMOOTHNESS, SMOOTH_WIDTH = 3.0, 3.0
"""Dense CRF's customary parameters, the same for every peer and for deepmrf.dense_crf."""

UNFOLD_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}
"""What unfolded maps may take at a time: unfolding all labels at once is no faster and may not fit."""


def direct_loop(
    q: Tensor, features: Tensor, weights: Tensor, window: int, gate: bool = True, sample: int | None = None
) -> Tensor:
    """b12 for the distance kernel, (w_colour, w_position, w_bias) = weights; `sample` does only so many offsets.

    Half the window's offsets take half the time, so a sample tells what all would take; its result means nothing.
    """
    w_colour, w_position, w_bias = weights
    total = torch.zeros_like(q)
    every = list(offsets(reaches((window, window)), q.shape[2:], centre=True))
    if sample is not None and sample < len(every):  # at random: near offsets overlap more than far ones
        every = [every[i] for i in np.random.default_rng(0).choice(len(every), sample, replace=False)]
    for offset in every:
        j, z = overlap(offset, q.shape[2:])
        (_, j_rows, j_columns), (_, z_rows, z_columns) = j, z
        d = features[:, :, j_rows, j_columns] - features[:, :, z_rows, z_columns]
        d = d.square_().sum(1, keepdim=True)  # (B, 1, H', W')
        d.mul_(w_colour).add_(w_position * sum(o * o for o in offset))
        total[:, :, j_rows, j_columns].addcmul_(d, q[:, :, z_rows, z_columns])
    return (total.mul_(q) if gate else total).add_(w_bias)


def _unfold(x: Tensor, window: int) -> Tensor:
    """Every pixel's window of x (B, C, H, W), zeros outside: (B, C, window^2, H W)."""
    return functional.unfold(x, window, padding=window // 2).view(*x.shape[:2], window * window, -1)


def _edges(image: Tensor, window: int) -> Tensor:
    """Both Gaussian kernels, symmetrically normalised, weighted and added: (B, window^2, H W)."""
    offsets = torch.arange(window, device=image.device, dtype=image.dtype) - window // 2
    squared = (offsets.square()[:, None] + offsets.square()).flatten()[:, None]  # |j - z|^2, (window^2, 1)
    inside = _unfold(torch.ones_like(image[:1, :1]), window)[0, 0]
    inside[window * window // 2] = 0  # no pixel is its own neighbour
    total = torch.zeros_like(inside)[None]
    colour = (_unfold(image, window) - image.flatten(2)[:, :, None]).square_().sum(1)
    bilateral = torch.exp(-colour / (2 * COLOUR_WIDTH**2) - squared / (2 * POSITION_WIDTH**2)) * inside
    smooth = (torch.exp(-squared / (2 * SMOOTH_WIDTH**2)) * inside)[None]
    for weight, kernel in ((APPEARANCE, bilateral), (SMOOTHNESS, smooth)):
        norm = kernel.sum(1, keepdim=True).clamp_min(1e-20).rsqrt()  # (B, 1, H W)
        around = _unfold(norm.view(-1, 1, *image.shape[2:]), window)[:, 0]
        total = total + weight * norm * kernel * around
    return total


def unfolded_crf(log_p: Tensor, image: Tensor, window: int = 11, iterations: int = 5) -> Tensor:
    """Mean field of a CRF with Potts compatibility whose edges end at the window. Returns log q (B, L, H, W).

    The kernel is computed once and stored; each iteration unfolds q and sums. window must be odd.
    """
    edges = _edges(image, window)
    per_label = log_p.shape[0] * window**2 * log_p[0, 0].numel() * log_p.element_size()
    step = max(1, UNFOLD_BYTES.get(log_p.device.type, UNFOLD_BYTES["cpu"]) // per_label)
    log_q = log_p
    for _ in range(iterations):
        messages = torch.empty_like(log_p)
        for start in range(0, log_p.shape[1], step):
            maps = log_q[:, start : start + step].exp()
            received = _unfold(maps, window).mul_(edges[:, None]).sum(2)  # (B, labels of the step, H W)
            messages[:, start : start + step] = received.view_as(maps)
        penalty = messages.sum(1, keepdim=True) - messages  # Potts: all other labels cost the same
        log_q = (log_p - penalty).log_softmax(1)
    return log_q


def pydensecrf_installed() -> bool:
    """Can the peer be imported?"""
    return importlib.util.find_spec("pydensecrf") is not None


def pydensecrf(energy: NDArray[np.float32], photo: NDArray[np.uint8], iterations: int) -> NDArray[np.float32]:
    """pydensecrf2 on one image: energy -log p (L, H W), photo (H, W, 3). The lattice is made per image: it counts."""
    densecrf: Any = importlib.import_module("pydensecrf.densecrf")
    height, width = photo.shape[:2]
    crf = densecrf.DenseCRF2D(width, height, energy.shape[0])
    crf.setUnaryEnergy(energy)
    crf.addPairwiseGaussian(sxy=SMOOTH_WIDTH, compat=SMOOTHNESS)
    crf.addPairwiseBilateral(sxy=POSITION_WIDTH, srgb=round(COLOUR_WIDTH * 255), rgbim=photo, compat=APPEARANCE)
    return np.array(crf.inference(iterations))
