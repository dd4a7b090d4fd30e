"""The distance kernel on the CPU, compiled by numba: exact, one pass over q, and only a few rows of temporaries.

The equations are in the package's docstring; the kernels are in cpu_kernels.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmrf.ops.distance import Arguments
from deepmrf.ops.jobs import empty, run_jobs, suits_window_sums
from deepmrf.ops.registry import Implementation, Pair
from deepmrf.ops.window import ALL, image_window, take_frame, touched

LABELS_PER_JOB = 8
"""As many as a vector has lanes."""
MIN_DEEP_PLANES = 4
"""Planes in a window from which on sums over planes, for every pixel, are faster than a walk over the planes."""
PLANE_SUMS_BYTES = 6 << 20
"""Sums over planes that stay in the cache."""


def _array(x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    return x.detach().to(dtype).contiguous().view(shape).numpy()


class _Problem:
    """The operator's arguments as the kernels take them: images (T, H, W), T and H being one axis."""

    def __init__(self, a: Arguments) -> None:
        self.arguments = a
        self.dtype = torch.float64 if a.q.dtype == torch.float64 else torch.float32
        self.size = image_window(a.q.shape[2:], a.window).sizes
        self.maps_shape = (*a.q.shape[:2], self.size[0] * self.size[1], self.size[2])
        self.spacing = (1.0,) * (3 - len(a.spacing)) + tuple(float(s) for s in a.spacing)
        self.q = _array(a.q, self.dtype, self.maps_shape)
        wide = torch.float64 if a.features.dtype == torch.float64 else self.dtype
        features, self.scale = a.features.detach(), 1.0
        if features.dtype == torch.uint8:  # by NumPy, which wakes no threads of PyTorch
            features, self.scale = torch.from_numpy(features.numpy().astype(self.q.dtype)), 1 / 255
        self.features = _array(features, wide, (*features.shape[:2], *self.maps_shape[2:]))
        self.mean = self.features.mean((2, 3), dtype=np.float64) * self.scale
        self.weights = a.weights.detach().to(torch.float64).numpy()

    def run(self, mode: int, grad: Any, ungated: Any, out: Any, pulled: Any) -> tuple[bool, Tensor]:
        """Every job of a mode: (did no NaN spread, the sums that are the gradients to the weights)."""
        from deepmrf.ops.distance import cpu_kernels as kernels

        images, labels = self.maps_shape[:2]
        a, (depth, height, width) = self.arguments, self.size
        mirrored = mode in (kernels.BACKWARD, kernels.PULL_BACK)
        window = image_window(a.q.shape[2:], a.window, mirrored)
        around, overlap = (sum(reach) for reach in window.reaches[:2])
        single = a.frame != ALL and len(a.window) == 3 and mode == kernels.FORWARD
        # Sums over planes should stay in the cache, but they are computed again where windows of two strips overlap.
        maps = 2 + len(kernels.NORMS[mode]) + self.features.shape[1]
        rows = PLANE_SUMS_BYTES // (width * maps * LABELS_PER_JOB * 8) - overlap
        rows = min(max(rows, overlap, 8), height)
        deep = () if single or around + 1 < MIN_DEEP_PLANES * (1 + overlap / rows) else (0,)
        planes = [(a.frame, a.frame + 1)] if single else [(0, depth)] if deep else [(t, t + 1) for t in range(depth)]
        # Labels add to the same gradient to the features, so one job must take all of them there.
        pull = mode in (kernels.PULL_AHEAD, kernels.PULL_BACK)
        group = labels if pull else -(-labels // -(-labels // LABELS_PER_JOB))
        # Strips of rows make jobs for every thread, but each strip begins by filling a window, at half the cost of its
        # rows or less.
        threads, jobs = torch.get_num_threads(), images * -(-labels // group) * len(planes)
        min_strips = -(-height // rows) if deep else 1
        max_strips = max(min_strips, min(4 * threads, height // max(overlap, 8)))
        strips = min(
            range(min_strips, max_strips + 1),
            key=lambda count: -(-jobs * count // threads) * (height / count + (1.0 if deep else 0.5) * overlap),
        )
        plan = [
            (image, label, part, height * strip // strips, height * (strip + 1) // strips)
            for image in range(images)
            for label in range(0, labels, group)
            for part in planes
            for strip in range(strips)
        ]
        keep = mode == kernels.FORWARD and ungated is not self.q
        sums = torch.zeros(len(plan), 3, dtype=torch.float64)
        kernel = partial(kernels.job, kernels.NORMS[mode], (0,) * self.features.shape[1], deep, mode, height)

        def job(index: int) -> bool:
            image, label, part, first, last = plan[index]
            clean = True
            for start in range(label, min(label + group, labels), LABELS_PER_JOB):
                maps = (image, slice(start, min(start + LABELS_PER_JOB, label + group)))
                clean &= kernel(
                    part, self.q[maps], grad[maps], ungated[maps], self.features[image], self.mean[image], self.scale,
                    self.weights, self.spacing, window.flat_reaches, a.gate, keep, out[maps], pulled[image],
                    sums[index].numpy(), first, last,
                )  # fmt: skip
            return clean

        return all(run_jobs(job, len(plan))), sums.sum(0)


def _bad(x: Tensor) -> Tensor:
    """Not a number, or infinite: either makes every running sum it enters useless from there on."""
    return ~torch.isfinite(x)


def _without(x: Tensor, bad: Tensor) -> Tensor:
    return torch.where(bad, torch.zeros((), dtype=x.dtype), x)


def _forward(a: Arguments) -> Pair:
    from deepmrf.ops.distance.cpu_kernels import FORWARD

    problem = _Problem(a)
    out, ungated = empty(a.q.shape, problem.dtype), empty(a.q.shape if a.keep else (0,), problem.dtype)
    before_gate = ungated.view(problem.maps_shape).numpy() if a.keep else problem.q
    clean, _ = problem.run(FORWARD, problem.q, before_gate, out.view(problem.maps_shape).numpy(), problem.features)
    out, ungated = (take_frame(x, a.frame).contiguous() if x.numel() else x for x in (out, ungated))
    if not clean and (bad := _bad(a.q) | _bad(a.features).any(1, keepdim=True)).any():
        out, ungated = _forward(a._replace(q=_without(a.q, bad), features=_without(a.features, _bad(a.features))))
        spoilt = take_frame(touched(bad, a.window), a.frame)
        for result in (out, ungated) if a.keep else (out,):
            result.masked_fill_(spoilt, torch.nan)
    return out.to(a.q.dtype), ungated.to(a.q.dtype)


def _backward(grad: Tensor, ungated: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    from deepmrf.ops.distance.cpu_kernels import BACKWARD, PULL_AHEAD, PULL_BACK

    problem = _Problem(a)
    slope = _array(grad, problem.dtype, problem.maps_shape)
    before_gate = _array(ungated, problem.dtype, problem.maps_shape) if a.gate else problem.q
    grad_q = empty(a.q.shape, problem.dtype)
    clean, grad_weights = problem.run(
        BACKWARD, slope, before_gate, grad_q.view(problem.maps_shape).numpy(), problem.features
    )
    grad_features = torch.zeros(a.features.shape, dtype=torch.float64) if needed[1] else None
    if grad_features is not None and grad_features.numel():
        pulled = grad_features.view(problem.features.shape).numpy()
        for mode in (PULL_AHEAD, PULL_BACK):
            clean &= problem.run(mode, slope, problem.q, problem.q, pulled)[0]
    if not clean:
        grad_q, grad_features = _backward_of_finite(grad, ungated, a, needed) or (grad_q, grad_features)
    return grad_q, grad_features, grad_weights


def _backward_of_finite(
    grad: Tensor, ungated: Tensor, a: Arguments, needed: Sequence[bool]
) -> tuple[Tensor, Tensor | None] | None:
    """Gradients to q and features without the numbers that are not finite, NaN where those reach; None if all are."""
    bad_q, bad_features = _bad(a.q), _bad(a.features)
    bad_pixel = bad_features.any(1, keepdim=True)
    bad = _bad(grad) | bad_pixel | bad_q if a.gate else _bad(grad) | bad_pixel  # what reaches the window sum
    if not (bad | bad_q).any():
        return None
    finite = a._replace(q=_without(a.q, bad_q | bad_pixel), features=_without(a.features, bad_features))
    before_gate = _without(ungated, _bad(ungated)) if a.gate else ungated
    grad_q, grad_features, _ = _backward(_without(grad, bad), before_gate, finite, needed)
    assert grad_q is not None  # it is always computed
    spoilt = touched(bad, a.window, mirrored=True)
    grad_q.masked_fill_(spoilt | _bad(ungated) if a.gate else spoilt, torch.nan)
    if grad_features is not None:
        pixels = (spoilt | touched(bad_q | bad_pixel, a.window)).any(1, keepdim=True)
        grad_features.masked_fill_(pixels, torch.nan)
    return grad_q, grad_features


IMPLEMENTATION = Implementation("numba", _forward, _backward, suits_window_sums)
