"""The operators of deepmrf.ops once more, in ONNX's own operators and for images of any size.

gaussian_penalty   b12 with the Gaussian kernel: a loop over the rows, matrix products over blocks of a row
distance_penalty   b12 with the distance kernel: box sums from running sums in float64
label_contexts     b13 and b14: a convolution and a minimum

PyTorch's exporter calls these in place of the operators (`TRANSLATIONS`); they write ONNX nodes where they look like
they compute. The image is uint8 and has two axes, as in every exported model.
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
"""The version of ONNX's operators; onnxruntime knows it since 1.14."""
BLOCK = 24
"""Pixels of a row that share one matrix of neighbours: more of them waste exponentials, fewer slow the products."""
FAR = 1e30
"""The squared distance of what is not in the window: no weight is left of it."""
SINGLE, DOUBLE, TRUTH = 1, 11, 9
"""ONNX's numbers for float32, float64 and truth values."""

Value = Any
"""A tensor of the ONNX graph."""


@script(Opset("deepmrf", 1), default_opset=op)  # type: ignore[untyped-decorator]
def gaussian_rows(here: FLOAT, around: FLOAT, q: FLOAT, place: FLOAT, sharpness: FLOAT, rows: INT64) -> FLOAT:
    """The window sums of every row, (H, B, blocks, BLOCK, L); only one row's weights exist at a time.

    here (H, B, blocks, BLOCK, F + 2), around (B, blocks, F + 2, H + rows - 1, reach), place (BLOCK, rows * reach),
    q (B, blocks, H + rows - 1, reach, L), sharpness 1 / a^2, rows (1,) the window's.
    onnxscript compiles this from its source: it looks like Python and is ONNX.
    """
    q_shape = op.Concat(op.Shape(q, start=0, end=2), [-1], op.Shape(q, start=4, end=5), axis=0)

    @graph()  # type: ignore[untyped-decorator]
    def row(i: INT64, go: BOOL):  # type: ignore[no-untyped-def]
        top = op.Unsqueeze(i, [0])
        bottom = top + rows
        colours = op.Reshape(op.Slice(around, top, bottom, [3]), [0, 0, 0, -1])
        labels = op.Reshape(op.Slice(q, top, bottom, [2]), q_shape)
        likeness = op.MatMul(op.Gather(here, i, axis=0), colours) * sharpness
        s = op.Exp(likeness + place)  # (B, blocks, BLOCK, rows * reach)
        again = op.Identity(go)
        total = op.MatMul(s, labels)
        return again, total

    height = op.Squeeze(op.Shape(here, start=0, end=1))
    sums = op.Loop(height, op.Cast(1, to=TRUTH), body=row)
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

    A row of pixels j is cut into blocks. The pixels z that a block can see are those of a few rows, reach = BLOCK +
    columns - 1 in each. -|I_j - I_z|^2 / 2 is the matrix product of (I_j, n_j, 1) and (I_z, 1, n_z), n = -|I|^2 / 2: in
    bytes about 128, float32 holds all of it exactly. Then come one exponential, and a product with q.
    """
    (up, down), (left, right) = reaches(window)
    colour = _bytes(image, q) - _real(128.0)
    n = op.ReduceSum(colour * colour, _whole(1)) * _real(-0.5)  # (B, 1, H, W)
    ones = n * _real(0.0) + _real(1.0)
    width = op.Shape(q, start=3, end=4)
    blocks = op.Div(width + _whole(BLOCK - 1), _whole(BLOCK))
    lacking = blocks * _whole(BLOCK) - width  # columns that the last block has too few
    here = op.Pad(op.Concat(colour, n, ones, axis=1), op.Concat(_whole(*[0] * 7), lacking, axis=0))
    here = op.Reshape(here, _whole(0, 0, 0, -1, BLOCK))  # (B, F + 2, H, blocks, BLOCK)
    # Outside the image all is zero: there q has nothing to weigh.
    border = op.Concat(_whole(0, 0, up, left, 0, 0, down), lacking + _whole(right), axis=0)
    start = op.Range(_one(0), op.Squeeze(blocks), _one(1)) * _whole(BLOCK)
    columns = op.Unsqueeze(start, _whole(1)) + op.Range(_one(0), _one(BLOCK + window[1] - 1), _one(1))
    around = op.Gather(op.Pad(op.Concat(colour, ones, n, axis=1), border), columns, axis=3)
    q_around = op.Gather(op.Pad(q, border), columns, axis=3)  # (B, L, H + rows - 1, blocks, reach)
    a, b = _item(bandwidths, 0), _item(bandwidths, 1)
    total = gaussian_rows(
        op.Transpose(here, perm=[2, 0, 3, 4, 1]),
        op.Transpose(around, perm=[0, 3, 1, 2, 4]),
        op.Transpose(q_around, perm=[0, 3, 2, 4, 1]),
        _places(window, spacing, b),
        _real(1.0) / (a * a * _real(255.0**2)),  # colours count in bytes here
        _whole(window[0]),
    )  # (H, B, blocks, BLOCK, L)
    total = op.Reshape(op.Transpose(total, perm=[1, 4, 0, 2, 3]), _whole(0, 0, 0, -1))
    total = op.Slice(total, _whole(0), width, _whole(3)) * _item(weights, 0)
    return (total * q if gate else total) + _item(weights, 1), _nothing()


def _places(window: Sequence[int], spacing: Sequence[float], b: Value) -> Value:
    """-|j - z|^2 / 2 b^2 for j of a block and z around it, or -FAR and less where z is j or not in N(j)."""
    (up, _), (left, _) = reaches(window)
    column = np.arange(BLOCK + window[1] - 1) - np.arange(BLOCK)[:, None]  # of the window, from its left edge
    across = np.where((column >= 0) & (column < window[1]), ((column - left) * spacing[1]) ** 2, FAR)
    along = ((np.arange(window[0]) - up) * spacing[0]) ** 2
    squared = op.Reshape(op.Constant(value_floats=across.ravel().tolist()), _whole(BLOCK, 1, -1))
    squared = squared + op.Reshape(op.Constant(value_floats=along.tolist()), _whole(1, -1, 1))
    place = op.Where(op.Greater(squared, _real(0.0)), squared * (_real(-0.5) / (b * b)), _real(-FAR))
    return op.Reshape(place, _whole(BLOCK, -1))  # (BLOCK, rows * reach)


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
    """b12 with the distance kernel: box sums and moments in float64, as in ops/distance.py."""
    x = op.Cast(q, to=DOUBLE)
    w_colour, w_position, w_bias = (op.Cast(_item(weights, i), to=DOUBLE) for i in range(3))
    rows, columns = reaches(window)
    lines = _axis_sum(x, 3, columns)
    box = _axis_sum(lines, 2, rows)
    spread = _axis_sum(_axis_spread(x, 3, columns, spacing[1]), 2, rows) + _axis_spread(lines, 2, rows, spacing[0])
    total = spread * w_position
    real = _bytes(image, q, DOUBLE) / _real(255.0, DOUBLE)
    real = real - op.ReduceMean(real, _whole(2, 3))  # distances stay, cancellation shrinks
    norm = op.ReduceSum(real * real, _whole(1))
    colour = norm * box + _box_sum(norm * x, rows, columns)
    for f in range(image.shape[1]):
        feature = op.Slice(real, _whole(f), _whole(f + 1), _whole(1))
        colour = colour - _real(2.0, DOUBLE) * feature * _box_sum(feature * x, rows, columns)
    total = total + colour * w_colour
    return op.Cast((total * x if gate else total) + w_bias, to=SINGLE), _nothing()


def _axis_sum(x: Value, axis: int, reach: Reach) -> Value:
    """sum of x[j - before .. j + after] along one axis: the difference of two running sums."""
    before, after = reach
    pads = [0] * 8
    pads[axis], pads[4 + axis] = before + 1, after
    running = op.CumSum(op.Pad(x, _whole(*pads)), _one(axis))
    size = before + after + 1
    ends = op.Slice(running, _whole(size), _whole(np.iinfo(np.int64).max), _whole(axis))
    return ends - op.Slice(running, _whole(0), _whole(-size), _whole(axis))


def _box_sum(x: Value, rows: Reach, columns: Reach) -> Value:
    return _axis_sum(_axis_sum(x, 3, columns), 2, rows)


def _axis_spread(x: Value, axis: int, reach: Reach, step: float) -> Value:
    """sum of (step (z - j))^2 x[z] over the same z, from three running sums about the middle of the axis."""
    size = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
    middle = op.Cast(size - _one(1), to=DOUBLE) / _real(2.0, DOUBLE)
    place = op.Cast(op.Range(_one(0), size, _one(1)), to=DOUBLE) - middle
    place = op.Reshape(place * _real(step, DOUBLE), _whole(*[-1 if i == axis else 1 for i in range(4)]))
    moment = x * place
    total = _axis_sum(moment * place, axis, reach) - _real(2.0, DOUBLE) * place * _axis_sum(moment, axis, reach)
    return total + place * place * _axis_sum(x, axis, reach)


def label_contexts(t: Value, weight: Value, bias: Value, contexts: int) -> tuple[Value, Value]:
    """b13 and b14."""
    (up, down), (left, right) = reaches(weight.shape[2:])
    o13 = op.Conv(t, weight, bias, pads=[up, left, down, right])  # (B, L * K, H, W)
    grouped = op.Reshape(o13, _whole(0, weight.shape[0] // contexts, contexts, -1))
    smallest = op.ReduceMin(grouped, _whole(2), keepdims=0)  # (B, L, H * W)
    return op.Reshape(smallest, op.Shape(t)), _nothing()


def log_sigmoid(x: Value) -> Value:
    """ln sigmoid(x), for models with unary="sigmoid": the exporter's own takes the logarithm of a rounded sigmoid."""
    return op.Neg(op.Softplus(op.Neg(x)))


def _bytes(image: Value, like: Value, to: int = SINGLE) -> Value:
    """The image's bytes as real numbers; one black channel where there are no features, for ONNX dislikes none."""
    if image.shape[1]:
        return op.Cast(image, to=to)
    return op.Cast(op.Slice(like, _whole(0), _whole(1), _whole(1)), to=to) * _real(0.0, to)


def _whole(*values: int) -> Value:
    return op.Constant(value_ints=[int(value) for value in values])


def _one(value: int) -> Value:
    return op.Constant(value_int=value)


def _real(value: float, to: int = SINGLE) -> Value:
    made = op.Constant(value_float=value)
    return made if to == SINGLE else op.Cast(made, to=to)


def _nothing() -> Value:
    """An operator's second result, which only its gradient reads."""
    return op.Constant(value_floats=[0.0])


def _item(values: Value, index: int) -> Value:
    """An entry of a vector, as a scalar."""
    return op.Gather(values, _one(index), axis=0)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.deepmrf.gaussian_penalty.default: gaussian_penalty,
    torch.ops.deepmrf.distance_penalty.default: distance_penalty,
    torch.ops.deepmrf.label_contexts.default: label_contexts,
    torch.ops.aten.log_sigmoid.default: log_sigmoid,
}
"""Which operator becomes which function."""
