"""How many pixels each label has before and after refinement: a dense CRF may do away with small structures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmrf.predict.tiles import Maps

MIN_SHARE = 5e-4
"""Labels with a smaller share of the pixels may change as they like."""
MAX_LOSS = 1 / 3
"""The share of its pixels from which on a label has lost many."""
MAX_TIMES = 2.0
"""Times its pixels from which on a label has gained many."""
MAX_NAMED = 3
"""Labels that are named; the others are counted."""
VALUES_AT_A_TIME = 1 << 24
"""Log-probabilities that are looked at together: those of a large image stay in their file."""

PixelCounts = tuple[tuple[int, int], ...]
"""(before, after) of each label."""


def count_pixels(log_p: Maps, labels: Tensor) -> PixelCounts:
    """Count the pixels of each label by the prediction (L, *S) and by its refined label map (*S) of uint8.

    Void pixels, of which the prediction says nothing, count for no label.
    """
    count = log_p.shape[0]
    before, after = torch.zeros(2, count, dtype=torch.int64)
    rows = max(1, VALUES_AT_A_TIME * len(labels) // math.prod(log_p.shape))
    for start in range(0, len(labels), rows):
        part = log_p[:, start : start + rows]
        highest, index = part.max(0)
        known = highest > part.amin(0)
        before += torch.bincount(index[known], minlength=count)
        after += torch.bincount(labels[start : start + rows][known], minlength=count)
    return tuple(zip(before.tolist(), after.tolist(), strict=True))


def total(counts: Sequence[PixelCounts]) -> PixelCounts:
    """The pixels of all images."""
    labels = zip(*counts, strict=True)  # the pairs of each
    return tuple((sum(before for before, _ in pairs), sum(after for _, after in pairs)) for pairs in labels)


def describe_changes(counts: PixelCounts, names: Sequence[str]) -> str:
    """What labels lost or gained many of their pixels, the greatest loss first; "" where none did."""
    least = max(1, MIN_SHARE * sum(before for before, _ in counts))
    changes = [(after / before, name) for name, (before, after) in zip(names, counts, strict=False) if before >= least]
    parts = []
    for times, name in sorted(changes):
        if times == 0:
            parts.append(f"{name} lost all its pixels")
        elif times <= 1 - MAX_LOSS:
            parts.append(f"{name} lost {int(100 * (1 - times))} % of its pixels")
        elif times >= MAX_TIMES:
            parts.append(f"{name} has {times:.1f} times its pixels")
    more = [f"{len(parts) - MAX_NAMED} more labels changed as much"] if len(parts) > MAX_NAMED else []
    return ", ".join(parts[:MAX_NAMED] + more)
