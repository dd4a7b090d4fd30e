"""Unary energies of labels and probabilities, and features of images, by pydensecrf's names.

The module has the name that pydensecrf gave it, so that one import line changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmrf.densecrf.crf import Floats, as_floats

__all__ = [
    "compute_unary",
    "create_pairwise_bilateral",
    "create_pairwise_gaussian",
    "softmax_to_unary",
    "unary_from_labels",
    "unary_from_softmax",
]


def unary_from_labels(labels: Any, n_labels: int, gt_prob: float, zero_unsure: bool = True) -> Floats:
    """Energies (n_labels, N) of a label map that is right with probability gt_prob.

    zero_unsure: id 0 means "any label", and ids 1 .. n_labels stand for the labels; else ids are 0 .. n_labels - 1.
    """
    if not 0 < gt_prob < 1:
        raise ValueError(f"gt_prob={gt_prob!r} must lie between 0 and 1, without both.")
    ids = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels).ravel()
    if not np.issubdtype(ids.dtype, np.integer) and not (ids == np.floor(ids)).all():
        raise ValueError("The labels must be whole numbers.")
    ids = ids.astype(np.int64)
    least, most = (0, n_labels) if zero_unsure else (0, n_labels - 1)
    if ids.size and (ids.min() < least or ids.max() > most):
        raise ValueError(
            f"The labels are {ids.min()} to {ids.max()}, but with n_labels={n_labels} and "
            f"zero_unsure={zero_unsure} they must be {least} to {most}."
        )
    wrong = (1 - gt_prob) / (n_labels - 1) if n_labels > 1 else gt_prob
    energy = np.full((n_labels, ids.size), -np.log(wrong), dtype=np.float32)
    known = np.flatnonzero(ids) if zero_unsure else np.arange(ids.size)
    energy[ids[known] - int(zero_unsure), known] = -np.log(gt_prob)
    if zero_unsure:
        energy[:, ids == 0] = -np.log(1 / n_labels)
    return energy


def compute_unary(labels: Any, M: int, GT_PROB: float = 0.5) -> Floats:
    """unary_from_labels under its old name, with id 0 for "any label"."""
    return unary_from_labels(labels, M, GT_PROB, True)


def unary_from_softmax(sm: Any, scale: float | None = None, clip: float | None = 1e-5) -> Floats:
    """Energies (labels, N) of probabilities (labels, ...).

    scale: trust them so much, and mix them with the uniform distribution for the rest. clip: the smallest probability.
    """
    if isinstance(sm, Tensor):
        sm = sm.detach().cpu()
        sm = sm.float() if sm.dtype == torch.bfloat16 else sm  # NumPy has no bfloat16
    shares = np.asarray(sm)
    if shares.ndim < 1 or not shares.shape[0]:
        raise ValueError(f"The probabilities have shape {shares.shape}: give (labels, ...).")
    if scale is not None:
        if not 0 < scale <= 1:
            raise ValueError(f"scale={scale!r} must lie above 0, and at most at 1.")
        shares = scale * shares + (1 - scale) / shares.shape[0]
    if clip is not None:
        shares = np.clip(shares, clip, 1.0)
    with np.errstate(divide="ignore"):
        return as_floats(-np.log(shares).reshape(shares.shape[0], -1), "The energy")


def softmax_to_unary(sm: Any, GT_PROB: float = 1) -> Floats:
    """unary_from_softmax under its old name, without clipping."""
    warnings.warn("softmax_to_unary is the old name of unary_from_softmax.", DeprecationWarning, stacklevel=2)
    return unary_from_softmax(sm, None if GT_PROB == 1 else GT_PROB, clip=None)


def create_pairwise_gaussian(sdims: Sequence[float], shape: Sequence[int]) -> Floats:
    """Positions over widths of the pixels of an image of any number of axes: (axes, N)."""
    _check_widths(sdims, len(shape), "sdims")
    axes = np.meshgrid(*[np.arange(n, dtype=np.float32) / np.float32(s) for n, s in zip(shape, sdims, strict=True)],
                       indexing="ij")  # fmt: skip
    return np.stack(axes).reshape(len(shape), -1)


def create_pairwise_bilateral(
    sdims: Sequence[float], schan: float | Sequence[float], img: Any, chdim: int = -1
) -> Floats:
    """Positions and colours over widths of the pixels of an image of any number of axes: (axes + channels, N).

    schan: the width of all channels, or a sequence of one per channel. chdim: which axis of img holds the channels; -1
    means that there is none, and the image has one channel.
    """
    image = as_floats(img, "img")
    planes = image[None] if chdim == -1 else np.moveaxis(image, chdim, 0)  # (channels, *S)
    widths = np.ravel(np.asarray(schan, dtype=np.float32))
    if np.ndim(schan) and len(widths) != len(planes):
        first, count = f"{widths[0] if len(widths) else 1:g}", len(planes)
        some = "1 channel" if count == 1 else f"{count} channels"
        each = f"({first},)" if count == 1 else f"({', '.join([first] * count)})" if count <= 4 else f"{count} widths"
        raise ValueError(
            f"schan is a sequence of length {len(widths)}, but the image has {some}{' (chdim=-1)' * (chdim == -1)}: "
            f"give one per channel ({each}), or schan={first} for all channels."
        )
    _check_widths(widths.tolist(), len(widths), "schan")
    colours = planes.reshape(len(planes), -1) / widths[:, None]
    return np.concatenate([create_pairwise_gaussian(sdims, planes.shape[1:]), colours.astype(np.float32)])


def _check_widths(widths: Sequence[float], count: int, name: str) -> None:
    if len(widths) != count:
        raise ValueError(f"{name} has {len(widths)} widths, but the image has {count} axes: give one each.")
    if not all(0 < width < np.inf for width in widths):
        raise ValueError(f"{name}={list(widths)} must be positive numbers: they are widths of Gaussians.")
