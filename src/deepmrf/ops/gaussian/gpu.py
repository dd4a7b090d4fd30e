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

from deepmrf.ops.gaussian import Arguments
from deepmrf.ops.launch import largest_bits, on_device, parts, power_of_two, runs_on, squared_spacing
from deepmrf.ops.registry import Implementation, Pair
from deepmrf.ops.window import ALL, ImageWindow, empty_penalty, image_window

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


def _suits(a: Arguments) -> bool:
    return runs_on(a.q) and a.q.dim() in (3, 4, 5) and a.features.shape[1] <= MAX_FEATURES and a.q.numel() > 0


class _Problem:
    """The operator's arguments as the kernels take them."""

    def __init__(self, a: Arguments) -> None:
        self.arguments, self.q = a, a.q.contiguous()
        self.images, self.labels = a.q.shape[:2]
        self.pixels = math.prod(a.q.shape[2:])
        self.features, self.bandwidths = a.features.contiguous(), a.bandwidths.contiguous()
        self.maps = a.features.shape[1]
        self.colours_padded = 4 if self.maps <= 4 else 8
        # The features, features last, in the unit in which s = exp2(-|I_j - I_z|^2 - ...): see `pack`.
        self.colours = torch.empty(
            self.images, self.pixels, self.colours_padded if self.maps else 0, dtype=torch.float32,
            device=a.q.device,
        )  # fmt: skip
        self.squares = squared_spacing(a.spacing)

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
        around = image_window(self.q.shape[2:], self.arguments.window, mirrored)
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
        self, packed: Packed, grad: Tensor | None = None, ungated: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the packed maps; with `grad`, for the backward. Returns (result, sum before the gate, programs' sums)."""
        from deepmrf.ops.gaussian import gpu_kernels as kernels

        a, back = self.arguments, grad is not None
        keep, frame = (False, ALL) if back else (a.keep, a.frame)
        around, tiles, tiles_x, constants = self.tiles(MAX_KEYS_BACKWARD if back else MAX_KEYS, mirrored=back)
        out, ungated_out = empty_penalty(self.q, keep, frame)
        first, shown = (0, around.sizes[0]) if frame == ALL else (frame, 1)
        grid = (tiles, packed.maps.shape[2] // packed.group, self.images * shown)
        partials = torch.empty((math.prod(grid) if back else 0, 4), dtype=torch.float32, device=out.device)
        few = packed.group <= 32 and self.colours_padded == 4
        kernels.window_sums[grid](
            packed.maps, self.colours, self.bandwidths, packed.scale, self.q, self.q if grad is None else grad,
            ungated_out if ungated is None else ungated, a.weights.contiguous(), out, partials, self.labels,
            *around.sizes, first, shown, tiles_x, *around.flat_reaches, *self.squares, BACK=back, GATE=a.gate,
            KEEP=keep, LABELS=packed.maps.shape[2], GROUP=packed.group,
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
def _forward(a: Arguments) -> Pair:
    problem = _Problem(a)
    out, ungated, _ = problem.sums(problem.pack(problem.q, features_too=True))
    return out, ungated


@on_device
def _backward(grad: Tensor, ungated: Tensor, a: Arguments, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    # With `frame`, grad is zero in the other frames; all pixels are summed all the same.
    problem, g = _Problem(a), grad.contiguous()
    pulled = problem.pack(g.to(torch.float32) * problem.q if a.gate else g, features_too=True)
    grad_q, _, partials = problem.sums(pulled, g, ungated.contiguous() if a.gate else None)
    total, by_colour, by_position, bias = partials.sum(0, dtype=torch.float64).to(torch.float32)
    w, (width, distance) = a.weights[0].to(torch.float32), a.bandwidths.to(torch.float32)
    # Exponents were summed, |I_j - I_z|^2 / 2 a^2 in units of log 2.
    grad_bandwidths = torch.stack([by_colour / width, by_position / distance]) * (2 * math.log(2) * w)
    grad_features = None
    if needed[1]:
        scale = w / width * -math.sqrt(2 * math.log(2))  # -w / a^2, and I' is I times sqrt(0.5 / log 2) / a
        grad_features = problem.feature_pull(pulled, problem.pack(problem.q, features_too=False)) * scale
    return grad_q, grad_features, torch.stack([total, bias]), grad_bandwidths


IMPLEMENTATION = Implementation("triton", _forward, _backward, _suits)
