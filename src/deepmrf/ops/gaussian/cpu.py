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

from deepmrf.ops.gaussian import Arguments
from deepmrf.ops.jobs import empty, run_jobs, suits_window_sums
from deepmrf.ops.registry import Implementation, Pair
from deepmrf.ops.window import ALL, image_window, take_frame, touched, unit_features

ROWS_PER_JOB = 9
"""A multiple of the rows that share their neighbours."""
PIXELS_PER_JOB = 1024
"""Of a row: their sums stay in the second cache."""


class _Problem:
    """The operator's arguments as the kernels take them: images (T, H, W), T and H being one axis of R rows."""

    def __init__(self, a: Arguments, mirrored: bool) -> None:
        from deepmrf.ops.gaussian.cpu_kernels import EXCLUDED, PIXELS_READ_BEYOND
        from deepmrf.ops.gaussian.cpu_sums import ROWS

        self.arguments = a
        self.dtype = torch.float64 if a.q.dtype == torch.float64 else torch.float32
        (frames, self.height, self.width), sides = image_window(a.q.shape[2:], a.window, mirrored)
        self.rows = frames * self.height
        self.maps_shape = (*a.q.shape[:2], self.rows, self.width)
        self.before = tuple(before for before, _ in sides)
        self.window = tuple(before + after + 1 for before, after in sides)
        # An odd number of cache lines: rows then begin at places of a cache that are far apart.
        self.length = (-(-(self.width + self.window[2] + PIXELS_READ_BEYOND) // 16) | 1) * 16

        # 2^-x is cheaper than e^-x, and the factors of both squared distances go into what they are computed from.
        self.a, self.b = a.bandwidths.detach().to(torch.float64)
        self.colour_scale = math.sqrt(0.5 * math.log2(math.e)) / self.a
        distance_scale = 0.5 * math.log2(math.e) / self.b**2
        images, count = a.features.shape[:2]
        self.features = torch.zeros(images, count, self.rows + ROWS - 1, self.length, dtype=self.dtype)
        scaled = unit_features(a.features.detach(), self.dtype) * self.colour_scale.to(self.dtype)
        self.features[:, :, : self.rows, self.before[2] : self.before[2] + self.width] = scaled.reshape(
            images, count, self.rows, self.width
        )
        steps = (1.0,) * (3 - len(a.spacing)) + tuple(a.spacing)
        squares = [
            (torch.arange(-before, after + 1, dtype=torch.float64) * step).square() * distance_scale
            for (before, after), step in zip(sides, steps, strict=True)
        ]
        distances = squares[0][:, None, None] + squares[1][:, None] + squares[2]
        distances[self.before] = EXCLUDED
        # Rows that are in the windows of some rows of a group are not in those of others.
        border = (0, PIXELS_READ_BEYOND, ROWS - 1, ROWS - 1)
        self.distances = functional.pad(distances.to(self.dtype), border, value=EXCLUDED)
        self.weights = a.weights.detach().to(self.dtype).numpy()

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
        pulled: Tensor, features_too: bool = False,
    ) -> Tensor:  # fmt: skip
        """Every job of a mode: the sums over pairs and of grad. With `frame`, only the pixels j there."""
        from deepmrf.ops.gaussian import cpu_kernels as kernels

        gate, keep, frame = self.arguments.gate, self.arguments.keep, self.arguments.frame
        volume = len(self.arguments.window) == 3

        lines = self.bordered(neighbours)
        maps = [x.numpy() for x in (q, grad, ungated, out, pulled)]
        centres, features, distances = centre.numpy(), self.features.numpy(), self.distances.numpy()
        # In BACKWARD, j is a neighbour in the windows of other pixels; otherwise it is the centre of its own window.
        first, last, only_frame = 0, self.rows, -1
        if frame != ALL and volume and mode == kernels.BACKWARD:
            only_frame = frame
        elif frame != ALL and volume:
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


def _forward(a: Arguments) -> Pair:
    from deepmrf.ops.gaussian.cpu_kernels import FORWARD

    problem = _Problem(a, mirrored=False)
    x = problem.maps(a.q)
    out = empty(problem.maps_shape, problem.dtype)
    ungated = torch.empty_like(out) if a.keep else x
    problem.run(FORWARD, x, x, x, x, ungated, out, x)
    out, ungated = (take_frame(x.view(a.q.shape), a.frame).contiguous() for x in (out, ungated))
    if not math.isfinite(out.sum()) and (bad := ~torch.isfinite(a.q)).any():
        # A weight of 0 does not stop a NaN just outside a window, so it is taken out and put back where it belongs.
        out, ungated = _forward(a._replace(q=torch.where(bad, 0, a.q)))
        spoilt = take_frame(touched(bad, a.window), a.frame)
        return out.masked_fill_(spoilt, torch.nan), ungated.masked_fill_(spoilt, torch.nan) if a.keep else ungated
    return out.to(a.q.dtype), ungated.to(a.q.dtype) if a.keep else a.q.new_empty(0)


def _backward(grad: Tensor, ungated: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    """Pairs are met with z at the centre, so that one pass over the mirrored windows does for q and the bandwidths."""
    from deepmrf.ops.gaussian.cpu_kernels import BACKWARD, PAIRS

    problem = _Problem(a, mirrored=True)
    x, g = problem.maps(a.q), problem.maps(grad)
    before_gate = problem.maps(ungated) if a.gate else x
    reaching = g * x if a.gate else g  # what reaches the window sum
    grad_q = empty(problem.maps_shape, problem.dtype)
    count = a.features.shape[1] if needed[1] else 1
    pulled = torch.zeros(len(x), count, *problem.maps_shape[2:], dtype=problem.dtype)
    total, by_colour, by_distance, by_bias = problem.run(
        BACKWARD, reaching, x, x, g, before_gate, grad_q, pulled, needed[1]
    )
    w = a.weights.detach().to(torch.float64)[0]
    # The sums hold squared distances times log2(e) / 2 a^2 and log2(e) / 2 b^2.
    unit = 2 / math.log2(math.e)
    grad_bandwidths = torch.stack([w * by_colour * unit / problem.a, w * by_distance * unit / problem.b])
    grad_features = None
    if needed[1]:
        # The other pixel of each pair: the same with j at the centre.
        _Problem(a, mirrored=False).run(PAIRS, x, reaching, x, g, before_gate, grad_q, pulled, needed[1])
        grad_features = pulled.mul_(-w / (problem.a**2 * problem.colour_scale)).view(a.features.shape)
    return grad_q.view(a.q.shape), grad_features, torch.stack([total, by_bias]), grad_bandwidths


IMPLEMENTATION = Implementation("numba", _forward, _backward, suits_window_sums)
