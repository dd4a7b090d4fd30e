"""The distance kernel's window sum on GPUs, in Triton: one pass over q, and nothing but the result is written.

A program owns a strip of rows of a few labels of one image. It keeps, per column, sums over the window's rows: of q, q
times the distance in rows, q times squares, each feature times q. One row down, a row of q enters the window and one
leaves. Along the row, sums over the window's columns come from running sums, restarted every K columns (K at least the
window) with coordinates from the middle of that stretch, so that float32 loses nothing to far columns: a window is the
end of one stretch plus the start of the next, or lies inside one. With I the features, N the weighted squares,

    total_j = w_colour I_j . (I_j Box(q) - 2 Box(I q)) + w_position x_j (x_j Box(q) - 2 Box(x q)) + Box(N q)

is evaluated at both ends of the window, and only the two results move to its centre. I_j is needed there, so the
features are copied once, centred, and shifted so that the reads of all labels are aligned.

The backward is the same pass over the gradient with a mirrored window. All sums have a fixed order: results repeat bit
for bit. Handles 1-D and 2-D, at most MAX_FEATURES features, rows (or windows) of at most MAX_COLUMNS; else torch runs.
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
from deepmrf.ops.backends import Implementation
from deepmrf.ops.window import Reach, accumulator, reaches

MAX_FEATURES = 4
"""A feature costs a sum per column in registers."""
MAX_COLUMNS = 4096
"""A program holds whole rows in registers."""
ELEMENTS = 512
"""Pixels (columns times labels) of a row that a program works on at once; more only for rows that are longer."""
PER_THREAD = 4
"""Of which each thread has this many: about ten numbers each must fit its registers."""
PROGRAMS_PER_PROCESSOR = 7
"""Strips are cut for so many programs on every multiprocessor: each strip first sums a whole window of rows."""
UNROLL = 1
"""Rows asked for at once in that first sum."""
AHEAD = False
"""Ask for a row's features one row early; the backward has no registers to spare for that."""
MAX_REGISTERS: int | None = 128
"""Registers per thread, or the compiler's choice; long rows, of which a thread has more, get the latter."""


class Plan(NamedTuple):
    """How an image is cut: labels per program, stretches of a row and their length, rows per strip, warps."""

    labels: int
    stretches: int
    stretch: int
    strip: int
    warps: int


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


def plane_sides(size: Sequence[int], window: Sequence[int], mirrored: bool = False) -> tuple[int, int, Reach, Reach]:
    """Height, width and the reaches along them, no longer than the image; a 1-D signal is an image of one row."""
    sides = [(min(b, n - 1), min(a, n - 1)) for (b, a), n in zip(reaches(window, mirrored), size, strict=True)]
    return (1, size[0], (0, 0), sides[0]) if len(size) == 1 else (size[0], size[1], sides[0], sides[1])


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _columns(width: int, reach: Reach) -> tuple[int, int]:
    """(padded width of a row, stretch after which its running sums restart)."""
    stretch = power_of_two(max(sum(reach) + 1, 4))  # four columns are one load; longer costs small windows digits
    return max(power_of_two(width), stretch, 32), stretch


def _plan(q: Tensor, height: int, width: int, reach: Reach) -> Plan:
    padded, stretch = _columns(width, reach)
    labels = min(max(ELEMENTS // padded, 1), power_of_two(q.shape[1]))
    warps = min(max(padded * labels // PER_THREAD // 32, 1), 16)
    columns_of_programs = q.shape[0] * -(-q.shape[1] // labels)
    strips = -(-PROGRAMS_PER_PROCESSOR * processors(q.device) // columns_of_programs)
    strip = max(-(-height // strips), min(16, height))
    return Plan(labels, padded // stretch, stretch, strip, warps)


def _suits(q: Tensor, features: Tensor, weights: Tensor, window: Sequence[int]) -> bool:
    if not runs_on(q) or q.dim() not in (3, 4) or features.shape[1] > MAX_FEATURES or q.numel() == 0:
        return False
    _, width, _, reach = plane_sides(q.shape[2:], window)
    return _columns(width, reach)[0] <= MAX_COLUMNS


def _shifted(features: Tensor, height: int, width: int, reach: Reach, padded: int) -> Tensor:
    """Centred features in place and shifted to both ends of the window, (3, B, F, H, padded)."""
    from deepmrf.ops import distance_kernels_triton as kernels

    images, maps = features.shape[:2]
    scale = 1 / 255 if features.dtype == torch.uint8 else 1.0
    shifted = torch.empty(3, images, maps, height, padded, dtype=torch.float32, device=features.device)
    if maps:
        kernels.shift_features[(images * maps, height)](
            features.contiguous(), shifted, images * maps, height, width, *reach, scale, SAMPLES=256, P=padded,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the pass; returns (result, kept sums, the programs' parts of the weights' gradients)."""
    from deepmrf.ops import distance_kernels_triton as kernels

    height, width, reach_y, reach_x = plane_sides(q.shape[2:], window, mirrored=back)
    plan = _plan(q, height, width, reach_x)
    groups, strips = -(-q.shape[1] // plan.labels), -(-height // plan.strip)
    programs = q.shape[0] * groups * strips
    squares = [s * s for s in spacing]
    with on_device(q):
        shifted = _shifted(features, height, width, reach_x, plan.stretches * plan.stretch)
        out = torch.empty_like(q)
        kept_out = torch.empty_like(q) if keep else q.new_empty(0)
        partials = torch.empty(programs if back else 0, 3, dtype=torch.float32, device=q.device)
        crowded = plan.labels * plan.stretches * plan.stretch > 32 * plan.warps * PER_THREAD
        options = {} if MAX_REGISTERS is None or crowded else {"maxnreg": MAX_REGISTERS}
        kernels.window_sums[(programs,)](
            x,
            q,
            kept,
            shifted,
            weights.contiguous(),
            out,
            kept_out,
            partials,
            q.shape[1],
            height,
            width,
            plan.strip,
            strips,
            groups,
            shifted[0].numel() // shifted.shape[-1],
            *reach_y,
            *reach_x,
            squares[0] if len(squares) == 2 else 0.0,
            squares[-1],
            BACK=back,
            GATE=gate,
            KEEP=keep,
            F=features.shape[1],
            G=plan.labels,
            NB=plan.stretches,
            K=plan.stretch,
            UNROLL=1 if interpreted() else UNROLL,
            AHEAD=AHEAD and not back,
            num_warps=plan.warps,
            **options,
        )
    return out, kept_out, partials


def _forward(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    x = q.contiguous()
    out, kept, _ = _sweep(x, x, x, features, weights, window, spacing, gate, keep, back=False)
    return out, kept


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
    grad_weights = partials.sum(0, dtype=torch.float64)
    return grad_q, q.new_empty(0, dtype=accumulator(q)), grad_weights.to(weights.dtype)


IMPLEMENTATION = Implementation("triton", _forward, _backward, _suits)
