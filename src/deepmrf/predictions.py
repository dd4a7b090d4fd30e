"""Reading the predictions that some network left in a folder, whatever they are saved as, by the image's name (stem).

    DIR/STEM.npy, DIR/STEM.npz              (L, H, W) or (H, W, L): probabilities, log-probabilities or logits
    DIR/STEM/ID.png or DIR/STEM/NAME.png    one grey picture per label, 8 or 16 bits
    DIR/STEM_ID.png                         the same, all in one folder
    DIR/STEM.png, DIR/STEM_confidence.png   a map of label ids (255: unknown), and how sure it is; CONFIDENCE if absent

What the numbers of an array mean is found out from the numbers; `read_with_kind` says what was found.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.dataset import need_folder
from deepmrf.data.files import VOID, DataError, images_in

CONFIDENCE = 0.9
"""The probability of the label that a map without a confidence names; the others share the rest."""
FLOOR = 1e-6
"""No label is less probable than this: a saved 0 means "very little", and its logarithm must stay finite."""
SUM_TOLERANCE = 0.02
"""How far sums may be from one and still mean probabilities: half precision and many labels."""
NAMED = ("probabilities", "log_probabilities", "logits", "arr_0")
"""The array of an .npz file that is taken when it holds several."""
_SURE = "_confidence"

Folder = str | os.PathLike[str]
Maps = NDArray[Any]


@dataclass(frozen=True)
class Source:
    """The files of one prediction; one of the three is given."""

    stem: str
    array: Path | None = None
    classes: dict[str, Path] = field(default_factory=dict)
    """Files by the label's id or name, as written."""
    ids: Path | None = None
    confidence: Path | None = None

    @property
    def path(self) -> Path:
        """A file to name in messages."""
        return self.array or self.ids or next(iter(self.classes.values()))


class Index:
    """What a folder of predictions holds, listed once."""

    def __init__(self, folder: Folder) -> None:
        self.folder = need_folder(Path(folder), "the predictions: .npy, .npz or .png by the images' names")
        entries = sorted(p for p in self.folder.iterdir() if not p.name.startswith("."))
        self.arrays = {p.stem: p for suffix in (".npz", ".npy") for p in entries if p.suffix.lower() == suffix}
        self.pictures = {p.stem: p for p in entries if p.suffix.lower() == ".png"}
        self.folders = {p.name: p for p in entries if p.is_dir()}
        self.numbered: dict[str, dict[str, Path]] = {}
        for stem, path in self.pictures.items():
            match = re.fullmatch(r"(.+)_(\d+)", stem)
            if match:
                self.numbered.setdefault(match[1], {})[match[2]] = path

    def find(self, stem: str) -> Source | None:
        """The prediction of an image, or None."""
        if stem in self.arrays:
            return Source(stem, array=self.arrays[stem])
        if stem in self.folders:
            files = {p.stem: p for p in images_in(self.folders[stem]) if p.suffix.lower() == ".png"}
            if files:
                return Source(stem, classes=files)
        if stem in self.pictures:
            return Source(stem, ids=self.pictures[stem], confidence=self.pictures.get(stem + _SURE))
        if stem in self.numbered:
            return Source(stem, classes=self.numbered[stem])
        return None

    def stems(self) -> list[str]:
        """All predictions. STEM_0.png, STEM_1.png ... are one, unless STEM.png lies there or an id is missing."""
        whole = {stem for stem, files in self.numbered.items() if self._is_whole(stem, files)}
        parts = {path.stem for stem in whole for path in self.numbered[stem].values()}
        maps = {s for s in self.pictures if not (s.endswith(_SURE) and s.removesuffix(_SURE) in self.pictures)}
        folders = {stem for stem in self.folders if self.find(stem) is not None}
        return sorted(set(self.arrays) | folders | whole | (maps - parts))

    def _is_whole(self, stem: str, files: dict[str, Path]) -> bool:
        ids = sorted(int(number) for number in files)
        return stem not in self.pictures and len(ids) > 1 and ids == list(range(len(ids)))


def find_predictions(folder: Folder) -> list[str]:
    """The stems of all predictions in a folder, sorted."""
    return Index(folder).stems()


def read_prediction(folder: Folder, stem: str, labels: int | None = None, names: Sequence[str] | None = None) -> Tensor:
    """The log-probabilities (L, H, W) of one image, float32; `names` are for files that are named after labels."""
    source = Index(folder).find(stem)
    if source is None:
        raise FileNotFoundError(
            f"{folder} holds no prediction for {stem!r}; save one as {stem}.npy, {stem}.npz or {stem}.png."
        )
    return read_with_kind(source, labels, names)[0]


def read_with_kind(source: Source, labels: int | None = None, names: Sequence[str] | None = None) -> tuple[Tensor, str]:
    """The log-probabilities (L, H, W), and what the files were taken for: "probabilities", "logits" ..."""
    if source.array is not None:
        values = _load(source.array)
        if values.ndim == 2 and values.dtype.kind in "iu":
            return _from_ids(values.astype(np.int64), None, labels, source.array), "label ids"
        return _from_array(_labels_first(values, labels, source.array), source.array)
    if source.ids is not None:
        sure = None if source.confidence is None else _share(_grey(source.confidence))
        return _from_ids(_ids(source.ids), sure, labels, source.ids), "label ids"
    maps = _stacked(source, labels, names)
    return _normalised(maps, 0.5), f"{8 * maps.dtype.itemsize}-bit pictures, one per label"


def count_labels(sources: Iterable[Source]) -> int:
    """L: as many as the first array has, or the most that pictures show."""
    most = 0
    for source in sources:
        if source.array is not None:
            values = _load(source.array, lazy=True)
            if values.ndim != 2:
                return int(_labels_first(values, None, source.array).shape[0])
            ids = np.asarray(values).astype(np.int64)
            most = max(most, int(ids[ids != VOID].max(initial=-1)) + 1)
        elif source.ids is not None:
            ids = _ids(source.ids)
            most = max(most, int(ids[ids != VOID].max(initial=-1)) + 1)
        else:
            most = max(most, len(source.classes))
    if most < 2:
        raise ValueError(f"The predictions show {most} labels, but at least 2 are needed; check what they hold.")
    return most


def check_size(log_p: Tensor, size: tuple[int, int], source: Source, image: Path) -> None:
    """The prediction is as large as its image."""
    height, width = log_p.shape[1:]
    if (height, width) != tuple(size):
        raise DataError(
            f"The prediction {source.path} is {width} x {height} pixels but its image {image} is "
            f"{size[1]} x {size[0]}; "
            "save predictions at the image's size.",
            source.path,
            "size",
        )


@dataclass(frozen=True)
class Trio:
    """An image, its prediction and, where known, its mask."""

    stem: str
    source: Source
    image: Path
    mask: Path | None = None


def match(predictions: Folder, images: Folder, masks: Folder | None = None) -> tuple[list[Trio], list[str]]:
    """All images that have what is needed, and a sentence on each kind of file that is missing, with counts."""
    index = Index(predictions)
    by_stem = _by_stem(need_folder(Path(images), "the images"))
    known = None if masks is None else _by_stem(need_folder(Path(masks), "the masks"))
    trios: list[Trio] = []
    without: list[str] = []
    unmasked: list[str] = []
    used: set[str] = set()
    for stem, image in by_stem.items():
        source = index.find(stem)
        if source is None:
            without.append(stem)
            continue
        used |= {stem} | {path.stem for path in source.classes.values()}
        if known is not None and stem not in known:
            unmasked.append(stem)
        else:
            trios.append(Trio(stem, source, image, None if known is None else known[stem]))
    # "a_0.png" may be the map of the image "a_0" or a part of the image "a": what an image claimed is no orphan.
    orphans = [s for s in index.stems() if s not in used and not {f"{s}_{n}" for n in index.numbered.get(s, ())} & used]
    notes = [
        f"{len(stems)} {what}: {_some(stems)}."
        for stems, what in (
            (without, "of the images have no prediction"),
            (unmasked, "of the predicted images have no mask"),
            (orphans, "of the predictions have no image"),
        )
        if stems
    ]
    if not trios:
        reasons = " ".join(notes) or f"There are no images in {images}."
        needed = "an image, a prediction" + (" and a mask" if masks is not None else "")
        raise FileNotFoundError(f"No name has {needed} in {predictions} and {images}; give them equal names. {reasons}")
    return trios, notes


def _by_stem(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in images_in(folder):
        if path.stem in found:
            raise ValueError(f"{found[path.stem]} and {path} have one name; keep one of them.")
        found[path.stem] = path
    return found


def _some(stems: Sequence[str]) -> str:
    return ", ".join(stems[:5]) + (f" and {len(stems) - 5} more" if len(stems) > 5 else "")


def _load(path: Path, lazy: bool = False) -> Maps:
    """The array of a .npy or .npz file; one of objects is refused, since unpickling runs code."""
    try:
        loaded = np.load(path, mmap_mode="r" if lazy else None, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded as archive:
            keys = list(archive.files)
            chosen = keys if len(keys) == 1 else [key for key in NAMED if key in keys]
            if not chosen:
                held = ", ".join(keys) or "nothing"
                raise DataError(f"{path} holds {held}; name the array {NAMED[0]!r}.", path, "unreadable")
            return np.asarray(archive[chosen[0]])
    except DataError:
        raise
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as why:
        reason = str(why).rstrip(".").splitlines()[0] if str(why) else type(why).__name__
        raise DataError(
            f"{path} cannot be read as an array ({reason}); save it again with numpy.save.", path, "unreadable"
        ) from why


def _labels_first(values: Maps, labels: int | None, path: Path) -> Maps:
    """The array as (L, H, W); without `labels`, the shorter of the outer axes is L."""
    if values.ndim == 4 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 3 or not values.size:
        raise DataError(f"{path} has shape {values.shape}; save (L, H, W) or (H, W, L).", path, "size")
    first, last = values.shape[0], values.shape[2]
    if labels is not None and labels not in (first, last):
        raise DataError(
            f"{path} has shape {values.shape}, but there are {labels} labels; save ({labels}, H, W).", path, "size"
        )
    leads = first == labels if labels is not None else first <= last
    made = values if leads else np.moveaxis(values, 2, 0)
    if made.shape[0] < 2:
        raise DataError(f"{path} has shape {values.shape}, a single label; save two maps, 1 - p and p.", path, "size")
    return made


def _from_array(values: Maps, path: Path) -> tuple[Tensor, str]:
    """Log-probabilities from whatever the numbers (L, H, W) are."""
    if values.dtype in (np.uint8, np.uint16):
        return _normalised(values, 0.5), f"{8 * values.dtype.itemsize}-bit probabilities"
    if values.dtype.kind != "f":
        raise DataError(f"{path} holds {values.dtype}; save floats, uint8 or uint16.", path, "unreadable")
    real = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if bool(torch.isnan(real).any()) or bool((real == torch.inf).any()):
        raise DataError(f"{path} holds NaN or infinity; look for an overflow where it was made.", path, "unreadable")
    low, high = float(real.min()), float(real.max())
    if low >= 0 and high <= 1 + SUM_TOLERANCE:
        kind = "probabilities" if _is_one(real.sum(0)) else "scores of 0 to 1, divided by their sum"
        return _normalised(real.numpy(), FLOOR), kind
    if high <= SUM_TOLERANCE and _is_one(real.exp().sum(0)):
        return _floored(real), "log-probabilities"
    return _floored(real.log_softmax(0)), "logits"


def _is_one(sums: Tensor) -> bool:
    return float((sums - 1).abs().max()) < SUM_TOLERANCE


def _normalised(values: Maps, least: float) -> Tensor:
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
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as why:
        raise DataError(f"{path} cannot be read as a picture; replace the file.", path, "unreadable") from why
    return values.astype(np.uint16) if picture.mode.startswith("I") else values


def _grey(path: Path) -> Maps:
    """A grey picture as uint8 or uint16."""
    return _picture(path, ("L", "I;16", "I;16B", "I"), "8-bit or 16-bit grey")


def _ids(path: Path) -> NDArray[np.int64]:
    return _picture(path, ("L", "P", "1"), "8-bit label ids, grey or palette").astype(np.int64)


def _share(values: Maps) -> NDArray[np.float32]:
    """A grey picture as numbers of 0 to 1."""
    return (values / np.iinfo(values.dtype).max).astype(np.float32)


def _from_ids(ids: NDArray[np.int64], sure: NDArray[np.float32] | None, labels: int | None, path: Path) -> Tensor:
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
    made = np.repeat(rest[None].astype(np.float32), count, axis=0)  # (L, H, W)
    np.put_along_axis(made, np.where(known, ids, 0)[None], np.where(known, share, 1 / count)[None], axis=0)
    return _floored(torch.from_numpy(made).log())


def _stacked(source: Source, labels: int | None, names: Sequence[str] | None) -> Maps:
    """One picture per label as (L, H, W)."""
    files = source.classes
    if all(stem.isdigit() for stem in files):
        found = {int(stem): path for stem, path in files.items()}
    elif names is not None:
        order = {name: label for label, name in enumerate(names)}
        found = {order[stem]: path for stem, path in files.items() if stem in order}
    else:
        raise DataError(
            f"{source.path.parent} holds pictures named after labels ({_some(list(files))}); "
            "give the labels' order in labels.json, or name them 0.png, 1.png ...",
            source.path,
            "id",
        )
    count = labels if labels is not None else len(names) if names is not None else len(files)
    missing = [label if names is None else names[label] for label in range(count) if label not in found]
    if missing or len(found) > count or count < 2:
        given = f"{len(files)} pictures for {count} labels"
        what = f"missing: {_some([str(m) for m in missing])}" if missing else f"found: {_some(list(files))}"
        raise DataError(f"The prediction {source.stem!r} has {given} ({what}); save one each.", source.path, "id")
    maps = [_grey(found[label]) for label in range(count)]
    if len({(m.shape, m.dtype) for m in maps}) > 1:
        raise DataError(f"The pictures of {source.stem!r} differ in size or bits; save all alike.", source.path, "size")
    return np.stack(maps)
