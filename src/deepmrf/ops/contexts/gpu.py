"""Label contexts on NVIDIA GPUs: the convolution as a product of half matrices, the minimum in its registers.

What is laid out where, in two axes (tall x wide filters):

- rows: t as half numbers, channels last, in a buffer (images, lines, columns) of pixels with a zero border; the right
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
has the 10 fractional bits of TF32, PyTorch's own choice for convolutions of float32, and runs twice as fast (error
about 3e-4 of the result). Where torch.backends.cudnn.allow_tf32 is off, a float32 is the sum of two float16 and a
product the sum of three (error under 1e-5, three times the work), and PyTorch computes the gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmrf.ops.contexts import Arguments, operator
from deepmrf.ops.launch import DTYPES, interpreted, largest_bits, on_device, parts, power_of_two, runs_on
from deepmrf.ops.registry import Implementation, Pair
from deepmrf.ops.window import reaches

MIN_WORK = 4e9
"""Multiplications below which cuDNN's single launch beats our five."""
MAX_FILTER_NUMBERS = 2**29
"""Places in the packed filters are counted in 32 bits."""
MAX_SLOTS = 16
"""Groups of eight columns in the widest tile: also the most patterns of one label."""
SPLIT_COPIES = 3
"""Channels per channel where a float32 is two float16: high, low, high times high, high, low."""
SHORT_SUM_STEPS = 16
"""Steps of a short sum where numbers are split in two."""
PIXELS_PER_PROGRAM = 16384
"""Pixels that a program of the bias' gradient sums."""


def _splits(t: Tensor) -> bool:
    """Is each float32 to be the sum of two float16? Where PyTorch must not round convolutions to TF32 either."""
    try:
        rounds = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the program set PyTorch's newer switches, which this one cannot describe
        rounds = torch.backends.cudnn.conv.fp32_precision != "ieee"  # type: ignore[attr-defined]
    return t.dtype == torch.float32 and not rounds


def _suits(a: Arguments) -> bool:
    """2-D, at most float32, on a GPU with matrix units, and large enough to pay for the launches."""
    t, weight, contexts = a.t, a.weight, a.contexts
    if t.dim() != 4 or t.numel() == 0 or not 1 <= contexts <= MAX_SLOTS or not runs_on(t):
        return False
    if weight.shape[0] != t.shape[1] * contexts:  # more maps than labels that pay
        return False
    if weight.dtype not in DTYPES or weight.numel() >= MAX_FILTER_NUMBERS:
        return False
    if not t.is_cuda:
        return t.device.type == "cpu"
    if torch.version.hip is not None or torch.cuda.get_device_capability(t.device) < (8, 0):
        return False
    return t.shape[0] * t.shape[2] * t.shape[3] * weight.numel() >= MIN_WORK


class Plan(NamedTuple):
    """The shapes of one product: see the head of this module."""

    group: int
    """Lines whose channels a pixel carries."""
    channels: int
    """Channels of a pixel, rounded up to eights."""
    block_k: int
    steps_row: int
    """Steps of one line of the filter."""
    steps: int
    block_n: int
    groups: int
    """Groups of block_n outputs."""
    shifts: int


def _up(value: int, to: int) -> int:
    return parts(value, to) * to


@functools.lru_cache(maxsize=256)
def make_plan(
    inputs: int, tall: int, wide: int, labels: int, contexts: int, copies: int = 1, adjoint: bool = False
) -> Plan:
    """The cheapest cut for `inputs` channels and `labels` outputs, by a count of cycles on one multiprocessor."""
    cuts: list[tuple[int, int, int]] = []  # block_n, groups, shifts
    if adjoint:
        for shifts in range(1, max(1, min(16, 8 * MAX_SLOTS // labels)) + 1):
            width = max(16, min(8 * MAX_SLOTS, power_of_two(shifts * labels)))
            cuts.append((width, parts(shifts * labels, width), shifts))
    else:
        slots = next((s for s in (2, 4, 8, MAX_SLOTS) if s // contexts * 8 >= labels), MAX_SLOTS)
        cuts.append((8 * slots, parts(labels, slots // contexts * 8), 1))
    best: tuple[float, Plan] | None = None
    for block_n, groups, shifts in cuts:
        for group in range(1, tall + 1):
            channels = _up(group * copies * inputs, 8)
            for block_k, penalty in ((64, 1.0), (32, 1.1), (16, 1.3)):
                steps_row = parts((wide + shifts - 1) * channels, block_k)
                steps = parts(tall, group) * steps_row
                # Of 256 rows: the matrix units against the traffic of shared memory, then the buffer's way to memory.
                step = max(8 * block_n, 768 + 5 * block_n) * block_k / 64 * penalty
                cost = groups * steps * step / shifts + 256 * 4 * channels / 14
                plan = Plan(group, channels, block_k, steps_row, steps, block_n, groups, shifts)
                if best is None or cost < best[0]:
                    best = cost, plan
    assert best is not None  # there is at least one cut
    return best[1]


class Tile(NamedTuple):
    """What a program of a product computes, and with what."""

    block_m: int
    """Rows of the matrix."""
    warps: int
    stages: int
    """Steps on their way through shared memory, with the one in work."""


def _roomy(device: torch.device) -> bool:
    """Has a multiprocessor the shared memory of the data-centre chips, or the 100 KB of the others?"""
    return torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3))


def _tile(plan: Plan, x: Tensor, split: bool = False) -> Tile:
    """The tile for a tensor: smaller where large ones would leave multiprocessors idle."""
    if interpreted():
        return Tile(128, 4, 1)
    if split:  # two sums share the registers
        return Tile(64, 4, 3 if _roomy(x.device) else 2)
    if not _roomy(x.device):
        return Tile(128, 4, 2)
    rows = x.shape[0] * x.shape[2] * x.shape[3] // plan.shifts * plan.groups
    if rows < 264 * 256:
        return Tile(64, 4, 3) if rows < 264 * 64 else Tile(128, 4, 3)
    return Tile(256, 8, 3 if plan.shifts == 1 else 4)


class Rows(NamedTuple):
    """A tensor as half numbers, channels last, with a zero border, and what is needed to read it."""

    buffer: Tensor
    bits: Tensor
    lines: int
    """Lines per image."""
    columns: int


def _lines(plan: Plan, height: int, tall: int) -> int:
    return height + _up(tall, plan.group) - plan.group


def _slack(plan: Plan, tile: Tile, columns: int) -> int:
    """Pixels that the last tile may read behind the last image."""
    return (tile.block_m + 1) * plan.shifts + parts(plan.steps_row * plan.block_k, plan.channels) + columns


def _rows(
    x: Tensor, plan: Plan, columns: int, border: tuple[int, int], lines: int, slack: int, copies: int = 1,
    active: Tensor | None = None, contexts: int = 0, bits: Tensor | None = None,
) -> Rows:  # fmt: skip
    """x laid out for a plan; `border` is the reach before a pixel, `slack` the readable zeros after the last image.

    With `active`, each number goes to the active one of `contexts` patterns. `bits` is largest_bits(x), if known.
    """
    from deepmrf.ops.contexts import gpu_kernels as kernels

    batch, labels, height, width = x.shape
    bits = largest_bits(x) if bits is None else bits
    pixels = batch * lines * columns + slack
    buffer = torch.empty(pixels * plan.channels, device=x.device, dtype=torch.float16)
    block_p, most_c, warps = (64, 64, 8) if active is None else (32, 128, 4)
    block_c = min(most_c, power_of_two(plan.channels))
    block_p = min(512 if interpreted() else block_p, power_of_two(columns))
    blocks = parts(columns, block_p)
    kernels.rows[(parts(pixels, columns) * blocks, parts(plan.channels, block_c))](
        x, x if active is None else active, bits, buffer, pixels, batch, height, width, lines, columns, blocks,
        border[0], BEFORE_X=border[1], LABELS=labels, K=contexts, COPIES=copies, GROUP=plan.group,
        CHANNELS=plan.channels, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=warps,
    )  # fmt: skip
    return Rows(buffer, bits, lines, columns)


def _filters(
    weight: Tensor, contexts: int, plan: Plan, copies: int = 1, adjoint: bool = False
) -> tuple[Tensor, Tensor]:
    """The weight laid out for a plan, and the bits of its largest magnitude."""
    from deepmrf.ops.contexts import gpu_kernels as kernels

    bits = largest_bits(weight)
    size = plan.groups * plan.steps * plan.block_n * plan.block_k
    packed = torch.empty(size, device=weight.device, dtype=torch.float16)
    block = 1 << 14 if interpreted() else 512
    kernels.filters[(parts(size, block),)](
        weight, bits, packed, size, LABELS=weight.shape[1], K=contexts, TALL=weight.shape[2],
        WIDE=weight.shape[3], COPIES=copies, GROUP=plan.group, CHANNELS=plan.channels, STEPS_ROW=plan.steps_row,
        STEPS=plan.steps, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, ADJOINT=adjoint, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return packed, bits


def _correlate(
    rows: Rows, packed: Tensor, bits: Tensor, plan: Plan, tile: Tile, out: Tensor, contexts: int = 1,
    bias: Tensor | None = None, active: Tensor | None = None, split: bool = False,
) -> None:  # fmt: skip
    """The product into out; with `bias`, its minimum over the contexts, and which one it is into `active`."""
    from deepmrf.ops.contexts import gpu_kernels as kernels

    batch, labels, height, width = out.shape
    tiles = parts((height - 1) * rows.columns + width, tile.block_m * plan.shifts)
    kernels.correlate[(tiles * batch * plan.groups,)](
        rows.buffer, packed, rows.bits, bits, out if bias is None else bias, out, out if active is None else active,
        height, width, rows.lines, rows.columns, tiles, OUTPUTS=labels * plan.shifts, LABELS=labels, K=contexts,
        GROUP=plan.group, CHANNELS=plan.channels, SHIFTS=plan.shifts, STEPS_ROW=plan.steps_row, STEPS=plan.steps,
        BLOCK_M=tile.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, LOG=(plan.block_n // 8).bit_length() - 1,
        GROUPS=plan.groups, MINIMUM=bias is not None, STAGES=tile.stages, CHUNK=SHORT_SUM_STEPS if split else 0,
        num_warps=tile.warps,
    )  # fmt: skip


@on_device
def _forward(a: Arguments) -> Pair:
    t, weight, bias, contexts = a
    if t.dim() != 4 or contexts > MAX_SLOTS or t.dtype not in DTYPES:
        raise ValueError(
            f"The triton implementation of label contexts takes t (B, L, H, W) of at most 32 bits and K <= {MAX_SLOTS},"
            f" but got shape {tuple(t.shape)}, {t.dtype}, K={contexts}: leave the choice to deepmrf.ops.use(None)."
        )
    t, weight, bias = t.contiguous(), weight.contiguous(), bias.contiguous()
    labels, height, width = t.shape[1:]
    tall, wide = weight.shape[2:]
    split = _splits(t)
    copies = SPLIT_COPIES if split else 1
    plan = make_plan(labels, tall, wide, labels, contexts, copies)
    tile = _tile(plan, t, split)
    columns = width + wide // 2
    out = torch.empty_like(t)
    active = torch.empty_like(out, dtype=torch.uint8)
    lines, slack = _lines(plan, height, tall), _slack(plan, tile, columns)
    rows = _rows(t, plan, columns, (tall // 2, wide // 2), lines, slack, copies)
    packed, bits = _filters(weight, contexts, plan, copies)
    _correlate(rows, packed, bits, plan, tile, out, contexts, bias, active, split)
    return out, active


class GradientTile(NamedTuple):
    """What a program of the gradient to the filters computes, and with what."""

    block_n: int
    """Numbers of a filter."""
    warps: int
    stages: int
    programs: int
    block_m: int = 128
    """Patterns."""
    block_p: int = 64
    """Pixels of a step."""


def _gradient_tile(device: torch.device) -> GradientTile:
    if interpreted():
        return GradientTile(128, 4, 1, programs=2)
    return GradientTile(256, 8, 4, programs=528) if _roomy(device) else GradientTile(128, 4, 2, programs=528)


@on_device
def _backward(grad: Tensor, active: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    if _splits(a.t):
        return operator.plain.backward(grad, active, a, needed)
    t_too, weight_too, _ = needed
    grad, active, t, weight, contexts = (
        grad.contiguous(), active.contiguous(), a.t.contiguous(), a.weight.contiguous(), a.contexts
    )  # fmt: skip
    batch, labels, height, width = t.shape
    tall, wide = int(weight.shape[2]), int(weight.shape[3])
    grad_bias, grad_bits = _bias_gradient(grad, active, contexts)
    grad_t = grad_weight = None
    if not t_too and not weight_too:
        return grad_t, grad_weight, grad_bias

    back = make_plan(labels * contexts, tall, wide, labels, 1, adjoint=True)
    front = make_plan(labels, tall, wide, labels, contexts)
    tile, cut = _tile(back, t), _gradient_tile(t.device)
    columns = width + wide // 2
    # Both buffers get the same lines, so that a pixel of one is a pixel of the other a fixed distance away.
    lines = max(_lines(back, height, tall), _lines(front, height, tall))
    pixels = batch * lines * columns
    tiles = parts(labels * contexts, cut.block_m) * parts(front.steps * front.block_k, cut.block_n)
    # At least as many sums as keep the places of one sum's numbers within 32 bits.
    fewest = 1 + pixels * max(back.channels, front.channels) // 2**30
    sums = max(fewest, min(cut.programs // tiles, pixels // (8 * cut.block_p)))
    pixels_each = _up(parts(pixels, sums), cut.block_p)
    beyond = sums * pixels_each - pixels
    (before_y, after_y), (before_x, after_x) = reaches((tall, wide))
    slack = max(_slack(back, tile, columns), beyond + after_y * columns + after_x)
    spread = _rows(
        grad, back, columns, (after_y, after_x), lines, slack, active=active, contexts=contexts, bits=grad_bits
    )  # fmt: skip
    if t_too:
        packed, bits = _filters(weight, contexts, back, adjoint=True)
        grad_t = torch.empty_like(t)
        _correlate(spread, packed, bits, back, tile, grad_t)
    if weight_too:
        slack = beyond + (lines - height) * columns + parts(front.steps_row * front.block_k, front.channels) + 1
        rows = _rows(t, front, columns, (before_y, before_x), lines, slack)
        first = (after_y * columns + after_x) * back.channels  # the pixel of spread that meets the first of rows
        total = _filter_gradient(spread, first, rows, labels * contexts, back, front, cut, sums, pixels_each)
        grad_weight = _unpacked(total, front, labels, tall, wide).contiguous()
    return grad_t, grad_weight, grad_bias


def _filter_gradient(
    spread: Rows, first: int, rows: Rows, patterns: int, back: Plan, front: Plan, cut: GradientTile, sums: int,
    pixels_each: int,
) -> Tensor:  # fmt: skip
    """The product of both buffers summed over the pixels: (patterns, steps * block_k), laid out as `front` has it."""
    from deepmrf.ops.contexts import gpu_kernels as kernels

    length = front.steps * front.block_k
    tiles_m, tiles_n = parts(patterns, cut.block_m), parts(length, cut.block_n)
    total = torch.empty(sums, patterns, length, device=rows.buffer.device, dtype=torch.float32)
    kernels.filter_gradient[(sums * tiles_m * tiles_n,)](
        spread.buffer[first:], rows.buffer, spread.bits, rows.bits, total, pixels_each, rows.columns,
        PATTERNS=patterns, SPREAD_CHANNELS=back.channels, GROUP=front.group, CHANNELS=front.channels, LENGTH=length,
        LENGTH_ROW=front.steps_row * front.block_k, M_TILES=tiles_m, N_TILES=tiles_n, BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n, BLOCK_P=cut.block_p, STAGES=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    return total.sum(0)


def _unpacked(total: Tensor, plan: Plan, labels: int, tall: int, wide: int) -> Tensor:
    """Filters (patterns, labels, tall, wide) from the layout of a plan, (patterns, steps * block_k)."""
    patterns = total.shape[0]
    total = total.view(patterns, -1, plan.steps_row * plan.block_k)[..., : wide * plan.channels]
    total = total.reshape(patterns, -1, wide, plan.channels)[..., : plan.group * labels]
    total = total.reshape(patterns, -1, wide, plan.group, labels)
    return total.permute(0, 4, 1, 3, 2).flatten(2, 3)[:, :, :tall]  # pattern, label, step and line, tap


def _bias_gradient(grad: Tensor, active: Tensor, contexts: int) -> tuple[Tensor, Tensor]:
    """The sum of grad over the pixels where each pattern is active, in a fixed order; and largest_bits(grad)."""
    from deepmrf.ops.contexts import gpu_kernels as kernels

    batch, labels, *size = grad.shape
    pixels = math.prod(size)
    programs = parts(pixels, PIXELS_PER_PROGRAM)
    sums = torch.empty(batch * programs, labels * contexts, device=grad.device, dtype=torch.float32)
    bits = torch.zeros(1, device=grad.device, dtype=torch.int32)
    kernels.bias_gradient[(batch * labels, programs)](
        grad, active, sums, bits, pixels, LABELS=labels, K=contexts, EACH=PIXELS_PER_PROGRAM,
        BLOCK=PIXELS_PER_PROGRAM if interpreted() else 1024, num_warps=4,
    )  # fmt: skip
    return sums.sum(0), bits


IMPLEMENTATION = Implementation("triton", _forward, _backward, _suits)
