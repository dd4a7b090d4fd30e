"""What the numbers in the files of a prediction mean: arrays, pictures and NIfTI volumes to log-probabilities.

Shapes: L labels, *S the image's axes, (H, W) or (D, H, W).
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.files import VOID, DataError
from deepmrf.data.volumes import is_volume, read_volume, whole_numbers

CONFIDENCE = 0.9
"""The probability of the label that a map without a confidence names; the others share the rest."""
FLOOR = 1e-6
"""No label is less probable than this: a saved 0 means "very little", and its logarithm must stay finite."""
SUM_TOLERANCE = 0.02
"""How far sums may be from one and still mean probabilities: half precision and many labels."""
OUTSIDE = 0.05
"""How far probabilities may be outside 0 to 1: bicubic interpolation overshoots."""
NAMED = ("probabilities", "log_probabilities", "logits", "arr_0")
"""The array of an .npz file that is taken when it holds several."""

Maps = NDArray[Any]


@dataclass(frozen=True)
class Coding:
    """The ids that stand for the labels 0 .. L-1 in masks and label maps, where they are others."""

    ids: tuple[int, ...]
    """One per label, of 0 to 255."""
    void: tuple[int, ...] = (VOID,)
    """Those that stand for none."""

    def __post_init__(self) -> None:
        for given in (*self.ids, *self.void):
            if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= 255:
                raise ValueError(f"The id {given!r} of a label is no whole number of 0 to 255; correct it.")
        if len({*self.ids, *self.void}) != len(self.ids) + len(self.void):
            raise ValueError(f"The ids {self.ids} and {self.void} of labels and void repeat; give each its own.")

    @classmethod
    def of(cls, lookup: NDArray[np.int16], labels: int) -> Coding | None:
        """That of a table (256,) from ids to labels; None where the ids are the labels."""
        found = {int(lookup[i]): int(i) for i in np.flatnonzero((lookup >= 0) & (lookup < labels))}
        made = cls(tuple(found[label] for label in range(labels)), tuple(np.flatnonzero(lookup == VOID).tolist()))
        return None if made == cls(tuple(range(labels))) else made

    def labels_of(self, ids: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
        """A map of ids as labels, void as 255."""
        table = np.full(257, -1, np.int64)
        table[list(self.void)], table[list(self.ids)] = VOID, np.arange(len(self.ids))
        mapped: NDArray[np.int64] = table[np.where((ids < 0) | (ids > 255), 256, ids)]
        if mapped.size and mapped.min() < 0:
            known = ", ".join(map(str, self.ids[:10])) + (" ..." if len(self.ids) > 10 else "")
            raise DataError(
                f"{path} holds the id {int(ids[mapped < 0][0])}, but the masks' ids in labels.json are {known}; "
                "save label maps with the ids of the masks.",
                path,
                "id",
            )
        return mapped

    def table(self) -> NDArray[np.uint8]:
        """The ids (L,), to index with labels."""
        return np.array(self.ids, dtype=np.uint8)


def load(path: Path, lazy: bool = False) -> Maps:
    """The array of a .npy, .npz or NIfTI file; one of objects is refused, since unpickling runs code."""
    if is_volume(path):
        return _load_volume(path)
    try:
        loaded = np.load(path, mmap_mode="r" if lazy else None, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded as archive:
            return np.asarray(archive[_chosen(list(archive.files), path)])
    except (DataError, MemoryError):
        raise
    except Exception as why:  # a broken file makes numpy and zlib raise nearly anything
        reason = (str(why).splitlines() or [type(why).__name__])[0].rstrip(".")
        raise DataError(
            f"{path} cannot be read as an array ({reason}); save it again with numpy.save.", path, "unreadable"
        ) from why


def _chosen(keys: list[str], path: Path) -> str:
    """The name of the array to take from an .npz file."""
    chosen = keys if len(keys) == 1 else [key for key in NAMED if key in keys]
    if not chosen:
        held = ", ".join(keys) or "nothing"
        raise DataError(f"{path} holds {held}; name the array {NAMED[0]!r}.", path, "unreadable")
    return chosen[0]


def _load_volume(path: Path) -> Maps:
    """Label ids (D, H, W) as ints, or one map per label as (L, D, H, W)."""
    values = read_volume(path, several=True).values
    if values.ndim == 3:
        ids = whole_numbers(values)
        return values if ids is None else ids
    if values.dtype.kind in "bi" or (values.dtype.kind == "u" and values.max() <= 1):
        values = values.astype(np.float32)  # a label or not: shares of one, and not of 255
    return np.moveaxis(values, -1, 0)


def shape_of(path: Path) -> tuple[int, ...]:
    """The shape of the array in a .npy or .npz file, without reading the array."""
    if path.suffix.lower() == ".npy":
        return tuple(load(path, lazy=True).shape)
    try:
        with zipfile.ZipFile(path) as archive:
            keys = [name.removesuffix(".npy") for name in archive.namelist()]
            with archive.open(f"{_chosen(keys, path)}.npy") as file:
                version = np.lib.format.read_magic(file)
                reader = np.lib.format.read_array_header_1_0
                if version[0] > 1:
                    reader = np.lib.format.read_array_header_2_0
                return tuple(reader(file)[0])
    except (DataError, MemoryError):
        raise
    except Exception as why:
        raise DataError(
            f"{path} cannot be read as an array; save it again with numpy.save.", path, "unreadable"
        ) from why


def labels_first(values: Maps, labels: int | None, path: Path, dims: int = 2) -> Maps:
    """The array as (L, *S); without `labels`, the shorter of the outer axes is L."""
    axes = "H, W" if dims == 2 else "D, H, W"
    if values.ndim == dims + 2 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != dims + 1 or not values.size:
        raise DataError(f"{path} has shape {values.shape}; save (L, {axes}) or ({axes}, L).", path, "size")
    first, last = values.shape[0], values.shape[-1]
    if labels is not None and labels not in (first, last):
        raise DataError(
            f"{path} has shape {values.shape}, but there are {labels} labels; save ({labels}, {axes}).", path, "size"
        )
    leads = first == labels if labels is not None else first <= last
    made = values if leads else np.moveaxis(values, -1, 0)
    if made.shape[0] < 2:
        raise DataError(f"{path} has shape {values.shape}, a single label; save two maps, 1 - p and p.", path, "size")
    return made


def from_array(values: Maps, path: Path) -> tuple[Tensor, str]:
    """Log-probabilities from whatever the numbers (L, *S) are."""
    if values.dtype.kind in "biu" and values.min() >= 0 and values.max() <= 1:
        values = values.astype(np.float32)  # a label or not: shares of one, and not of 255
    if values.dtype in (np.uint8, np.uint16):
        return normalised(values, 0.5), f"{8 * values.dtype.itemsize}-bit probabilities"
    if values.dtype.kind != "f":
        raise DataError(f"{path} holds {values.dtype}; save floats, uint8 or uint16.", path, "unreadable")
    real = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if bool(torch.isnan(real).any()) or bool((real == torch.inf).any()):
        raise DataError(f"{path} holds NaN or infinity; look for an overflow where it was made.", path, "unreadable")
    low, high = float(real.min()), float(real.max())
    if low >= -OUTSIDE and high <= 1 + OUTSIDE and _is_one(real.sum(0)):
        return normalised(real.numpy(), FLOOR), "probabilities"
    if low >= 0 and high <= 1 + SUM_TOLERANCE:
        return normalised(real.numpy(), FLOOR), "scores of 0 to 1, divided by their sum"
    if high <= SUM_TOLERANCE and _is_one(real.exp().sum(0)):
        return _floored(real), "log-probabilities"
    return _floored(real.log_softmax(0)), "logits"


def _is_one(sums: Tensor) -> bool:
    return float((sums - 1).abs().max()) < SUM_TOLERANCE


def normalised(values: Maps, least: float) -> Tensor:
    """log(values / their sum) where values below `least` are `least`: of bytes, half a step."""
    shares = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clamp_min(least)
    return _floored((shares / shares.sum(0)).log())


def _floored(log_p: Tensor) -> Tensor:
    return log_p.clamp_min(float(np.log(FLOOR))).log_softmax(0)


def _picture(path: Path, modes: Sequence[str], wanted: str) -> Maps:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            if picture.mode not in modes:
                raise DataError(f"{path} is a picture of mode {picture.mode}; save {wanted}.", path, "unreadable")
            values = np.asarray(picture)
    except (DataError, MemoryError):
        raise
    except Exception as why:  # as of arrays
        raise DataError(f"{path} cannot be read as a picture; replace the file.", path, "unreadable") from why
    return values.astype(np.uint16) if picture.mode.startswith("I") else values


def grey(path: Path) -> Maps:
    """A grey picture as uint8 or uint16."""
    return _picture(path, ("L", "I;16", "I;16B", "I"), "8-bit or 16-bit grey")


def ids_of(path: Path) -> NDArray[np.int64]:
    """A picture of label ids."""
    return _picture(path, ("L", "P", "1"), "8-bit label ids, grey or palette").astype(np.int64)


def as_share(values: Maps) -> NDArray[np.float32]:
    """A grey picture as numbers of 0 to 1."""
    return (values / np.iinfo(values.dtype).max).astype(np.float32)


def from_ids(ids: NDArray[np.int64], sure: NDArray[np.float32] | None, labels: int | None, path: Path) -> Tensor:
    """The named label gets its confidence, at least as much as the others, which share the rest; unknown is even."""
    known = ids != VOID
    count = labels if labels is not None else int(ids[known].max(initial=1)) + 1
    if ids[known].max(initial=0) >= count or ids.min(initial=0) < 0:
        odd = int(ids[known & ((ids >= count) | (ids < 0))][0])
        raise DataError(f"{path} holds the id {odd}, but there are {count} labels; correct it.", path, "id")
    if sure is not None and sure.shape != ids.shape:
        raise DataError(f"The confidence of {path} has another size than it; save both alike.", path, "size")
    share: NDArray[Any] = np.full(ids.shape, CONFIDENCE, np.float32) if sure is None else sure
    share = np.clip(
        share, 1 / count + FLOOR, 1 - FLOOR, dtype=np.float32
    )  # a label that is named is never the least probable
    rest = np.where(known, (1 - share) / (count - 1), 1 / count)
    made = np.repeat(rest[None].astype(np.float32), count, axis=0)  # (L, *S)
    np.put_along_axis(made, np.where(known, ids, 0)[None], np.where(known, share, 1 / count)[None], axis=0)
    return _floored(torch.from_numpy(made).log())
