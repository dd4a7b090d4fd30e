"""The Triton kernels of gaussian/gpu.py, which explains them; import this module only when they run."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

S_EXPONENT = tl.constexpr(14.0)
"""s is multiplied as s * 2^S_EXPONENT in float16."""
UNDO_S_EXPONENT = tl.constexpr(2.0**-14)
OUTSIDE = tl.constexpr(-1e30)
"""The exponent of pairs outside the window: exp2 of it is 0, and 0 times it too (0 times infinity is not)."""
PER_SQUARE = tl.constexpr(0.7213475204444817)
"""0.5 / log 2: exp(-d^2 / 2 a^2) is exp2 of minus this times (d / a)^2."""
ROOT = tl.constexpr(0.8493218002880191)
"""Its square root."""


@triton.jit
def pack(
    x, features, bandwidths, bits, scale, packed, colours, L, pixels, feature_scale,
    F: tl.constexpr, LABELS: tl.constexpr, COLOURS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x (B, L, pixels), scaled, into (B, pixels, LABELS): labels last, zeros after the L-th. Writes the scale, too.

    `bits` has x's largest magnitude as a float32, which the scale, a power of two, brings into 0.5 .. 1.
    With F > 0 also the features (B, F, pixels) into (B, pixels, COLOURS), in the unit in which exponents are squares.
    """
    exponent = tl.load(bits) >> 23
    # Zeros, infinities and NaN keep the scale 1, so that they come out as they went in.
    exponent = tl.where((exponent == 0) | (exponent == 255), 126, tl.minimum(tl.maximum(exponent, 26), 226))
    factor = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(scale, factor)
    image = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = pixel < pixels
    label = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    at = (image * L + label[:, None]) * pixels + pixel[None, :]
    value = tl.load(x + at, mask=(label[:, None] < L) & there[None, :], other=0).to(tl.float32)
    value = tl.trans(value * factor)
    at = (image * pixels + pixel[:, None]) * LABELS + label[None, :]
    tl.store(packed + at, value.to(packed.dtype.element_ty), mask=there[:, None])
    if F > 0:  # noqa: SIM102 (the constant first: without features none of this is compiled)
        if tl.program_id(1) == 0:
            unit = feature_scale * ROOT / tl.load(bandwidths).to(tl.float32)
            colour = tl.arange(0, COLOURS)
            source = features + (image * F + colour[:, None]) * pixels + pixel[None, :]
            feature = tl.load(source, mask=(colour[:, None] < F) & there[None, :], other=0).to(tl.float32)
            to = colours + (image * pixels + pixel[:, None]) * COLOURS + colour[None, :]
            tl.store(to, tl.trans(feature * unit), mask=there[:, None])


@triton.jit
def _column_exponent(x_query, x_key, x_tile, x_first, reach_before, reach_after, W, scale, EXPONENT: tl.constexpr):
    """EXPONENT minus the exponent of the columns' distance; OUTSIDE of window or image. (queries, keys)"""
    # x_key - x_query as a product of matrices, exact for such small numbers: it lies in registers as the matrix units
    # leave their results, what is computed from it does too, and so s needs no way through shared memory to the next.
    term = tl.arange(0, 16)
    from_tile = -(x_query - x_tile)[:, None].to(tl.float16)
    from_first = (x_key - x_first)[None, :].to(tl.float16)
    ones = tl.full((1, 1), 1, tl.float16)
    zeros = tl.full((1, 1), 0, tl.float16)
    left = tl.where(term[None, :] == 0, from_tile, tl.where(term[None, :] == 1, ones, zeros))
    right = tl.where(term[:, None] == 0, ones, tl.where(term[:, None] == 1, from_first, zeros))
    step = tl.dot(left, right) + (x_first - x_tile)
    near = (step >= -reach_before) & (step <= reach_after) & (x_key[None, :] < W)
    return tl.where(near, EXPONENT - scale * step * step, OUTSIDE)


@triton.jit
def _row_exponent(y_query, y_key, reach_before, reach_after, scale):
    """The same for the rows: (queries,)."""
    step = y_key - y_query
    near = (step >= -reach_before) & (step <= reach_after)
    step = step.to(tl.float32)
    return tl.where(near, -scale * step * step, OUTSIDE)


@triton.jit
def _colours(colours, pixel, mask, F: tl.constexpr, COLOURS: tl.constexpr):
    """The F features at some pixels, one after the other: a tuple."""
    features = ()
    for c in tl.static_range(F):
        features = features + (tl.load(colours + pixel * COLOURS + c, mask=mask, other=0),)
    return features


@triton.jit
def _four(x, KEYS: tl.constexpr):
    """The columns of x (KEYS, 4)."""
    even, odd = tl.split(tl.reshape(x, (KEYS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _colours_at_once(colours, pixel, mask, F: tl.constexpr, COLOURS: tl.constexpr, KEYS: tl.constexpr):
    """The same by one wide load, for neighbouring pixels: COLOURS, 4 or 8, of them."""
    features = ()
    if F > 0:
        at = pixel[:, None] * COLOURS + tl.arange(0, COLOURS)[None, :]
        value = tl.load(colours + at, mask=mask[:, None], other=0)
        if COLOURS == 4:
            features = _four(value, KEYS)
        else:
            even, odd = tl.split(tl.reshape(value, (KEYS, 4, 2)))
            a, c, e, g = _four(even, KEYS)
            b, d, f, h = _four(odd, KEYS)
            features = (a, b, c, d, e, f, g, h)
    return features


@triton.jit
def _finished(total, y, y_to):
    """total, once the matrix units have summed it: y < y_to always holds, but the compiler does not know that.

    They read s from registers while the program goes on. Without this use of the sum, Triton (3.6, 3.9) lets them run
    on into the next row, which is written into these registers: too early where other programs keep the units busy.
    """
    return tl.where(y < y_to, total, 0.0)


@triton.jit
def _rows(
    total, by_colour, by_position, y_from, y_to, keys, colours, at_frame, exponent_t, exponent_x, query_features,
    x_query, y_query, x_key, label, W, before_y, after_y, scale_y,
    CENTRE: tl.constexpr, MOMENTS: tl.constexpr, F: tl.constexpr, LABELS: tl.constexpr, COLOURS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Add the keys of some rows of a frame; CENTRE: a query can be among them."""
    there = x_key < W
    for y in range(y_from, y_to):
        pixel = at_frame + y * W + x_key
        value = tl.load(keys + pixel[:, None] * LABELS + label[None, :], mask=there[:, None], other=0)
        key_features = _colours_at_once(colours, pixel, there, F, COLOURS, KEYS)
        row = _row_exponent(y_query, y, before_y, after_y, scale_y) + exponent_t
        nearness = exponent_x + row[:, None]
        if CENTRE:
            centre = (y_query[:, None] == y) & (x_query[:, None] == x_key[None, :])
            nearness = tl.where(centre, OUTSIDE, nearness)
        if MOMENTS:
            colour = tl.zeros(exponent_x.shape, tl.float32)
            for c in tl.static_range(F):
                step = query_features[c][:, None] - key_features[c][None, :]
                colour += step * step
            s = tl.exp2(nearness - colour)
            total = _finished(tl.dot(s.to(value.dtype), value, total), y, y_to)
            by_colour = _finished(tl.dot((s * colour).to(value.dtype), value, by_colour), y, y_to)
            by_position = tl.dot((s * (S_EXPONENT - nearness)).to(value.dtype), value, by_position)
            by_position = _finished(by_position, y, y_to)
        else:
            for c in tl.static_range(F):
                step = query_features[c][:, None] - key_features[c][None, :]
                nearness -= step * step
            total = _finished(tl.dot(tl.exp2(nearness).to(value.dtype), value, total), y, y_to)
    return total, by_colour, by_position


@triton.jit
def window_sums(
    keys, colours, bandwidths, scale, q, grad, ungated, weights, out, partials, L, T, H, W, first, shown,
    tiles_x, before_t, after_t, before_y, after_y, before_x, after_x, square_t, square_y, square_x,
    BACK: tl.constexpr, GATE: tl.constexpr, KEEP: tl.constexpr, F: tl.constexpr, LABELS: tl.constexpr,
    COLOURS: tl.constexpr, GROUP: tl.constexpr, TY: tl.constexpr, TX: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The window sums of TY x TX pixels for GROUP labels, for `shown` frames from the `first` on.

    Forward: keys are q; KEEP writes the sum before the gate to `ungated`.
    BACK: keys are the gradient, the reaches are mirrored, `ungated` is read, and `partials` gets the other gradients.
    """
    tile = tl.program_id(0)
    image = (tl.program_id(2) // shown).to(tl.int64)
    t = first + tl.program_id(2) % shown
    y_start, x_start = tile // tiles_x * TY, tile % tiles_x * TX
    query = tl.arange(0, TY * TX)
    y_query, x_query = y_start + query // TX, x_start + query % TX
    inside = (y_query < H) & (x_query < W)
    label = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    width = tl.load(bandwidths + 1).to(tl.float32)
    unit = PER_SQUARE / (width * width)
    scale_t, scale_y, scale_x = unit * square_t, unit * square_y, unit * square_x
    at_image = image * T * H * W
    pixel = at_image + t * H * W + y_query * W + x_query
    query_features = _colours(colours, pixel, inside, F, COLOURS)

    total = tl.zeros((TY * TX, GROUP), tl.float32)
    by_colour = tl.zeros((TY * TX, GROUP), tl.float32)
    by_position = tl.zeros((TY * TX, GROUP), tl.float32)
    y_first = tl.maximum(y_start - before_y, 0)
    y_end = tl.minimum(y_start + TY + after_y, H)
    for x in range(tl.maximum(x_start - before_x, 0), tl.minimum(x_start + TX + after_x, W), KEYS):
        x_key = x + tl.arange(0, KEYS)
        exponent_x = _column_exponent(x_query, x_key, x_start, x, before_x, after_x, W, scale_x, S_EXPONENT)
        for frame in range(tl.maximum(t - before_t, 0), tl.minimum(t + after_t, T - 1) + 1):
            at_frame = at_image + frame * H * W
            step = (frame - t).to(tl.float32)
            exponent_t = -scale_t * step * step
            # Three stretches of rows, so that only the middle one looks for the query itself; other frames need one.
            y_own = tl.where(frame == t, y_start, y_end)
            y_rest = tl.where(frame == t, tl.minimum(y_start + TY, H), y_end)
            total, by_colour, by_position = _rows(
                total, by_colour, by_position, y_first, y_own, keys, colours, at_frame, exponent_t, exponent_x,
                query_features, x_query, y_query, x_key, label, W, before_y, after_y, scale_y, False, BACK, F, LABELS,
                COLOURS, KEYS,
            )  # fmt: skip
            total, by_colour, by_position = _rows(
                total, by_colour, by_position, y_own, y_rest, keys, colours, at_frame, exponent_t, exponent_x,
                query_features, x_query, y_query, x_key, label, W, before_y, after_y, scale_y, True, BACK, F, LABELS,
                COLOURS, KEYS,
            )  # fmt: skip
            total, by_colour, by_position = _rows(
                total, by_colour, by_position, y_rest, y_end, keys, colours, at_frame, exponent_t, exponent_x,
                query_features, x_query, y_query, x_key, label, W, before_y, after_y, scale_y, False, BACK, F, LABELS,
                COLOURS, KEYS,
            )  # fmt: skip

    w = tl.load(weights).to(tl.float32)
    at = (image * L + label[None, :]) * T * H * W + (t * H * W + y_query * W + x_query)[:, None]
    at_out = (image * L + label[None, :]) * shown * H * W + ((t - first) * H * W + y_query * W + x_query)[:, None]
    mask = inside[:, None] & (label[None, :] < L)
    undo = UNDO_S_EXPONENT / tl.load(scale)
    total *= undo
    if BACK:
        here = tl.load(q + at, mask=mask, other=0).to(tl.float32)
        gradient = tl.load(grad + at, mask=mask, other=0).to(tl.float32)
        result = w * total
        if GATE:
            result += gradient * tl.load(ungated + at, mask=mask, other=0).to(tl.float32)
        tl.store(out + at_out, result, mask=mask)
        program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tile
        tl.store(partials + program * 4, tl.sum(here * total))
        tl.store(partials + program * 4 + 1, tl.sum(here * by_colour) * undo)
        tl.store(partials + program * 4 + 2, tl.sum(here * by_position) * undo)
        tl.store(partials + program * 4 + 3, tl.sum(gradient))
    else:
        result = w * total
        if KEEP:
            tl.store(ungated + at_out, result, mask=mask)
        if GATE:
            result *= tl.load(q + at, mask=mask, other=0).to(tl.float32)
        tl.store(out + at_out, result + tl.load(weights + 1).to(tl.float32), mask=mask)


@triton.jit
def feature_pull(
    queries, keys, query_scale, key_scale, colours, bandwidths, pull, T, H, W, tiles_x,
    before_t, after_t, before_y, after_y, before_x, after_x, square_t, square_y, square_x,
    ADD: tl.constexpr, F: tl.constexpr, LABELS: tl.constexpr, COLOURS: tl.constexpr, GROUP: tl.constexpr,
    TY: tl.constexpr, TX: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """sum over z of s(j, z) <query_j, key_z> (I_j - I_z), (B, F, T, H, W); ADD adds it to what is there."""
    tile = tl.program_id(0)
    image = (tl.program_id(1) // T).to(tl.int64)
    t = tl.program_id(1) % T
    y_start, x_start = tile // tiles_x * TY, tile % tiles_x * TX
    query = tl.arange(0, TY * TX)
    y_query, x_query = y_start + query // TX, x_start + query % TX
    inside = (y_query < H) & (x_query < W)
    group = tl.arange(0, GROUP)
    width = tl.load(bandwidths + 1).to(tl.float32)
    unit = PER_SQUARE / (width * width)
    scale_t, scale_y, scale_x = unit * square_t, unit * square_y, unit * square_x
    at_image = image * T * H * W
    pixel = at_image + t * H * W + y_query * W + x_query
    query_features = _colours(colours, pixel, inside, F, COLOURS)
    query_at = pixel[:, None] * LABELS + group[None, :]
    sums = ()
    for _ in tl.static_range(F):
        sums = sums + (tl.zeros((TY * TX,), tl.float32),)

    y_first = tl.maximum(y_start - before_y, 0)
    y_end = tl.minimum(y_start + TY + after_y, H)
    for x in range(tl.maximum(x_start - before_x, 0), tl.minimum(x_start + TX + after_x, W), KEYS):
        x_key = x + tl.arange(0, KEYS)
        there = x_key < W
        exponent_x = _column_exponent(x_query, x_key, x_start, x, before_x, after_x, W, scale_x, 0)
        for frame in range(tl.maximum(t - before_t, 0), tl.minimum(t + after_t, T - 1) + 1):
            step_t = (frame - t).to(tl.float32)
            for y in range(y_first, y_end):
                key = at_image + frame * H * W + y * W + x_key
                key_features = _colours_at_once(colours, key, there, F, COLOURS, KEYS)
                row = _row_exponent(y_query, y, before_y, after_y, scale_y) - scale_t * step_t * step_t
                nearness = exponent_x + row[:, None]
                for c in tl.static_range(F):
                    step = query_features[c][:, None] - key_features[c][None, :]
                    nearness -= step * step
                pair = tl.zeros((TY * TX, KEYS), tl.float32)
                at = key[None, :] * LABELS + group[:, None]
                for first in tl.static_range(0, LABELS, GROUP):
                    left = tl.load(queries + query_at + first, mask=inside[:, None], other=0)
                    right = tl.load(keys + at + first, mask=there[None, :], other=0)
                    pair = tl.dot(left, right, pair)
                pair *= tl.exp2(nearness)  # the query itself may stay: its step is 0
                fresh = ()
                for c in tl.static_range(F):
                    fresh = fresh + (
                        sums[c] + tl.sum(pair * (query_features[c][:, None] - key_features[c][None, :]), 1),
                    )
                sums = fresh

    undo_query, undo_key = 1.0 / tl.load(query_scale), 1.0 / tl.load(key_scale)
    for c in tl.static_range(F):
        to = pull + (image * F + c) * T * H * W + t * H * W + y_query * W + x_query
        value = sums[c] * undo_query * undo_key  # one after the other: their product may not fit
        if ADD:
            value += tl.load(to, mask=inside, other=0)
        tl.store(to, value, mask=inside)
