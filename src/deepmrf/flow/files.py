"""Reading Middlebury's .flo files.

Format, little-endian: the float32 number 202021.25; width and height as int32; float32 (x, y) of each pixel, in rows.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC_NUMBER = 202021.25
"""The first number of every .flo file."""
UNKNOWN_FLOW = 1e9
"""Larger values mean that the true flow is unknown."""
HEADER_BYTES = 12


def read_flo(path: Path | str) -> NDArray[Any]:
    """Read the flow (H, W, 2), in pixels, of a .flo file; values above UNKNOWN_FLOW are unknown."""
    content = Path(path).read_bytes()
    if len(content) < HEADER_BYTES or struct.unpack("<f", content[:4])[0] != MAGIC_NUMBER:
        raise ValueError(f"{path} is no .flo file: it does not begin with the number {MAGIC_NUMBER}, so pass another.")
    width, height = struct.unpack("<ii", content[4:HEADER_BYTES])
    if width < 1 or height < 1 or len(content) != HEADER_BYTES + 8 * width * height:
        raise ValueError(
            f"{path} says it holds {width} x {height} pixels, but has {len(content)} bytes instead of "
            f"12 + 8 per pixel: copy it again."
        )
    return np.frombuffer(content, "<f4", offset=HEADER_BYTES).reshape(height, width, 2).astype(np.float32)
