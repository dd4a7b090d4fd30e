"""Label contexts on NVIDIA GPUs: the convolution as a product of half matrices, the minimum in its registers.

What is laid out where, in two axes (tall x wide filters):

- rows: t as half numbers, channels last, in a buffer (images, rows, columns) of pixels with a zero border; the right
  border of a line is the left border of the next. A pixel carries the channels of `group` lines below one another, as
  3 * 21 = 63 fills 64 channels better than 21 fills 24. The taps of one line of the filter are then contiguous from
  each pixel on, so the matrix of all stretches of the image is an overlapping view of the buffer, never a copy.
- filters: (output groups, steps, block_n, block_k), a step being block_k numbers of such a stretch. Column 8 s + p of a
  group is pattern s % K of label 8 (s // K) + p: a thread holds the same p of every eight columns, so it has all K
  patterns of its labels and takes the minimum without talking to the others.
- The gradient to t is the same product with mirrored filters, of the gradient spread to the active patterns. It has few
  outputs, so a row of the matrix makes `shifts` neighbouring pixels, which share most of their stretch.
- The gradient to the filters sums over pixels, in parts that are added in a fixed order.

Numbers are scaled by a power of two, found on the device, to use the range of float16, and summed in float32. float16
has the 10 fractional bits of TF32, PyTorch's own choice for convolutions of float32, and runs twice as fast.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepmrf.ops.registry import Implementation
from deepmrf.ops.window import reaches

_PRECISIONS = ("auto", "fp16", "bf16", "fp16x3")
_precision = "auto"
_SMALLEST_WORK = 4e9
"""Multiplications below which cuDNN's single launch beats our five."""
_SLOTS = 16
"""Groups of eight columns in the widest tile: also the most patterns of one label."""
CHUNK = 16
"""Steps of a short sum where numbers are split in two."""
ROWS = (64, 8)
"""Pixels of a line, and warps, of a program that lays out rows."""
ROWS_SPREAD = (32, 4)
"""The same when it spreads them to the active patterns."""


def set_precision(name: str) -> None:
    """How t and the filters are rounded before they are multiplied; sums are always in float32.

    "fp16" (error about 3e-4 of the result, as TF32), "bf16" (3e-3), "fp16x3" (each number as the sum of two float16,
    three products: under 1e-5; three times the work, gradients by cuDNN), or "auto", the default: "fp16", or "fp16x3"
    for float32 when torch.backends.cudnn.allow_tf32 is off.
    """
    global _precision
    if name not in _PRECISIONS:
        raise ValueError(f"There is no precision {name!r}: choose one of {', '.join(_PRECISIONS)}.")
    _precision = name


@contextmanager
def precision(name: str) -> Iterator[None]:
    """set_precision inside a `with` block."""
    before = _precision
    set_precision(name)
    try:
        yield
    finally:
        set_precision(before)


def _chosen(t: Tensor) -> str:
    if _precision != "auto":
        return _precision
    try:
        rounded = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the program set PyTorch's newer switches, which this one cannot describe
        rounded = torch.backends.cudnn.conv.fp32_precision != "ieee"  # type: ignore[attr-defined]
    return "fp16" if rounded or t.dtype != torch.float32 else "fp16x3"


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("deepmrf.ops.contexts.gpu_kernels")


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _suits(t: Tensor, weight: Tensor, bias: Tensor, contexts: int) -> bool:
    """2-D, at most float32, on a GPU with matrix units, and large enough to pay for the launches."""
    if t.dim() != 4 or t.numel() == 0 or not 1 <= contexts <= _SLOTS or not _installed():
        return False
    if weight.shape[0] != t.shape[1] * contexts:  # more maps than labels that pay
        return False
    if any(x.dtype not in (torch.float32, torch.bfloat16, torch.float16) for x in (t, weight, bias)):
        return False
    if t.device.type != "cuda":
        return _interpreted() and t.device.type == "cpu"
    if torch.version.hip is not None or torch.cuda.get_device_capability(t.device) < (8, 0):
        return False
    # Places in the packed filters are counted in 32 bits.
    work = t.shape[0] * t.shape[2] * t.shape[3] * weight.numel()
    return work >= _SMALLEST_WORK and weight.numel() < 2**29


@dataclass(frozen=True)
class Tile:
    """How one product is cut and run: rows per program, warps, steps in flight, operands brought by the copy engine.

    chunk: steps that matrix units sum by themselves, as they do not round; 0 for all.
    """

    block_m: int = 256
    warps: int = 8
    stages: int = 3
    tma_a: bool = False
    tma_b: bool = False
    chunk: int = 0


@dataclass(frozen=True)
class _Plan:
    """The shapes of one product: see the head of this module."""

    group: int
    channels: int
    block_k: int
    steps_row: int
    steps: int
    block_n: int
    groups: int
    shifts: int


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


@functools.lru_cache(maxsize=256)
def _plan(each: int, tall: int, wide: int, labels: int, contexts: int, copies: int, adjoint: bool) -> _Plan:
    """The cheapest cut for `each` channels and `labels` outputs, by a count of cycles on one multiprocessor."""
    cuts: list[tuple[int, int, int]] = []  # block_n, groups, shifts
    if adjoint:
        for shifts in range(1, max(1, min(16, 8 * _SLOTS // labels)) + 1):
            width = max(16, min(8 * _SLOTS, 1 << (shifts * labels - 1).bit_length()))
            cuts.append((width, -(-shifts * labels // width), shifts))
    else:
        slots = next((s for s in (2, 4, 8, _SLOTS) if s // contexts * 8 >= labels), _SLOTS)
        cuts.append((8 * slots, -(-labels // (slots // contexts * 8)), 1))
    best: tuple[float, _Plan] | None = None
    for block_n, groups, shifts in cuts:
        for group in range(1, tall + 1):
            channels = _up(group * copies * each, 8)
            for block_k, penalty in ((64, 1.0), (32, 1.1), (16, 1.3)):
                steps_row = -(-(wide + shifts - 1) * channels // block_k)
                steps = -(-tall // group) * steps_row
                # Of 256 rows: the matrix units against the traffic of shared memory, then the buffer's way to memory.
                step = max(8 * block_n, 768 + 5 * block_n) * block_k / 64 * penalty
                cost = groups * steps * step / shifts + 256 * 4 * channels / 14
                plan = _Plan(group, channels, block_k, steps_row, steps, block_n, groups, shifts)
                if best is None or cost < best[0]:
                    best = cost, plan
    assert best is not None  # there is at least one cut
    return best[1]


def largest_bits(x: Tensor) -> Tensor:
    """The bits of the largest magnitude of x, (1,)."""
    size = x.numel()
    bits = torch.zeros(1, device=x.device, dtype=torch.int32)
    block, each = (4096, 16384) if size >= 1 << 22 else (1024, 1024)
    _kernels().largest[(-(-size // each),)](x, bits, size, EACH=each, BLOCK=block, num_warps=8)
    return bits


@dataclass(frozen=True)
class _Rows:
    """A tensor as half numbers, channels last, with a zero border, and what is needed to read it."""

    buffer: Tensor
    bits: Tensor
    lines: int
    columns: int


def _rows(
    x: Tensor, active: Tensor | None, contexts: int, plan: _Plan, filters: tuple[int, int], border: tuple[int, int],
    lines: int, slack: int, copies: int, half: torch.dtype, bits: Tensor | None = None,
) -> _Rows:  # fmt: skip
    """x laid out for a plan; `lines` is rows per image, `slack` the readable zero pixels after the last image.

    `bits` is what largest_bits finds, if it is known.
    """
    batch, labels, height, width = x.shape
    columns = width + filters[1] // 2  # the larger of the two reaches of a window
    bits = largest_bits(x) if bits is None else bits
    pixels = batch * lines * columns + slack
    buffer = torch.empty(pixels * plan.channels, device=x.device, dtype=half)
    block_c = min(64 if active is None else 128, 1 << (plan.channels - 1).bit_length())
    block_p, warps = ROWS if active is None else ROWS_SPREAD
    block_p = min(block_p if not _interpreted() else 512, 1 << (columns - 1).bit_length())
    blocks = -(-columns // block_p)
    _kernels().rows[(-(-pixels // columns) * blocks, -(-plan.channels // block_c))](
        x, x if active is None else active, bits, buffer, pixels, batch, height, width, lines, columns, blocks,
        border[0], BEFORE_X=border[1], LABELS=labels, K=0 if active is None else contexts, COPIES=copies,
        GROUP=plan.group, CHANNELS=plan.channels, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    return _Rows(buffer, bits, lines, columns)


def _filters(
    weight: Tensor, contexts: int, plan: _Plan, adjoint: bool, copies: int, half: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weight laid out for a plan, and the bits of its largest magnitude."""
    bits = largest_bits(weight)
    size = plan.groups * plan.steps * plan.block_n * plan.block_k
    packed = torch.empty(size, device=weight.device, dtype=half)
    block = 512 if not _interpreted() else 1 << 14
    _kernels().filters[(-(-size // block),)](
        weight, bits, packed, size, LABELS=weight.shape[1], K=contexts, TALL=weight.shape[2],
        WIDE=weight.shape[3], COPIES=copies, GROUP=plan.group, CHANNELS=plan.channels, STEPS_ROW=plan.steps_row,
        STEPS=plan.steps, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, ADJOINT=adjoint, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return packed, bits


def _roomy(device: torch.device) -> bool:
    """Has a multiprocessor the shared memory of the data-centre chips, or the 100 KB of the others?"""
    return torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3))


def _tile(plan: _Plan, x: Tensor, copies: int = 1) -> Tile:
    """The default tile for a tensor: smaller where large ones would leave multiprocessors idle."""
    chunk = CHUNK if copies > 1 else 0
    if _interpreted():
        return Tile(block_m=128, warps=4, stages=1, chunk=chunk)
    if chunk:  # two sums share the registers
        return Tile(block_m=64, warps=4, stages=3 if _roomy(x.device) else 2, chunk=chunk)
    if not _roomy(x.device):
        return Tile(block_m=128, warps=4, stages=2)
    rows = x.shape[0] * x.shape[2] * x.shape[3] // plan.shifts * plan.groups
    if rows < 264 * 256:
        return Tile(block_m=64, warps=4, stages=3) if rows < 264 * 64 else Tile(block_m=128, warps=4, stages=3)
    return Tile(stages=3 if plan.shifts == 1 else 4)


def _slack(plan: _Plan, tile: Tile, columns: int) -> int:
    """Pixels that the last tile may read behind the last image."""
    return (tile.block_m + 1) * plan.shifts + -(-plan.steps_row * plan.block_k // plan.channels) + columns


def _lines(plan: _Plan, height: int, tall: int) -> int:
    return height + _up(tall, plan.group) - plan.group


def _correlate(
    rows: _Rows, packed: Tensor, bits: Tensor, bias: Tensor | None, log_p: Tensor | None,
    shape: torch.Size, contexts: int, plan: _Plan, tile: Tile, out: Tensor, active: Tensor | None,
) -> None:  # fmt: skip
    """The product and its epilogue, into out and active."""
    batch, labels, height, width = shape
    flat = (height - 1) * rows.columns + width
    tiles = -(-flat // (tile.block_m * plan.shifts))
    a_desc, b_desc = rows.buffer, packed
    if tile.tma_a or tile.tma_b:
        make = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
        length = plan.steps_row * plan.block_k
        if tile.tma_a:
            # A line for every `shifts` pixels, long enough to start at any of them.
            stride = plan.shifts * plan.channels
            length += stride - plan.channels
            reach = (rows.buffer.numel() - length) // stride + 1
            a_desc = make(rows.buffer, [reach, length], [stride, 1], [tile.block_m, plan.block_k])
        if tile.tma_b:
            lines = packed.numel() // plan.block_k
            b_desc = make(packed, [lines, plan.block_k], [plan.block_k, 1], [plan.block_n, plan.block_k])
    unused = rows.buffer
    _kernels().correlate[(tiles * batch * plan.groups,)](
        rows.buffer, packed, a_desc, b_desc, rows.bits, bits, unused if bias is None else bias,
        unused if log_p is None else log_p, out, unused if active is None else active,
        height, width, rows.lines, rows.columns, tiles,
        OUTPUTS=labels * plan.shifts, LABELS=labels, K=contexts, GROUP=plan.group, CHANNELS=plan.channels,
        SHIFTS=plan.shifts, STEPS_ROW=plan.steps_row, STEPS=plan.steps, BLOCK_M=tile.block_m, BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k, LOG=(plan.block_n // 8).bit_length() - 1, GROUPS=plan.groups,
        MODE="sum" if bias is None else "minimum" if log_p is None else "softmax",
        TMA_A=tile.tma_a, TMA_B=tile.tma_b, STAGES=tile.stages, CHUNK=tile.chunk, num_warps=tile.warps,
    )  # fmt: skip


def _run(
    t: Tensor, weight: Tensor, bias: Tensor, contexts: int, log_p: Tensor | None, tile: Tile | None, out: Tensor,
    active: Tensor | None,
) -> None:  # fmt: skip
    """The forward product into out (and active)."""
    name = _chosen(t)
    half, copies = torch.bfloat16 if name == "bf16" else torch.float16, 3 if name == "fp16x3" else 1
    t, weight, bias = t.contiguous(), weight.contiguous(), bias.contiguous()
    tall, wide = weight.shape[2:]
    plan = _plan(t.shape[1], tall, wide, t.shape[1], contexts, copies, False)
    tile = tile or _tile(plan, t, copies)
    columns = t.shape[3] + wide // 2
    rows = _rows(
        t, None, contexts, plan, (tall, wide), (tall // 2, wide // 2), _lines(plan, t.shape[2], tall),
        _slack(plan, tile, columns), copies, half,
    )  # fmt: skip
    packed, bits = _filters(weight, contexts, plan, False, copies, half)
    _correlate(rows, packed, bits, bias, log_p, t.shape, contexts, plan, tile, out, active)


def _forward(t: Tensor, weight: Tensor, bias: Tensor, contexts: int, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """(o14, which of the K patterns is active as uint8)."""
    _check(t, contexts)
    out = torch.empty_like(t, memory_format=torch.contiguous_format)
    active = torch.empty_like(out, dtype=torch.uint8)
    _run(t, weight, bias, contexts, None, tile, out, active)
    return out, active


def _check(t: Tensor, contexts: int) -> None:
    if t.dim() != 4 or contexts > _SLOTS or t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"The triton implementation of label contexts takes t (B, L, H, W) of at most 32 bits and K <= {_SLOTS}; "
            f"got shape {tuple(t.shape)}, {t.dtype}, K={contexts}: leave the choice to deepmrf.ops.use(None)."
        )


def forward_softmax(
    t: Tensor, weight: Tensor, bias: Tensor, contexts: int, log_p: Tensor, tile: Tile | None = None
) -> Tensor:
    """log_softmax(log_p - o14) over the labels (B, L, H, W), without gradients; one kernel where L fits a tile."""
    _check(t, contexts)
    name = _chosen(t)
    plan = _plan(t.shape[1], *weight.shape[2:], t.shape[1], contexts, 3 if name == "fp16x3" else 1, False)
    if plan.groups > 1:
        return torch.log_softmax(log_p - _forward(t, weight, bias, contexts)[0], 1)
    out = torch.empty_like(log_p, memory_format=torch.contiguous_format)
    _run(t, weight, bias, contexts, log_p.contiguous(), tile, out, None)
    return out


@dataclass(frozen=True)
class GradientTile:
    """How the gradient to the filters is cut: patterns x filter numbers per program, pixels per step."""

    block_m: int = 128
    block_n: int = 256
    block_p: int = 64
    warps: int = 8
    stages: int = 4
    programs: int = 528


def _gradient_tile(device: torch.device) -> GradientTile:
    if _interpreted():
        return GradientTile(block_n=128, warps=4, stages=1, programs=2)
    return GradientTile() if _roomy(device) else GradientTile(block_n=128, warps=4, stages=2)


def _backward(
    grad: Tensor, active: Tensor, t: Tensor, weight: Tensor, contexts: int, t_too: bool, weight_too: bool,
    tile: Tile | None = None, gradient_tile: GradientTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients to t, weight (each empty unless asked for) and bias."""
    name = _chosen(t)
    if name == "fp16x3":
        exact: tuple[Tensor, Tensor, Tensor] = importlib.import_module("deepmrf.ops.contexts")._backward(
            grad, active, t, weight, contexts, t_too, weight_too
        )
        return exact
    half = torch.bfloat16 if name == "bf16" else torch.float16
    grad, active, t, weight = grad.contiguous(), active.contiguous(), t.contiguous(), weight.contiguous()
    batch, labels, height, width = t.shape
    tall, wide = int(weight.shape[2]), int(weight.shape[3])
    sums_of_grad, grad_bits = _bias_gradient(grad, active, contexts)
    bias_grad = sums_of_grad.to(weight.dtype)
    if not t_too and not weight_too:
        return t.new_empty(0), t.new_empty(0), bias_grad

    back = _plan(labels * contexts, tall, wide, labels, 1, 1, True)
    front = _plan(labels, tall, wide, labels, contexts, 1, False)
    tile = tile or _tile(back, t)
    cut = gradient_tile or (_gradient_tile(t.device))
    columns = width + wide // 2
    # Both buffers get the same lines, so that a pixel of one is a pixel of the other a fixed distance away.
    lines = max(_lines(back, height, tall), _lines(front, height, tall))
    tiles_m = -(-labels * contexts // cut.block_m)
    length = front.steps * front.block_k
    tiles_n = -(-length // cut.block_n)
    # At least as many parts as keep the places of one part's numbers within 32 bits.
    fewest = 1 + batch * lines * columns * max(back.channels, front.channels) // 2**30
    parts = max(fewest, min(cut.programs // (tiles_m * tiles_n), batch * lines * columns // (8 * cut.block_p)))
    each = _up(-(-batch * lines * columns // parts), cut.block_p)
    beyond = parts * each - batch * lines * columns
    (before_y, after_y), (before_x, after_x) = reaches((tall, wide))
    slack = max(_slack(back, tile, columns), beyond + after_y * columns + after_x)
    spread = _rows(
        grad, active, contexts, back, (tall, wide), (after_y, after_x), lines, slack, 1, half, grad_bits
    )  # fmt: skip

    grad_t, grad_weight = t.new_empty(0), t.new_empty(0)
    if t_too:
        packed, bits = _filters(weight, contexts, back, True, 1, half)
        grad_t = torch.empty_like(t, memory_format=torch.contiguous_format)
        _correlate(spread, packed, bits, None, None, t.shape, 1, back, tile, grad_t, None)
    if weight_too:
        slack = beyond + (lines - height) * columns + -(-front.steps_row * front.block_k // front.channels) + 1
        rows = _rows(t, None, contexts, front, (tall, wide), (before_y, before_x), lines, slack, 1, half)
        sums = torch.empty(parts, labels * contexts, length, device=t.device, dtype=torch.float32)
        _kernels().filter_gradient[(parts * tiles_m * tiles_n,)](
            spread.buffer[(after_y * columns + after_x) * back.channels :], rows.buffer, spread.bits,
            rows.bits, sums, each, columns, PATTERNS=labels * contexts, SPREAD_CHANNELS=back.channels,
            GROUP=front.group, CHANNELS=front.channels, LENGTH=length, LENGTH_ROW=front.steps_row * front.block_k,
            M_TILES=tiles_m, N_TILES=tiles_n, BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_P=cut.block_p,
            STAGES=cut.stages, num_warps=cut.warps,
        )  # fmt: skip
        total = sums.sum(0).view(labels * contexts, -1, front.steps_row * front.block_k)[..., : wide * front.channels]
        total = total.reshape(labels * contexts, -1, wide, front.channels)[..., : front.group * labels]
        total = total.reshape(labels * contexts, -1, wide, front.group, labels)
        total = total.permute(0, 4, 1, 3, 2)  # pattern, label, step, line, tap
        grad_weight = total.flatten(2, 3)[:, :, :tall].to(weight.dtype).contiguous()
    return grad_t, grad_weight, bias_grad


def _bias_gradient(grad: Tensor, active: Tensor, contexts: int) -> tuple[Tensor, Tensor]:
    """The sum of grad over the pixels where each pattern is active, in a fixed order; and largest_bits(grad)."""
    batch, labels, *size = grad.shape
    pixels = math.prod(size)
    each = 16384
    parts = -(-pixels // each)
    sums = torch.empty(batch * parts, labels * contexts, device=grad.device, dtype=torch.float32)
    bits = torch.zeros(1, device=grad.device, dtype=torch.int32)
    _kernels().bias_gradient[(batch * labels, parts)](
        grad, active, sums, bits, pixels, LABELS=labels, K=contexts, EACH=each,
        BLOCK=1024 if not _interpreted() else each, num_warps=4,
    )  # fmt: skip
    return sums.sum(0), bits


IMPLEMENTATION = Implementation("triton", _forward, _backward, _suits)
