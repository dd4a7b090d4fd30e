"""Softmax over labels and sums on the CPU, in the same threads as the compiled kernels.

PyTorch's own threads wait for more work for some milliseconds after each operation, and keep the cores busy that the
kernels need next. So between kernels nothing of PyTorch that has threads should run. Here NumPy computes, on as many
pixels at a time as the caches hold, and `run_jobs` shares the pixels between threads.

Where a gradient is needed, or the tensors are small or not plain ones on the CPU, PyTorch computes the same: equal but
for rounding.
Shapes: (B, L, *S).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmrf.ops.jobs import empty, run_jobs
from deepmrf.ops.registry import unobserved

NUMBERS_PER_JOB = 1 << 17
"""They stay in the caches of a core."""
MIN_NUMBERS = 1 << 18
"""For smaller tensors, PyTorch computes: a step takes a few milliseconds in all."""


def softmax(x: Tensor) -> Tensor:
    """Probabilities of labels from their logarithms, up to a constant per pixel."""
    if not _by_numpy(x):
        return x.softmax(1)

    def job(x: Any, out: Any) -> None:
        np.exp(np.subtract(x, x.max(0), out=out), out=out)
        np.multiply(out, 1 / out.sum(0), out=out)

    return _over_pixels(job, x, empty(x.shape, x.dtype))


def exp(x: Tensor) -> Tensor:
    """Probabilities of labels from their logarithms."""
    return _over_pixels(np.exp, x, empty(x.shape, x.dtype)) if _by_numpy(x) else x.exp()


def log(q: Tensor) -> Tensor:
    """Logarithms of probabilities, finite also where they are 0. Overwrites q."""
    smallest = torch.finfo(q.dtype).tiny
    if not _by_numpy(q) or not q.is_contiguous():
        return q.clamp_min_(smallest).log_()
    return _over_pixels(lambda q, out: np.log(np.maximum(q, smallest, out=out), out=out), q, q)


def negative(x: Tensor) -> Tensor:
    """-x: energies from log-probabilities."""
    return _over_pixels(np.negative, x, empty(x.shape, x.dtype)) if _by_numpy(x) else torch.neg(x)


def log_softmax_of_difference(x: Tensor, y: Tensor) -> Tensor:
    """log_softmax(x - y). Without gradients it overwrites y."""
    if not _by_numpy(x, y) or not y.is_contiguous():
        return (x - y if torch.is_grad_enabled() else torch.sub(x, y, out=y)).log_softmax(1)

    def job(x: Any, out: Any) -> None:
        np.subtract(x, out, out=out)
        np.subtract(out, out.max(0), out=out)
        np.subtract(out, np.log(np.exp(out).sum(0)), out=out)

    return _over_pixels(job, x, y)


def total(x: Tensor) -> float:
    """The sum of all numbers, in any order."""
    if not _plain(x) or not x.is_contiguous():
        return float(x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)))
    return _over_numbers(np.sum, x)


def total_of_squares(x: Tensor) -> float:
    """The sum of the squares of all numbers, in any order."""
    if not _plain(x) or not x.is_contiguous():
        real = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        return float((real * real).sum())
    return _over_numbers(lambda part: np.einsum("i,i->", part, part), x)  # np.dot would wake the threads of BLAS


def _over_numbers(sum_of: Callable[[Any], Any], x: Tensor) -> float:
    """The sum of sum_of(part) over parts (N,) that together cover x."""
    numbers = x.numpy().reshape(-1)
    starts = range(0, numbers.size, NUMBERS_PER_JOB)
    with np.errstate(all="ignore"):
        return float(sum(run_jobs(lambda k: sum_of(numbers[starts[k] : starts[k] + NUMBERS_PER_JOB]), len(starts))))


def _by_numpy(*tensors: Tensor) -> bool:
    return all(x.numel() >= MIN_NUMBERS and _plain(x) for x in tensors)


def _plain(x: Tensor) -> bool:
    """Can NumPy compute on it, and nobody watches?"""
    return x.dtype in (torch.float32, torch.float64) and unobserved(x)


def _over_pixels(job: Callable[[Any, Any], Any], x: Tensor, out: Tensor) -> Tensor:
    """Run job(x, out) on arrays (L, pixels) that together cover x and out; returns out, which is contiguous."""
    images, labels = x.shape[:2]
    given, result = (y.detach().numpy().reshape(images, labels, -1) for y in (x, out))
    pixels, step = math.prod(x.shape[2:]), max(1, NUMBERS_PER_JOB // labels)
    parts = [(b, slice(start, start + step)) for b in range(images) for start in range(0, pixels, step)]

    def run(index: int) -> None:
        b, part = parts[index]
        with np.errstate(all="ignore"):  # as in PyTorch, NaN is an answer
            job(given[b, :, part], result[b, :, part])

    run_jobs(run, len(parts))
    return out
