"""Approximate label contexts at a lower cost: separable filters of low rank, and contexts on a coarser grid, in 2-D.

The patterns mu_k(u, v, .) of one layer are alike and smooth, so a few products of a column and a row approximate all of
them together (the second scheme of Jaderberg et al., Speeding up convolutional neural networks with low rank
expansions, 2014):

    weight[u, v, y, x]  ~  sum over r of  second[u, r, x] first[r, v, y]

`separate` finds the best such sum in the least squares sense from trained filters; first and second can also be
trained themselves. Per pixel it costs R n (L + K L) multiplications instead of n^2 L K L.

`strided_contexts` evaluates the contexts on blocks of stride x stride pixels, with filters that give the exact mean
over every block of a t that is constant on blocks, and interpolates the minimum: t is a local average already, so
little is lost.

Which one: on CPUs the exact contexts (cpu.py) take less time than separable ones of any useful rank, and stride 2 takes
less than both and stays closer to the exact result. Separable filters save parameters, and time where only the plain
convolution is available.

Shapes: t (B, L, H, W), weight (L * K, L, N, M), first (R, L, N, 1), second (L * K, R, 1, M), bias (L * K,).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops.contexts import label_contexts, window_convolution
from deepmrf.ops.window import reaches

Factors = tuple[Tensor, Tensor]


def separate(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """(first, second, error): the closest filters that are a sum of `rank` products, and how far off they are.

    error is the norm of the difference divided by the norm of weight: 0 at the full rank min(L N, L K M).
    """
    if weight.dim() != 4:
        raise ValueError(f"weight has {weight.dim() - 2} spatial axes, but separate splits filters of 2.")
    channels, labels, high, wide = weight.shape
    full = min(labels * high, channels * wide)
    if not 1 <= rank <= full:
        raise ValueError(f"rank={rank} must be between 1 and {full}, where the filters are exact.")
    matrix = weight.detach().double().permute(1, 2, 0, 3).reshape(labels * high, channels * wide)
    left, size, right = torch.linalg.svd(matrix, full_matrices=False)
    share = size[:rank].sqrt()  # to both sides alike, so that neither learns faster when they are trained on
    first = (left[:, :rank] * share).T.reshape(rank, labels, high, 1)
    second = (share[:, None] * right[:rank]).view(rank, channels, 1, wide).transpose(0, 1)
    error = (size[rank:].square().sum() / size.square().sum().clamp_min(torch.finfo(size.dtype).tiny)).sqrt()
    return first.to(weight.dtype).contiguous(), second.to(weight.dtype).contiguous(), float(error)


def low_rank_contexts(t: Tensor, first: Tensor, second: Tensor, bias: Tensor, contexts: int) -> Tensor:
    """o14 with weight replaced by the product of first and second. Returns (B, L, H, W)."""
    columns = window_convolution(t.contiguous(memory_format=torch.channels_last), first)
    # The maps of pattern k of all labels are one convolution: the minimum then never runs along a short axis.
    smallest = window_convolution(columns, second[::contexts]) + bias[::contexts].view(-1, 1, 1)
    for k in range(1, contexts):
        o13 = window_convolution(columns, second[k::contexts]) + bias[k::contexts].view(-1, 1, 1)
        smallest = torch.minimum(smallest, o13)
    return smallest.contiguous()


def coarse_filters(weight: Tensor, stride: int) -> Tensor:
    """Filters for block means: entry D is the mean over the pixels i of a block of the sum over the j of block D.

    Along an axis offset d of the filter counts for block D with the share 1 - |d / stride - D| of the pairs of pixels,
    or not at all; axes of 1 pixel stay. The result is odd along each axis: it reaches the farther side on both.
    """
    for axis, (before, after) in enumerate(reaches(weight.shape[2:]), start=2):
        reach = -(-max(before, after) // stride)
        offset = torch.arange(-before, after + 1, device=weight.device, dtype=weight.dtype)
        block = torch.arange(-reach, reach + 1, device=weight.device, dtype=weight.dtype)
        share = (1 - (offset / stride - block[:, None]).abs()).clamp_min(0)  # (blocks, offsets)
        weight = (weight.movedim(axis, -1) @ share.T).movedim(-1, axis)
    return weight


def _block_means(t: Tensor, stride: int) -> Tensor:
    if stride == 2 and t.device.type == "cpu":  # halfway between four pixels lies their mean, and this has vectors
        return functional.interpolate(t, scale_factor=0.5, mode="bilinear", align_corners=False)
    return functional.avg_pool2d(t, stride)


def strided_contexts(t: Tensor, filters: Tensor | Factors, bias: Tensor, contexts: int, stride: int) -> Tensor:
    """o14 computed for blocks of stride x stride pixels and interpolated. filters: weight, or (first, second).

    Zeros are outside the image, as always: a block over its border averages them in. Returns (B, L, H, W).
    """
    if stride < 1:
        raise ValueError(f"stride={stride} must be at least 1 pixel: 1 is every pixel.")
    high, wide = t.shape[2:]
    if stride > 1:
        t = _block_means(functional.pad(t, (0, -wide % stride, 0, -high % stride)), stride)
    if isinstance(filters, Tensor):
        o14 = label_contexts(t, coarse_filters(filters, stride) if stride > 1 else filters, bias, contexts)
    else:
        # A column filter is 1 pixel wide and its row filter 1 pixel high: coarsening one after the other is both.
        first, second = (coarse_filters(part, stride) if stride > 1 else part for part in filters)
        o14 = low_rank_contexts(t, first, second, bias, contexts)
    if stride == 1:
        return o14
    fine = functional.interpolate(o14, scale_factor=stride, mode="bilinear", align_corners=False)
    return fine[..., :high, :wide].contiguous()
