"""The Triton kernels of contexts/gpu.py, which says what is laid out where; import this module only when they run."""
# mypy: ignore-errors
# ruff: noqa: SIM108 (a branch on a constant leaves the other side uncompiled)

from __future__ import annotations

import triton
import triton.language as tl

from deepmrf.ops.launch_kernels import raise_bits


@triton.jit
def _power(bits):
    """The power of two that brings the largest magnitude to 2^12 .. 2^13, and its inverse, from the exponent's bits."""
    exponent = (tl.load(bits) >> 23) - 127
    # Zeros, infinities and NaN keep the scale 1; tiny tensors a scale whose product with another is still finite.
    exponent = tl.where((exponent == -127) | (exponent == 128), 12, tl.maximum(exponent, -48))
    up = ((139 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((115 + exponent) << 23).to(tl.float32, bitcast=True)
    return up, down


@triton.jit
def _split(value, copy, COPIES: tl.constexpr, LOW: tl.constexpr):
    """value rounded to float16, or, in the copy LOW, what the rounding lost."""
    high = value.to(tl.float16)
    if COPIES == 1:
        result = high
    else:
        result = tl.where(copy == LOW, (value - high.to(tl.float32)).to(tl.float16), high)
    return result


@triton.jit
def rows(
    x, active, bits, buffer, pixels, images, height, width, rows_in, columns_in, blocks, before_y,
    BEFORE_X: tl.constexpr, LABELS: tl.constexpr, K: tl.constexpr, COPIES: tl.constexpr, GROUP: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """x (B, LABELS, H, W) to half numbers, channels last, zero border; K > 0 spreads it to the active one of K."""
    # A program has part of one line, so that only scalars are divided, and loads and stores have constant strides.
    scale, _ = _power(bits)
    line = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    image = line // rows_in
    at_x = column - BEFORE_X
    EACH: tl.constexpr = LABELS * K if K > 0 else LABELS
    down = c // (EACH * COPIES)
    copy = c % (EACH * COPIES) // EACH
    source = c % EACH // (K if K > 0 else 1)
    y = line % rows_in - before_y + down
    plane = image.to(tl.int64) * LABELS + source
    at = ((plane * height + y) * width)[:, None] + at_x[None, :]
    there = (y >= 0) & (y < height) & (down < GROUP) & (plane < images * LABELS)
    ok = ((at_x >= 0) & (at_x < width))[None, :] & there[:, None]
    value = tl.load(x + at, mask=ok, other=0).to(tl.float32) * scale
    if K > 0:
        chosen = tl.load(active + at, mask=ok, other=0).to(tl.int32)
        value = tl.where(chosen == (c % EACH % K)[:, None], value, 0.0)
    half = _split(value, copy[:, None], COPIES, 1)
    first = line.to(tl.int64) * columns_in
    to = buffer + first * CHANNELS + (column[:, None] * CHANNELS + c[None, :])
    here = (column < columns_in) & (first + column < pixels)
    tl.store(to, tl.trans(half), mask=here[:, None] & (c < CHANNELS)[None, :])


@triton.jit
def filters(
    weight, bits, packed, size,
    LABELS: tl.constexpr, K: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, COPIES: tl.constexpr,
    GROUP: tl.constexpr, CHANNELS: tl.constexpr, STEPS_ROW: tl.constexpr, STEPS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ADJOINT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """weight (LABELS * K, LABELS, TALL, WIDE) to (output groups, steps, BLOCK_N, BLOCK_K)."""
    scale, _ = _power(bits)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = e % BLOCK_K
    column = e // BLOCK_K % BLOCK_N
    step = e // (BLOCK_K * BLOCK_N) % STEPS
    group = e // (BLOCK_K * BLOCK_N * STEPS)
    along = step % STEPS_ROW * BLOCK_K + within
    tap_x = along // CHANNELS
    channel = along % CHANNELS
    EACH: tl.constexpr = LABELS * K if ADJOINT else LABELS
    down = channel // (EACH * COPIES)
    copy = channel % (EACH * COPIES) // EACH
    source = channel % EACH
    tap_y = step // STEPS_ROW * GROUP + down
    ok = (e < size) & (down < GROUP) & (tap_y < TALL)
    if ADJOINT:
        output = group * BLOCK_N + column
        from_label = output % LABELS
        tap_x = WIDE - 1 - (tap_x - output // LABELS)
        tap_y = TALL - 1 - tap_y
        to_pattern = source
        ok = ok & (tap_x >= 0) & (tap_x < WIDE)
    else:
        A: tl.constexpr = BLOCK_N // 8 // K
        slot = column // 8
        label = (group * A + slot // K) * 8 + column % 8
        to_pattern = label * K + slot % K
        from_label = source
        ok = ok & (slot < A * K) & (label < LABELS) & (tap_x < WIDE)
    at = ((to_pattern * LABELS + from_label) * TALL + tap_y) * WIDE + tap_x
    value = tl.load(weight + at, mask=ok, other=0).to(tl.float32) * scale
    tl.store(packed + e, _split(value, copy, COPIES, 2), mask=e < size)


@triton.jit
def _slot(acc, SLOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG: tl.constexpr):
    """Columns 8 SLOT .. 8 SLOT + 7. A thread owns the same two of every eight columns: this moves no data."""
    x = acc
    for bit in tl.static_range(LOG):
        even, odd = tl.split(tl.permute(tl.reshape(x, (BLOCK_M, BLOCK_N >> (bit + 4), 2, 8)), (0, 1, 3, 2)))
        if (SLOT >> bit) % 2 == 0:
            x = even
        else:
            x = odd
    return tl.reshape(x, (BLOCK_M, 8))


@triton.jit
def _smallest(
    acc, bias, scale, label, ok, A_SLOT: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOG: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """(minimum over the K patterns of eight labels, which one), the first among equals."""
    best = _slot(acc, A_SLOT * K, BLOCK_M, BLOCK_N, LOG) * scale
    if BIAS:
        best += tl.load(bias + label * K, mask=ok, other=0).to(tl.float32)[None, :]
    which = tl.zeros((BLOCK_M, 8), tl.int32)
    for k in tl.static_range(1, K):
        value = _slot(acc, A_SLOT * K + k, BLOCK_M, BLOCK_N, LOG) * scale
        if BIAS:
            value += tl.load(bias + label * K + k, mask=ok, other=0).to(tl.float32)[None, :]
        less = value < best
        best = tl.where(less, value, best)
        which = tl.where(less, k, which)
    return best, which


@triton.jit
def _multiply(
    acc, a_ptrs, b_ptrs, start, stop, columns_in, GROUP: tl.constexpr, CHANNELS: tl.constexpr, STEPS_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc plus steps start .. stop - 1: (BLOCK_M, BLOCK_K) of the buffer times (BLOCK_N, BLOCK_K) of the filters."""
    for step in tl.range(start, stop, num_stages=STAGES):
        down = step // STEPS_ROW * GROUP * columns_in
        along = step % STEPS_ROW * BLOCK_K
        a = tl.load(a_ptrs + (down * CHANNELS + along))
        b = tl.load(b_ptrs + step * (BLOCK_N * BLOCK_K))
        acc = tl.dot(a, b.T, acc)
    return acc


@triton.jit
def correlate(
    buffer, packed, bits_x, bits_w, bias, out, active, height, width, rows_in, columns_in, tiles,
    OUTPUTS: tl.constexpr, LABELS: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
    SHIFTS: tl.constexpr, STEPS_ROW: tl.constexpr, STEPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, LOG: tl.constexpr, GROUPS: tl.constexpr, MINIMUM: tl.constexpr, STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The products of every stretch of the buffer with the filters, to out.

    MINIMUM: with the bias, the minimum over K to out, and which one it is to active.
    CHUNK: steps that matrix units sum by themselves; 0 for all of them.
    """
    group = tl.program_id(0) % GROUPS
    tile = tl.program_id(0) // GROUPS
    image = tile // tiles
    m0 = tile % tiles * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = image.to(tl.int64) * rows_in * columns_in + m0 * SHIFTS
    a_ptrs = buffer + first * CHANNELS + (m[:, None] * (SHIFTS * CHANNELS) + k[None, :])
    b_ptrs = packed + group * (STEPS * BLOCK_N * BLOCK_K) + (n[:, None] * BLOCK_K + k[None, :])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if CHUNK == 0:
        acc = _multiply(
            acc, a_ptrs, b_ptrs, 0, STEPS, columns_in, GROUP, CHANNELS, STEPS_ROW, BLOCK_N, BLOCK_K, STAGES
        )  # fmt: skip
    else:
        # Matrix units cut off what does not fit a sum instead of rounding it: long sums are made of short ones.
        for start in range(0, STEPS, CHUNK):
            acc += _multiply(
                tl.zeros((BLOCK_M, BLOCK_N), tl.float32), a_ptrs, b_ptrs, start, tl.minimum(start + CHUNK, STEPS),
                columns_in, GROUP, CHANNELS, STEPS_ROW, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip

    _, down_x = _power(bits_x)
    _, down_w = _power(bits_w)
    scale = down_x * down_w
    p = (m0 + m) * SHIFTS
    A: tl.constexpr = BLOCK_N // 8 // K
    for a_slot in tl.static_range(A):
        output = (group * A + a_slot) * 8 + tl.arange(0, 8)
        valid = output < OUTPUTS
        label = output % LABELS
        best, which = _smallest(acc, bias, scale, output, valid, a_slot, K, BLOCK_M, BLOCK_N, LOG, MINIMUM)
        if SHIFTS == 1:  # divisions by pixel only
            y = (p // columns_in)[:, None]
            x = (p % columns_in)[:, None]
        else:
            pixel = p[:, None] + (output // LABELS)[None, :]
            y = pixel // columns_in
            x = pixel % columns_in
        ok = valid[None, :] & (y < height) & (x < width)
        to = (image.to(tl.int64) * LABELS + label[None, :]) * (height * width) + (y * width + x)
        tl.store(out + to, best.to(out.dtype.element_ty), mask=ok)
        if MINIMUM:
            tl.store(active + to, which.to(tl.uint8), mask=ok)


@triton.jit
def filter_gradient(
    spread, buffer, bits_g, bits_x, out, each, columns_in,
    PATTERNS: tl.constexpr, SPREAD_CHANNELS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr, LENGTH_ROW: tl.constexpr, M_TILES: tl.constexpr, N_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[part, pattern, along] = sum over the part's pixels p of spread[p, pattern] buffer[p .., along]."""
    tile = tl.program_id(0) % (M_TILES * N_TILES)  # tiles of one part run together: they read the same pixels
    part = tl.program_id(0) // (M_TILES * N_TILES)
    pattern = tile // N_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    along = tile % N_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    first = part.to(tl.int64) * each
    shift = along // LENGTH_ROW * (GROUP * columns_in * CHANNELS) + along % LENGTH_ROW
    g_ptrs = spread + first * SPREAD_CHANNELS + (p[:, None] * SPREAD_CHANNELS + pattern[None, :])
    x_ptrs = buffer + first * CHANNELS + (p[:, None] * CHANNELS + shift[None, :])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    g_mask = (pattern < SPREAD_CHANNELS)[None, :]
    x_mask = (along < LENGTH)[None, :]
    for i in tl.range(0, each, BLOCK_P, num_stages=STAGES):
        g = tl.load(g_ptrs + i * SPREAD_CHANNELS, mask=g_mask, other=0)
        x = tl.load(x_ptrs + i * CHANNELS, mask=x_mask, other=0)
        acc = tl.dot(g.T, x, acc)
    _, down_g = _power(bits_g)
    _, down_x = _power(bits_x)
    to = out + (part.to(tl.int64) * PATTERNS + pattern[:, None]) * LENGTH + along[None, :]
    tl.store(to, acc * (down_g * down_x), mask=(pattern < PATTERNS)[:, None] & x_mask)


@triton.jit
def bias_gradient(
    grad, active, out, bits, size, LABELS: tl.constexpr, K: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums of grad over each stretch of an image, one per label and active pattern; raises `bits` to |grad|."""
    line = tl.program_id(0)  # image * LABELS + label
    start = tl.program_id(1) * EACH
    base = line.to(tl.int64) * size
    part = line // LABELS * tl.num_programs(1) + tl.program_id(1)
    magnitudes = tl.zeros((BLOCK,), tl.float32)
    totals = ()
    for _ in tl.static_range(K):
        totals = totals + (tl.zeros((BLOCK,), tl.float32),)
    for i in range(0, EACH, BLOCK):
        at = start + i + tl.arange(0, BLOCK)
        value = tl.load(grad + base + at, mask=at < size, other=0).to(tl.float32)
        chosen = tl.load(active + base + at, mask=at < size, other=0).to(tl.int32)
        magnitudes = tl.maximum(magnitudes, tl.abs(value))
        sums = ()
        for k in tl.static_range(K):
            sums = sums + (totals[k] + tl.where(chosen == k, value, 0.0),)
        totals = sums
    for k in tl.static_range(K):
        tl.store(out + (part.to(tl.int64) * LABELS + line % LABELS) * K + k, tl.sum(totals[k], 0))
    raise_bits(bits, magnitudes)
