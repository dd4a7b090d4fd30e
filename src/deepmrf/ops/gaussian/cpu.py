"""The Gaussian kernel on the CPU, compiled by numba: weights once for all labels, sums in registers.

The equations are in the package's docstring; the kernels and how they sum are in cpu_kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops.distance import unit_features
from deepmrf.ops.jobs import empty, run_jobs, suits_window_sums
from deepmrf.ops.registry import Implementation
from deepmrf.ops.window import ALL, box_sum, reaches, take_frame

ROWS_PER_JOB = 9
"""A multiple of the rows that share their neighbours."""
PIXELS_PER_JOB = 1024
"""Of a row: their sums stay in the second cache."""


def _odd_cache_lines(size: int) -> int:
    """size, rounded up to an odd number of cache lines: rows then begin at places of a cache that are far apart."""
    return (-(-size // 16) | 1) * 16


class _Problem:
    """The operator's arguments as the kernels take them: images (T, H, W), T and H being one axis of R rows."""

    def __init__(
        self,
        q: Tensor,
        features: Tensor,
        weights: Tensor,
        bandwidths: Tensor,
        window: Sequence[int],
        spacing: Sequence[float],
        mirrored: bool,
    ) -> None:
        from deepmrf.ops.gaussian.cpu_kernels import EXCLUDED, PIXELS_READ_BEYOND
        from deepmrf.ops.gaussian.cpu_sums import ROWS

        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.volume = q.dim() == 5
        size = (1,) * (5 - q.dim()) + tuple(q.shape[2:])
        steps = (1.0,) * (5 - q.dim()) + tuple(spacing)
        sides = reaches((1,) * (5 - q.dim()) + tuple(window), mirrored)
        cut = [(min(before, n - 1), min(after, n - 1)) for (before, after), n in zip(sides, size, strict=True)]
        self.height, self.width = size[1:]
        self.rows = size[0] * size[1]
        self.maps_shape = (q.shape[0], q.shape[1], self.rows, self.width)
        self.before = tuple(before for before, _ in cut)
        self.window = tuple(before + after + 1 for before, after in cut)
        self.length = _odd_cache_lines(self.width + self.window[2] + PIXELS_READ_BEYOND)

        # 2^-x is cheaper than e^-x, and the factors of both squared distances go into what they are computed from.
        self.a, self.b = bandwidths.detach().to(torch.float64)
        self.colour_scale = math.sqrt(0.5 * math.log2(math.e)) / self.a
        distance_scale = 0.5 * math.log2(math.e) / self.b**2
        count = features.shape[1]
        self.features = torch.zeros(q.shape[0], count, self.rows + ROWS - 1, self.length, dtype=self.dtype)
        scaled = unit_features(features.detach(), self.dtype) * self.colour_scale.to(self.dtype)
        self.features[:, :, : self.rows, self.before[2] : self.before[2] + self.width] = scaled.reshape(
            q.shape[0], count, self.rows, self.width
        )
        squares = [
            (torch.arange(-before, after + 1, dtype=torch.float64) * step).square() * distance_scale
            for (before, after), step in zip(cut, steps, strict=True)
        ]
        distances = squares[0][:, None, None] + squares[1][:, None] + squares[2]
        distances[self.before] = EXCLUDED
        # Rows that are in the windows of some rows of a group are not in those of others.
        border = (0, PIXELS_READ_BEYOND, ROWS - 1, ROWS - 1)
        self.distances = functional.pad(distances.to(self.dtype), border, value=EXCLUDED)
        self.weights = weights.detach().to(self.dtype).numpy()

    def maps(self, x: Tensor) -> Tensor:
        """(B, L, R, W), in the dtype to compute in."""
        return x.detach().to(self.dtype).contiguous().view(self.maps_shape)

    def bordered(self, x: Tensor) -> Any:
        """x (B, L, R, W) as (B, R, L, X), zeros outside."""
        images, labels = self.maps_shape[:2]
        lines = torch.zeros(images, self.rows, labels, self.length, dtype=self.dtype)
        lines[..., self.before[2] : self.before[2] + self.width] = x.transpose(1, 2)
        return lines.numpy()

    def run(
        self, mode: int, neighbours: Tensor, centre: Tensor, q: Tensor, grad: Tensor, ungated: Tensor, out: Tensor,
        pulled: Tensor, gate: bool, keep: bool, features_too: bool, frame: int = ALL,
    ) -> Tensor:  # fmt: skip
        """Every job of a mode: the sums over pairs and of grad. With `frame`, only the pixels j there."""
        from deepmrf.ops.gaussian import cpu_kernels as kernels

        lines = self.bordered(neighbours)
        maps = [x.numpy() for x in (q, grad, ungated, out, pulled)]
        centres, features, distances = centre.numpy(), self.features.numpy(), self.distances.numpy()
        # In BACKWARD, j is a neighbour in the windows of other pixels; otherwise it is the centre of its own window.
        first, last, only_frame = 0, self.rows, -1
        if frame != ALL and self.volume and mode == kernels.BACKWARD:
            only_frame = frame
        elif frame != ALL and self.volume:
            first, last = frame * self.height, (frame + 1) * self.height
        rows, columns = range(first, last, ROWS_PER_JOB), range(0, self.width, PIXELS_PER_JOB)
        parts = [(image, y, x) for image in range(self.maps_shape[0]) for y in rows for x in columns]
        sums = torch.zeros(len(parts), 4, dtype=torch.float64)

        def job(index: int) -> None:
            image, y, x = parts[index]
            kernels.job(
                mode, self.height, lines[image], centres[image], features[image], distances, self.before, self.window,
                self.weights, gate, keep, features_too, *[array[image] for array in maps], sums[index].numpy(), y,
                min(y + ROWS_PER_JOB, last), x, min(x + PIXELS_PER_JOB, self.width), only_frame,
            )  # fmt: skip

        run_jobs(job, len(parts))
        return sums.sum(0)


def _forward(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    keep: bool,
    frame: int = ALL,
) -> tuple[Tensor, Tensor]:
    from deepmrf.ops.gaussian.cpu_kernels import FORWARD

    problem = _Problem(q, features, weights, bandwidths, window, spacing, mirrored=False)
    x = problem.maps(q)
    out = empty(problem.maps_shape, problem.dtype)
    ungated = torch.empty_like(out) if keep else x
    problem.run(FORWARD, x, x, x, x, ungated, out, x, gate, keep, features_too=False, frame=frame)
    out, ungated = (take_frame(x.view(q.shape), frame).contiguous() for x in (out, ungated))
    if not math.isfinite(out.sum()) and (bad := ~torch.isfinite(q)).any():
        # A weight of 0 does not stop a NaN just outside a window, so it is taken out and put back where it belongs.
        clean = torch.where(bad, 0, q)
        out, ungated = _forward(clean, features, weights, bandwidths, window, spacing, gate, keep, frame)
        touched = take_frame(box_sum(bad.to(torch.float64), reaches(window)) > 0.5, frame)
        return out.masked_fill_(touched, torch.nan), ungated.masked_fill_(touched, torch.nan) if keep else ungated
    return out.to(q.dtype), ungated.to(q.dtype) if keep else q.new_empty(0)


def _backward(
    grad: Tensor,
    ungated: Tensor,
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    features_too: bool,
    frame: int = ALL,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs are met with z at the centre, so that one pass over the mirrored windows does for q and the bandwidths."""
    from deepmrf.ops.gaussian.cpu_kernels import BACKWARD, PAIRS

    problem = _Problem(q, features, weights, bandwidths, window, spacing, mirrored=True)
    x, g = problem.maps(q), problem.maps(grad)
    before_gate = problem.maps(ungated) if gate else x
    reaching = g * x if gate else g  # what reaches the window sum
    grad_q = empty(problem.maps_shape, problem.dtype)
    count = features.shape[1] if features_too else 1
    pulled = torch.zeros(q.shape[0], count, *problem.maps_shape[2:], dtype=problem.dtype)
    total, by_colour, by_distance, by_bias = problem.run(
        BACKWARD, reaching, x, x, g, before_gate, grad_q, pulled, gate, False, features_too, frame
    )
    w = weights.detach().to(torch.float64)[0]
    # The sums hold squared distances times log2(e) / 2 a^2 and log2(e) / 2 b^2.
    unit = 2 / math.log2(math.e)
    grad_bandwidths = torch.stack([w * by_colour * unit / problem.a, w * by_distance * unit / problem.b])
    grad_weights = torch.stack([total, by_bias])
    grad_features = torch.empty(0, dtype=problem.dtype)
    if features_too:
        # The other pixel of each pair: the same with j at the centre.
        ahead = _Problem(q, features, weights, bandwidths, window, spacing, mirrored=False)
        ahead.run(PAIRS, x, reaching, x, g, before_gate, grad_q, pulled, gate, False, features_too, frame)
        scale = -w / (problem.a**2 * problem.colour_scale)
        grad_features = pulled.mul_(scale).view(features.shape).to(q.dtype)
    return (
        grad_q.view(q.shape).to(q.dtype),
        grad_features,
        grad_weights.to(weights.dtype),
        grad_bandwidths.to(bandwidths.dtype),
    )


IMPLEMENTATION = Implementation("numba", _forward, _backward, suits_window_sums)
