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

from deepmrf.ops.jobs import empty, run_jobs, suits_window_sums
from deepmrf.ops.registry import Implementation
from deepmrf.ops.window import ALL, Reach, box_sum, reaches, take_frame

LABELS_PER_JOB = 8
"""As many as a vector has lanes."""
DEEP_PLANES_PER_LABEL = 2
"""Planes in a window, per label in a vector's lanes, from which on running sums along the first axis are faster."""


def _array(x: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    return x.detach().to(dtype).contiguous().view(shape).numpy()


class _Problem:
    """The operator's arguments as the kernels take them: images (T, H, W), T and H being one axis."""

    def __init__(
        self, q: Tensor, features: Tensor, weights: Tensor, window: Sequence[int], spacing: Sequence[float]
    ) -> None:
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        images, labels, size = q.shape[0], q.shape[1], q.shape[2:]
        self.axes = len(size)
        new_axes = 3 - len(size)
        self.size = (1,) * new_axes + tuple(size)
        self.maps_shape = (images, labels, self.size[0] * self.size[1], self.size[2])
        self.window = (1,) * new_axes + tuple(window)
        self.spacing = (1.0,) * new_axes + tuple(float(s) for s in spacing)
        self.q = _array(q, self.dtype, self.maps_shape)
        wide = torch.float64 if features.dtype == torch.float64 else self.dtype
        given, self.scale = features.detach(), 1.0
        if features.dtype == torch.uint8:  # by NumPy, which wakes no threads of PyTorch
            given, self.scale = torch.from_numpy(given.numpy().astype(self.q.dtype)), 1 / 255
        self.features = _array(given, wide, (images, features.shape[1], *self.maps_shape[2:]))
        self.mean = self.features.mean((2, 3), dtype=np.float64) * self.scale
        self.weights = weights.detach().to(torch.float64).numpy()

    def reach(self, mirrored: bool) -> list[Reach]:
        """The reach of the window along each axis, cut to the image: borders are as long as a window reaches."""
        return [
            (min(before, n - 1), min(after, n - 1))
            for (before, after), n in zip(reaches(self.window, mirrored), self.size, strict=True)
        ]

    def run(
        self, mode: int, gate: bool, grad: Any, ungated: Any, out: Any, pulled: Any, frame: int = ALL
    ) -> tuple[bool, Tensor]:
        """Every job of a mode: (did no NaN spread, the sums that are the gradients to the weights)."""
        from deepmrf.ops.distance import cpu_kernels as kernels

        images, labels = self.maps_shape[:2]
        reach = self.reach(mirrored=mode in (kernels.BACKWARD, kernels.PULL_BACK))
        single = frame != ALL and self.axes == 3 and mode == kernels.FORWARD
        groups = -(-labels // LABELS_PER_JOB)
        # A plane is an image whose windows reach over other planes: each of these costs time, and so do empty lanes.
        # Running sums along the first axis do not cost more for more planes, but they take one label at a time.
        deep = not single and self.size[0] > 1 and (sum(reach[0]) + 1) * groups >= DEEP_PLANES_PER_LABEL * labels
        planes = [frame] if single else [0] if deep else range(self.size[0])
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
                    self.scale, self.weights, spacing, sides, gate, keep, out[part], pulled[image],
                    sums[index].numpy(), first, last,
                )  # fmt: skip
            return clean

        return all(run_jobs(job, len(plan))), sums.sum(0)


def _bad(x: Tensor) -> Tensor:
    """Not a number, or infinite: either makes every running sum it enters useless from there on."""
    return ~torch.isfinite(x)


def _without(x: Tensor, bad: Tensor) -> Tensor:
    return torch.where(bad, torch.zeros((), dtype=x.dtype), x)


def _touched(bad: Tensor, window: Sequence[int], mirrored: bool) -> Tensor:
    """Pixels whose window holds a bad one."""
    return box_sum(bad.to(torch.float64), reaches(window, mirrored)) > 0.5


def _forward(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    keep: bool,
    frame: int = ALL,
) -> tuple[Tensor, Tensor]:
    from deepmrf.ops.distance.cpu_kernels import FORWARD

    problem = _Problem(q, features, weights, window, spacing)
    out = empty(q.shape, problem.dtype)
    ungated = empty(q.shape if keep else (0,), problem.dtype)
    clean, _ = problem.run(
        FORWARD,
        gate,
        problem.q,
        ungated.view(problem.maps_shape).numpy() if keep else problem.q,
        out.view(problem.maps_shape).numpy(),
        problem.features,
        frame,
    )
    out, ungated = take_frame(out, frame).contiguous(), take_frame(ungated, frame).contiguous() if keep else ungated
    if not clean and (bad := _bad(q) | _bad(features).any(1, keepdim=True)).any():
        finite = _without(features, _bad(features))
        out, ungated = _forward(_without(q, bad), finite, weights, window, spacing, gate, keep, frame)
        touched = take_frame(_touched(bad, window, mirrored=False), frame)
        for result in (out, ungated) if keep else (out,):
            result.masked_fill_(touched, torch.nan)
    return out.to(q.dtype), ungated.to(q.dtype)


def _backward(
    grad: Tensor,
    ungated: Tensor,
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    features_too: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from deepmrf.ops.distance.cpu_kernels import BACKWARD, PULL_AHEAD, PULL_BACK

    problem = _Problem(q, features, weights, window, spacing)
    slope = _array(grad, problem.dtype, problem.maps_shape)
    before_gate = _array(ungated, problem.dtype, problem.maps_shape) if gate else problem.q
    grad_q = empty(q.shape, problem.dtype)
    clean, grad_weights = problem.run(
        BACKWARD, gate, slope, before_gate, grad_q.view(problem.maps_shape).numpy(), problem.features
    )
    grad_features = torch.zeros(features.shape if features_too else 0, dtype=torch.float64)
    if features_too and features.shape[1]:
        pulled = grad_features.view(problem.features.shape).numpy()
        for mode in (PULL_AHEAD, PULL_BACK):
            clean &= problem.run(mode, gate, slope, problem.q, problem.q, pulled)[0]
    if not clean:
        bad_features = _bad(features)
        bad_q, bad_grad, bad_pixel = _bad(q), _bad(grad), bad_features.any(1, keepdim=True)
        bad = bad_grad | bad_pixel | bad_q if gate else bad_grad | bad_pixel  # what reaches the window sum
        if (bad | bad_q).any():
            grad_q, grad_features, _ = _backward(
                _without(grad, bad), _without(ungated, _bad(ungated)) if gate else ungated,
                _without(q, bad_q | bad_pixel), _without(features, bad_features), weights, window, spacing, gate,
                features_too,
            )  # fmt: skip
            grad_q.masked_fill_(_touched(bad, window, mirrored=True), torch.nan)
            if gate:
                grad_q.masked_fill_(_bad(ungated), torch.nan)
            if features_too:
                touched = _touched(bad, window, True) | _touched(bad_q | bad_pixel, window, False)
                grad_features.masked_fill_(touched.any(1, keepdim=True), torch.nan)
    return grad_q.to(q.dtype), grad_features.to(q.dtype if features_too else torch.float64), grad_weights.to(weights)


IMPLEMENTATION = Implementation("numba", _forward, _backward, suits_window_sums)
