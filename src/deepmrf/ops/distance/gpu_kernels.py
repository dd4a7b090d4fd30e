"""Triton kernels of distance_triton.py, which says how they work; import this module only when they run."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shift_features(
    features, shifted, planes, H, W, before, after, scale, SAMPLES: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr
):
    """Centred features (B, F, H, W) into (3, B, F, H, P): in place, as seen `after` to the left, `before + 1` right.

    They are centred about the mean of SAMPLES pixels: distances are the same about any number near the mean.
    """
    plane = tl.program_id(0).to(tl.int64)
    here = features + plane * H * W
    sample = tl.arange(0, SAMPLES).to(tl.int64) * H * W // SAMPLES
    mean = tl.sum(tl.load(here + sample).to(tl.float32), 0) * (scale / SAMPLES)
    x = tl.arange(0, P)
    for y in range(tl.program_id(1) * ROWS, tl.minimum(tl.program_id(1) * ROWS + ROWS, H)):
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
def _ends(values, crossing, NB: tl.constexpr, G: tl.constexpr, K: tl.constexpr):
    """Running sums along a stretch, and the same less the stretch's total where the window runs past its end."""
    running = tl.cumsum(values, 2)
    # The total is the last of them. A thread has four neighbours: the fourth of the last thread goes to the others.
    _, odd = tl.split(tl.reshape(running, (NB, G, K // 4, 2, 2)))
    _, fourth = tl.split(odd)
    total = tl.gather(fourth, tl.full((NB, G, K // 4), K // 4 - 1, tl.int32), 2)
    total = tl.reshape(tl.broadcast_to(total[:, :, :, None], (NB, G, K // 4, 4)), (NB, G, K))
    return running, running - crossing * total


@triton.jit
def _load(x, gate, at, mask, GATED: tl.constexpr):
    """What is summed: x, times the gate in the backward of a gated sum."""
    value = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    if GATED:
        value *= tl.load(gate + at, mask=mask, other=0).to(tl.float32)
    return value


@triton.jit
def _features(at, next_feature, F: tl.constexpr):
    """F features from their first one's place: a tuple."""
    found = ()
    for c in tl.static_range(F):
        found = found + (tl.load(at + c * next_feature),)
    return found


@triton.jit
def _add(hue, squares, value, feature, weight, F: tl.constexpr):
    """Add features times value to each of `hue`, and weight times squared features times value to `squares`."""
    norm = tl.zeros(value.shape, tl.float32)
    fresh = ()
    for c in tl.static_range(F):
        norm += feature[c] * feature[c]
        fresh = fresh + (hue[c] + feature[c] * value,)
    return fresh, squares + weight * norm * value


@triton.jit
def _between(end, start, before, after, NB: tl.constexpr, G: tl.constexpr, K: tl.constexpr):
    """`end` at each window's last column less `start` at the one before its first, both (NB, G, K), zero outside."""
    # Side by side on one axis: Triton exchanges such a gather through shared memory, and waits for all warps but once;
    # on more axes it would shuffle, far too often. A thread has eight numbers of `both`: the first of all threads stand
    # together there, then the second of all, so that neighbouring threads never ask the same bank.
    place = tl.arange(0, NB * G * K * 2)
    column = place // (2 * G * K) * K + place // 2 % K + tl.where(place % 2 == 0, after, -before - 1)
    inside = (column >= 0) & (column < NB * K)
    source = column // K * (G * K) + place // (2 * K) % G * K + column % K
    source = (source % 4 * 2 + place % 2) * (NB * G * K // 4) + source // 4
    both = tl.reshape(tl.trans(tl.reshape(tl.join(end, start), (NB * G * K // 4, 8))), (NB * G * K * 2,))
    found = tl.where(inside, tl.gather(both, tl.where(inside, source, 0), 0), 0.0)
    last, first = tl.split(tl.reshape(found, (NB, G, K, 2)))
    return last - first


@triton.jit(do_not_specialize=["strip", "strips", "groups"])
def window_sums(
    x, q, kept, shifted, weights, out, kept_out, partials, L, T, H, W, first, shown, strip, strips, groups, rows,
    before_t, after_t, before_y, after_y, before_x, after_x, square_t, square_y, square_x,
    BACK: tl.constexpr, GATE: tl.constexpr, KEEP: tl.constexpr, FRAMES: tl.constexpr, F: tl.constexpr,
    G: tl.constexpr, NB: tl.constexpr, K: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A strip of rows of G labels of one frame. Forward: x is q. BACK: x is the gradient, the reaches are mirrored.

    FRAMES: the window reaches into other frames. Results are for `shown` frames from the `first` on.
    """
    P: tl.constexpr = NB * K
    GATED: tl.constexpr = BACK and GATE
    program = tl.program_id(0)
    group = program % groups
    strip_at = program // groups % strips
    t = first + program // groups // strips % shown
    image = (program // groups // strips // shown).to(tl.int64)
    y_start = strip_at * strip
    y_stop = tl.minimum(y_start + strip, H)

    label = group * G + tl.arange(0, G)
    plane = (image * L + label) * T * H * W
    # Tensors are (NB, G, K), columns cut into NB stretches of K. A row of features is loaded for each of the G labels,
    # which costs nothing: they ask for the same addresses at the same time, and the way to the cache is what counts.
    k = tl.arange(0, K)[None, None, :]
    column = tl.arange(0, NB)[:, None, None] * K + k  # (NB, 1, K)
    inside = (label[None, :, None] < L) & (column < W)
    at = plane[None, :, None] + column  # (NB, G, K), of row 0
    at_out = at
    if FRAMES:
        at_out = ((image * L + label) * shown * H * W)[None, :, None] + (column - first * H * W)
    one = tl.full((1, 1, 1), 1, tl.int32)  # compared with it, a row's number makes a mask of three axes
    next_feature = T * H * P
    own_features = shifted + image * F * next_feature + (column + tl.zeros((1, G, 1), tl.int32))
    ends = own_features + tl.cast(rows, tl.int64) * P + t * H * P
    starts = ends + tl.cast(rows, tl.int64) * P
    w_colour = tl.load(weights).to(tl.float32)
    w_position = tl.load(weights + 1).to(tl.float32)
    w_bias = tl.load(weights + 2).to(tl.float32)
    # Forward, both terms share one sum of weighted squares; backward keeps them apart for the weights' gradients.
    if BACK:
        by_colour, by_t, by_y, by_x = 1.0, square_t, square_y, square_x
    else:
        by_colour, by_t = w_colour, w_position * square_t
        by_y, by_x = w_position * square_y, w_position * square_x

    # Column sums over the rows of the window: x, (row - y) x, squares x, and each feature times x.
    mass = tl.zeros((NB, G, K), tl.float32)
    slope = tl.zeros((NB, G, K), tl.float32)
    squares = tl.zeros((NB, G, K), tl.float32)
    spread = tl.zeros((NB, G, K), tl.float32)  # BACK: the squares of the positions alone
    hue = ()
    for _ in tl.static_range(F):
        hue = hue + (tl.zeros((NB, G, K), tl.float32),)

    t_first = tl.maximum(t - before_t, 0)
    t_stop = tl.minimum(t + after_t, T - 1) + 1
    y_first = tl.maximum(y_start - before_y, 0)
    for frame in range(t_first, t_stop):
        step_t = (frame - t).to(tl.float32)
        far = by_t * step_t * step_t
        for row in tl.range(y_first, tl.minimum(y_start + after_y, H - 1) + 1, loop_unroll_factor=UNROLL):
            value = _load(x, q, at + (frame * H + row) * W, inside, GATED)
            feature = _features(own_features + (frame * H + row) * P, next_feature, F)
            step = (row - y_start).to(tl.float32)
            mass += value
            slope += step * value
            if BACK:
                spread += (step * step * by_y + far) * value
            else:
                squares += (step * step * by_y + far) * value
            hue, squares = _add(hue, squares, value, feature, by_colour, F)

    u = (k - K // 2).to(tl.float32)  # place inside a stretch of K columns
    to_right = u - after_x  # from a window's last column to its centre
    to_left = u + (before_x + 1)  # from the column before a window's first to its centre
    crossing = (k + before_x + after_x + 1 >= K).to(tl.float32)
    came_step = after_y * 1.0
    went_step = before_y + 1.0
    sum_colour = tl.zeros((NB, G, K), tl.float32)
    sum_position = tl.zeros((NB, G, K), tl.float32)
    sum_bias = tl.zeros((NB, G, K), tl.float32)

    for y in tl.range(y_start, y_stop, num_stages=STAGES):
        # The next rows are asked for first, so that they arrive behind the arithmetic.
        entering, leaving = y + 1 + after_y, y - before_y
        if not FRAMES:
            came = _load(x, q, at + entering * W, inside & (one + entering <= H), GATED)
            went = _load(x, q, at + leaving * W, inside & (one + leaving > 0), GATED)

        # Along the row: each window is the end of one stretch and the start of the next, or lies inside one. What a
        # window's centre j knows (its features, its place) enters at both ends, so that one number per end travels.
        mass_end, mass_start = _ends(mass, crossing, NB, G, K)
        slope_end, slope_start = _ends(u * mass, crossing, NB, G, K)
        position_end = by_x * to_right * (to_right * mass_end - 2 * slope_end)
        position_start = by_x * to_left * (to_left * mass_start - 2 * slope_start)
        colour_end = tl.zeros((NB, G, K), tl.float32)
        colour_start = tl.zeros((NB, G, K), tl.float32)
        for c in tl.static_range(F):
            hue_end, hue_start = _ends(hue[c], crossing, NB, G, K)
            feature = tl.load(ends + y * P + c * next_feature)
            colour_end += feature * (feature * mass_end - 2 * hue_end)
            feature = tl.load(starts + y * P + c * next_feature)
            colour_start += feature * (feature * mass_start - 2 * hue_start)
        # Asked for before the exchange through shared memory, behind whose barriers they would have to wait.
        if not FRAMES:
            new = _features(own_features + tl.minimum(entering, H - 1) * P, next_feature, F)
            old = _features(own_features + tl.maximum(leaving, 0) * P, next_feature, F)
        if BACK:
            squares_end, squares_start = _ends(spread + by_x * u * u * mass, crossing, NB, G, K)
            position_end += squares_end
            position = _between(position_end, position_start + squares_start, before_x, after_x, NB, G, K)
            squares_end, squares_start = _ends(squares, crossing, NB, G, K)
            colour = _between(colour_end + squares_end, colour_start + squares_start, before_x, after_x, NB, G, K)
            here = tl.load(q + at + (t * H + y) * W, mask=inside, other=0).to(tl.float32)
            gradient = tl.load(x + at + (t * H + y) * W, mask=inside, other=0).to(tl.float32)
            sum_colour += here * colour
            sum_position += here * position
            sum_bias += gradient
            total = w_colour * colour + w_position * position
            if GATE:
                total += gradient * tl.load(kept + at + (t * H + y) * W, mask=inside, other=0).to(tl.float32)
            tl.store(out + at_out + (t * H + y) * W, total, mask=inside)
        else:
            squares_end, squares_start = _ends(squares + by_x * u * u * mass, crossing, NB, G, K)
            end = w_colour * colour_end + position_end + squares_end
            start = w_colour * colour_start + position_start + squares_start
            total = _between(end, start, before_x, after_x, NB, G, K)
            if KEEP:
                tl.store(kept_out + at_out + (t * H + y) * W, total, mask=inside)
            if GATE:
                total *= tl.load(q + at + (t * H + y) * W, mask=inside, other=0).to(tl.float32)
            tl.store(out + at_out + (t * H + y) * W, total + w_bias, mask=inside)

        # Down one row: every (row - y) shrinks by one, a row enters at `after`, one leaves at -(before + 1).
        down = by_y * (mass - 2 * slope)
        if FRAMES:
            came = tl.zeros((NB, G, K), tl.float32)
            went = tl.zeros((NB, G, K), tl.float32)
            for frame in range(t_first, t_stop):
                step_t = (frame - t).to(tl.float32)
                row = frame * H + entering
                value = _load(x, q, at + row * W, inside & (one + entering <= H), GATED)
                new = _features(own_features + (frame * H + tl.minimum(entering, H - 1)) * P, next_feature, F)
                gone = _load(x, q, at + (frame * H + leaving) * W, inside & (one + leaving > 0), GATED)
                old = _features(own_features + (frame * H + tl.maximum(leaving, 0)) * P, next_feature, F)
                came += value
                went += gone
                down += (by_t * step_t * step_t) * (value - gone)
                hue, squares = _add(hue, squares, value, new, by_colour, F)
                hue, squares = _add(hue, squares, -gone, old, by_colour, F)
        else:
            hue, squares = _add(hue, squares, came, new, by_colour, F)
            hue, squares = _add(hue, squares, -went, old, by_colour, F)
        down += by_y * (came_step * came_step * came - went_step * went_step * went)
        if BACK:
            spread += down
        else:
            squares += down
        slope += came_step * came + went_step * went - mass
        mass += came - went

    if BACK:
        tl.store(partials + program * 3, tl.sum(sum_colour))
        tl.store(partials + program * 3 + 1, tl.sum(sum_position))
        tl.store(partials + program * 3 + 2, tl.sum(sum_bias))
