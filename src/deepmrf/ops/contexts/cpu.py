"""Label contexts on CPUs, exactly, in the frequency domain: o14 without ever storing the K L maps of an image.

The image is cut into tiles that overlap by the filter's reach (overlap-save). A tile of P x P pixels gives the
(P - n + 1)^2 outputs in its inside; its L spectra, times the K L x L filter spectra frequency by frequency, give K L
spectra, whose inverse transforms are reduced to the minimum over K at once. Counted per output and pair of maps, n^2
multiplications become about 2 (P / (P - n + 1))^2, 3.6 for a 9 x 9 filter and P = 32, plus the transforms.

The gradient to t is the same with flipped filters from K L maps to L. The gradient to the filters sums the products of
the two spectra over the tiles, and returns to n x n once at the end.

The kernels are compiled on their first use: cpu_tiles.py and cpu_kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops.contexts import Arguments, operator
from deepmrf.ops.jobs import empty, run_in_parts
from deepmrf.ops.registry import Implementation, Pair, installed
from deepmrf.ops.window import Reach, image_window, reaches

TILE_SIDES = ((5, 16), (16, 32), (40, 64))
"""(longest filter, P): the tile for a filter, by measurement for 2 to 21 labels on two cores."""
MIN_WORK = 10**8
"""Multiplications of the plain convolution from which on the frequency domain was faster, for filters of every size.
Below, both take about a millisecond, and nothing is worth compiling."""
MAX_ROWS = 8
"""Maps that one product computes: their sums fill the vector registers."""
MAX_FILTER_SUMS = 8
"""Parts of the gradient to the filters, each of which takes the memory of their spectra."""


def _clipped_reaches(t: Tensor, weight: Tensor) -> tuple[Reach, ...]:
    """The reach of the filters along both axes, no farther than the image."""
    return image_window(t.shape[2:], weight.shape[2:]).reaches[1:]


def _rows(count: int) -> int:
    """How many of `count` maps one product computes, so that few or none are left over."""
    return count if count <= MAX_ROWS else min(range(MAX_ROWS, 4, -1), key=lambda rows: -count % rows)


def _array(x: Tensor, dtype: torch.dtype) -> Any:
    return x.detach().to(dtype).contiguous().numpy()


def _with_zeros(array: Any, axis: int, count: int) -> Any:
    """The array, contiguous, with so many zeros after it along an axis."""
    border = [(0, count if i == axis else 0) for i in range(array.ndim)]
    return np.pad(array, border) if count else np.ascontiguousarray(array)


class _Plan:
    """Tiles and sizes of one call."""

    def __init__(self, t: Tensor, weight: Tensor) -> None:
        self.reaches = _clipped_reaches(t, weight)
        self.full_reaches = reaches(weight.shape[2:])
        self.window = tuple(before + after + 1 for before, after in self.reaches)
        self.side = next(side for longest, side in TILE_SIDES if max(self.window) <= longest)
        self.dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
        self.lanes = 8 if self.dtype == torch.float64 else 16
        self.size, self.vector = (0,) * self.side, (0,) * self.lanes  # the kernels take the lengths of these
        self.frequencies = self.side**2 // 2 + 2
        inside = [self.side - n + 1 for n in self.window]
        across = [-(-n // m) for n, m in zip(t.shape[2:], inside, strict=True)]
        self.grid = (*across, *inside)
        self.groups = -(-t.shape[0] * math.prod(across) // self.lanes)

    def cropped(self, weight: Tensor) -> Any:
        """The filters as far as they reach inside the image, times 1/P^2: the transforms are P^2 times too large."""
        filters = _array(weight, self.dtype)
        for axis, ((before, _), (near, _), n) in enumerate(
            zip(self.full_reaches, self.reaches, self.window, strict=True), start=2
        ):
            filters = filters.take(range(before - near, before - near + n), axis)
        return filters / np.asarray(self.side**2, filters.dtype)

    def uncropped(self, weight: Tensor) -> Tensor:
        """The adjoint of `cropped`: zeros where the filters reach out of the image."""
        border: list[int] = []
        for (before, after), (near, far) in zip(self.full_reaches[::-1], self.reaches[::-1], strict=True):
            border += [before - near, after - far]
        return functional.pad(weight / self.side**2, border)

    def spectra(self, filters: Any) -> Any:
        """filters (passes, Q, h, w) -> (passes, F, 2, Q rounded up to whole groups of lanes)."""
        from deepmrf.ops.contexts.cpu_kernels import filter_spectra

        filters = _with_zeros(filters, 1, -filters.shape[1] % self.lanes)
        passes, count = filters.shape[:2]
        result = np.empty((passes, self.frequencies, 2, count), filters.dtype)
        run_in_parts(
            lambda start, stop: filter_spectra(self.size, filters, self.vector, result, start, stop),
            passes * count // self.lanes,
            torch.get_num_threads(),
        )
        return result


def _in_passes(weight: Any, contexts: int) -> tuple[Any, int, int]:
    """(filters (passes, L block, h, w), block, rows) from (K L, L, h, w): a pass makes the patterns of some labels."""
    patterns, labels = weight.shape[:2]
    used = max(1, MAX_ROWS // contexts) * contexts
    rows = _rows(used)
    block = -(-used // rows) * rows
    passes = -(-patterns // used)
    weight = _with_zeros(weight, 0, passes * used - patterns)
    weight = _with_zeros(weight.reshape(passes, used, *weight.shape[1:]), 1, block - used)
    return weight.swapaxes(1, 2).reshape(passes, labels * block, *weight.shape[3:]), block, rows


def _forward(a: Arguments) -> Pair:
    if not _possible(a):
        return operator.plain.forward(a)
    from deepmrf.ops.contexts.cpu_kernels import forward_tiles

    plan = _Plan(a.t, a.weight)
    filters, block, rows = _in_passes(plan.cropped(a.weight), a.contexts)
    spectra = plan.spectra(filters)
    image, biases = _array(a.t, plan.dtype), _array(a.bias, plan.dtype)
    shape = (a.t.shape[0], a.weight.shape[0] // a.contexts, *a.t.shape[2:])
    out, active = empty(shape, plan.dtype), empty(shape, torch.uint8)
    corner = tuple(-before for before, _ in plan.reaches)

    def work(start: int, stop: int) -> None:
        forward_tiles(
            plan.size, (0,) * rows, image, spectra, plan.vector, block, biases, a.contexts, corner, plan.grid,
            out.numpy(), active.numpy(), start, stop,
        )  # fmt: skip

    run_in_parts(work, plan.groups, 4 * torch.get_num_threads())
    return out.to(a.t.dtype), active


def _backward(grad: Tensor, active: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    if not _possible(a):
        return operator.plain.backward(grad, active, a, needed)
    from deepmrf.ops.contexts.cpu_kernels import backward_tiles

    plan = _Plan(a.t, a.weight)
    t_too, weight_too, _ = needed
    labels, patterns = a.t.shape[1], a.weight.shape[0]
    rows = _rows(labels)
    block = -(-labels // rows) * rows
    grads, image, which = _array(grad, plan.dtype), _array(a.t, plan.dtype), _array(active, torch.uint8)
    grad_bias = _bias_gradient(grads, which, a.contexts).view(len(grad), patterns).sum(0)
    if not t_too and not weight_too:
        return None, None, grad_bias

    spectra = np.empty((1, plan.frequencies, 2, 1), grads.dtype)  # not read unless t_too
    if t_too:
        flipped = _with_zeros(plan.cropped(a.weight)[:, :, ::-1, ::-1], 1, block - labels)
        spectra = plan.spectra(flipped.reshape(1, patterns * block, *plan.window))
    out = empty(a.t.shape if t_too else (1, 1, 1, 1), plan.dtype)
    corner = tuple(-after for _, after in plan.reaches)
    sums_shape = (plan.frequencies if weight_too else 1, -(-patterns // plan.lanes), block, 2, plan.lanes)

    def work(start: int, stop: int) -> Any:
        sums = np.zeros(sums_shape, grads.dtype)
        backward_tiles(
            plan.size, (0,) * rows, grads, which, image, spectra, plan.vector, block, a.contexts, corner, plan.grid,
            out.numpy(), sums, t_too, weight_too, start, stop,
        )  # fmt: skip
        return sums

    # One part per thread, whichever finishes first: the sums over tiles are then the same in every run.
    sums = run_in_parts(work, plan.groups, min(torch.get_num_threads(), MAX_FILTER_SUMS))
    grad_weight = None
    if weight_too:
        filters = _filters_from_spectra(plan, sum(sums[1:], start=sums[0]))[:labels, ..., :patterns]
        grad_weight = plan.uncropped(filters.permute(3, 0, 1, 2).flip(2, 3))
    return out, grad_weight, grad_bias


def _bias_gradient(grad: Any, active: Any, contexts: int) -> Tensor:
    """The sum of grad (B, L, H, W) over the pixels where each pattern is active, (B L, K) in float64."""
    from deepmrf.ops.contexts.cpu_kernels import bias_sums

    sums = np.zeros((grad.shape[0] * grad.shape[1], contexts))
    grad, active = grad.reshape(len(sums), -1), active.reshape(len(sums), -1)
    run_in_parts(lambda start, stop: bias_sums(grad, active, sums, start, stop), len(sums), torch.get_num_threads())
    return torch.from_numpy(sums)


def _filters_from_spectra(plan: _Plan, spectra: Any) -> Tensor:
    """Filters (labels, h, w, patterns), both rounded up, from spectra (F, patterns / lanes, labels, 2, lanes)."""
    from deepmrf.ops.contexts.cpu_kernels import filters_from_spectra

    _, groups, block, _, lanes = spectra.shape
    filters = np.empty((block, *plan.window, groups * lanes), spectra.dtype)
    run_in_parts(
        lambda start, stop: filters_from_spectra(plan.size, spectra, plan.vector, filters, start, stop),
        block * groups,
        torch.get_num_threads(),
    )
    return torch.from_numpy(filters)


def _possible(a: Arguments) -> bool:
    """Can these run here at all? Two axes, on the CPU, not empty, filters that fit into a tile."""
    return (
        a.t.device.type == "cpu"
        and a.t.dim() == 4
        and a.t.is_floating_point()
        and a.t.numel() > 0
        and a.weight.numel() > 0
        and all(before + after < TILE_SIDES[-1][0] for before, after in _clipped_reaches(a.t, a.weight))
    )


def _suits(a: Arguments) -> bool:
    if not _possible(a):
        return False
    taps = math.prod(before + after + 1 for before, after in _clipped_reaches(a.t, a.weight))
    work = a.t[:, 0].numel() * a.weight.shape[0] * a.weight.shape[1] * taps
    return work >= MIN_WORK and installed("numba")


IMPLEMENTATION = Implementation("numba", _forward, _backward, _suits)
