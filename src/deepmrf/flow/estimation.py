"""Estimating optical flow by OpenCV's DIS or any function of two frames, and keeping it on disk.

A frame is uint8 RGB (H, W, 3), a flow from one to another (H, W, 2): x and y in pixels.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.writing import replacing
from deepmrf.flow.clip import Flow

Array = NDArray[Any]
Method = Literal["dis"] | Callable[[Array, Array], Array]
"""How flow is estimated: OpenCV's DIS, or a function of two uint8 frames (H, W, 3) that returns (H, W, 2)."""
SMALLEST = 32
"""Frames are padded to this many pixels before DIS sees them: it wants a pyramid of some levels."""


def estimate(frames: Array | Tensor, method: Method = "dis") -> Flow:
    """The flow of one clip of uint8 frames (T, H, W, 3), both ways, by OpenCV's DIS or any function of two frames."""
    given = _frames(frames)
    pairs = [_both_ways(a, b, method) for a, b in itertools.pairwise(given)]
    return _clip(pairs, given.shape[1:3])


def between(first: Array, second: Array, method: Method = "dis") -> Array:
    """The flow (H, W, 2) from one uint8 frame (H, W, 3) to another."""
    if first.shape != second.shape or first.ndim != 3 or first.shape[2] != 3 or first.dtype != np.uint8:
        raise ValueError(
            f"The frames have shapes {first.shape} of {first.dtype} and {second.shape} of {second.dtype}: "
            "pass two uint8 RGB frames (H, W, 3) of one size."
        )
    found = _dis(first, second) if method == "dis" else _called(method, first, second)
    if found.shape != (*first.shape[:2], 2):
        raise ValueError(f"The flow of frames {first.shape} has shape {found.shape}: method must return (H, W, 2).")
    return found.astype(np.float32, copy=False)


def _called(method: Any, first: Array, second: Array) -> Array:
    if not callable(method):
        raise ValueError(f"method={method!r} is unknown: pass 'dis' or a function of two frames.")
    return np.asarray(method(first, second))


def _frames(frames: Array | Tensor) -> Array:
    array = frames.cpu().numpy() if isinstance(frames, Tensor) else np.asarray(frames)
    if array.ndim != 4 or array.shape[-1] != 3 or array.dtype != np.uint8 or not array.size:
        raise ValueError(f"frames has shape {array.shape} of {array.dtype}: pass uint8 RGB frames (T, H, W, 3).")
    return array


def _both_ways(first: Array, second: Array, method: Method) -> Array:
    """(2, 2, H, W): forward and backward."""
    return np.stack([between(first, second, method), between(second, first, method)]).transpose(0, 3, 1, 2)


def _clip(pairs: Sequence[Array], size: tuple[int, ...]) -> Flow:
    whole = np.stack(pairs, 2) if pairs else np.zeros((2, 2, 0, *size), np.float32)
    both = torch.from_numpy(whole.astype(np.float32, copy=False))
    return Flow(both[:1], both[1:])


def _dis(first: Array, second: Array) -> Array:
    try:
        cv2: Any = importlib.import_module("cv2")
    except ImportError:
        raise ImportError(
            "Optical flow by 'dis' needs OpenCV: pip install opencv-python-headless, or pass a function as method."
        ) from None
    height, width = first.shape[:2]
    border = [(0, max(SMALLEST - n, 0)) for n in (height, width)]
    given = [np.ascontiguousarray(frame) for frame in (first, second)]
    grey = [np.pad(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), border, mode="edge") for frame in given]
    found: Array = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM).calc(*grey, None)
    return found[:height, :width]


def cached(folder: Path | str, names: Sequence[str], frames: Array | Tensor, method: Method = "dis") -> Flow:
    """estimate, kept on disk: one float16 .npz in `folder` for each two neighbouring frames, by their names.

    names: one per frame, such as its file's. The size, the method and a checksum of the frames are kept, too: frames
    that have changed under their old names are estimated again.
    """
    given = _frames(frames)
    if len(names) != len(given):
        raise ValueError(f"There are {len(names)} names for {len(given)} frames: pass one for each.")
    label = method if isinstance(method, str) else _name_of(method)
    sums = [zlib.crc32(frame.tobytes()) for frame in given]
    pairs = []
    for t in range(len(given) - 1):
        key = "\0".join([*names[t : t + 2], label, *map(str, given.shape[1:3])])
        stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in Path(names[t]).stem)[:80]
        path = Path(folder) / f"{stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
        checksum = np.array(sums[t : t + 2], np.int64)
        pair = _read_pair(path, checksum, given.shape[1:3])
        if pair is None:
            pair = _both_ways(given[t], given[t + 1], method).astype(np.float16)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                np.savez(file, flow=pair, checksum=checksum)
        pairs.append(pair)
    return _clip(pairs, given.shape[1:3])


def _name_of(method: Callable[..., Any]) -> str:
    name = getattr(method, "__qualname__", "<none>")
    if "<" in name:
        raise ValueError(f"Flows of {method!r} cannot be kept by its name: pass a function defined with def.")
    return f"{method.__module__}.{name}"


def _read_pair(path: Path, checksum: Array, size: tuple[int, ...]) -> Array | None:
    """What a file holds, or None if it is missing, broken or of other frames."""
    try:
        with np.load(path) as file:
            flow, of = file["flow"], file["checksum"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return flow if flow.shape == (2, 2, *size) and np.array_equal(of, checksum) else None
