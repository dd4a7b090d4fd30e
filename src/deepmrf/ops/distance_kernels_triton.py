"""Triton kernels of distance_triton.py, which says how they work; import this module only when they run."""
# mypy: ignore-errors
# ruff: noqa: SIM108 (a branch on a constant leaves the other side uncompiled)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shift_features(features, shifted, planes, H, W, before, after, scale, SAMPLES: tl.constexpr, P: tl.constexpr):
    """Centred features (B, F, H, W) into (3, B, F, H, P): in place, as seen `after` to the left, `before + 1` right.

    They are centred about the mean of SAMPLES pixels: distances are the same about any number near the mean.
    """
    plane = tl.program_id(0).to(tl.int64)
    here = features + plane * H * W
    sample = tl.arange(0, SAMPLES).to(tl.int64) * H * W // SAMPLES
    mean = tl.sum(tl.load(here + sample).to(tl.float32), 0) * (scale / SAMPLES)
    y = tl.program_id(1)
    x = tl.arange(0, P)
    for side in tl.static_range(3):
        if side == 0:
            at = x
        elif side == 1:
            at = x - after
        else:
            at = x + before + 1
        inside = (at >= 0) & (at < W)
        value = tl.load(here + y * W + at, mask=inside, other=0).to(tl.float32) * scale - mean
        to = shifted + ((side * planes + plane) * H + y) * P + x
        tl.store(to, tl.where(inside, value, 0.0))


@triton.jit
def _both_ends(features, row, next_feature, other_side, F: tl.constexpr):
    """The features of a row as both ends of a window see them: F from its last column, then F from before its first."""
    found = ()
    for c in tl.static_range(F):
        found = found + (tl.load(features + row + c * next_feature),)
    for c in tl.static_range(F):
        found = found + (tl.load(features + other_side + row + c * next_feature),)
    return found


@triton.jit
def _ends(values, crossing):
    """Running sums along a stretch, and the same less the stretch's total where the window runs past its end."""
    running = tl.cumsum(values, 2)
    return running, running - crossing * tl.sum(values, 2, keep_dims=True)


@triton.jit
def _load(x, gate, at, mask, GATED: tl.constexpr):
    """What is summed: x, times the gate in the backward of a gated sum."""
    value = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    if GATED:
        value *= tl.load(gate + at, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def _pick(x, shift, NB: tl.constexpr, G: tl.constexpr, K: tl.constexpr):
    """x (NB, G, K) `shift` columns further, zero outside."""
    # One axis: Triton exchanges such a gather through shared memory, any other by warp shuffles, far too many here.
    place = tl.arange(0, NB * G * K)
    column = place // (G * K) * K + place % K + shift
    inside = (column >= 0) & (column < NB * K)
    source = column // K * (G * K) + place // K % G * K + column % K
    found = tl.gather(tl.reshape(x, (NB * G * K,)), tl.where(inside, source, 0), 0)
    return tl.reshape(tl.where(inside, found, 0.0), (NB, G, K))


@triton.jit
def window_sums(
    x, q, kept, shifted, weights, out, kept_out, partials, L, H, W, strip, strips, groups, rows,
    before_y, after_y, before_x, after_x, square_y, square_x,
    BACK: tl.constexpr, GATE: tl.constexpr, KEEP: tl.constexpr, F: tl.constexpr,
    G: tl.constexpr, NB: tl.constexpr, K: tl.constexpr, UNROLL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A strip of rows of G labels of one image. Forward: x is q. BACK: x is the gradient, the reaches are mirrored."""
    P: tl.constexpr = NB * K
    GATED: tl.constexpr = BACK and GATE
    program = tl.program_id(0)
    group = program % groups
    strip_at = program // groups % strips
    image = (program // groups // strips).to(tl.int64)
    y_start = strip_at * strip
    y_stop = tl.minimum(y_start + strip, H)

    label = group * G + tl.arange(0, G)
    plane = (image * L + label) * H * W
    # Tensors are (NB, G, K), columns cut into NB stretches of K: in this order a thread holds all G labels of its
    # columns, and loads their features once.
    k = tl.arange(0, K)[None, None, :]
    column = tl.arange(0, NB)[:, None, None] * K + k  # (NB, 1, K)
    inside = (label[None, :, None] < L) & (column < W)
    at = plane[None, :, None] + column  # (NB, G, K), of row 0
    one = tl.full((1, 1, 1), 1, tl.int32)  # compared with it, a row's number makes a mask of three axes
    feature_row = image * F * H  # of the first feature's row 0
    w_colour = tl.load(weights).to(tl.float32)
    w_position = tl.load(weights + 1).to(tl.float32)
    w_bias = tl.load(weights + 2).to(tl.float32)
    # Forward, both terms share one sum of weighted squares; backward keeps them apart for the weights' gradients.
    if BACK:
        by_colour = 1.0
        by_y = square_y
        by_x = square_x
    else:
        by_colour = w_colour
        by_y = w_position * square_y
        by_x = w_position * square_x

    # Column sums over the rows of the window: x, (row - y) x, squares x, and each feature times x.
    mass = tl.zeros((NB, G, K), tl.float32)
    slope = tl.zeros((NB, G, K), tl.float32)
    squares = tl.zeros((NB, G, K), tl.float32)
    spread = tl.zeros((NB, G, K), tl.float32)  # BACK: the squares of the positions alone
    hue = ()
    for _ in tl.static_range(F):
        hue = hue + (tl.zeros((NB, G, K), tl.float32),)

    y_first = tl.maximum(y_start - before_y, 0)
    for row in tl.range(y_first, tl.minimum(y_start + after_y, H - 1) + 1, loop_unroll_factor=UNROLL):
        value = _load(x, q, at + row * W, inside, GATED)
        step = (row - y_start).to(tl.float32)
        mass += value
        slope += step * value
        norm = tl.zeros((NB, 1, K), tl.float32)
        fresh = ()
        for c in tl.static_range(F):
            feature = tl.load(shifted + (feature_row + c * H + row) * P + column)
            norm += feature * feature
            fresh = fresh + (hue[c] + feature * value,)
        hue = fresh
        if BACK:
            squares += norm * value
            spread += (step * step * by_y) * value
        else:
            squares += (norm * by_colour + step * step * by_y) * value

    u = (k - K // 2).to(tl.float32)  # place inside a stretch of K columns
    to_right = u - after_x  # from a window's last column to its centre
    to_left = u + (before_x + 1)  # from the column before a window's first to its centre
    crossing = (k + before_x + after_x + 1 >= K).to(tl.float32)
    came_step = after_y * 1.0
    went_step = before_y + 1.0
    sum_colour = tl.zeros((NB, G, K), tl.float32)
    sum_position = tl.zeros((NB, G, K), tl.float32)
    sum_bias = tl.zeros((NB, G, K), tl.float32)

    ends = shifted + (rows + feature_row) * P + column
    other_end = rows.to(tl.int64) * P
    seen = ()
    if AHEAD:
        seen = _both_ends(ends, y_start * P, H * P, other_end, F)

    for y in range(y_start, y_stop):
        # The next rows are asked for first, so that they arrive behind the arithmetic.
        entering, leaving = y + 1 + after_y, y - before_y
        came = _load(x, q, at + entering * W, inside & (one + entering <= H), GATED)
        went = _load(x, q, at + leaving * W, inside & (one + leaving > 0), GATED)

        # Along the row: each window is the end of one stretch and the start of the next, or lies inside one. What a
        # window's centre j knows (its features, its place) enters at both ends, so that one number per end travels.
        mass_end, mass_start = _ends(mass, crossing)
        slope_end, slope_start = _ends(u * mass, crossing)
        position_end = by_x * to_right * (to_right * mass_end - 2 * slope_end)
        position_start = by_x * to_left * (to_left * mass_start - 2 * slope_start)
        colour_end = tl.zeros((NB, G, K), tl.float32)
        colour_start = tl.zeros((NB, G, K), tl.float32)
        for c in tl.static_range(F):
            hue_end, hue_start = _ends(hue[c], crossing)
            if AHEAD:
                feature = seen[c]
            else:
                feature = tl.load(ends + (c * H + y) * P)
            colour_end += feature * (feature * mass_end - 2 * hue_end)
            if AHEAD:
                feature = seen[F + c]
            else:
                feature = tl.load(ends + other_end + (c * H + y) * P)
            colour_start += feature * (feature * mass_start - 2 * hue_start)
        # Asked for before the exchange through shared memory, behind whose barriers they would have to wait.
        new = ()
        old = ()
        for c in tl.static_range(F):
            first = shifted + (feature_row + c * H) * P + column
            new = new + (tl.load(first + tl.minimum(entering, H - 1) * P),)
            old = old + (tl.load(first + tl.maximum(leaving, 0) * P),)
        if AHEAD:
            seen = _both_ends(ends, tl.minimum(y + 1, H - 1) * P, H * P, other_end, F)
        if BACK:
            squares_end, squares_start = _ends(spread + by_x * u * u * mass, crossing)
            position = _pick(position_end + squares_end, after_x, NB, G, K)
            position -= _pick(position_start + squares_start, -before_x - 1, NB, G, K)
            squares_end, squares_start = _ends(squares, crossing)
            colour = _pick(colour_end + squares_end, after_x, NB, G, K)
            colour -= _pick(colour_start + squares_start, -before_x - 1, NB, G, K)
            here = tl.load(q + at + y * W, mask=inside, other=0).to(tl.float32)
            gradient = tl.load(x + at + y * W, mask=inside, other=0).to(tl.float32)
            sum_colour += here * colour
            sum_position += here * position
            sum_bias += gradient
            total = w_colour * colour + w_position * position
            if GATE:
                total += gradient * tl.load(kept + at + y * W, mask=inside, other=0).to(tl.float32)
            tl.store(out + at + y * W, total, mask=inside)
        else:
            squares_end, squares_start = _ends(squares + by_x * u * u * mass, crossing)
            total = _pick(w_colour * colour_end + position_end + squares_end, after_x, NB, G, K)
            total -= _pick(w_colour * colour_start + position_start + squares_start, -before_x - 1, NB, G, K)
            if KEEP:
                tl.store(kept_out + at + y * W, total, mask=inside)
            if GATE:
                total *= tl.load(q + at + y * W, mask=inside, other=0).to(tl.float32)
            tl.store(out + at + y * W, total + w_bias, mask=inside)

        # Down one row: every (row - y) shrinks by one, a row enters at `after`, one leaves at -(before + 1).
        if BACK:
            spread += by_y * (mass - 2 * slope + came_step * came_step * came - went_step * went_step * went)
        else:
            squares += by_y * (mass - 2 * slope + came_step * came_step * came - went_step * went_step * went)
        slope += came_step * came + went_step * went - mass
        mass += came - went
        norm_came = tl.zeros((NB, 1, K), tl.float32)
        norm_went = tl.zeros((NB, 1, K), tl.float32)
        fresh = ()
        for c in tl.static_range(F):
            norm_came += new[c] * new[c]
            norm_went += old[c] * old[c]
            fresh = fresh + (hue[c] + new[c] * came - old[c] * went,)
        hue = fresh
        squares += by_colour * (norm_came * came - norm_went * went)

    if BACK:
        tl.store(partials + program * 3, tl.sum(sum_colour))
        tl.store(partials + program * 3 + 1, tl.sum(sum_position))
        tl.store(partials + program * 3 + 2, tl.sum(sum_bias))
