"""The Triton kernels of distance/gpu.py, which explains them; import this module only when they run.

Tensors are (NB, G, K): columns cut into NB stretches of K, and G labels between them.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shift_features(
    features, shifted, planes, H, W, before, after, scale, SAMPLES: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr
):
    """Centred features (B, F, H, W) into (3, B, F, H, P): in place, as seen `after` to the left, `before + 1` right."""
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
    """The F features of some pixels, from the address of the first feature on: a tuple."""
    features = ()
    for c in tl.static_range(F):
        features = features + (tl.load(at + c * next_feature),)
    return features


@triton.jit
def _zeros(count: tl.constexpr, NB: tl.constexpr, G: tl.constexpr, K: tl.constexpr):
    """`count` tensors of zeros: a tuple."""
    zeros = ()
    for _ in tl.static_range(count):
        zeros = zeros + (tl.zeros((NB, G, K), tl.float32),)
    return zeros


@triton.jit
def _add_products(products, value, features, F: tl.constexpr):
    """products + features * value, for each feature."""
    sums = ()
    for c in tl.static_range(F):
        sums = sums + (products[c] + features[c] * value,)
    return sums


@triton.jit
def _add(products, squares, value, features, weight, F: tl.constexpr):
    """(products + features * value, squares + weight * |features|^2 * value)."""
    norm = tl.zeros(value.shape, tl.float32)
    for c in tl.static_range(F):
        norm += features[c] * features[c]
    return _add_products(products, value, features, F), squares + weight * norm * value


@triton.jit
def _between(end, start, before, after, NB: tl.constexpr, G: tl.constexpr, K: tl.constexpr):
    """`end` at each window's last column less `start` at the column before its first; both are zero outside."""
    # Side by side on one axis: Triton exchanges such a gather through shared memory, and waits for all warps but once;
    # on more axes it would shuffle, far too often. A thread has eight numbers of `both`: the first of all threads stand
    # together there, then the second of all, so that neighbouring threads never ask the same bank.
    index = tl.arange(0, NB * G * K * 2)
    column = index // (2 * G * K) * K + index // 2 % K + tl.where(index % 2 == 0, after, -before - 1)
    inside = (column >= 0) & (column < NB * K)
    source = column // K * (G * K) + index // (2 * K) % G * K + column % K
    source = (source % 4 * 2 + index % 2) * (NB * G * K // 4) + source // 4
    both = tl.reshape(tl.trans(tl.reshape(tl.join(end, start), (NB * G * K // 4, 8))), (NB * G * K * 2,))
    moved = tl.where(inside, tl.gather(both, tl.where(inside, source, 0), 0), 0.0)
    last, first = tl.split(tl.reshape(moved, (NB, G, K, 2)))
    return last - first


@triton.jit(do_not_specialize=["strip", "strips", "groups"])
def window_sums(
    x, q, shifted, weights, out, ungated, partials, L, T, H, W, first, shown, strip, strips, groups, rows,
    before_t, after_t, before_y, after_y, before_x, after_x, square_t, square_y, square_x,
    BACK: tl.constexpr, GATE: tl.constexpr, KEEP: tl.constexpr, FRAMES: tl.constexpr, F: tl.constexpr,
    G: tl.constexpr, NB: tl.constexpr, K: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The window sums of x over a strip of rows of G labels of one frame, for `shown` frames from the `first` on.

    Forward: x is q; KEEP writes the sum before the gate to `ungated`.
    BACK: x is the gradient, the reaches are mirrored, `ungated` is read, and `partials` gets the weights' gradients.
    FRAMES: the window reaches into other frames.
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
    # A row of features is loaded for each of the G labels, which costs nothing: they ask for the same addresses at the
    # same time, and the way to the cache is what counts.
    k = tl.arange(0, K)[None, None, :]
    column = tl.arange(0, NB)[:, None, None] * K + k  # (NB, 1, K)
    inside = (label[None, :, None] < L) & (column < W)
    at = plane[None, :, None] + column  # (NB, G, K), of row 0
    at_out = at
    if FRAMES:
        at_out = ((image * L + label) * shown * H * W)[None, :, None] + (column - first * H * W)
    ones = tl.full((1, 1, 1), 1, tl.int32)  # added to a row's number, it makes a tensor of three axes for the masks
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
    products = _zeros(F, NB, G, K)

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
            products, squares = _add(products, squares, value, feature, by_colour, F)

    u = (k - K // 2).to(tl.float32)  # position inside a stretch of K columns
    to_right = u - after_x  # from a window's last column to its centre
    to_left = u + (before_x + 1)  # from the column before a window's first to its centre
    crossing = (k + before_x + after_x + 1 >= K).to(tl.float32)
    step_in = after_y * 1.0
    step_out = before_y + 1.0
    sum_colour = tl.zeros((NB, G, K), tl.float32)
    sum_position = tl.zeros((NB, G, K), tl.float32)
    sum_bias = tl.zeros((NB, G, K), tl.float32)

    for y in tl.range(y_start, y_stop, num_stages=STAGES):
        # The next rows are asked for first, so that they arrive behind the arithmetic.
        entering, leaving = y + 1 + after_y, y - before_y
        if not FRAMES:
            entered = _load(x, q, at + entering * W, inside & (ones + entering <= H), GATED)
            left = _load(x, q, at + leaving * W, inside & (ones + leaving > 0), GATED)

        # Along the row: each window is the end of one stretch and the start of the next, or lies inside one. What a
        # window's centre j knows (its features, its position) enters at both ends, so that one number per end travels.
        mass_end, mass_start = _ends(mass, crossing, NB, G, K)
        slope_end, slope_start = _ends(u * mass, crossing, NB, G, K)
        position_end = by_x * to_right * (to_right * mass_end - 2 * slope_end)
        position_start = by_x * to_left * (to_left * mass_start - 2 * slope_start)
        colour_end = tl.zeros((NB, G, K), tl.float32)
        colour_start = tl.zeros((NB, G, K), tl.float32)
        for c in tl.static_range(F):
            product_end, product_start = _ends(products[c], crossing, NB, G, K)
            feature = tl.load(ends + y * P + c * next_feature)
            colour_end += feature * (feature * mass_end - 2 * product_end)
            feature = tl.load(starts + y * P + c * next_feature)
            colour_start += feature * (feature * mass_start - 2 * product_start)
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
                total += gradient * tl.load(ungated + at + (t * H + y) * W, mask=inside, other=0).to(tl.float32)
            tl.store(out + at_out + (t * H + y) * W, total, mask=inside)
        else:
            squares_end, squares_start = _ends(squares + by_x * u * u * mass, crossing, NB, G, K)
            end = w_colour * colour_end + position_end + squares_end
            start = w_colour * colour_start + position_start + squares_start
            total = _between(end, start, before_x, after_x, NB, G, K)
            if KEEP:
                tl.store(ungated + at_out + (t * H + y) * W, total, mask=inside)
            if GATE:
                total *= tl.load(q + at + (t * H + y) * W, mask=inside, other=0).to(tl.float32)
            tl.store(out + at_out + (t * H + y) * W, total + w_bias, mask=inside)

        # Down one row: every (row - y) shrinks by one, a row enters at `after`, one leaves at -(before + 1).
        down = by_y * (mass - 2 * slope)
        if FRAMES:
            entered = tl.zeros((NB, G, K), tl.float32)
            left = tl.zeros((NB, G, K), tl.float32)
            for frame in range(t_first, t_stop):
                step_t = (frame - t).to(tl.float32)
                row = frame * H + entering
                value = _load(x, q, at + row * W, inside & (ones + entering <= H), GATED)
                new = _features(own_features + (frame * H + tl.minimum(entering, H - 1)) * P, next_feature, F)
                value_left = _load(x, q, at + (frame * H + leaving) * W, inside & (ones + leaving > 0), GATED)
                old = _features(own_features + (frame * H + tl.maximum(leaving, 0)) * P, next_feature, F)
                entered += value
                left += value_left
                down += (by_t * step_t * step_t) * (value - value_left)
                products, squares = _add(products, squares, value, new, by_colour, F)
                products, squares = _add(products, squares, -value_left, old, by_colour, F)
        else:
            products, squares = _add(products, squares, entered, new, by_colour, F)
            products, squares = _add(products, squares, -left, old, by_colour, F)
        down += by_y * (step_in * step_in * entered - step_out * step_out * left)
        if BACK:
            spread += down
        else:
            squares += down
        slope += step_in * entered + step_out * left - mass
        mass += entered - left

    if BACK:
        tl.store(partials + program * 3, tl.sum(sum_colour))
        tl.store(partials + program * 3 + 1, tl.sum(sum_position))
        tl.store(partials + program * 3 + 2, tl.sum(sum_bias))


@triton.jit(do_not_specialize=["strip", "strips", "groups", "chunk", "chunks"])
def feature_pull(
    grad, q, centred, weights, pull, L, T, H, W, strip, strips, groups, chunk, chunks,
    before_t, after_t, before_y, after_y, before_x, after_x,
    MIRRORED: tl.constexpr, GATE: tl.constexpr, F: tl.constexpr, G: tl.constexpr, NB: tl.constexpr, K: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """2 w_colour * sum over a chunk of labels of y_j (I_j Box(x)_j - Box(I x)_j), into pull (B, chunks, F, T, H, W).

    x is q, and y is the gradient (times q with GATE). MIRRORED: x and y change places, the reaches are mirrored, and
    the result is added to what is there.
    """
    P: tl.constexpr = NB * K
    X_GATED: tl.constexpr = MIRRORED and GATE
    Y_GATED: tl.constexpr = GATE and not MIRRORED
    if MIRRORED:
        x, y = grad, q
    else:
        x, y = q, grad
    program = tl.program_id(0)
    chunk_at = program % chunks
    strip_at = program // chunks % strips
    t = program // chunks // strips % T
    image = (program // chunks // strips // T).to(tl.int64)
    row_start = strip_at * strip
    row_stop = tl.minimum(row_start + strip, H)
    t_first = tl.maximum(t - before_t, 0)
    t_stop = tl.minimum(t + after_t, T - 1) + 1

    k = tl.arange(0, K)[None, None, :]
    column = tl.arange(0, NB)[:, None, None] * K + k  # (NB, 1, K)
    crossing = (k + before_x + after_x + 1 >= K).to(tl.float32)
    ones = tl.full((1, 1, 1), 1, tl.int32)
    next_feature = T * H * P
    own_features = centred + image * F * next_feature + (column + tl.zeros((1, G, 1), tl.int32))
    column_out = tl.arange(0, NB)[:, None] * K + tl.arange(0, K)[None, :]  # (NB, K): labels are summed
    to_plane = pull + (image * chunks + chunk_at) * F * T * H * W + column_out
    factor = 2 * tl.load(weights).to(tl.float32)

    for group in range(chunk_at * chunk, tl.minimum(chunk_at * chunk + chunk, groups)):
        label = group * G + tl.arange(0, G)
        inside = (label[None, :, None] < L) & (column < W)
        at = ((image * L + label) * T * H * W)[None, :, None] + column
        added_columns = W  # where the sums of earlier groups are
        if not MIRRORED:
            added_columns = tl.where(group > chunk_at * chunk, W, 0)
        mass = tl.zeros((NB, G, K), tl.float32)
        products = _zeros(F, NB, G, K)
        for frame in range(t_first, t_stop):
            row_first = frame * H + tl.maximum(row_start - before_y, 0)
            row_last = frame * H + tl.minimum(row_start + after_y, H - 1)
            for row in tl.range(row_first, row_last + 1, loop_unroll_factor=UNROLL):
                value = _load(x, q, at + row * W, inside, X_GATED)
                features = _features(own_features + row * P, next_feature, F)
                mass += value
                products = _add_products(products, value, features, F)

        for row in range(row_start, row_stop):
            # The centre's own numbers are asked for before the exchange through shared memory.
            here = t * H + row
            weight = _load(y, q, at + here * W, inside, Y_GATED) * factor
            features = _features(own_features + here * P, next_feature, F)
            end, start = _ends(mass, crossing, NB, G, K)
            box = _between(end, start, before_x, after_x, NB, G, K)
            for c in tl.static_range(F):
                end, start = _ends(products[c], crossing, NB, G, K)
                pulled = weight * (features[c] * box - _between(end, start, before_x, after_x, NB, G, K))
                to = to_plane + (c * T * H + here) * W
                total = tl.load(to, mask=column_out < added_columns, other=0) + tl.sum(pulled, 1)
                tl.store(to, total, mask=column_out < W)

            entering, leaving = row + 1 + after_y, row - before_y
            for frame in range(t_first, t_stop):
                value = _load(x, q, at + (frame * H + entering) * W, inside & (ones + entering <= H), X_GATED)
                features = _features(own_features + (frame * H + tl.minimum(entering, H - 1)) * P, next_feature, F)
                mass += value
                products = _add_products(products, value, features, F)
                value = _load(x, q, at + (frame * H + leaving) * W, inside & (ones + leaving > 0), X_GATED)
                features = _features(own_features + (frame * H + tl.maximum(leaving, 0)) * P, next_feature, F)
                mass -= value
                products = _add_products(products, -value, features, F)
        tl.debug_barrier()  # the next group reads what this one wrote, perhaps in another thread
