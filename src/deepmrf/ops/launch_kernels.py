"""The Triton kernel that finds the largest magnitude of a tensor; import this module only when kernels run."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def raise_bits(bits, magnitudes):
    """Raise `bits` to the largest magnitude. Bits of floats >= 0 have the order of the numbers: any order will do."""
    tl.atomic_max(bits, tl.max(magnitudes, 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def largest(x, bits, size, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Raise `bits` to the largest magnitude of x, of which a program reads EACH numbers."""
    start = tl.program_id(0).to(tl.int64) * EACH
    magnitudes = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(0, EACH, BLOCK):
        at = start + i + tl.arange(0, BLOCK)
        magnitudes = tl.maximum(magnitudes, tl.abs(tl.load(x + at, mask=at < size, other=0).to(tl.float32)))
    raise_bits(bits, magnitudes)
