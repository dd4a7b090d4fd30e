"""The bilateral filter of rloss, by its names and in its order of arguments.

    out[k, i] = sum over j of exp(-|xy_i - xy_j|^2 / 2 sigma_xy^2 - |rgb_i - rgb_j|^2 / 2 sigma_rgb^2) in[k, j]

Arrays may be flat, as rloss passes them: images (N, 3, H, W), values (N, K, H, W). deepmrf.losses.DenseCRFLoss is the
loss itself, with gradients, on any device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deepmrf.densecrf.crf import as_floats
from deepmrf.ops.lattice import build_lattice, lattice_filter
from deepmrf.ops.lattice.features import bilateral_features


def bilateralfilter_batch(
    images: Any, ins: Any, outs: Any, N: int, K: int, H: int, W: int, sigma_rgb: float, sigma_xy: float
) -> None:  # fmt: skip
    """Filter K maps of N images, and write the sums into `outs`, a float32 array of N * K * H * W numbers."""
    pictures, values = as_floats(images, "images"), as_floats(ins, "ins")
    if pictures.size % max(1, N * H * W) or values.size != N * K * H * W or np.size(outs) != values.size:
        raise ValueError(
            f"images has {pictures.size} numbers, ins {values.size} and outs {np.size(outs)}, but N={N}, K={K}, H={H}, "
            f"W={W} need {3 * N * H * W} (three channels), {N * K * H * W} and {N * K * H * W}."
        )
    planes = torch.from_numpy(pictures.reshape(N, -1, H, W))
    lattice = build_lattice(bilateral_features(planes, sigma_xy, sigma_rgb, reverse=True))
    with torch.inference_mode():
        sums = lattice_filter(torch.from_numpy(values.reshape(N, K, H * W)), lattice)
    np.copyto(outs, sums.numpy().reshape(np.shape(outs)))


def bilateralfilter(image: Any, ins: Any, outs: Any, H: int, W: int, sigma_rgb: float, sigma_xy: float) -> None:
    """Filter one map of one image; see bilateralfilter_batch."""
    bilateralfilter_batch(image, ins, outs, 1, 1, H, W, sigma_rgb, sigma_xy)
