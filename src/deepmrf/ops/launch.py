"""What the GPU kernels share: whether Triton can run them, on which device, and its size.

Kernels work on images of three axes (frames, rows, columns); a signal is an image of one frame and one row.
This module does not import Triton: the modules gpu_kernels.py and launch_kernels.py do, on their first use.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from deepmrf.ops.registry import installed

Function = TypeVar("Function", bound=Callable[..., Any])

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels take; they compute in float32 or, in matrix products, in scaled float16."""


def interpreted() -> bool:
    """Does Triton run its kernels in Python, on tensors of any device? For tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(x: Tensor) -> bool:
    """Can a Triton kernel run on this tensor?"""
    return x.dtype in DTYPES and (x.is_cuda or interpreted()) and installed("triton")


@functools.cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on_device(function: Function) -> Function:
    """Make the device of the function's first tensor (or arguments) the current one, on which Triton launches."""

    @functools.wraps(function)
    def wrapped(first: Any, *others: Any) -> Any:
        x: Tensor = first if isinstance(first, Tensor) else first[0]
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(first, *others)
        with torch.cuda.device(x.device):
            return function(first, *others)

    return cast(Function, wrapped)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least the size."""
    return 1 << max(size - 1, 0).bit_length()


def parts(size: int, part: int) -> int:
    """How many parts of this size cover the whole, the last one perhaps not full."""
    return -(-size // part)


def squared_spacing(spacing: Sequence[float]) -> tuple[float, ...]:
    """The squared distance between neighbours along three axes."""
    return (0.0,) * (3 - len(spacing)) + tuple(s * s for s in spacing)


def largest_bits(x: Tensor) -> Tensor:
    """The bits of the largest magnitude of x as a float32, (1,) int32: kernels read a scale from its exponent."""
    from deepmrf.ops import launch_kernels as kernels

    size = x.numel()
    bits = torch.zeros(1, device=x.device, dtype=torch.int32)
    block, each = (4096, 16384) if size >= 1 << 22 else (1024, 1024)
    kernels.largest[(parts(size, each),)](x, bits, size, EACH=each, BLOCK=block, num_warps=8)
    return bits
