"""The distance kernel on the CPU, compiled by numba: exact, one pass over q, and only a few rows of temporaries.

The equations are in the package's docstring. The kernels are in cpu_kernels.py (images) and cpu_deep.py (volumes with
windows of many planes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
DEEP_PLANES_PER_LABEL = 2
"""Planes in a window, per label in a vector's lanes, from which on running sums along the first axis are faster."""


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
        a = self.arguments
        mirrored = mode in (kernels.BACKWARD, kernels.PULL_BACK)
        reach = list(image_window(a.q.shape[2:], a.window, mirrored).reaches)
        single = a.frame != ALL and len(a.window) == 3 and mode == kernels.FORWARD
        groups = -(-labels // LABELS_PER_JOB)
        # A plane is an image whose windows reach over other planes: each of these costs time, and so do empty lanes.
        # Running sums along the first axis do not cost more for more planes, but they take one label at a time.
        deep = not single and self.size[0] > 1 and (sum(reach[0]) + 1) * groups >= DEEP_PLANES_PER_LABEL * labels
        planes = [a.frame] if single else [0] if deep else range(self.size[0])
        # Labels add to the same gradient to the features, so one job must take all of them there.
        pull = mode in (kernels.PULL_AHEAD, kernels.PULL_BACK)
        group = labels if pull else -(-labels // groups)
        before, after = reach[0] if deep else reach[1]
        length = self.size[0] if deep else self.size[1]
        # Strips of rows (or of planes) make jobs for every thread, but each strip begins by filling a window, at half
        # the cost of its rows or less.
        threads, jobs = torch.get_num_threads(), images * -(-labels // group) * len(planes)
        max_strips = max(1, min(4 * threads, length // max(before + after, 8)))
        strips = min(
            range(1, max_strips + 1),
            key=lambda count: -(-jobs * count // threads) * (length / count + 0.5 * (before + after)),
        )
        plan = [
            (image, label, plane, length * strip // strips, length * (strip + 1) // strips)
            for image in range(images)
            for label in range(0, labels, group)
            for plane in planes
            for strip in range(strips)
        ]
        keep = mode == kernels.FORWARD and ungated is not self.q
        axes = slice(0, 3) if deep else slice(1, 3)
        spacing = self.spacing[axes]
        sides = tuple(side for pair in reach[axes] for side in pair)
        sums = torch.zeros(len(plan), 3, dtype=torch.float64)
        kernel: Callable[..., bool]
        if deep:
            from deepmrf.ops.distance.cpu_deep import deep_job

            kernel = partial(deep_job, mode, self.size[1])
        else:
            channels = (0,) * self.features.shape[1]
            kernel = partial(kernels.job, kernels.NORMS[mode], channels, mode, self.size[1])

        def job(index: int) -> bool:
            image, label, plane, first, last = plan[index]
            around = (max(plane - reach[0][0], 0), min(plane + reach[0][1] + 1, self.size[0]))
            planes_of_window = () if deep else (plane, around, self.spacing[0])
            clean = True
            for start in range(label, min(label + group, labels), LABELS_PER_JOB):
                part = (image, slice(start, min(start + LABELS_PER_JOB, label + group)))
                clean &= kernel(
                    *planes_of_window, self.q[part], grad[part], ungated[part], self.features[image], self.mean[image],
                    self.scale, self.weights, spacing, sides, a.gate, keep, out[part], pulled[image],
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
