"""The Gaussian kernel's window sum on GPUs, in Triton: attention inside a window, with a fixed kernel.

A program owns a small tile of pixels j ("queries") and a group of labels. It walks over the rows of the tile's
surroundings, KEYS pixels z at a time, computes s(j, z) in float32 registers, and multiplies it with q on the tensor
cores. What depends on the columns alone (their distance, window and image border) is worked out once per tile, what
depends on the rows once per row, so a pair costs one subtraction and one product per feature, an addition and an exp2.

The numbers multiplied are float16 by default: q divided by a power of two at least its largest magnitude, s times 2^14,
products summed in float32. That keeps as many digits as tf32 (relative error of t under 1e-3, measured nearer 1e-4,
because float16 rounds and tf32 cuts off) at twice the speed; smaller s than 2^-38 count as zero. PRECISION = "ieee"
multiplies in float32 instead, slowly.

The backward is the same sum over the gradient with a mirrored window; s |I_j - I_z|^2 and s |j - z|^2 are summed beside
it for the bandwidths. All sums have a fixed order. Handles 1-D and 2-D, at most MAX_FEATURES features; else torch runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepmrf.ops.backends import Implementation
from deepmrf.ops.contexts_triton import largest_bits
from deepmrf.ops.distance import unit_features
from deepmrf.ops.distance_triton import on_device, plane_sides, power_of_two, runs_on
from deepmrf.ops.window import Reach

MAX_FEATURES = 8
PRECISION = "half"
"""How products are formed: "half" (float16, scaled), or float32 as "tf32", "tf32x3" or "ieee"."""
QUERIES = 64
"""Pixels of a tile."""
KEYS = 64
"""Surrounding pixels at a time, at most."""
KEYS_BACK = 32
"""The same in the backward, which keeps three sums instead of one."""
WARPS = 4
STAGES = 3
MAX_GROUP = 64
"""Labels of one program: s is computed again for every such group."""


class Packed(NamedTuple):
    """Maps with the labels last, (B, pixels, labels), and the power of two they were multiplied with."""

    maps: Tensor
    scale: Tensor
    group: int


def _suits(q: Tensor, features: Tensor, weights: Tensor, window: Sequence[int]) -> bool:
    return runs_on(q) and q.dim() in (3, 4) and features.shape[1] <= MAX_FEATURES and q.numel() > 0


def _shift() -> int:
    return 14 if PRECISION == "half" else 0


def _pack(x: Tensor) -> Packed:
    from deepmrf.ops import gaussian_kernels_triton as kernels

    images, labels = x.shape[:2]
    flat = x.reshape(images, labels, -1)
    pixels = flat.shape[2]
    group = min(max(power_of_two(labels), 16), MAX_GROUP)
    padded = -(-labels // group) * group
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    bits = largest_bits(flat) if PRECISION == "half" else scale
    half = torch.float16 if PRECISION == "half" else torch.float32
    maps = torch.empty(images, pixels, padded, dtype=half, device=x.device)
    block = 64
    kernels.pack[(-(-pixels // block), padded // group, images)](
        flat, bits, scale, maps, labels, pixels, LABELS=padded, BLOCK=block, GROUP=group, SCALED=PRECISION == "half",
        num_warps=4,
    )  # fmt: skip
    return Packed(maps, scale, group)


class _Pass:
    """What the kernels need of one image and window."""

    def __init__(
        self, q: Tensor, features: Tensor, bandwidths: Tensor, window: Sequence[int], spacing: Sequence[float]
    ) -> None:
        self.size, self.window = q.shape[2:], window
        self.images, self.labels = q.shape[:2]
        self.colour_band, self.place_band = bandwidths.to(torch.float32)
        # s = exp2(-|I'_j - I'_z|^2 - ...), I' the features times this
        self.unit = math.sqrt(0.5 / math.log(2)) / self.colour_band
        self.features = (unit_features(features, torch.float32) * self.unit).contiguous()
        per_square = 0.5 / math.log(2) / self.place_band.square()
        self.steps = torch.stack([per_square * (s * s) for s in ([1.0, *spacing] if len(spacing) == 1 else spacing)])

    def tile(self, most_keys: int, mirrored: bool) -> tuple[int, int, Reach, Reach, int, int, int]:
        """Height, width, both reaches, the tile's height and width, and the keys at a time."""
        height, width, reach_y, reach_x = plane_sides(self.size, self.window, mirrored)
        tall = min(QUERIES // 8, power_of_two(height))
        wide = QUERIES // tall
        keys = min(max(power_of_two(wide + sum(reach_x)), 16), most_keys)
        return height, width, reach_y, reach_x, tall, wide, keys

    def numbers(self, undo: Tensor) -> Tensor:
        """The scalars a kernel reads: what makes exponents of squared steps, and what undoes the scales."""
        return torch.cat([self.steps, undo.reshape(1)])

    def sums(
        self,
        packed: Packed,
        q: Tensor,
        weights: Tensor,
        gate: bool,
        keep: bool = False,
        grad: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Launch the sum of the packed maps; with `grad`, the backward's. (result, kept sum, programs' partial sums)"""
        from deepmrf.ops import gaussian_kernels_triton as kernels

        back = grad is not None
        height, width, reach_y, reach_x, tall, wide, keys = self.tile(KEYS_BACK if back else KEYS, mirrored=back)
        tiles_y, tiles_x = -(-height // tall), -(-width // wide)
        groups = packed.maps.shape[2] // packed.group
        out = torch.empty_like(q)
        kept_out = torch.empty_like(q) if keep else q.new_empty(0)
        programs = tiles_y * tiles_x * groups * self.images
        partials = torch.empty(programs if back else 0, 4, dtype=torch.float32, device=q.device)
        kernels.window_sums[(tiles_y * tiles_x, groups, self.images)](
            packed.maps,
            self.features,
            self.numbers(math.ldexp(1.0, -_shift()) / packed.scale),
            q,
            q if grad is None else grad,
            q if kept is None else kept,
            weights,
            out,
            kept_out,
            partials,
            self.labels,
            height,
            width,
            tiles_x,
            *reach_y,
            *reach_x,
            BACK=back,
            GATE=gate,
            KEEP=keep,
            F=self.features.shape[1],
            LABELS=packed.maps.shape[2],
            GROUP=packed.group,
            TY=tall,
            TX=wide,
            KEYS=keys,
            SHIFT=_shift(),
            PRECISION="tf32" if PRECISION == "half" else PRECISION,
            num_warps=WARPS,
            num_stages=STAGES,
        )
        return out, kept_out, partials

    def feature_pull(self, pulled: Packed, q: Packed) -> Tensor:
        """The sum over all pairs of s(j, z) <pulled_j, q_z> (I'_j - I'_z), to I_j and to I_z, (B, F, *S)."""
        from deepmrf.ops import gaussian_kernels_triton as kernels

        result = torch.empty_like(self.features)
        numbers = self.numbers(1 / (pulled.scale * q.scale))
        for mirrored, (queries, keys) in enumerate([(pulled, q), (q, pulled)]):
            height, width, reach_y, reach_x, tall, wide, at_once = self.tile(KEYS_BACK, mirrored=bool(mirrored))
            tiles_y, tiles_x = -(-height // tall), -(-width // wide)
            kernels.feature_pull[(tiles_y * tiles_x, self.images)](
                queries.maps,
                keys.maps,
                self.features,
                numbers,
                result,
                height,
                width,
                tiles_x,
                *reach_y,
                *reach_x,
                ADD=bool(mirrored),
                F=self.features.shape[1],
                LABELS=q.maps.shape[2],
                GROUP=q.group,
                TY=tall,
                TX=wide,
                KEYS=at_once,
                PRECISION="tf32" if PRECISION == "half" else PRECISION,
                num_warps=WARPS,
                num_stages=STAGES,
            )
        return result


def _forward(
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    with on_device(q):
        x = q.contiguous()
        sweep = _Pass(x, features, bandwidths, window, spacing)
        out, kept, _ = sweep.sums(_pack(x), x, weights.contiguous(), gate, keep)
    return out, kept


def _backward(
    grad: Tensor,
    kept: Tensor,
    q: Tensor,
    features: Tensor,
    weights: Tensor,
    bandwidths: Tensor,
    window: Sequence[int],
    spacing: Sequence[float],
    gate: bool,
    features_too: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with on_device(q):
        x, g = q.contiguous(), grad.contiguous()
        sweep = _Pass(x, features, bandwidths, window, spacing)
        pulled = _pack(g.to(torch.float32) * x if gate else g)
        before_gate = kept.contiguous() if gate else None
        grad_q, _, partials = sweep.sums(pulled, x, weights.contiguous(), gate, grad=g, kept=before_gate)
        total, by_colour, by_place, bias = partials.sum(0, dtype=torch.float64).to(torch.float32)
        w, a, b = weights[0].to(torch.float32), sweep.colour_band, sweep.place_band
        # Exponents were summed, |I_j - I_z|^2 / 2 a^2 in units of log 2.
        grad_bandwidths = torch.stack([by_colour / a, by_place / b]) * (2 * math.log(2) * w)
        if features_too:
            scale = -w / (a * a * sweep.unit)
            grad_features = (sweep.feature_pull(pulled, _pack(x)) * scale).to(q.dtype)
        else:
            grad_features = q.new_empty(0, dtype=torch.float32)
    return (
        grad_q,
        grad_features,
        torch.stack([total, bias]).to(weights.dtype),
        grad_bandwidths.to(bandwidths.dtype),
    )


IMPLEMENTATION = Implementation("triton", _forward, _backward, _suits)
