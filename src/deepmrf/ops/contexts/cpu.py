"""Label contexts on CPUs, exactly, in the frequency domain: o14 without ever storing the K L maps of an image.

The image is cut into tiles that overlap by the filter's reach (overlap-save). A tile of P x P pixels gives the
(P - n + 1)^2 outputs in its inside; its L spectra, times the K L x L filter spectra frequency by frequency, give K L
spectra, whose inverse transforms lose to the minimum over K at once. Counted per output and pair of maps, n^2
multiplications become about 2 (P / (P - n + 1))^2, 3.6 for a 9 x 9 filter and P = 32, plus the transforms.

The gradient to t is the same thing with flipped filters from K L maps to L; the gradient to the filters sums the
products of the two spectra over the tiles, and returns to n x n once at the end.

The work is in cpu_kernels.py, compiled on first use (seconds; the disk keeps it for the next process).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops.jobs import run_jobs
from deepmrf.ops.registry import Implementation, installed
from deepmrf.ops.window import Reach, reaches

_SIDES = ((5, 16), (16, 32), (40, 64))
"""(filters up to, P): the tile for a filter, by measurement for 2 to 21 labels on two cores."""
_WORTH = 10**8
"""Multiplications of the plain convolution above which the frequency domain is used: from there on it was faster for
every size of filter, 1 x 1 included; below, both take about a millisecond, and nothing is worth compiling."""


def _side(window: tuple[int, ...]) -> int:
    """P for filters of this size."""
    return next(side for longest, side in _SIDES if max(window) <= longest)


def _sides(t: Tensor, weight: Tensor) -> list[Reach]:
    """The reach of the filters along each axis; what is out of every pixel's reach is left out."""
    return [
        (min(before, n - 1), min(after, n - 1))
        for (before, after), n in zip(reaches(weight.shape[2:]), t.shape[2:], strict=True)
    ]


def _rows(count: int) -> int:
    """How many maps one product computes together: at most 8, with little or nothing left over."""
    return count if count <= 8 else min(range(8, 4, -1), key=lambda rows: -count % rows)


def _in_parts(work: Callable[[int, int], Any], count: int, parts: int) -> list[Any]:
    """[work(start, stop), ...] over 0 .. count - 1 cut into parts, shared between threads."""
    parts = max(1, min(parts, count))
    return run_jobs(lambda part: work(count * part // parts, count * (part + 1) // parts), parts)


def _array(x: Tensor) -> Any:
    return x.detach().contiguous().numpy()


class _Plan:
    """Tiles, sizes and filter spectra of one call."""

    def __init__(self, t: Tensor, weight: Tensor) -> None:
        self.sides = _sides(t, weight)
        self.window = tuple(before + after + 1 for before, after in self.sides)
        self.side = _side(self.window)
        self.dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
        self.lanes = 8 if self.dtype == torch.float64 else 16
        self.size, self.vector = (0,) * self.side, (0,) * self.lanes  # read for their length: cpu_kernels.py
        self.frequencies = self.side**2 // 2 + 2
        inside = [self.side - n + 1 for n in self.window]
        across = [-(-n // m) for n, m in zip(t.shape[2:], inside, strict=True)]
        self.grid = (*across, *inside)
        self.groups = -(-t.shape[0] * math.prod(across) // self.lanes)

    def cropped(self, weight: Tensor) -> Tensor:
        """The filters without what no pixel reaches, times 1/P^2, which the transforms leave to do."""
        weight = weight.detach().to(self.dtype) / self.side**2
        for axis, ((before, _), (near, _), n) in enumerate(
            zip(reaches(weight.shape[2:]), self.sides, self.window, strict=True), start=2
        ):
            weight = weight.narrow(axis, before - near, n)
        return weight

    def spectra(self, filters: Tensor) -> Any:
        """filters (passes, Q, h, w) -> (passes, F, 2, Q rounded up to whole groups of lanes)."""
        from deepmrf.ops.contexts.cpu_kernels import filter_spectra

        filters = functional.pad(filters, (0, 0, 0, 0, 0, -filters.shape[1] % self.lanes))
        passes, count = filters.shape[:2]
        given = _array(filters)
        result = np.empty((passes, self.frequencies, 2, count), given.dtype)
        _in_parts(
            lambda start, stop: filter_spectra(self.size, given, self.vector, result, start, stop),
            passes * count // self.lanes,
            torch.get_num_threads(),
        )
        return result


def _in_blocks(weight: Tensor, contexts: int) -> tuple[Tensor, int]:
    """Filters (K L, L, h, w) in the order of the passes over labels: (passes, L block, h, w), block."""
    channels, labels = weight.shape[:2]
    together = max(1, 8 // contexts)
    used = together * contexts
    rows = _rows(used)
    block = -(-used // rows) * rows
    passes = -(-channels // used)
    weight = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, passes * used - channels))
    weight = functional.pad(weight.view(passes, used, *weight.shape[1:]), (0, 0, 0, 0, 0, 0, 0, block - used))
    return weight.transpose(1, 2).reshape(passes, labels * block, *weight.shape[3:]), block


def _forward(t: Tensor, weight: Tensor, bias: Tensor, contexts: int) -> tuple[Tensor, Tensor]:
    if not _possible(t, weight):
        from deepmrf.ops.contexts import _forward as plain

        return plain(t, weight, bias, contexts)
    from deepmrf.ops.contexts.cpu_kernels import forward_tiles

    plan = _Plan(t, weight)
    filters, block = _in_blocks(plan.cropped(weight), contexts)
    spectra = plan.spectra(filters)
    image, offset = _array(t.to(plan.dtype)), _array(bias.to(plan.dtype))
    shape = (t.shape[0], weight.shape[0] // contexts, *t.shape[2:])
    out, active = torch.empty(shape, dtype=plan.dtype), torch.empty(shape, dtype=torch.uint8)
    to, which = out.numpy(), active.numpy()
    corner = tuple(-before for before, _ in plan.sides)
    rows = (0,) * _rows(min(block, max(1, 8 // contexts) * contexts))

    def work(start: int, stop: int) -> None:
        forward_tiles(
            plan.size, rows, image, spectra, plan.vector, block, offset, contexts, corner, plan.grid, to, which, start,
            stop,
        )  # fmt: skip

    _in_parts(work, plan.groups, 4 * torch.get_num_threads())
    return out.to(t.dtype), active


def _backward(
    grad: Tensor, active: Tensor, t: Tensor, weight: Tensor, contexts: int, t_too: bool, weight_too: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not _possible(t, weight):
        from deepmrf.ops.contexts import _backward as plain

        return plain(grad, active, t, weight, contexts, t_too, weight_too)
    from deepmrf.ops.contexts.cpu_kernels import backward_tiles, bias_sums, filters_from_spectra

    plan = _Plan(t, weight)
    labels, maps = t.shape[1], weight.shape[0]
    rows = _rows(labels)
    block = -(-labels // rows) * rows
    padded = -(-maps // plan.lanes) * plan.lanes
    given, image, which = _array(grad.to(plan.dtype)), _array(t.to(plan.dtype)), _array(active)

    sums = np.zeros((t.shape[0] * grad.shape[1], contexts))
    flat, flat_which = given.reshape(len(sums), -1), which.reshape(len(sums), -1)
    _in_parts(lambda start, stop: bias_sums(flat, flat_which, sums, start, stop), len(sums), torch.get_num_threads())
    grad_bias = torch.from_numpy(sums).view(t.shape[0], maps).sum(0).to(weight.dtype)
    if not t_too and not weight_too:
        return t.new_empty(0), t.new_empty(0), grad_bias

    spectra = np.empty((1, plan.frequencies, 2, 1), given.dtype)  # not read unless t_too
    if t_too:
        flipped = functional.pad(plan.cropped(weight).flip(2, 3), (0, 0, 0, 0, 0, block - labels))
        spectra = plan.spectra(flipped.reshape(1, maps * block, *plan.window))
    out = torch.empty(t.shape if t_too else (1, 1, 1, 1), dtype=plan.dtype)
    to = out.numpy()
    corner = tuple(-after for _, after in plan.sides)

    def work(start: int, stop: int) -> Any:
        total = np.zeros(
            (plan.frequencies if weight_too else 1, padded // plan.lanes, block, 2, plan.lanes), given.dtype
        )
        backward_tiles(
            plan.size, (0,) * rows, given, which, image, spectra, plan.vector, block, contexts, corner,
            plan.grid, to, total, t_too, weight_too, start, stop,
        )  # fmt: skip
        return total

    # One part per thread, whatever finishes first: the sums over tiles are then the same in every run.
    totals = _in_parts(work, plan.groups, min(torch.get_num_threads(), 8))
    grad_weight = t.new_empty(0)
    if weight_too:
        total = sum(totals[1:], start=totals[0])
        filters = np.empty((block, *plan.window, padded), given.dtype)
        _in_parts(
            lambda start, stop: filters_from_spectra(plan.size, total, plan.vector, filters, start, stop),
            block * padded // plan.lanes,
            torch.get_num_threads(),
        )
        inside = torch.from_numpy(filters)[:labels, ..., :maps].permute(3, 0, 1, 2).flip(2, 3) / plan.side**2
        border = []
        for (before, _), (near, _), n, size in reversed(
            list(zip(reaches(weight.shape[2:]), plan.sides, plan.window, weight.shape[2:], strict=True))
        ):
            border += [before - near, size - n - (before - near)]
        grad_weight = functional.pad(inside, border).to(weight.dtype)
    return out.to(t.dtype) if t_too else t.new_empty(0), grad_weight, grad_bias


def _possible(t: Tensor, weight: Tensor) -> bool:
    """Can these run here at all? Two axes, on the CPU, not empty, filters that fit into a tile."""
    return (
        t.device.type == "cpu"
        and t.dim() == 4
        and t.is_floating_point()
        and t.numel() > 0
        and weight.numel() > 0
        and all(before + after < _SIDES[-1][0] for before, after in _sides(t, weight))
    )


def _suits(t: Tensor, weight: Tensor, contexts: int) -> bool:
    if not _possible(t, weight):
        return False
    work = t[:, 0].numel() * weight.shape[0] * weight.shape[1] * math.prod(_Plan(t, weight).window)
    return work >= _WORTH and installed("numba")


IMPLEMENTATION = Implementation("numba", _forward, _backward, _suits)
