"""The kernel of linked.py, compiled by numba. Import this module on first use only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.ops.jobs import compiled

Array = NDArray[Any]


@compiled
def add_rows(
    out: Array, q: Array, flow: Array, reliable: Array, weight: float, gate: bool, index: int, frame: int, there: int,
    top: int, bottom: int,
) -> None:  # fmt: skip
    """Rows top .. bottom - 1 of out (L, H, W) += frame `there` of q (L, T, H, W), sampled along flow[:, index].

    flow (2, N, H, W), reliable (1, N, H, W). gate: times q of `frame`.
    """
    labels, _, height, width = q.shape
    corners, weights = np.empty((4, width), np.int64), np.empty((4, width), q.dtype)
    for y in range(top, bottom):
        for x in range(width):
            at_x = min(max(x + flow[0, index, y, x], 0), width - 1)
            at_y = min(max(y + flow[1, index, y, x], 0), height - 1)
            left, above = int(at_x), int(at_y)
            right, below = min(left + 1, width - 1), min(above + 1, height - 1)
            share_x, share_y = at_x - left, at_y - above
            factor = weight if reliable[0, index, y, x] else 0.0
            corners[0, x], corners[1, x] = above * width + left, above * width + right
            corners[2, x], corners[3, x] = below * width + left, below * width + right
            weights[0, x], weights[1, x] = factor * (1 - share_y) * (1 - share_x), factor * (1 - share_y) * share_x
            weights[2, x], weights[3, x] = factor * share_y * (1 - share_x), factor * share_y * share_x
        for label in range(labels):
            maps, row = q[label, there].reshape(height * width), out[label, y]
            own = q[label, frame, y]
            for x in range(width):
                total = weights[0, x] * maps[corners[0, x]] + weights[1, x] * maps[corners[1, x]]
                total += weights[2, x] * maps[corners[2, x]] + weights[3, x] * maps[corners[3, x]]
                row[x] += own[x] * total if gate else total
