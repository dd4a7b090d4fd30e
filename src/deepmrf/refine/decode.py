"""Read the arrays, pictures and NIfTI volumes of a prediction, and turn their numbers into log-probabilities.

Shapes: L labels, *S the image's axes, (H, W) or (D, H, W).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.files import VOID, DataError, decoded, reading
from deepmrf.data.volumes import is_volume, read_volume, whole_numbers

CONFIDENCE = 0.9
"""The probability of the label that a map without a confidence names; the others share the rest."""
MIN_PROBABILITY = 1e-6
"""No label is less probable than this: a saved 0 means "very little", and its logarithm must stay finite."""
MIN_LOGIT = float(np.finfo(np.float32).min)
SUM_TOLERANCE = 0.02
"""How far sums may be from one and still mean probabilities: half precision and many labels."""
RANGE_TOLERANCE = 0.05
"""How far probabilities may be outside 0 to 1: bicubic interpolation overshoots."""
MAX_VALUES_CHECKED = 1 << 24
"""Numbers of an array that are looked at together to tell what they mean."""
MAX_PIXELS = 1 << 30
"""Images and label maps of more pixels are refused: 30,000 x 30,000 are 0.9 billion."""
ARRAY_NAMES = ("probabilities", "log_probabilities", "logits", "arr_0")
"""The array of an .npz file that is taken when it holds several, the first of these first."""
ARRAY_FILE = "an array", "save it again with numpy.save"
"""What a .npy or .npz file cannot be read as where it is broken, and what to do then."""

Array = NDArray[Any]
Region = tuple[slice, ...]


def read_array(path: Path, lazy: bool = False) -> Array:
    """The array of a .npy, .npz or NIfTI file; one of objects is refused, since unpickling runs code."""
    if is_volume(path):
        return _read_nifti(path)
    with reading(path, *ARRAY_FILE):
        content = np.load(path, mmap_mode="r" if lazy else None, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return content
        with content as archive:
            return np.asarray(archive[_array_name(list(archive.files), path)])


def read_shape(path: Path) -> tuple[int, ...]:
    """The shape of the array in a .npy or .npz file, without reading the array."""
    if path.suffix.lower() == ".npy":
        return tuple(read_array(path, lazy=True).shape)
    with reading(path, *ARRAY_FILE), zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        with archive.open(f"{_array_name(names, path)}.npy") as file:
            major, _ = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            return tuple(header(file)[0])


def _array_name(names: list[str], path: Path) -> str:
    """The array to take from an .npz file."""
    candidates = names if len(names) == 1 else [name for name in ARRAY_NAMES if name in names]
    if not candidates:
        content = ", ".join(names) or "nothing"
        raise DataError(f"{path} holds {content}; name the array {ARRAY_NAMES[0]!r}.", path, "unreadable")
    return candidates[0]


def _read_nifti(path: Path) -> Array:
    """Label ids (D, H, W) as ints, or one map per label as (L, D, H, W)."""
    values = read_volume(path, several=True).values
    if values.ndim == 3:
        ids = whole_numbers(values)
        return values if ids is None else ids
    if values.dtype.kind in "bi" or (values.dtype.kind == "u" and values.max() <= 1):
        values = values.astype(np.float32)  # a label or not: shares of one, and not of 255
    return np.moveaxis(values, -1, 0)


def labels_first(
    values: Array, labels: int | None, path: Path, dims: int = 2, labels_json: Path | None = None
) -> Array:
    """The array as (L, *S); without `labels`, the shorter of the outer axes is L. labels_json: what names them."""
    axes = "H, W" if dims == 2 else "D, H, W"
    if values.ndim == dims + 2 and values.shape[0] == 1:
        values = values[0]
    if values.ndim == dims and values.dtype.kind == "f":
        raise DataError(f"{path} holds a single map; save two, 1 - p and p, as (2, {axes}).", path, "size")
    if values.ndim != dims + 1 or not values.size:
        raise DataError(f"{path} has shape {values.shape}; save (L, {axes}) or ({axes}, L).", path, "size")
    first, last = values.shape[0], values.shape[-1]
    if labels is not None and labels not in (first, last):
        problem = f"there are {labels} labels; save ({labels}, {axes}) or ({axes}, {labels})"
        if labels_json is not None:
            problem = f"{labels_json} names {labels} labels: correct one of them"
        raise DataError(f"{path} has shape {values.shape}, but {problem}.", path, "size")
    is_first = first == labels if labels is not None else first <= last
    if (first if is_first else last) < 2:
        raise DataError(f"{path} has shape {values.shape}, a single label; save two maps, 1 - p and p.", path, "size")
    return values if is_first else np.moveaxis(values, -1, 0)


@dataclass(frozen=True)
class LogProbabilities:
    """Log-probabilities (L, *S) of float32, computed by maps[:, rows, columns]: large arrays stay in their file."""

    shape: tuple[int, ...]
    read: Callable[[Region], Tensor]
    """From slices along the image's axes to the log-probabilities there."""

    def __getitem__(self, index: Region) -> Tensor:
        return self.read(index[1:])

    def tensor(self) -> Tensor:
        """All of them."""
        return self.read((slice(None),) * (len(self.shape) - 1))


def decode_array(values: Array, path: Path) -> tuple[LogProbabilities, str]:
    """Log-probabilities (L, *S) from an array (L, *S), and what its numbers were taken for."""
    kind, decode = _array_kind(values, path)
    return LogProbabilities(values.shape, lambda region: decode(values[(slice(None), *region)])), kind


def _array_kind(values: Array, path: Path) -> tuple[str, Callable[[Array], Tensor]]:
    """What the numbers of an array mean, and the function that makes log-probabilities of a part of them."""
    as_shares = partial(_log_shares, least=MIN_PROBABILITY)
    if values.dtype.kind in "biu" and values.min() >= 0 and values.max() <= 1:
        # A label or not: shares of one, and not of 255.
        one_hot = all(_is_one(torch.from_numpy(part.astype(np.float32)).sum(0)) for part in _parts(values))
        return "probabilities" if one_hot else "scores of 0 to 1, divided by their sum", as_shares
    if values.dtype in (np.uint8, np.uint16):
        return f"{8 * values.dtype.itemsize}-bit probabilities", partial(_log_shares, least=0.5)  # 0 is half a step
    if values.dtype.kind != "f":
        raise DataError(f"{path} holds {values.dtype}; save floats, uint8 or uint16.", path, "unreadable")
    low, high, sums_are_one, exp_sums_are_one = torch.inf, -torch.inf, True, True
    for part in map(_to_float, _parts(values)):
        if bool(torch.isnan(part).any()) or bool((part == torch.inf).any()):
            message = f"{path} holds NaN or infinity; look for an overflow where it was made."
            raise DataError(message, path, "unreadable")
        low, high = min(low, float(part.min())), max(high, float(part.max()))
        sums_are_one = sums_are_one and _is_one(part.sum(0))
        exp_sums_are_one = exp_sums_are_one and high <= SUM_TOLERANCE and _is_one(part.exp().sum(0))
    if low >= -RANGE_TOLERANCE and high <= 1 + RANGE_TOLERANCE and sums_are_one:
        return "probabilities", as_shares
    if low >= 0 and high <= 1 + SUM_TOLERANCE:
        return "scores of 0 to 1, divided by their sum", as_shares
    if exp_sums_are_one:
        return "log-probabilities", lambda part: _with_floor(_to_float(part))
    # Where all labels are impossible (-inf), they are equally probable, as they are where all probabilities are 0.
    return "logits", lambda part: _with_floor(_to_float(part).clamp_min(MIN_LOGIT).log_softmax(0))


def _parts(values: Array) -> Iterator[Array]:
    """The array (L, *S) in parts along its second axis, each of at most MAX_VALUES_CHECKED numbers or one row."""
    rows = max(1, MAX_VALUES_CHECKED * values.shape[1] // values.size)
    for start in range(0, values.shape[1], rows):
        yield values[:, start : start + rows]


def _to_float(values: Array) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))


def _is_one(sums: Tensor) -> bool:
    return float((sums - 1).abs().max()) < SUM_TOLERANCE


def _log_shares(values: Array, least: float) -> Tensor:
    """log(values / their sum), with `least` in place of smaller values."""
    shares = _to_float(values).clamp_min(least)
    return _with_floor((shares / shares.sum(0)).log())


def _with_floor(log_p: Tensor) -> Tensor:
    return log_p.clamp_min(float(np.log(MIN_PROBABILITY))).log_softmax(0)


def decode_ids(
    ids: Array, confidence: NDArray[np.float32] | None, labels: int | None, path: Path, gt_prob: float = CONFIDENCE
) -> LogProbabilities:
    """Log-probabilities (L, *S) from label ids: the named label gets its confidence, the others share the rest.

    gt_prob: the confidence where there is no map of it. The named label is never the least probable one. Where the id
    is void, all labels are equally probable.
    """
    lowest, highest = int(ids.min(initial=0)), int(ids.max(initial=0, where=ids != VOID))
    count = labels if labels is not None else max(highest, 1) + 1
    if lowest < 0 or highest >= count:
        wrong = lowest if lowest < 0 else highest
        remedy = f"save ids of 0 to {count - 1}, or give a labels.json with the masks' ids"
        if count == 2:
            remedy += "; of a soft mask, save the probabilities of both labels as an array (2, H, W)"
        raise DataError(f"{path} holds the id {wrong}, but there are {count} labels; {remedy}.", path, "id")
    if confidence is not None and confidence.shape != ids.shape:
        raise DataError(f"The confidence of {path} has another size than it; save both alike.", path, "size")

    def read(region: Region) -> Tensor:
        given = gt_prob if confidence is None else confidence[region]
        return _log_p_of_ids(ids[region], np.float32(given), count)

    return LogProbabilities((count, *ids.shape), read)


def _log_p_of_ids(ids: Array, confidence: Any, count: int) -> Tensor:
    known = ids != VOID
    share = np.clip(confidence, 1 / count + MIN_PROBABILITY, 1 - MIN_PROBABILITY, dtype=np.float32)
    rest = np.where(known, (1 - share) / (count - 1), 1 / count)
    p = np.repeat(rest[None].astype(np.float32), count, axis=0)  # (L, *S)
    index = np.where(known, ids, 0)[None].astype(np.int64)
    np.put_along_axis(p, index, np.where(known, share, 1 / count)[None].astype(np.float32), axis=0)
    return _with_floor(torch.from_numpy(p).log())


def check_gt_prob(gt_prob: float, labels: int) -> None:
    """Raise a ValueError where this confidence of label maps does not make their labels the most probable ones."""
    if not 1 / labels < gt_prob < 1:
        raise ValueError(
            f"gt_prob={gt_prob!r} must lie above {1 / labels:.3g}, one of {labels} labels, and below 1: it is the "
            "probability that a mask's label is right."
        )


def read_grey(path: Path) -> Array:
    """A grey picture as uint8 or uint16."""
    return _read_picture(path, ("L", "I;16", "I;16B", "I"), "8-bit or 16-bit grey")


def read_ids(path: Path) -> NDArray[np.uint8]:
    """A picture of label ids."""
    return _read_picture(path, ("L", "P", "1"), "8-bit label ids, grey or palette").astype(np.uint8, copy=False)


def read_shares(path: Path) -> NDArray[np.float32]:
    """A grey picture as numbers of 0 to 1."""
    values = read_grey(path)
    return (values / np.iinfo(values.dtype).max).astype(np.float32)


def read_shades(path: Path) -> set[int] | None:
    """The values of a grey picture, all of 0 to 255 for one of 16 bits; None for a picture of another kind."""
    with decoded(path, MAX_PIXELS) as picture:
        if picture.mode.startswith("I"):
            return set(range(256))
        return {value for value, count in enumerate(picture.histogram()) if count} if picture.mode == "L" else None


def _read_picture(path: Path, modes: Sequence[str], needed: str) -> Array:
    with decoded(path, MAX_PIXELS) as picture:
        if picture.mode not in modes:
            raise DataError(f"{path} is a picture of mode {picture.mode}; save {needed}.", path, "unreadable")
        values = np.asarray(picture)
    return values.astype(np.uint16) if picture.mode.startswith("I") else values
