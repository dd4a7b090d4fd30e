"""The operators of deepmrf.ops built from ONNX's operators, for images of any size.

gaussian_penalty   b12 with the Gaussian kernel: a loop over rows, matrix products over blocks of a row
distance_penalty   b12 with the distance kernel: box sums from running sums in float64
label_contexts     b13 and b14: a convolution and a minimum

PyTorch's exporter calls these functions in place of the operators (`TRANSLATIONS`). They compute nothing: every `op.X`
adds a node to the ONNX graph. The image is uint8 with two spatial axes.

Shapes: B batch, L labels, F features, H, W; a block has N = BLOCK pixels of a row and sees M = N + columns - 1 of them,
where the window has `rows` x `columns` pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnxscript import BOOL, FLOAT, INT64, graph, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

from deepmrf.ops.window import ALL, Reach, reaches

OPSET = 18
"""The version of ONNX's operators; onnxruntime supports it since 1.14."""
BLOCK = 24
"""Pixels of a row that share one matrix of neighbours: larger blocks waste exponentials, smaller ones slow products."""
OUTSIDE_WINDOW = 1e30
"""The squared distance of pixels outside the window: their weight becomes exp(-1e30) = 0."""
FLOAT32, FLOAT64, BOOLEAN = 1, 11, 9
"""ONNX's numbers for data types."""

Value = Any
"""A tensor in the ONNX graph."""


@script(Opset("deepmrf", 1), default_opset=op)  # type: ignore[untyped-decorator]
def gaussian_rows(here: FLOAT, around: FLOAT, q: FLOAT, position: FLOAT, sharpness: FLOAT, rows: INT64) -> FLOAT:
    """The window sums of every row, (H, B, blocks, N, L); only one row's weights are in memory at a time.

    here (H, B, blocks, N, F + 2), around (B, blocks, F + 2, H + rows - 1, M), q (B, blocks, H + rows - 1, M, L),
    position (N, rows * M) as from `_position_term`, sharpness 1 / a^2, rows (1,).
    onnxscript compiles this function from its source code.
    """
    q_shape = op.Concat(op.Shape(q, start=0, end=2), [-1], op.Shape(q, start=4, end=5), axis=0)

    @graph()  # type: ignore[untyped-decorator]
    def row(i: INT64, go: BOOL):  # type: ignore[no-untyped-def]
        top = op.Unsqueeze(i, [0])
        bottom = top + rows
        colours = op.Reshape(op.Slice(around, top, bottom, [3]), [0, 0, 0, -1])
        labels = op.Reshape(op.Slice(q, top, bottom, [2]), q_shape)
        likeness = op.MatMul(op.Gather(here, i, axis=0), colours) * sharpness
        s = op.Exp(likeness + position)  # (B, blocks, N, rows * M)
        go_on = op.Identity(go)
        total = op.MatMul(s, labels)
        return go_on, total

    height = op.Squeeze(op.Shape(here, start=0, end=1))
    sums = op.Loop(height, op.Cast(1, to=BOOLEAN), body=row)
    return sums


def gaussian_penalty(
    q: Value,
    image: Value,
    weights: Value,
    bandwidths: Value,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    keep: bool,
    frame: int = ALL,
) -> tuple[Value, Value]:
    """b12 with the Gaussian kernel.

    -|I_j - I_z|^2 / 2 is the matrix product of (I_j, n_j, 1) and (I_z, 1, n_z), n = -|I|^2 / 2. In bytes centred on 128
    it is exact in float32. One exponential and one product with q follow.
    """
    (up, down), (left, right) = reaches(window)
    colour = _bytes(image, q) - _float(128.0)
    n = op.ReduceSum(colour * colour, _ints(1)) * _float(-0.5)  # (B, 1, H, W)
    ones = n * _float(0.0) + _float(1.0)
    width = op.Shape(q, start=3, end=4)
    blocks = op.Div(width + _ints(BLOCK - 1), _ints(BLOCK))
    missing = blocks * _ints(BLOCK) - width  # columns that the last block lacks
    here = op.Pad(op.Concat(colour, n, ones, axis=1), op.Concat(_ints(*[0] * 7), missing, axis=0))
    here = op.Reshape(here, _ints(0, 0, 0, -1, BLOCK))  # (B, F + 2, H, blocks, N)
    # Outside the image everything is zero, q included.
    padding = op.Concat(_ints(0, 0, up, left, 0, 0, down), missing + _ints(right), axis=0)
    start = op.Range(_int(0), op.Squeeze(blocks), _int(1)) * _ints(BLOCK)
    columns = op.Unsqueeze(start, _ints(1)) + op.Range(_int(0), _int(BLOCK + window[1] - 1), _int(1))
    around = op.Gather(op.Pad(op.Concat(colour, ones, n, axis=1), padding), columns, axis=3)
    q_around = op.Gather(op.Pad(q, padding), columns, axis=3)  # (B, L, H + rows - 1, blocks, M)
    a, b = _item(bandwidths, 0), _item(bandwidths, 1)
    total = gaussian_rows(
        op.Transpose(here, perm=[2, 0, 3, 4, 1]),
        op.Transpose(around, perm=[0, 3, 1, 2, 4]),
        op.Transpose(q_around, perm=[0, 3, 2, 4, 1]),
        _position_term(window, spacing, b),
        _float(1.0) / (a * a * _float(255.0**2)),  # colours are bytes here
        _ints(window[0]),
    )  # (H, B, blocks, N, L)
    total = op.Reshape(op.Transpose(total, perm=[1, 4, 0, 2, 3]), _ints(0, 0, 0, -1))
    total = op.Slice(total, _ints(0), width, _ints(3)) * _item(weights, 0)
    return (total * q if gate else total) + _item(weights, 1), _unused()


def _position_term(window: Sequence[int], spacing: Sequence[float], b: Value) -> Value:
    """-|j - z|^2 / 2 b^2 for j of a block and z around it, (N, rows * M); far below 0 where z is not in N(j)."""
    (up, _), (left, _) = reaches(window)
    column = np.arange(BLOCK + window[1] - 1) - np.arange(BLOCK)[:, None]  # counted from the window's left edge
    in_window = (column >= 0) & (column < window[1])
    across = np.where(in_window, ((column - left) * spacing[1]) ** 2, OUTSIDE_WINDOW)
    along = ((np.arange(window[0]) - up) * spacing[0]) ** 2
    squared = op.Reshape(op.Constant(value_floats=across.ravel().tolist()), _ints(BLOCK, 1, -1))
    squared = squared + op.Reshape(op.Constant(value_floats=along.tolist()), _ints(1, -1, 1))
    scaled = squared * (_float(-0.5) / (b * b))
    position = op.Where(op.Greater(squared, _float(0.0)), scaled, _float(-OUTSIDE_WINDOW))
    return op.Reshape(position, _ints(BLOCK, -1))


def distance_penalty(
    q: Value,
    image: Value,
    weights: Value,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    keep: bool,
    frame: int = ALL,
) -> tuple[Value, Value]:
    """b12 with the distance kernel: box sums and moments in float64, as in deepmrf.ops.distance."""
    x = op.Cast(q, to=FLOAT64)
    w_colour, w_position, w_bias = (op.Cast(_item(weights, i), to=FLOAT64) for i in range(3))
    rows, columns = reaches(window)
    row_sums = _axis_sum(x, 3, columns)
    box = _axis_sum(row_sums, 2, rows)
    spread_across = _axis_sum(_axis_spread(x, 3, columns, spacing[1]), 2, rows)
    total = (spread_across + _axis_spread(row_sums, 2, rows, spacing[0])) * w_position
    features = _bytes(image, q, FLOAT64) / _float(255.0, FLOAT64)
    features = features - op.ReduceMean(features, _ints(2, 3))  # the same distances, less cancellation
    norm = op.ReduceSum(features * features, _ints(1))
    colour = norm * box + _box_sum(norm * x, rows, columns)
    for f in range(image.shape[1]):
        feature = op.Slice(features, _ints(f), _ints(f + 1), _ints(1))
        colour = colour - _float(2.0, FLOAT64) * feature * _box_sum(feature * x, rows, columns)
    total = total + colour * w_colour
    return op.Cast((total * x if gate else total) + w_bias, to=FLOAT32), _unused()


def _axis_sum(x: Value, axis: int, reach: Reach) -> Value:
    """Return the sum of x[j - before .. j + after] along one axis: a difference of two running sums."""
    before, after = reach
    padding = [0] * 8
    padding[axis], padding[4 + axis] = before + 1, after
    running = op.CumSum(op.Pad(x, _ints(*padding)), _int(axis))
    size = before + after + 1
    ends = op.Slice(running, _ints(size), _ints(np.iinfo(np.int64).max), _ints(axis))
    return ends - op.Slice(running, _ints(0), _ints(-size), _ints(axis))


def _box_sum(x: Value, rows: Reach, columns: Reach) -> Value:
    return _axis_sum(_axis_sum(x, 3, columns), 2, rows)


def _axis_spread(x: Value, axis: int, reach: Reach, step: float) -> Value:
    """Return the sum of (step (z - j))^2 x[z] over the same z, from three running sums about the middle of the axis."""
    size = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
    middle = op.Cast(size - _int(1), to=FLOAT64) / _float(2.0, FLOAT64)
    position = op.Cast(op.Range(_int(0), size, _int(1)), to=FLOAT64) - middle
    position = op.Reshape(position * _float(step, FLOAT64), _ints(*[-1 if i == axis else 1 for i in range(4)]))
    moment = x * position
    second_moment = _axis_sum(moment * position, axis, reach)
    total = second_moment - _float(2.0, FLOAT64) * position * _axis_sum(moment, axis, reach)
    return total + position * position * _axis_sum(x, axis, reach)


def label_contexts(t: Value, weight: Value, bias: Value, contexts: int) -> tuple[Value, Value]:
    """b13 and b14."""
    (up, down), (left, right) = reaches(weight.shape[2:])
    o13 = op.Conv(t, weight, bias, pads=[up, left, down, right])  # (B, L * K, H, W)
    grouped = op.Reshape(o13, _ints(0, weight.shape[0] // contexts, contexts, -1))
    o14 = op.ReduceMin(grouped, _ints(2), keepdims=0)  # (B, L, H * W)
    return op.Reshape(o14, op.Shape(t)), _unused()


def log_sigmoid(x: Value) -> Value:
    """ln sigmoid(x), for models with unary="sigmoid". The exporter's own version takes the log of a rounded sigmoid."""
    return op.Neg(op.Softplus(op.Neg(x)))


def _bytes(image: Value, q: Value, dtype: int = FLOAT32) -> Value:
    """Return the image as floats 0 .. 255; without features, one black channel of q's size, since ONNX needs one."""
    if image.shape[1]:
        return op.Cast(image, to=dtype)
    return op.Cast(op.Slice(q, _ints(0), _ints(1), _ints(1)), to=dtype) * _float(0.0, dtype)


def _ints(*values: int) -> Value:
    """Return a constant vector of int64."""
    return op.Constant(value_ints=[int(value) for value in values])


def _int(value: int) -> Value:
    """Return a constant scalar of int64."""
    return op.Constant(value_int=value)


def _float(value: float, dtype: int = FLOAT32) -> Value:
    """Return a constant scalar."""
    constant = op.Constant(value_float=value)
    return constant if dtype == FLOAT32 else op.Cast(constant, to=dtype)


def _unused() -> Value:
    """Return an operator's second result, which only its gradient reads."""
    return op.Constant(value_floats=[0.0])


def _item(values: Value, index: int) -> Value:
    """Return an entry of a vector, as a scalar."""
    return op.Gather(values, _int(index), axis=0)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.deepmrf.gaussian_penalty.default: gaussian_penalty,
    torch.ops.deepmrf.distance_penalty.default: distance_penalty,
    torch.ops.deepmrf.label_contexts.default: label_contexts,
    torch.ops.aten.log_sigmoid.default: log_sigmoid,
}
"""The function that replaces each operator."""
