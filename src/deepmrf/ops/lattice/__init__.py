"""The Gaussian filter over all pairs of points, by the permutohedral lattice, in time linear in the points.

    out[c, i] = sum over all j of exp(-|f_i - f_j|^2 / 2) values[c, j]          j = i included

f are features of any number of axes d, each divided by the width of the Gaussian: position, colour, anything. The
lattice evaluates the sum approximately, as K = slice . blur_d .. blur_0 . splat:

    splat    each point gives its values to the d + 1 vertices of its simplex, by barycentric weights
    blur     for each axis of the lattice: row[m] += (row[m - axis] + row[m + axis]) / 2
    slice    each point gathers from the same vertices by the same weights, times 1 / (1 + 2^-d)

The transpose of K blurs the axes in reverse order: that is the gradient to the values. The gradient to the features is
that of the exact sum, its sums evaluated by the same filter. `build` says what a lattice is.

Shapes: values (B, C, N), features (B, d, N). A lattice of one image serves a batch of any size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepmrf.ops.lattice import cpu, gpu
from deepmrf.ops.lattice.build import Arguments, Lattice, build_plain, neighbours_of_runs, slice_scale
from deepmrf.ops.registry import Implementation, Operator, Pair

__all__ = ["Lattice", "build_lattice", "gaussian_filter", "gaussian_filter_reference", "lattice_filter"]


def gaussian_filter_reference(values: Tensor, features: Tensor) -> Tensor:
    """The equation above, every pair written out: O(N^2) memory. For readers and tests only."""
    distance = (features[:, :, :, None] - features[:, :, None, :]).square().sum(1)  # (B, N, N)
    return torch.einsum("bij,bcj->bci", torch.exp(-distance / 2), values)


def build_lattice(features: Tensor) -> Lattice:
    """The lattice of the points features (B, d, N), d >= 1; it is built in float64 for float64, else in float32."""
    if features.dim() != 3 or features.shape[1] == 0:
        raise ValueError(f"Features must be (B, d, N) with d >= 1; these are {tuple(features.shape)}.")
    features = features.detach()
    features = features if features.dtype == torch.float64 else features.float()
    if features.is_cuda and gpu.can_build(features):
        return gpu.build(features)
    return cpu.build(features) if cpu.can_build(features) else build_plain(features)


def _forward(a: Arguments) -> Pair:
    """One channel per column; the last row is zero, and stands for the vertices that do not exist (-1)."""
    images, points, sides = a.vertex.shape
    neighbours = a.links if a.links.dim() == 3 else neighbours_of_runs(a.links, a.tables[0], a.vertices)
    dtype = torch.promote_types(a.values.dtype, torch.float32)
    columns = a.values.to(dtype).view(images, -1, points)  # images that share a lattice become channels
    columns = columns.mT.reshape(images * points, -1)
    weight = a.weight.to(dtype).view(-1, sides)
    index = a.vertex.view(-1, sides).long()
    rows = columns.new_zeros(a.vertices + 1, columns.shape[1])
    for r in range(sides):
        rows.index_add_(0, index[:, r], columns * weight[:, r, None])
    for axis in reversed(range(sides)) if a.transpose else range(sides):
        before, after = neighbours[axis].long()
        rows[:-1] = rows[:-1] + (rows[before] + rows[after]) / 2
    out = torch.zeros_like(columns)
    for r in range(sides):
        out += rows[index[:, r]] * weight[:, r, None]
    out = (out * slice_scale(sides - 1)).view(images, points, -1).mT.contiguous()
    return out.view(a.values.shape).to(a.values.dtype), a.values.new_empty(0)


operator = Operator(
    "lattice_filter",
    Arguments,
    Implementation("torch", _forward),
    lambda a: (torch.empty_like(a.values, memory_format=torch.contiguous_format), a.values.new_empty(0)),
    kernels={"triton": "deepmrf.ops.lattice.gpu", "numba": "deepmrf.ops.lattice.cpu"},
    adjoint=lambda grad, a: a._replace(values=grad.contiguous(), transpose=not a.transpose),
)


def lattice_filter(values: Tensor, lattice: Lattice, *, transpose: bool = False) -> Tensor:
    """K values, or its transpose; see the head of this module. Gradients flow to the values (B, C, N)."""
    images, points, _ = lattice.vertex.shape
    if values.dim() != 3 or values.shape[2] != points or images not in (1, values.shape[0]):
        raise ValueError(
            f"Values must be (B, C, N) with {points} points{f' and {images} images' if images > 1 else ''} as in the "
            f"lattice; these are {tuple(values.shape)}."
        )
    if values.numel() == 0:
        return values.clone()
    tables: tuple[Tensor, ...] = (lattice.run_ends,) if lattice.links.dim() == 1 else ()
    if values.is_cuda or lattice.splat_tables:
        tables = gpu.tables_of(lattice)
    return operator(
        values.contiguous(), lattice.vertex, lattice.weight, lattice.links, list(tables), lattice.vertices, transpose
    )


class _Filter(torch.autograd.Function):
    """K values, with gradients to both; those to the features are

    sum over c, j of k(i, j) (f_j - f_i) (g[c, i] values[c, j] + g[c, j] values[c, i]),     g the gradient to out.
    """

    @staticmethod
    def forward(ctx, values, features, lattice):  # type: ignore[no-untyped-def]
        ctx.lattice = lattice
        ctx.save_for_backward(values, features)
        return lattice_filter(values, lattice)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        values, features = ctx.saved_tensors
        lattice, back = ctx.lattice, lattice_filter(grad, ctx.lattice, transpose=True)
        if not ctx.needs_input_grad[1]:
            return back, None, None
        sums = (grad * lattice_filter(values, lattice) + values * back).sum(1, keepdim=True)
        centred = features - features.mean(2, keepdim=True)  # the same differences, less cancellation
        pulls = []
        for axis in centred.split(1, dim=1):
            ahead = lattice_filter(axis * values, lattice)
            behind = lattice_filter(axis * grad, lattice, transpose=True)
            pulls.append((grad * ahead + values * behind).sum(1, keepdim=True) - axis * sums)
        return back, torch.cat(pulls, dim=1).to(features.dtype), None


def gaussian_filter(values: Tensor, features: Tensor | None, lattice: Lattice | None = None) -> Tensor:
    """Filter values (B, C, N) by features (B, d, N), with gradients to both; lattice: of these features, or alone."""
    if features is None:
        if lattice is None:
            raise ValueError("Give features, or a lattice that is built of some.")
        return lattice_filter(values, lattice)
    lattice = build_lattice(features) if lattice is None else lattice
    result: Tensor = _Filter.apply(values, features, lattice)  # type: ignore[no-untyped-call]
    return result
