"""The Gaussian kernel's window sum on GPUs, in Triton: attention inside a window, with a fixed kernel.

A program owns a small tile of pixels j ("queries") and a group of labels. It walks over the rows of the tile's
surroundings, frame by frame, some pixels z ("keys") at a time, computes s(j, z) in float32 registers, and multiplies it
with q on the tensor cores. What depends on the columns alone (their distance, window and image border) is worked out
once per tile, what depends on the rows once per row, so a pair costs one subtraction and one product per feature, an
addition and an exp2.

The numbers multiplied are float16: q divided by a power of two at least its largest magnitude, s times 2^14, products
summed in float32. That keeps as many digits as tf32 (relative error of t under 1e-3, measured nearer 1e-4, because
float16 rounds and tf32 cuts off) at twice the speed; smaller s than 2^-38 count as zero.

The backward is the same sum over the gradient with a mirrored window; s |I_j - I_z|^2 and s |j - z|^2 are summed beside
it for the bandwidths. All sums have a fixed order. The kernels take 1-D to 3-D images and at most MAX_FEATURES
features; plain PyTorch does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmrf.ops.launch import (
    ImageWindow,
    image_window,
    largest_bits,
    on_device,
    parts,
    power_of_two,
    runs_on,
    squared_spacing,
)
from deepmrf.ops.registry import Implementation
from deepmrf.ops.window import ALL

MAX_FEATURES = 8
PIXELS_PER_TILE = 64
MAX_KEYS = 64
"""Surrounding pixels that a program works on at once."""
MAX_KEYS_BACKWARD = 32
"""The same in the backward, which has three sums instead of one."""
WARPS = 4
KEYS_IN_FLIGHT = 3
"""Blocks of keys on their way through shared memory, with the one in work."""
MAX_REGISTERS = 128
"""Registers per thread, for up to 32 labels and 4 features; the compiler chooses for more."""
MAX_REGISTERS_BACKWARD = 168
"""The same in the backward."""
MAX_LABELS = 64
"""Labels of one program: s is computed again for every such group."""
PIXELS_PER_PACKING = 64
"""Pixels that a program packs."""


class Packed(NamedTuple):
    """Maps as the tensor cores take them: float16, labels last and padded with zeros to whole groups."""

    maps: Tensor
    """(B, pixels, labels)."""
    scale: Tensor
    """The power of two that the maps were multiplied with."""
    group: int
    """Labels of one program."""


def _suits(q: Tensor, features: Tensor, weights: Tensor, window: Sequence[int]) -> bool:
    return runs_on(q) and q.dim() in (3, 4, 5) and features.shape[1] <= MAX_FEATURES and q.numel() > 0


class _Problem:
    """The operator's arguments as the kernels take them."""

    def __init__(
        self, q: Tensor, features: Tensor, bandwidths: Tensor, window: Sequence[int], spacing: Sequence[float]
    ) -> None:
        self.q, self.window, self.size = q, window, q.shape[2:]
        self.images, self.labels = q.shape[:2]
        self.pixels = math.prod(self.size)
        self.features, self.bandwidths = features.contiguous(), bandwidths.contiguous()
        self.maps = features.shape[1]
        self.colours_padded = 4 if self.maps <= 4 else 8
        # The features, features last, in the unit in which s = exp2(-|I_j - I_z|^2 - ...): see `pack`.
        self.colours = torch.empty(
            self.images, self.pixels, self.colours_padded if self.maps else 0, dtype=torch.float32, device=q.device
        )
        self.squares = squared_spacing(spacing)

    def pack(self, x: Tensor, features_too: bool) -> Packed:
        """x (B, L, *S) as the tensor cores take it; `features_too` writes the colours beside it."""
        from deepmrf.ops.gaussian import gpu_kernels as kernels

        group = min(max(power_of_two(self.labels), 16), MAX_LABELS)
        padded = parts(self.labels, group) * group
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        maps = torch.empty(self.images, self.pixels, padded, dtype=torch.float16, device=x.device)
        kernels.pack[(parts(self.pixels, PIXELS_PER_PACKING), padded // group, self.images)](
            x, self.features, self.bandwidths, largest_bits(x), scale, maps, self.colours, self.labels, self.pixels,
            1 / 255 if self.features.dtype == torch.uint8 else 1.0, F=self.maps if features_too else 0, LABELS=padded,
            COLOURS=self.colours_padded, BLOCK=PIXELS_PER_PACKING, GROUP=group, num_warps=4,
        )  # fmt: skip
        return Packed(maps, scale, group)

    def tiles(self, max_keys: int, mirrored: bool) -> tuple[ImageWindow, int, int, dict[str, Any]]:
        """(the window, tiles of a frame, tiles of a row, the constants of both kernels)."""
        around = image_window(self.size, self.window, mirrored)
        _, height, width = around.sizes
        tall = min(PIXELS_PER_TILE // 8, power_of_two(height))
        wide = PIXELS_PER_TILE // tall
        keys = min(max(power_of_two(wide + sum(around.reaches[2])), 16), max_keys)
        constants = {
            "F": self.maps, "COLOURS": self.colours_padded, "TY": tall, "TX": wide, "KEYS": keys, "num_warps": WARPS,
            "num_stages": KEYS_IN_FLIGHT,
        }  # fmt: skip
        tiles_x = parts(width, wide)
        return around, parts(height, tall) * tiles_x, tiles_x, constants

    def sums(
        self,
        packed: Packed,
        weights: Tensor,
        gate: bool,
        keep: bool = False,
        grad: Tensor | None = None,
        ungated: Tensor | None = None,
        frame: int = ALL,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the packed maps; with `grad`, for the backward. Returns (result, sum before the gate, programs' sums)."""
        from deepmrf.ops.gaussian import gpu_kernels as kernels

        q, back = self.q, grad is not None
        around, tiles, tiles_x, constants = self.tiles(MAX_KEYS_BACKWARD if back else MAX_KEYS, mirrored=back)
        out = torch.empty_like(q if frame == ALL else q.select(2, frame), memory_format=torch.contiguous_format)
        ungated_out = torch.empty_like(out) if keep else q.new_empty(0)
        first, shown = (0, around.sizes[0]) if frame == ALL else (frame, 1)
        grid = (tiles, packed.maps.shape[2] // packed.group, self.images * shown)
        partials = torch.empty((math.prod(grid) if back else 0, 4), dtype=torch.float32, device=q.device)
        few = packed.group <= 32 and self.colours_padded == 4
        kernels.window_sums[grid](
            packed.maps, self.colours, self.bandwidths, packed.scale, q, q if grad is None else grad,
            ungated_out if ungated is None else ungated, weights, out, partials, self.labels, *around.sizes, first,
            shown, tiles_x, *around.flat_reaches, *self.squares, BACK=back, GATE=gate, KEEP=keep,
            LABELS=packed.maps.shape[2], GROUP=packed.group,
            maxnreg=(MAX_REGISTERS_BACKWARD if back else MAX_REGISTERS) if few else None, **constants,
        )  # fmt: skip
        return out, ungated_out, partials

    def feature_pull(self, pulled: Packed, q: Packed) -> Tensor:
        """The sum over all pairs of s(j, z) <pulled_j, q_z> (I'_j - I'_z), to I_j and to I_z, (B, F, *S)."""
        from deepmrf.ops.gaussian import gpu_kernels as kernels

        result = torch.empty(self.features.shape, dtype=torch.float32, device=self.q.device)
        for mirrored, (queries, keys) in ((False, (pulled, q)), (True, (q, pulled))):
            around, tiles, tiles_x, constants = self.tiles(MAX_KEYS_BACKWARD, mirrored)
            kernels.feature_pull[(tiles, self.images * around.sizes[0])](
                queries.maps, keys.maps, queries.scale, keys.scale, self.colours, self.bandwidths, result,
                *around.sizes, tiles_x, *around.flat_reaches, *self.squares, ADD=mirrored, LABELS=q.maps.shape[2],
                GROUP=q.group, **constants,
            )  # fmt: skip
        return result


@on_device
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
    x = q.contiguous()
    problem = _Problem(x, features, bandwidths, window, spacing)
    out, ungated, _ = problem.sums(problem.pack(x, features_too=True), weights.contiguous(), gate, keep, frame=frame)
    return out, ungated


@on_device
def _backward(
    grad: Tensor,
    ungated: Tensor,
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
    # With `frame`, grad is zero in the other frames; all pixels are summed all the same.
    x, g = q.contiguous(), grad.contiguous()
    problem = _Problem(x, features, bandwidths, window, spacing)
    pulled = problem.pack(g.to(torch.float32) * x if gate else g, features_too=True)
    before_gate = ungated.contiguous() if gate else None
    grad_q, _, partials = problem.sums(pulled, weights.contiguous(), gate, grad=g, ungated=before_gate)
    total, by_colour, by_position, bias = partials.sum(0, dtype=torch.float64).to(torch.float32)
    w, (a, b) = weights[0].to(torch.float32), bandwidths.to(torch.float32)
    # Exponents were summed, |I_j - I_z|^2 / 2 a^2 in units of log 2.
    grad_bandwidths = torch.stack([by_colour / a, by_position / b]) * (2 * math.log(2) * w)
    if features_too:
        scale = w / a * -math.sqrt(2 * math.log(2))  # -w / a^2, and I' is I times sqrt(0.5 / log 2) / a
        grad_features = (problem.feature_pull(pulled, problem.pack(x, features_too=False)) * scale).to(q.dtype)
    else:
        grad_features = q.new_empty(0, dtype=torch.float32)
    return (
        grad_q,
        grad_features,
        torch.stack([total, bias]).to(weights.dtype),
        grad_bandwidths.to(bandwidths.dtype),
    )


IMPLEMENTATION = Implementation("triton", _forward, _backward, _suits)
