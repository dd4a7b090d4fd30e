"""Triton kernels of gaussian_triton.py, which says how they work; import this module only when they run."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(-1e30)
"""The exponent of pairs outside the window: exp2 of it is 0, and 0 times it too (0 times infinity is not)."""


@triton.jit
def pack(
    x, bits, scale, packed, L, pixels, LABELS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """x (B, L, pixels), scaled, into (B, pixels, LABELS): labels last, zeros after the L-th. Writes the scale, too.

    bits: of x's largest magnitude as a float32, which the scale, a power of two, brings into 0.5 .. 1.
    """
    factor = 1.0
    if SCALED:
        exponent = tl.load(bits) >> 23
        # Zeros, infinities and NaN keep the scale 1, so that they come out as they went in.
        exponent = tl.where((exponent == 0) | (exponent == 255), 126, tl.minimum(tl.maximum(exponent, 26), 226))
        factor = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(scale, factor)
    image = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    label = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    at = (image * L + label[:, None]) * pixels + pixel[None, :]
    value = tl.load(x + at, mask=(label[:, None] < L) & (pixel[None, :] < pixels), other=0).to(tl.float32)
    value = tl.trans(value * factor)
    at = (image * pixels + pixel[:, None]) * LABELS + label[None, :]
    tl.store(packed + at, value.to(packed.dtype.element_ty), mask=pixel[:, None] < pixels)


@triton.jit
def _place(x_query, x_key, reach_before, reach_after, W, scale, SHIFT: tl.constexpr):
    """SHIFT minus the exponent of the columns' distance, FAR outside window and image: (queries, keys)."""
    step = x_key[None, :] - x_query[:, None]
    near = (step >= -reach_before) & (step <= reach_after) & (x_key[None, :] < W)
    step = step.to(tl.float32)
    return tl.where(near, SHIFT - scale * step * step, FAR)


@triton.jit
def _row_place(y_query, y_key, reach_before, reach_after, scale):
    """The same for the rows: (queries,)."""
    step = y_key - y_query
    near = (step >= -reach_before) & (step <= reach_after)
    step = step.to(tl.float32)
    return tl.where(near, -scale * step * step, FAR)


@triton.jit
def _colours(features, first, pixels, mask, F: tl.constexpr):
    """The F features at some pixels, a tuple."""
    found = ()
    for c in tl.static_range(F):
        found = found + (tl.load(features + first + c * pixels, mask=mask, other=0),)
    return found


@triton.jit
def _rows(
    total, by_colour, by_place, y_from, y_to, keys, features, at_image, at_features, place, mine, x_query, y_query,
    x_key, label, H, W, before_y, after_y, scale_y,
    CENTRE: tl.constexpr, MOMENTS: tl.constexpr, F: tl.constexpr, LABELS: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys of some rows; CENTRE: a query can be among them."""
    there = x_key < W
    for y in range(y_from, y_to):
        at = (at_image + y * W + x_key)[:, None] * LABELS + label[None, :]
        value = tl.load(keys + at, mask=there[:, None], other=0)
        theirs = _colours(features, at_features + y * W + x_key, H * W, there, F)
        nearness = place + _row_place(y_query, y, before_y, after_y, scale_y)[:, None]
        if CENTRE:
            centre = (y_query[:, None] == y) & (x_query[:, None] == x_key[None, :])
            nearness = tl.where(centre, FAR, nearness)
        if MOMENTS:
            colour = tl.zeros(place.shape, tl.float32)
            for c in tl.static_range(F):
                step = mine[c][:, None] - theirs[c][None, :]
                colour += step * step
            s = tl.exp2(nearness - colour)
            total = tl.dot(s.to(value.dtype), value, total, input_precision=PRECISION)
            by_colour = tl.dot((s * colour).to(value.dtype), value, by_colour, input_precision=PRECISION)
            by_place = tl.dot((s * (SHIFT - nearness)).to(value.dtype), value, by_place, input_precision=PRECISION)
        else:
            for c in tl.static_range(F):
                step = mine[c][:, None] - theirs[c][None, :]
                nearness -= step * step
            total = tl.dot(tl.exp2(nearness).to(value.dtype), value, total, input_precision=PRECISION)
    return total, by_colour, by_place


@triton.jit
def window_sums(
    keys, features, numbers, q, grad, kept, weights, out, kept_out, partials, L, H, W, tiles_x,
    before_y, after_y, before_x, after_x,
    BACK: tl.constexpr, GATE: tl.constexpr, KEEP: tl.constexpr, F: tl.constexpr, LABELS: tl.constexpr,
    GROUP: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, KEYS: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums around TY x TX pixels for GROUP labels. Forward: keys are q. BACK: the gradient, mirrored reaches."""
    tile = tl.program_id(0)
    image = tl.program_id(2).to(tl.int64)
    y_start, x_start = tile // tiles_x * TY, tile % tiles_x * TX
    query = tl.arange(0, TY * TX)
    y_query, x_query = y_start + query // TX, x_start + query % TX
    inside = (y_query < H) & (x_query < W)
    label = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    scale_y, scale_x, undo = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    at_image, at_features = image * H * W, image * F * H * W
    mine = _colours(features, at_features + y_query * W + x_query, H * W, inside, F)

    total = tl.zeros((TY * TX, GROUP), tl.float32)
    by_colour = tl.zeros((TY * TX, GROUP), tl.float32)
    by_place = tl.zeros((TY * TX, GROUP), tl.float32)
    y_first = tl.maximum(y_start - before_y, 0)
    y_last = tl.minimum(y_start + TY - 1 + after_y, H - 1)
    y_stop = tl.minimum(y_start + TY, H)
    for x in range(tl.maximum(x_start - before_x, 0), tl.minimum(x_start + TX + after_x, W), KEYS):
        x_key = x + tl.arange(0, KEYS)
        place = _place(x_query, x_key, before_x, after_x, W, scale_x, SHIFT)
        # Three stretches of rows, so that only the middle one looks for the query itself.
        total, by_colour, by_place = _rows(
            total, by_colour, by_place, y_first, y_start, keys, features, at_image, at_features, place, mine, x_query,
            y_query, x_key, label, H, W, before_y, after_y, scale_y, False, BACK, F, LABELS, SHIFT, PRECISION,
        )  # fmt: skip
        total, by_colour, by_place = _rows(
            total, by_colour, by_place, y_start, y_stop, keys, features, at_image, at_features, place, mine, x_query,
            y_query, x_key, label, H, W, before_y, after_y, scale_y, True, BACK, F, LABELS, SHIFT, PRECISION,
        )  # fmt: skip
        total, by_colour, by_place = _rows(
            total, by_colour, by_place, y_stop, y_last + 1, keys, features, at_image, at_features, place, mine, x_query,
            y_query, x_key, label, H, W, before_y, after_y, scale_y, False, BACK, F, LABELS, SHIFT, PRECISION,
        )  # fmt: skip

    w = tl.load(weights).to(tl.float32)
    at = (image * L + label[None, :]) * H * W + (y_query * W + x_query)[:, None]
    mask = inside[:, None] & (label[None, :] < L)
    total *= undo
    if BACK:
        here = tl.load(q + at, mask=mask, other=0).to(tl.float32)
        gradient = tl.load(grad + at, mask=mask, other=0).to(tl.float32)
        result = w * total
        if GATE:
            result += gradient * tl.load(kept + at, mask=mask, other=0).to(tl.float32)
        tl.store(out + at, result, mask=mask)
        program = (image * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tile
        tl.store(partials + program * 4, tl.sum(here * total))
        tl.store(partials + program * 4 + 1, tl.sum(here * by_colour) * undo)
        tl.store(partials + program * 4 + 2, tl.sum(here * by_place) * undo)
        tl.store(partials + program * 4 + 3, tl.sum(gradient))
    else:
        result = w * total
        if KEEP:
            tl.store(kept_out + at, result, mask=mask)
        if GATE:
            result *= tl.load(q + at, mask=mask, other=0).to(tl.float32)
        tl.store(out + at, result + tl.load(weights + 1).to(tl.float32), mask=mask)


@triton.jit
def feature_pull(
    queries, keys, features, numbers, pull, H, W, tiles_x, before_y, after_y, before_x, after_x,
    ADD: tl.constexpr, F: tl.constexpr, LABELS: tl.constexpr, GROUP: tl.constexpr, TY: tl.constexpr,
    TX: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum over z of s(j, z) <query_j, key_z> (I_j - I_z) around TY x TX pixels, (B, F, H, W); ADD: to what is there."""
    tile = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    y_start, x_start = tile // tiles_x * TY, tile % tiles_x * TX
    query = tl.arange(0, TY * TX)
    y_query, x_query = y_start + query // TX, x_start + query % TX
    inside = (y_query < H) & (x_query < W)
    group = tl.arange(0, GROUP)
    scale_y, scale_x, undo = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    at_image, at_features = image * H * W, image * F * H * W
    mine = _colours(features, at_features + y_query * W + x_query, H * W, inside, F)
    mine_at = (at_image + y_query * W + x_query)[:, None] * LABELS + group[None, :]
    sums = ()
    for _ in tl.static_range(F):
        sums = sums + (tl.zeros((TY * TX,), tl.float32),)

    y_first = tl.maximum(y_start - before_y, 0)
    y_last = tl.minimum(y_start + TY - 1 + after_y, H - 1)
    for x in range(tl.maximum(x_start - before_x, 0), tl.minimum(x_start + TX + after_x, W), KEYS):
        x_key = x + tl.arange(0, KEYS)
        there = x_key < W
        place = _place(x_query, x_key, before_x, after_x, W, scale_x, 0)
        for y in range(y_first, y_last + 1):
            theirs = _colours(features, at_features + y * W + x_key, H * W, there, F)
            nearness = place + _row_place(y_query, y, before_y, after_y, scale_y)[:, None]
            for c in tl.static_range(F):
                step = mine[c][:, None] - theirs[c][None, :]
                nearness -= step * step
            pair = tl.zeros((TY * TX, KEYS), tl.float32)
            at = (at_image + y * W + x_key)[None, :] * LABELS + group[:, None]
            for first in tl.static_range(0, LABELS, GROUP):
                left = tl.load(queries + mine_at + first, mask=inside[:, None], other=0)
                right = tl.load(keys + at + first, mask=there[None, :], other=0)
                pair = tl.dot(left, right, pair, input_precision=PRECISION)
            pair *= tl.exp2(nearness)  # the query itself may stay: its step is 0
            fresh = ()
            for c in tl.static_range(F):
                fresh = fresh + (sums[c] + tl.sum(pair * (mine[c][:, None] - theirs[c][None, :]), 1),)
            sums = fresh

    for c in tl.static_range(F):
        at = pull + at_features + c * H * W + y_query * W + x_query
        value = sums[c] * undo
        if ADD:
            value += tl.load(at, mask=inside, other=0)
        tl.store(at, value, mask=inside)
