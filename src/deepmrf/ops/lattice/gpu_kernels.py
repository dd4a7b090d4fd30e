"""Triton kernels of gpu.py, which says what is laid out where; import this module only when they run."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: a number added to it and taken off again is rounded, ties to even
_MAX_ROUNDED = tl.constexpr(4194304.0)


@triton.jit
def simplices(features, scales, multipliers, keys, weights, points, total, AXES: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and weights of the AXES + 1 vertices of each point's simplex; see build.py. Must not fuse sums and products.

    features (B, AXES, points); scales: of each axis, and 1 / (AXES + 1); multipliers: of each axis, and of the image.
    """
    SIDES: tl.constexpr = AXES + 1
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < total
    image = at // points
    base = image * AXES * points + at % points
    inverse = tl.load(scales + AXES)
    rest = tl.zeros((BLOCK,), tl.float32)
    lifted = ()
    for k in tl.static_range(AXES):
        scaled = tl.load(features + base + (AXES - 1 - k) * points, mask=ok, other=0) * tl.load(scales + AXES - 1 - k)
        lifted = (rest - scaled * (AXES - k),) + lifted
        rest = rest + scaled
    lifted = (rest,) + lifted
    multiples = ()
    offset = ()
    excess = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(SIDES):
        x = lifted[i] * inverse
        nearest = tl.where(tl.abs(x) < _MAX_ROUNDED, (x + _ROUNDING) - _ROUNDING, x)
        multiples = multiples + (nearest,)
        offset = offset + (lifted[i] - nearest * SIDES,)
        excess += nearest.to(tl.int32)
    ranks = ()
    origins = ()
    key = image * tl.load(multipliers + AXES)
    every_axis = tl.zeros((BLOCK,), tl.int64)
    for i in tl.static_range(SIDES):
        rank = excess
        for j in tl.static_range(SIDES):
            if j > i:
                rank += (offset[i] < offset[j]).to(tl.int32)
            if j < i:
                rank += 1 - (offset[j] < offset[i]).to(tl.int32)
        wrap = (rank < 0).to(tl.int32) - (rank >= SIDES).to(tl.int32)
        origin = (multiples[i] + wrap.to(tl.float32)) * SIDES
        ranks = ranks + (rank + wrap * SIDES,)
        origins = origins + (origin,)
        if i < AXES:
            multiplier = tl.load(multipliers + i)
            key += origin.to(tl.int64) * multiplier
            every_axis += multiplier
    tl.store(keys + at * SIDES, key, mask=ok)
    previous = tl.zeros((BLOCK,), tl.float32)  # the offset of one rank more
    last = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(SIDES):  # the vertex of remainder r + 1, by the axis of rank AXES - r
        value = tl.zeros((BLOCK,), tl.float32)
        multiplier = tl.zeros((BLOCK,), tl.int64)
        for i in tl.static_range(SIDES):
            chosen = ranks[i] == AXES - r
            value = tl.where(chosen, (lifted[i] - origins[i]) * inverse, value)
            if i < AXES:
                multiplier = tl.where(chosen, tl.load(multipliers + i), multiplier)
        if r == 0:
            last = value
        else:
            tl.store(weights + at * SIDES + r, value - previous, mask=ok)
        if r < AXES:
            key += every_axis - SIDES * multiplier
            tl.store(keys + at * SIDES + r + 1, key, mask=ok)
        previous = value
    tl.store(weights + at * SIDES, last + (1.0 - previous), mask=ok)


@triton.jit
def splat(
    values, pixels, weights, starts, targets, rows, chunks, entries, channels, stride,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """rows[target] = sum of weight * values[pixel] over the entries of a chunk, in their order."""
    k = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = k < chunks
    start = tl.load(starts + k, mask=inside, other=0)
    end = tl.load(starts + k + 1, mask=inside & (k + 1 < chunks), other=entries)
    length = tl.where(inside, end - start, 0)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for e in range(tl.max(length, 0)):
        ok = e < length
        pixel = tl.load(pixels + start + e, mask=ok, other=0).to(tl.int64)
        weight = tl.load(weights + start + e, mask=ok, other=0)
        here = ok[:, None] & (c < channels)[None, :]
        total += weight[:, None] * tl.load(values + pixel[:, None] * stride + c[None, :], mask=here, other=0)
    to = tl.load(targets + k, mask=inside, other=0).to(tl.int64)
    tl.store(rows + to[:, None] * stride + c[None, :], total, mask=inside[:, None] & (c < channels)[None, :])


@triton.jit
def combine(rows, many, starts, first, channels, stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """rows[many[k]] = sum of the partial sums starts[k] .. starts[k + 1] - 1, which begin at row `first`."""
    k = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin = tl.load(starts + k)
    end = tl.load(starts + k + 1)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for p in range(begin, end, BLOCK_R):
        part = p + tl.arange(0, BLOCK_R)
        ok = (part < end)[:, None] & (c < channels)[None, :]
        row = (first + part).to(tl.int64)
        total += tl.sum(tl.load(rows + row[:, None] * stride + c[None, :], mask=ok, other=0), 0)
    to = tl.load(many + k).to(tl.int64)
    tl.store(rows + to * stride + c, total, mask=c < channels)


@triton.jit
def blur(rows, neighbours, blurred, vertices, channels, stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """blurred[m] = rows[m] + (rows[before m] + rows[after m]) / 2; neighbours (2, M), -1 for none."""
    m = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = m < vertices
    before = tl.load(neighbours + m, mask=inside, other=-1).to(tl.int64)
    after = tl.load(neighbours + vertices + m, mask=inside, other=-1).to(tl.int64)
    column = (c < channels)[None, :]
    sides = tl.load(rows + before[:, None] * stride + c[None, :], mask=(before >= 0)[:, None] & column, other=0)
    sides += tl.load(rows + after[:, None] * stride + c[None, :], mask=(after >= 0)[:, None] & column, other=0)
    here = m.to(tl.int64)[:, None] * stride + c[None, :]
    own = tl.load(rows + here, mask=inside[:, None] & column, other=0)
    tl.store(blurred + here, own + 0.5 * sides, mask=inside[:, None] & column)


@triton.jit
def slice_rows(
    rows, vertex, weights, scores, out, points, channels, stride, scale,
    CORNERS: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out = scale * sum over a pixel's corners of weight * rows[vertex]; SOFTMAX: of that plus its scores."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = n < points
    ok = inside[:, None] & (c < channels)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for corner in tl.static_range(CORNERS):
        m = tl.load(vertex + n * CORNERS + corner, mask=inside, other=0).to(tl.int64)
        weight = tl.load(weights + n * CORNERS + corner, mask=inside, other=0)
        total += weight[:, None] * tl.load(rows + m[:, None] * stride + c[None, :], mask=ok, other=0)
    total = total * scale
    at = n[:, None] * stride + c[None, :]
    if SOFTMAX:
        total = tl.where((c < channels)[None, :], total + tl.load(scores + at, mask=ok, other=0), float("-inf"))
        power = tl.exp(total - tl.max(total, 1)[:, None])
        total = power / tl.sum(power, 1)[:, None]
    tl.store(out + at, total, mask=ok)
