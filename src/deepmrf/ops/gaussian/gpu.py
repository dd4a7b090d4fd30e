"""The Gaussian kernel's window sum on GPUs, in Triton: attention inside a window, with a fixed kernel.

A program owns a small tile of pixels j ("queries") and a group of labels. It walks over the rows of the tile's
surroundings, frame by frame, KEYS pixels z at a time, computes s(j, z) in float32 registers, and multiplies it with q
on the tensor cores. What depends on the columns alone (their distance, window and image border) is worked out once per
tile, what depends on the rows once per row, so a pair costs one subtraction and one product per feature, an addition
and an exp2.

The numbers multiplied are float16 by default: q divided by a power of two at least its largest magnitude, s times 2^14,
products summed in float32. That keeps as many digits as tf32 (relative error of t under 1e-3, measured nearer 1e-4,
because float16 rounds and tf32 cuts off) at twice the speed; smaller s than 2^-38 count as zero. PRECISION = "ieee"
multiplies in float32 instead, slowly.

The backward is the same sum over the gradient with a mirrored window; s |I_j - I_z|^2 and s |j - z|^2 are summed beside
it for the bandwidths. All sums have a fixed order. Handles 1-D to 3-D, at most MAX_FEATURES features; else torch runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmrf.ops.contexts.gpu import largest_bits
from deepmrf.ops.distance.gpu import Sides, on_device, power_of_two, runs_on, sides
from deepmrf.ops.registry import Implementation
from deepmrf.ops.window import ALL

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
MAX_REGISTERS = 128
"""Registers per thread, for up to 32 labels and 4 features; the compiler's choice for more."""
MAX_REGISTERS_BACK = 168
"""The same in the backward."""
MAX_GROUP = 64
"""Labels of one program: s is computed again for every such group."""


class Packed(NamedTuple):
    """Maps with the labels last, (B, pixels, labels), and the power of two they were multiplied with."""

    maps: Tensor
    scale: Tensor
    group: int


def _suits(q: Tensor, features: Tensor, weights: Tensor, window: Sequence[int]) -> bool:
    return runs_on(q) and q.dim() in (3, 4, 5) and features.shape[1] <= MAX_FEATURES and q.numel() > 0


class _Pass:
    """What the kernels need of one image and window."""

    def __init__(
        self, q: Tensor, features: Tensor, bandwidths: Tensor, window: Sequence[int], spacing: Sequence[float]
    ) -> None:
        self.q, self.window, self.size = q, window, q.shape[2:]
        self.images, self.labels = q.shape[:2]
        self.pixels = math.prod(self.size)
        self.features, self.bandwidths = features.contiguous(), bandwidths.contiguous()
        self.count = features.shape[1]
        self.wide = 4 if self.count <= 4 else 8
        # The features, labels last like the maps, in the unit in which s = exp2(-|I_j - I_z|^2 - ...): see `pack`.
        self.colours = torch.empty(
            self.images, self.pixels, self.wide if self.count else 0, dtype=torch.float32, device=q.device
        )
        self.squares = [0.0] * (3 - len(spacing)) + [s * s for s in spacing]

    def pack(self, x: Tensor, features_too: bool) -> Packed:
        """x (B, L, *S) as the matrix units want it; the first call does the features, too."""
        from deepmrf.ops.gaussian import gpu_kernels as kernels

        half = PRECISION == "half"
        group = min(max(power_of_two(self.labels), 16), MAX_GROUP)
        padded = -(-self.labels // group) * group
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        dtype = torch.float16 if half else torch.float32
        maps = torch.empty(self.images, self.pixels, padded, dtype=dtype, device=x.device)
        block = 64
        kernels.pack[(-(-self.pixels // block), padded // group, self.images)](
            x, self.features, self.bandwidths, largest_bits(x) if half else scale, scale, maps, self.colours,
            self.labels, self.pixels, 1 / 255 if self.features.dtype == torch.uint8 else 1.0,
            F=self.count if features_too else 0, LABELS=padded, COLOURS=self.wide, BLOCK=block, GROUP=group,
            SCALED=half, num_warps=4,
        )  # fmt: skip
        return Packed(maps, scale, group)

    def tile(self, most_keys: int, mirrored: bool) -> tuple[Sides, int, dict[str, Any]]:
        """Sizes and reaches along the three axes, tiles of a frame, and the constants of both kernels."""
        around = sides(self.size, self.window, mirrored)
        height, reach_x = around.sizes[1], around.reaches[2]
        tall = min(QUERIES // 8, power_of_two(height))
        wide = QUERIES // tall
        keys = min(max(power_of_two(wide + sum(reach_x)), 16), most_keys)
        constants = {
            "F": self.count, "COLOURS": self.wide, "TY": tall, "TX": wide, "KEYS": keys,
            "PRECISION": "tf32" if PRECISION == "half" else PRECISION, "num_warps": WARPS, "num_stages": STAGES,
        }  # fmt: skip
        return around, -(-height // tall), constants

    def sums(
        self,
        packed: Packed,
        weights: Tensor,
        gate: bool,
        keep: bool = False,
        grad: Tensor | None = None,
        kept: Tensor | None = None,
        frame: int = ALL,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Launch the sum of the packed maps; with `grad`, the backward's. (result, kept sum, programs' partial sums)"""
        from deepmrf.ops.gaussian import gpu_kernels as kernels

        q, back = self.q, grad is not None
        around, tiles_y, constants = self.tile(KEYS_BACK if back else KEYS, mirrored=back)
        tiles_x = -(-around.sizes[2] // constants["TX"])
        groups = packed.maps.shape[2] // packed.group
        out = torch.empty_like(q if frame == ALL else q.select(2, frame), memory_format=torch.contiguous_format)
        kept_out = torch.empty_like(out) if keep else out
        first, shown = (0, around.sizes[0]) if frame == ALL else (frame, 1)
        grid = (tiles_y * tiles_x, groups, self.images * shown)
        partials = torch.empty((math.prod(grid) if back else 0, 4), dtype=torch.float32, device=q.device)
        few = packed.group <= 32 and self.wide == 4 and PRECISION == "half"
        registers = (MAX_REGISTERS_BACK if back else MAX_REGISTERS) if few else None
        kernels.window_sums[grid](
            packed.maps, self.colours, self.bandwidths, packed.scale, q, q if grad is None else grad,
            q if kept is None else kept, weights, out, kept_out, partials, self.labels, *around.sizes, first, shown,
            tiles_x, *around.flat, *self.squares, BACK=back, GATE=gate, KEEP=keep, LABELS=packed.maps.shape[2],
            GROUP=packed.group, SHIFT=14 if PRECISION == "half" else 0, maxnreg=registers, **constants,
        )  # fmt: skip
        return out, kept_out if keep else q.new_empty(0), partials

    def feature_pull(self, pulled: Packed, q: Packed) -> Tensor:
        """The sum over all pairs of s(j, z) <pulled_j, q_z> (I'_j - I'_z), to I_j and to I_z, (B, F, *S)."""
        from deepmrf.ops.gaussian import gpu_kernels as kernels

        result = torch.empty(self.features.shape, dtype=torch.float32, device=self.q.device)
        for mirrored, (queries, keys) in enumerate([(pulled, q), (q, pulled)]):
            around, tiles_y, constants = self.tile(KEYS_BACK, mirrored=bool(mirrored))
            tiles_x = -(-around.sizes[2] // constants["TX"])
            kernels.feature_pull[(tiles_y * tiles_x, self.images * around.sizes[0])](
                queries.maps, keys.maps, queries.scale, keys.scale, self.colours, self.bandwidths, result,
                *around.sizes, tiles_x, *around.flat, *self.squares, ADD=bool(mirrored), LABELS=q.maps.shape[2],
                GROUP=q.group, **constants,
            )  # fmt: skip
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
    frame: int = ALL,
) -> tuple[Tensor, Tensor]:
    with on_device(q):
        x = q.contiguous()
        sweep = _Pass(x, features, bandwidths, window, spacing)
        out, kept, _ = sweep.sums(sweep.pack(x, features_too=True), weights.contiguous(), gate, keep, frame=frame)
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
    frame: int = ALL,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # With `frame`, grad is zero in the others; the windows of all pixels that see it are summed all the same.
    with on_device(q):
        x, g = q.contiguous(), grad.contiguous()
        sweep = _Pass(x, features, bandwidths, window, spacing)
        pulled = sweep.pack(g.to(torch.float32) * x if gate else g, features_too=True)
        before_gate = kept.contiguous() if gate else None
        grad_q, _, partials = sweep.sums(pulled, weights.contiguous(), gate, grad=g, kept=before_gate)
        total, by_colour, by_place, bias = partials.sum(0, dtype=torch.float64).to(torch.float32)
        w, (a, b) = weights[0].to(torch.float32), bandwidths.to(torch.float32)
        # Exponents were summed, |I_j - I_z|^2 / 2 a^2 in units of log 2.
        grad_bandwidths = torch.stack([by_colour / a, by_place / b]) * (2 * math.log(2) * w)
        if features_too:
            scale = w / a * -math.sqrt(2 * math.log(2))  # -w / a^2, and I' is I times sqrt(0.5 / log 2) / a
            grad_features = (sweep.feature_pull(pulled, sweep.pack(x, features_too=False)) * scale).to(q.dtype)
        else:
            grad_features = q.new_empty(0, dtype=torch.float32)
    return (
        grad_q,
        grad_features,
        torch.stack([total, bias]).to(weights.dtype),
        grad_bandwidths.to(bandwidths.dtype),
    )


IMPLEMENTATION = Implementation("triton", _forward, _backward, _suits)
