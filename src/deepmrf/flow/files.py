"""Middlebury's .flo files, and files written as a whole or not at all.

A flow in a file is (H, W, 2): x and y in pixels.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.writing import write_bytes

MAGIC = 202021.25
"""The number every .flo file begins with."""
UNKNOWN = 1e9
"""Larger numbers mean that the true flow is not known."""


def read_flo(path: Path | str) -> NDArray[Any]:
    """The flow (H, W, 2) of a Middlebury .flo file; numbers above UNKNOWN are not known."""
    content = Path(path).read_bytes()
    if len(content) < 12 or struct.unpack("<f", content[:4])[0] != MAGIC:
        raise ValueError(f"{path} is no .flo file: it does not begin with the number {MAGIC}, so pass another.")
    width, height = struct.unpack("<ii", content[4:12])
    if width < 1 or height < 1 or len(content) != 12 + 8 * width * height:
        raise ValueError(
            f"{path} says it holds {width} x {height} pixels, but has {len(content)} bytes instead of "
            f"12 + 8 per pixel: copy it again."
        )
    return np.frombuffer(content, "<f4", offset=12).reshape(height, width, 2).astype(np.float32)


def write_flo(path: Path | str, flow: NDArray[Any] | Tensor) -> None:
    """Write a flow (H, W, 2) as a Middlebury .flo file."""
    array = np.asarray(flow.detach().cpu() if isinstance(flow, Tensor) else flow)
    if array.ndim != 3 or array.shape[2] != 2 or not array.size:
        raise ValueError(f"The flow has shape {array.shape}: a .flo file holds (H, W, 2).")
    head = struct.pack("<fii", MAGIC, array.shape[1], array.shape[0])
    write_bytes(Path(path), head + array.astype("<f4").tobytes())
