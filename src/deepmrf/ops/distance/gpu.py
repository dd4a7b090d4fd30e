"""The distance kernel's window sum on GPUs, in Triton: one pass over q that writes nothing but the result.

A program owns a strip of rows of a few labels of one image. It keeps, per column, sums over the window's rows: of q, q
times the distance in rows, q times squares, each feature times q. One row down, a row of q enters the window and one
leaves; in 3-D, one of every frame in the window. Along the row, sums over the window's columns come from running sums.
These restart every K columns (K at least the window) with coordinates about the middle of that stretch, so that float32
loses nothing to far columns: a window is the end of one stretch plus the start of the next, or lies inside one. With I
the features, N the weighted squares,

    total_j = w_colour I_j . (I_j Box(q) - 2 Box(I q)) + w_position x_j (x_j Box(q) - 2 Box(x q)) + Box(N q)

is evaluated at both ends of the window, and only the two results move to its centre. I_j is needed there, so the
features are copied once, centred, and shifted so that the reads of all labels are aligned.

The gradient to q is the same pass over g (the gradient, times q with the gate) with a mirrored window. The gradient to
the features has the sums of both directions, which two more passes take over the same columns:

    2 w_colour * sum over labels of ( g_j (I_j Box(q)_j - Box(I q)_j) + q_j (I_j Mirrored(g)_j - Mirrored(I g)_j) )

All sums have a fixed order: results repeat bit for bit. The kernels take 1-D to 3-D images, at most MAX_FEATURES
features, and rows (or windows) of at most MAX_COLUMNS; plain PyTorch does the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deepmrf.ops.distance import Arguments
from deepmrf.ops.launch import interpreted, on_device, parts, power_of_two, processors, runs_on, squared_spacing
from deepmrf.ops.registry import Implementation, Pair
from deepmrf.ops.window import ALL, ImageWindow, Reach, empty_penalty, image_window

MAX_FEATURES = 4
"""A feature costs a sum per column in registers."""
MAX_COLUMNS = 4096
"""A program holds whole rows in registers."""
PIXELS_PER_PROGRAM = 512
"""Pixels (columns times labels) of a row that a program works on at once; more only for rows that are longer."""
PIXELS_PER_THREAD = 4
"""About ten numbers for each of them must fit a thread's registers."""
UNROLLED_ROWS = 4
"""Rows loaded at once in a strip's first sum, over a window of rows."""
FIRST_SUM_COST = 0.25
"""Cost of a row in the first sum, relative to a later row. Each strip begins with one, so strips must not be short."""
ROWS_IN_FLIGHT = 3
"""Rows on their way through shared memory in the forward pass, with the one in work; the backward gains nothing."""
SHARED_BYTES = 98304
"""Shared memory for the rows in flight: as much as any GPU gives a program."""
MAX_REGISTERS = {"forward": 128, "backward": 168, "pull": 128}
"""Registers per thread; for long rows, of which a thread has more pixels, the compiler chooses."""
REGISTERS_PER_PROCESSOR = 65536
ROWS_PER_COPY = 8
"""Rows of features that a program copies."""
SAMPLES_OF_MEAN = 256
"""Pixels whose mean features are centred about: distances are the same about any number near the mean."""

Pass = Literal["forward", "backward", "pull"]
"""The window sum, its adjoint, or one direction of the gradient to the features."""


class Plan(NamedTuple):
    """How one pass over an image is cut into programs."""

    window: ImageWindow
    stretches: int
    """Stretches of columns in a row."""
    stretch: int
    """Columns of a stretch."""
    strips: int
    """Strips of rows in a frame."""
    strip: int
    """Rows of a strip."""
    groups: int
    """Groups of labels."""
    labels: int
    """Labels of a group, which a program works on at once."""
    chunks: int
    """Chunks of groups; each has a program for every strip."""
    chunk: int
    """Groups of a chunk, which a program works on one after the other."""
    warps: int
    registers: int | None
    """Registers per thread at most; None leaves the choice to the compiler."""
    rows_in_flight: int


@functools.lru_cache(maxsize=256)
def _columns(width: int, reach: Reach) -> tuple[int, int]:
    """(padded width of a row, stretch after which its running sums restart)."""
    stretch = power_of_two(max(sum(reach) + 1, 4))  # four columns are one load; longer costs small windows digits
    return max(power_of_two(width), stretch, 32), stretch


@functools.lru_cache(maxsize=256)
def make_plan(shape: tuple[int, ...], features: int, window: tuple[int, ...], kind: Pass, device: torch.device) -> Plan:
    """The plan of a pass over q of this shape."""
    around = image_window(shape[2:], window, mirrored=kind == "backward")
    frames, height, width = around.sizes
    padded, stretch = _columns(width, around.reaches[2])
    labels = min(max(PIXELS_PER_PROGRAM // padded, 1), power_of_two(shape[1]))
    groups = parts(shape[1], labels)
    # Chunks write a map per feature each: with a group per feature, all of these together are no larger than q.
    chunk = min(max(features, 1), groups) if kind == "pull" else 1
    warps = min(max(padded * labels // PIXELS_PER_THREAD // 32, 1), 16)
    crowded = padded * labels > 32 * warps * PIXELS_PER_THREAD
    most = REGISTERS_PER_PROCESSOR // (32 * warps)
    registers = None if crowded else min(MAX_REGISTERS[kind], most)
    loads = 4 * features + 3  # numbers of a pixel on their way; two more go from thread to thread
    room = SHARED_BYTES // (padded * labels * 4 * (loads + 2))
    columns_of_programs = shape[0] * frames * parts(groups, chunk)
    at_once = processors(device) * max(most // (registers or 255), 1)

    def cost(strips: int) -> float:
        waves = parts(columns_of_programs * strips, at_once)
        return waves * (parts(height, strips) + FIRST_SUM_COST * sum(around.reaches[1]))

    strip = parts(height, min(range(1, max(height // 16, 1) + 1), key=cost))
    return Plan(
        around, padded // stretch, stretch, parts(height, strip), strip, groups, labels, parts(groups, chunk), chunk,
        warps, registers, min(ROWS_IN_FLIGHT, 1 + room) if kind == "forward" else 1,
    )  # fmt: skip


def _suits(a: Arguments) -> bool:
    if not runs_on(a.q) or a.q.dim() not in (3, 4, 5) or a.features.shape[1] > MAX_FEATURES or a.q.numel() == 0:
        return False
    return _columns(a.q.shape[-1], image_window(a.q.shape[2:], a.window).reaches[2])[0] <= MAX_COLUMNS


def _shifted(features: Tensor, plan: Plan) -> Tensor:
    """Centred features in place and shifted to both ends of the window, (3, B, F, rows of all frames, padded)."""
    from deepmrf.ops.distance import gpu_kernels as kernels

    images, maps = features.shape[:2]
    frames, height, width = plan.window.sizes
    padded = plan.stretches * plan.stretch
    shifted = torch.empty((3, images, maps, frames * height, padded), dtype=torch.float32, device=features.device)
    if maps:
        kernels.shift_features[(images * maps, parts(frames * height, ROWS_PER_COPY))](
            features.contiguous(), shifted, images * maps, frames * height, width, *plan.window.reaches[2],
            1 / 255 if features.dtype == torch.uint8 else 1.0, SAMPLES=SAMPLES_OF_MEAN, ROWS=ROWS_PER_COPY, P=padded,
            num_warps=4,
        )  # fmt: skip
    return shifted


def _launch(
    a: Arguments, plan: Plan, x: Tensor, shifted: Tensor, out: Tensor, ungated: Tensor, partials: Tensor | None = None
) -> None:
    """Sum x into out: forward q; with `partials`, which get sums for the weights' gradients, the gradient."""
    from deepmrf.ops.distance import gpu_kernels as kernels

    frames, height, width = plan.window.sizes
    back = partials is not None
    first, shown = (0, frames) if a.frame == ALL or back else (a.frame, 1)
    kernels.window_sums[(a.q.shape[0] * shown * plan.groups * plan.strips,)](
        x, a.q, shifted, a.weights, out, ungated, out if partials is None else partials, a.q.shape[1], frames, height,
        width, first, shown, plan.strip, plan.strips, plan.groups,
        shifted.shape[1] * shifted.shape[2] * shifted.shape[3], *plan.window.flat_reaches, *squared_spacing(a.spacing),
        BACK=back, GATE=a.gate, KEEP=a.keep and not back, FRAMES=frames > 1, F=shifted.shape[2], G=plan.labels,
        NB=plan.stretches, K=plan.stretch, UNROLL=1 if interpreted() else UNROLLED_ROWS, STAGES=plan.rows_in_flight,
        num_warps=plan.warps, maxnreg=plan.registers,
    )  # fmt: skip


@on_device
def _forward(a: Arguments) -> Pair:
    a = a._replace(q=a.q.contiguous(), weights=a.weights.contiguous())
    plan = make_plan(a.q.shape, a.features.shape[1], tuple(a.window), "forward", a.q.device)
    out, ungated = empty_penalty(a.q, a.keep, a.frame)
    _launch(a, plan, a.q, _shifted(a.features, plan), out, ungated)
    return out, ungated


@on_device
def _backward(grad: Tensor, ungated: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    a = a._replace(q=a.q.contiguous(), weights=a.weights.contiguous())
    grad, ungated = grad.contiguous(), ungated.contiguous()
    plan = make_plan(a.q.shape, a.features.shape[1], tuple(a.window), "backward", a.q.device)
    grad_q = torch.empty_like(a.q)
    programs = a.q.shape[0] * plan.window.sizes[0] * plan.groups * plan.strips
    partials = torch.empty((programs, 3), dtype=torch.float32, device=grad.device)
    shifted = _shifted(a.features, plan)
    _launch(a, plan, grad, shifted, grad_q, ungated, partials)
    grad_features = _feature_gradient(a, grad, shifted[0]).view(a.features.shape) if needed[1] else None
    return grad_q, grad_features, partials.sum(0, dtype=torch.float64)


def _feature_gradient(a: Arguments, grad: Tensor, centred: Tensor) -> Tensor:
    """The gradient to the features (B, F, pixels), from centred ones (B, F, rows of all frames, padded)."""
    from deepmrf.ops.distance import gpu_kernels as kernels

    images, maps = centred.shape[:2]
    plan = make_plan(a.q.shape, maps, tuple(a.window), "pull", grad.device)
    frames, height, width = plan.window.sizes
    pull = torch.empty((images, plan.chunks, maps, frames * height * width), dtype=torch.float32, device=grad.device)
    for mirrored in (False, True) if maps else ():  # the second adds to the first
        around = image_window(a.q.shape[2:], a.window, mirrored)
        kernels.feature_pull[(images * frames * plan.chunks * plan.strips,)](
            grad, a.q, centred, a.weights, pull, a.q.shape[1], frames, height, width, plan.strip, plan.strips,
            plan.groups, plan.chunk, plan.chunks, *around.flat_reaches, MIRRORED=mirrored, GATE=a.gate, F=maps,
            G=plan.labels, NB=plan.stretches, K=plan.stretch, UNROLL=1 if interpreted() else UNROLLED_ROWS,
            num_warps=plan.warps, maxnreg=plan.registers,
        )  # fmt: skip
    return pull.sum(1)


IMPLEMENTATION = Implementation("triton", _forward, _backward, _suits)
