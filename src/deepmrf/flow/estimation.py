"""Estimate optical flow by OpenCV's DIS or any function of two frames, cache it on disk, read Middlebury's .flo files.

A frame is uint8 RGB (H, W, 3); the flow from one frame to another is (H, W, 2): x and y in pixels.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.flow.clip import Flow

Array = NDArray[Any]
Method = Literal["dis", "dis-fast"] | Callable[[Array, Array], Array]
"""How flow is estimated: OpenCV's DIS; the same by its fast preset, nearly as good for links; or a function of two
uint8 frames (H, W, 3) that returns (H, W, 2)."""
MIN_SIDE_FOR_DIS = 32
"""Smaller frames are padded to this many pixels per side: DIS needs a pyramid of a few levels."""
FLO_NUMBER = 202021.25
"""The first number of every .flo file."""
UNKNOWN_FLOW = 1e9
"""Larger values in .flo files mean that the true flow is unknown."""


def estimate(frames: Array | Tensor, method: Method = "dis") -> Flow:
    """Estimate the flow of one clip of uint8 frames (T, H, W, 3) in both directions."""
    clip = _check_frames(frames)
    pairs = [both_directions(a, b, method) for a, b in itertools.pairwise(clip)]
    return flow_of_pairs(pairs, clip.shape[1:3])


def between(first: Array, second: Array, method: Method = "dis") -> Array:
    """Estimate the flow (H, W, 2) from one uint8 frame (H, W, 3) to another."""
    if first.shape != second.shape or first.ndim != 3 or first.shape[2] != 3 or first.dtype != np.uint8:
        raise ValueError(
            f"The frames have shapes {first.shape} of {first.dtype} and {second.shape} of {second.dtype}: "
            "pass two uint8 RGB frames (H, W, 3) of one size."
        )
    if method in ("dis", "dis-fast"):
        flow = _dis(first, second, fast=method == "dis-fast")
    elif callable(method):
        flow = np.asarray(method(first, second))
    else:
        raise ValueError(f"method={method!r} is unknown: pass 'dis', 'dis-fast' or a function of two frames.")
    if flow.shape != (*first.shape[:2], 2):
        raise ValueError(f"The flow of frames {first.shape} has shape {flow.shape}: method must return (H, W, 2).")
    return flow.astype(np.float32, copy=False)


def _check_frames(frames: Array | Tensor) -> Array:
    array = frames.cpu().numpy() if isinstance(frames, Tensor) else np.asarray(frames)
    if array.ndim != 4 or array.shape[-1] != 3 or array.dtype != np.uint8 or not array.size:
        raise ValueError(f"frames has shape {array.shape} of {array.dtype}: pass uint8 RGB frames (T, H, W, 3).")
    return array


def both_directions(first: Array, second: Array, method: Method) -> Array:
    """Estimate the flows between two frames, forward and backward: (2, 2, H, W)."""
    return np.stack([between(first, second, method), between(second, first, method)]).transpose(0, 3, 1, 2)


def flow_of_pairs(pairs: Sequence[Array], size: tuple[int, ...]) -> Flow:
    """Return the flow of a clip of this size (H, W) from those of its pairs of frames, each (2, 2, H, W)."""
    array = np.stack(pairs, 2) if pairs else np.zeros((2, 2, 0, *size), np.float32)
    directions = torch.from_numpy(array.astype(np.float32, copy=False))  # (2, 2, T - 1, H, W)
    return Flow(directions[:1], directions[1:])


def _dis(first: Array, second: Array, fast: bool = False) -> Array:
    from deepmrf.data.extras import optional  # here, since layers import this module and need no data sets

    cv2 = optional("cv2", "Optical flow by 'dis' needs", "video")
    height, width = first.shape[:2]
    padding = [(0, max(MIN_SIDE_FOR_DIS - n, 0)) for n in (height, width)]
    frames = [np.ascontiguousarray(frame) for frame in (first, second)]
    grey = [np.pad(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), padding, mode="edge") for frame in frames]
    preset = cv2.DISOPTICAL_FLOW_PRESET_FAST if fast else cv2.DISOPTICAL_FLOW_PRESET_MEDIUM
    flow: Array = cv2.DISOpticalFlow_create(preset).calc(*grey, None)
    return flow[:height, :width]


def cached(folder: Path | str, names: Sequence[str], frames: Array | Tensor, method: Method = "dis") -> Flow:
    """Like `estimate`, but cached on disk: one float16 .npz file in `folder` per pair of neighbouring frames.

    names: one per frame, such as its file's. Files are found by the names, the frames' size and the method. They hold
    checksums of the frames: frames that have changed under the same names are estimated again.
    """
    clip = _check_frames(frames)
    if len(names) != len(clip):
        raise ValueError(f"There are {len(names)} names for {len(clip)} frames: pass one for each.")
    from deepmrf.data.writing import replacing  # here: layers import flow, and must not bring Pillow

    method_name = (
        method if isinstance(method, str) else f"{method.__module__}.{getattr(method, '__qualname__', '<none>')}"
    )
    if "<" in method_name:
        raise ValueError(f"Flows of {method!r} cannot be cached by its name: pass a function defined with def.")
    checksums = [zlib.crc32(frame.tobytes()) for frame in clip]
    pairs = []
    for t in range(len(clip) - 1):
        key = "\0".join([*names[t : t + 2], method_name, *map(str, clip.shape[1:3])])
        stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(names[t]).stem)[:80]
        path = Path(folder) / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
        checksum = np.array(checksums[t : t + 2], np.int64)
        pair = _read_pair(path, checksum, clip.shape[1:3])
        if pair is None:
            pair = both_directions(clip[t], clip[t + 1], method).astype(np.float16)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                np.savez(file, flow=pair, checksum=checksum)
        pairs.append(pair)
    return flow_of_pairs(pairs, clip.shape[1:3])


def _read_pair(path: Path, checksum: Array, size: tuple[int, ...]) -> Array | None:
    """Return the flow in a cache file; None if the file is missing, damaged or of other frames."""
    try:
        with np.load(path) as file:
            flow, saved_checksum = file["flow"], file["checksum"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return flow if flow.shape == (2, 2, *size) and np.array_equal(saved_checksum, checksum) else None


def read_flo(path: Path | str) -> Array:
    """Read the flow (H, W, 2), in pixels, of a .flo file; values above UNKNOWN_FLOW are unknown.

    Little-endian: the float32 FLO_NUMBER; width and height as int32; float32 (x, y) of each pixel, in rows.
    """
    content = Path(path).read_bytes()
    number, width, height = struct.unpack("<fii", content[:12]) if len(content) >= 12 else (0, 0, 0)
    if number != FLO_NUMBER:
        raise ValueError(f"{path} is no .flo file: it does not begin with the number {FLO_NUMBER}, so pass another.")
    if width < 1 or height < 1 or len(content) != 12 + 8 * width * height:
        raise ValueError(
            f"{path} says it holds {width} x {height} pixels, but has {len(content)} bytes instead of "
            f"12 + 8 per pixel: copy it again."
        )
    return np.frombuffer(content, "<f4", offset=12).reshape(height, width, 2).astype(np.float32)
