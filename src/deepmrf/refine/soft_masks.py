"""Soft masks: one grey map per image, the probability of the foreground.

    DIR/STEM.png                 grey of 8 or 16 bits, white is certain
    DIR/STEM.npy, DIR/STEM.npz   floats of 0 to 1, of the image's size

Saliency maps, class activation maps and binary masks that were resized or smoothed are such. Nothing in a picture says
that its numbers are shades and not label ids; `are_soft` tells by their spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepmrf.data.files import VOID, DataError
from deepmrf.refine.decode import (
    MIN_PROBABILITY,
    RANGE_TOLERANCE,
    Array,
    LogProbabilities,
    Region,
    read_array,
    read_shades,
    read_shares,
)

if TYPE_CHECKING:
    from deepmrf.refine.predictions import PredictionFiles

MIN_SHADES = 16
"""Pictures of soft masks show at least this many different values, in every quarter of 0 to 255."""
MAX_FILES_READ = 50
"""Files that are read to tell."""
MAX_EVEN_VALUES = 9
"""So many values at equal steps from 0 to 255 are labels painted for the eye, not shades."""


def open_soft_mask(files: PredictionFiles, gt_prob: float | None = None) -> tuple[LogProbabilities, str]:
    """Log-probabilities (2, *S) of background and foreground; gt_prob: no probability is larger than this."""
    shares = _read_shares(files)
    if shares is None:
        raise DataError(
            f"{files.path} is no soft mask: save a grey picture of 8 or 16 bits, or floats of 0 to 1 (H, W).",
            files.path,
            "unreadable",
        )
    least = MIN_PROBABILITY if gt_prob is None else 1 - gt_prob
    kind = "soft masks, grey is the probability of the foreground"
    kind += "" if gt_prob is None else f", right with probability {gt_prob:g} at most"

    def read(region: Region) -> Tensor:
        p = torch.from_numpy(np.array(shares[region], dtype=np.float32)).clamp(least, 1 - least)
        return torch.stack([1 - p, p]).log()

    return LogProbabilities((2, *shares.shape), read), kind


def are_soft(predictions: Sequence[PredictionFiles]) -> bool:
    """Are these soft masks, and not label maps? Maps of floats are; pictures are where shades are many and spread."""
    values = (_all_shades(predictions) or set()) - {0, VOID}
    return len(values) >= MIN_SHADES and {value // 64 for value in values} == {0, 1, 2, 3}


def check_not_painted(predictions: Sequence[PredictionFiles]) -> None:
    """Raise a ValueError where pictures hold a few values at equal steps from 0 to 255: 255 is no void id there."""
    values = sorted(_all_shades(predictions) or ())
    if not 3 <= len(values) <= MAX_EVEN_VALUES or np.abs(values - np.linspace(0, 255, len(values))).max() > 1:
        return
    ids = ", ".join(map(str, values))
    raise ValueError(
        f'The label maps hold {ids}, and 255 would be void: give a labels.json with "ids": [{ids}] and as many '
        '"names", or read them as soft masks.'
    )


def _all_shades(predictions: Sequence[PredictionFiles]) -> set[int] | None:
    """The values of some of the predictions, from all parts of their folder; None where one is no soft mask."""
    values: set[int] = set()
    for files in predictions[:: max(1, len(predictions) // MAX_FILES_READ)]:
        with suppress(DataError):  # reading it later names it
            shades = _shades(files)
            if shades is None:
                return None
            values |= shades
    return values


def _shades(files: PredictionFiles) -> set[int] | None:
    """The values of a map that may be a soft mask, all of 0 to 255 for one of floats; None for other predictions."""
    if files.ids is None:
        return None if _read_shares(files) is None else set(range(256))
    return None if files.confidence is not None else read_shades(files.ids)


def _read_shares(files: PredictionFiles) -> Array | None:
    """The map (*S) as numbers of 0 to 1; None for a prediction that is none."""
    if files.ids is not None:
        return read_shares(files.ids)
    if files.array is None:
        return None
    values = read_array(files.array, lazy=True)
    values = values[0] if values.ndim == files.dims + 1 and values.shape[0] == 1 else values
    values = values.T if files.reversed_axes else values
    if values.ndim != files.dims or values.dtype.kind != "f" or not values.size:
        return None
    within = values.min() >= -RANGE_TOLERANCE and values.max() <= 1 + RANGE_TOLERANCE  # NaN is not
    return values if within else None
