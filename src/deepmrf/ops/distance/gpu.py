"""The distance kernel's window sum on GPUs, in Triton: one pass over q, and nothing but the result is written.

A program owns a strip of rows of a few labels of one image. It keeps, per column, sums over the window's rows: of q, q
times the distance in rows, q times squares, each feature times q. One row down, a row of q enters the window and one
leaves; in 3-D, one of every frame in the window. Along the row, sums over the window's columns come from running sums,
restarted every K columns (K at least the window) with coordinates from the middle of that stretch, so that float32
loses nothing to far columns: a window is the end of one stretch plus the start of the next, or lies inside one. With I
the features, N the weighted squares,

    total_j = w_colour I_j . (I_j Box(q) - 2 Box(I q)) + w_position x_j (x_j Box(q) - 2 Box(x q)) + Box(N q)

is evaluated at both ends of the window, and only the two results move to its centre. I_j is needed there, so the
features are copied once, centred, and shifted so that the reads of all labels are aligned.

The backward is the same pass over the gradient with a mirrored window. All sums have a fixed order: results repeat bit
for bit. Handles 1-D to 3-D, at most MAX_FEATURES features, rows (or windows) of at most MAX_COLUMNS; else torch runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmrf.ops import distance
from deepmrf.ops.registry import Implementation
from deepmrf.ops.window import ALL, Reach, accumulator, reaches

MAX_FEATURES = 4
"""A feature costs a sum per column in registers."""
MAX_COLUMNS = 4096
"""A program holds whole rows in registers."""
ELEMENTS = 512
"""Pixels (columns times labels) of a row that a program works on at once; more only for rows that are longer."""
PER_THREAD = 4
"""Of which each thread has this many: about ten numbers each must fit its registers."""
UNROLL = 4
"""Rows asked for at once in a strip's first sum, over a window of rows."""
WARM_UP = 0.25
"""What a row costs there, of what it costs later: many strips keep the processors busy, but each begins so."""
STAGES = 3
"""Rows on their way through shared memory while one is worked on, and that one."""
STAGES_BACK = 1
"""The same in the backward, which gains nothing by it."""
SHARED_BYTES = 98304
"""What such rows may take of a multiprocessor's shared memory: as much as any GPU gives a program."""
MAX_REGISTERS = 128
"""Registers per thread; for long rows, of which a thread has more, the compiler's choice."""
MAX_REGISTERS_BACK = 168
"""The same in the backward."""
REGISTERS = 65536
"""Of a multiprocessor."""


class Sides(NamedTuple):
    """An image as frames, rows and columns: how many of each, and the window's reach along them."""

    sizes: tuple[int, int, int]
    reaches: tuple[Reach, Reach, Reach]

    @property
    def flat(self) -> tuple[int, ...]:
        """(before, after) along each axis, in one tuple."""
        return tuple(pixels for reach in self.reaches for pixels in reach)


class Plan(NamedTuple):
    """How an image is cut, and what a program gets."""

    sides: Sides
    labels: int
    """Of a program."""
    stretches: int
    """Of a row."""
    stretch: int
    """Columns of one."""
    strip: int
    """Rows of a program."""
    warps: int
    registers: int | None
    """Of a thread, at most; None for the compiler's choice."""
    stages: int


def interpreted() -> bool:
    """Does Triton run its kernels in Python, on tensors of any device? For tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_on(q: Tensor) -> bool:
    """Can a Triton kernel run on this tensor?"""
    return (q.is_cuda or interpreted()) and _installed() and q.dtype in (torch.float32, torch.bfloat16, torch.float16)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least the size."""
    return 1 << max(size - 1, 0).bit_length()


def sides(size: Sequence[int], window: Sequence[int], mirrored: bool = False) -> Sides:
    """Sizes and reaches along three axes, none longer than the image; a signal is an image of one row and one frame."""
    found = [(min(b, n - 1), min(a, n - 1)) for (b, a), n in zip(reaches(window, mirrored), size, strict=True)]
    missing = 3 - len(found)
    t, y, x = [(0, 0)] * missing + found
    frames, height, width = [1] * missing + list(size)
    return Sides((frames, height, width), (t, y, x))


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else contextlib.nullcontext()


def _columns(width: int, reach: Reach) -> tuple[int, int]:
    """(padded width of a row, stretch after which its running sums restart)."""
    stretch = power_of_two(max(sum(reach) + 1, 4))  # four columns are one load; longer costs small windows digits
    return max(power_of_two(width), stretch, 32), stretch


@functools.lru_cache(maxsize=256)
def make_plan(
    shape: tuple[int, ...], features: int, window: tuple[int, ...], mirrored: bool, device: torch.device
) -> Plan:
    """The plan for q of this shape; the backward's is the `mirrored` one."""
    around = sides(shape[2:], window, mirrored)
    frames, height, width = around.sizes
    padded, stretch = _columns(width, around.reaches[2])
    labels = min(max(ELEMENTS // padded, 1), power_of_two(shape[1]))
    warps = min(max(padded * labels // PER_THREAD // 32, 1), 16)
    crowded = padded * labels > 32 * warps * PER_THREAD
    most = REGISTERS // (32 * warps)
    registers = None if crowded else min(MAX_REGISTERS_BACK if mirrored else MAX_REGISTERS, most)
    loads = 4 * features + (7 if mirrored else 3)  # of a row; two more numbers a pixel go from thread to thread
    room = SHARED_BYTES // (padded * labels * 4 * (loads + 2))
    stages = min(STAGES_BACK if mirrored else STAGES, 1 + room)
    columns_of_programs = shape[0] * frames * -(-shape[1] // labels)
    at_once = processors(device) * max(most // (registers or 255), 1)

    def cost(strips: int) -> float:
        waves = -(-columns_of_programs * strips // at_once)
        return waves * (-(-height // strips) + WARM_UP * sum(around.reaches[1]))

    strips = min(range(1, max(height // 16, 1) + 1), key=cost)
    return Plan(around, labels, padded // stretch, stretch, -(-height // strips), warps, registers, stages)


def _suits(q: Tensor, features: Tensor, weights: Tensor, window: Sequence[int]) -> bool:
    if not runs_on(q) or q.dim() not in (3, 4, 5) or features.shape[1] > MAX_FEATURES or q.numel() == 0:
        return False
    around = sides(q.shape[2:], window)
    return _columns(around.sizes[2], around.reaches[2])[0] <= MAX_COLUMNS


def _shifted(features: Tensor, plan: Plan) -> Tensor:
    """Centred features in place and shifted to both ends of the window, (3, B, F, rows of all frames, padded)."""
    from deepmrf.ops.distance import gpu_kernels as kernels

    images, maps = features.shape[:2]
    frames, height, width = plan.sides.sizes
    padded = plan.stretches * plan.stretch
    shifted = torch.empty((3, images, maps, frames * height, padded), dtype=torch.float32, device=features.device)
    if maps:
        rows = 8
        kernels.shift_features[(images * maps, -(-frames * height // rows))](
            features.contiguous(), shifted, images * maps, frames * height, width, *plan.sides.reaches[2],
            1 / 255 if features.dtype == torch.uint8 else 1.0, SAMPLES=256, ROWS=rows, P=padded,
            num_warps=4,
        )  # fmt: skip
    return shifted


def _sweep(
    x: Tensor,
    q: Tensor,
    kept: Tensor,
    features: Tensor,
    weights: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    keep: bool,
    back: bool,
    frame: int = ALL,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch the pass; returns (result, kept sums if asked for, BACK: the parts of the weights' gradients)."""
    from deepmrf.ops.distance import gpu_kernels as kernels

    images, all_labels = q.shape[:2]
    plan = make_plan(q.shape, features.shape[1], tuple(window), back, q.device)
    frames, height, width = plan.sides.sizes
    groups, strips = -(-all_labels // plan.labels), -(-height // plan.strip)
    first, shown = (0, frames) if frame == ALL else (frame, 1)
    programs = images * shown * groups * strips
    with on_device(q):
        shifted = _shifted(features, plan)
        out = torch.empty_like(q if frame == ALL else q.select(2, frame), memory_format=torch.contiguous_format)
        kept_out = torch.empty_like(out) if keep else None
        partials = torch.empty((programs, 3), dtype=torch.float32, device=q.device) if back else None
        kernels.window_sums[(programs,)](
            x, q, kept, shifted, weights.contiguous(), out, out if kept_out is None else kept_out,
            out if partials is None else partials, all_labels, frames, height, width, first, shown, plan.strip, strips,
            groups, images * features.shape[1] * frames * height, *plan.sides.flat,
            *[0.0] * (3 - len(spacing)), *[s * s for s in spacing],
            BACK=back, GATE=gate, KEEP=keep, FRAMES=frames > 1, F=features.shape[1], G=plan.labels, NB=plan.stretches,
            K=plan.stretch, UNROLL=1 if interpreted() else UNROLL, STAGES=plan.stages,
            num_warps=plan.warps,
            maxnreg=plan.registers,
        )  # fmt: skip
    return out, kept_out, partials


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
    x = q.contiguous()
    out, kept, _ = _sweep(x, x, x, features, weights, window, spacing, gate, keep, back=False, frame=frame)
    return out, q.new_empty(0) if kept is None else kept


def _backward(
    grad: Tensor,
    kept: Tensor,
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    features_too: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if features_too:  # rare, and it needs every box sum of both directions: plain torch has them
        return distance._backward(grad, kept, q, features, weights, window, spacing, gate, features_too)
    x, g = q.contiguous(), grad.contiguous()
    before_gate = kept.contiguous() if gate else x
    grad_q, _, partials = _sweep(g, x, before_gate, features, weights, window, spacing, gate, keep=False, back=True)
    assert partials is not None  # back=True makes them
    grad_weights = partials.sum(0, dtype=torch.float64)
    return grad_q, q.new_empty(0, dtype=accumulator(q)), grad_weights.to(weights.dtype)


IMPLEMENTATION = Implementation("triton", _forward, _backward, _suits)
