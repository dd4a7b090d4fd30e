"""Reading the predictions that some network left in a folder, whatever they are saved as, by the image's name (stem).

    DIR/STEM.npy, DIR/STEM.npz              (L, H, W) or (H, W, L): probabilities, log-probabilities or logits
    DIR/STEM/ID.png or DIR/STEM/NAME.png    one grey picture per label, 8 or 16 bits
    DIR/STEM_ID.png                         the same, all in one folder
    DIR/STEM.png, DIR/STEM_confidence.png   a map of label ids (255: unknown), and how sure it is; CONFIDENCE if absent

Where the images are volumes (NIfTI), so are the predictions:

    DIR/STEM.npy, DIR/STEM.npz              (L, D, H, W) or (D, H, W, L), as above; or ints (D, H, W), label ids
    DIR/STEM.nii.gz, DIR/STEM.nii           one map per label along the fourth axis, or label ids

What the numbers of an array mean is found out from the numbers; `read_with_kind` says what was found. IDs are the
labels 0 .. L-1, or those of a Coding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.dataset import need_folder
from deepmrf.data.files import VOID, DataError, images_in
from deepmrf.data.volumes import is_volume, read_grid, volumes_in
from deepmrf.data.volumes import stem as volume_stem
from deepmrf.refine.decode import (
    CONFIDENCE,
    Coding,
    Maps,
    as_share,
    from_array,
    from_ids,
    grey,
    ids_of,
    labels_first,
    load,
    shape_of,
)

__all__ = [
    "CONFIDENCE",
    "Coding",
    "Folder",
    "Index",
    "Source",
    "Trio",
    "check_size",
    "count_labels",
    "dims_of",
    "find_predictions",
    "match",
    "read_prediction",
    "read_with_kind",
    "shown_labels",
]

_SURE = "_confidence"

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Source:
    """The files of one prediction; one of the three is given."""

    stem: str
    array: Path | None = None
    classes: dict[str, Path] = field(default_factory=dict)
    """Files by the label's id or name, as written."""
    ids: Path | None = None
    confidence: Path | None = None
    dims: int = 2
    """3 for a volume."""
    backwards: bool = False
    """The array's axes are W, H, D, as some tools for volumes save them."""

    @property
    def path(self) -> Path:
        """A file to name in messages."""
        return self.array or self.ids or next(iter(self.classes.values()))


class Index:
    """What a folder of predictions holds, listed once."""

    def __init__(self, folder: Folder, dims: int = 2) -> None:
        kinds = ".npy, .npz or .png" if dims == 2 else ".npy, .npz, .nii or .nii.gz"
        self.folder, self.dims = need_folder(Path(folder), f"the predictions: {kinds} by the images' names"), dims
        entries = sorted(p for p in self.folder.iterdir() if not p.name.startswith("."))
        self.arrays = {volume_stem(p): p for p in entries if dims == 3 and is_volume(p)}
        self.arrays |= {p.stem: p for suffix in (".npz", ".npy") for p in entries if p.suffix.lower() == suffix}
        self.pictures = {p.stem: p for p in entries if dims == 2 and p.suffix.lower() == ".png"}
        self.folders = {p.name: p for p in entries if dims == 2 and p.is_dir()}
        self.numbered: dict[str, dict[str, Path]] = {}
        for stem, path in self.pictures.items():
            match = re.fullmatch(r"(.+)_(\d+)", stem)
            if match:
                self.numbered.setdefault(match[1], {})[match[2]] = path

    def find(self, stem: str) -> Source | None:
        """The prediction of an image, or None."""
        if stem in self.arrays:
            return Source(stem, array=self.arrays[stem], dims=self.dims)
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


def find_predictions(folder: Folder, dims: int = 2) -> list[str]:
    """The stems of all predictions in a folder, sorted; dims=3 for volumes."""
    return Index(folder, dims).stems()


def read_prediction(
    folder: Folder, stem: str, labels: int | None = None, names: Sequence[str] | None = None, *, dims: int = 2
) -> Tensor:
    """The log-probabilities (L, H, W) of one image, float32; `names` are for files that are named after labels.

    With dims=3, (L, D, H, W) of one volume.
    """
    source = Index(folder, dims).find(stem)
    if source is None:
        last = f"{stem}.png" if dims == 2 else f"{stem}.nii.gz"
        raise FileNotFoundError(
            f"{folder} holds no prediction for {stem!r}; save one as {stem}.npy, {stem}.npz or {last}."
        )
    return read_with_kind(source, labels, names)[0]


def read_with_kind(
    source: Source, labels: int | None = None, names: Sequence[str] | None = None, coding: Coding | None = None
) -> tuple[Tensor, str]:
    """The log-probabilities (L, *S), and what the files were taken for: "probabilities", "logits" ...

    `coding` is for label maps, and for pictures that are named after ids.
    """
    as_ids = "label ids" if coding is None else "label ids, those of the masks"
    if source.array is not None:
        values = load(source.array)
        if values.ndim == source.dims and values.dtype.kind in "iu":
            ids = _labels_of(values.astype(np.int64), coding, source.array)
            return from_ids(ids.T if source.backwards else ids, None, labels, source.array), as_ids
        values = labels_first(values, labels, source.array, source.dims)
        return from_array(values.transpose(0, 3, 2, 1) if source.backwards else values, source.array)
    if source.ids is not None:
        sure = None if source.confidence is None else as_share(grey(source.confidence))
        return from_ids(_labels_of(ids_of(source.ids), coding, source.ids), sure, labels, source.ids), as_ids
    maps = _stacked(source, labels, names, coding)
    return from_array(maps, source.path)[0], f"{8 * maps.dtype.itemsize}-bit pictures, one per label"


def _labels_of(ids: NDArray[np.int64], coding: Coding | None, path: Path) -> NDArray[np.int64]:
    return ids if coding is None else coding.labels_of(ids, path)


def count_labels(sources: Iterable[Source]) -> int:
    """L: as many as the first array has, or the most that pictures show.

    A file that cannot be read counts only where no other tells: it is named when its turn comes.
    """
    most, bad = 0, None
    for source in sources:
        try:
            shown, sure = shown_labels(source)
        except DataError as why:
            bad = bad or why
            continue
        if sure:
            return shown
        most = max(most, shown)
    if most < 2 and bad is not None:
        raise bad
    if most < 2:
        raise ValueError(f"The predictions show {most} labels, but at least 2 are needed; check what they hold.")
    return most


def shown_labels(source: Source) -> tuple[int, bool]:
    """How many labels a prediction shows, and whether there can be no more, as where each has a map."""
    if source.array is not None:
        values = load(source.array, lazy=True)
        if values.ndim != source.dims or (source.dims == 3 and values.dtype.kind == "f"):
            return int(labels_first(values, None, source.array, source.dims).shape[0]), True
        ids = np.asarray(values).astype(np.int64)
    elif source.ids is not None:
        ids = ids_of(source.ids)
    else:
        return len(source.classes), False
    return int(ids[ids != VOID].max(initial=-1)) + 1, False


def check_size(log_p: Tensor, size: Sequence[int], source: Source, image: Path) -> None:
    """The prediction is as large as its image."""
    found = tuple(log_p.shape[1:])
    if found != tuple(size):
        if len(found) == 2:
            given, needed = f"{found[1]} x {found[0]} pixels", f"{size[1]} x {size[0]}"
        else:
            given, needed = " x ".join(map(str, found)) + " voxels", " x ".join(map(str, size))
        raise DataError(
            f"The prediction {source.path} is {given} but its image {image} is {needed}; "
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

    @property
    def dims(self) -> int:
        """2, or 3 for a volume."""
        return self.source.dims


def dims_of(images: Folder) -> int:
    """2 for a folder of pictures, 3 for one of NIfTI volumes."""
    top = need_folder(Path(images), "the images")
    volumes, pictures = volumes_in(top), images_in(top)
    if volumes and pictures:
        raise ValueError(
            f"{top} holds both volumes ({volumes[0].name}) and pictures ({pictures[0].name}); keep one kind."
        )
    return 3 if volumes else 2


def match(predictions: Folder, images: Folder, masks: Folder | None = None) -> tuple[list[Trio], list[str]]:
    """All images that have what is needed, and a sentence on each kind of file that is missing, with counts."""
    dims = dims_of(images)
    index = Index(predictions, dims)
    by_stem = _by_stem(Path(images), dims)
    known = None if masks is None else _by_stem(need_folder(Path(masks), "the masks"), dims)
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
    if dims == 3 and _are_backwards(trios):
        trios = [replace(trio, source=replace(trio.source, backwards=_is_array(trio))) for trio in trios]
        notes.append("The predictions' axes are W, H, D (as nnU-Net and SimpleITK save arrays) and were turned.")
    return trios, notes


def _is_array(trio: Trio) -> bool:
    return trio.source.array is not None and not is_volume(trio.source.array)


def _are_backwards(trios: Sequence[Trio]) -> bool:
    """Do arrays have their volumes' sizes only when read from the last axis to the first, and none as it is?

    Asked of the whole folder, since a volume that is as deep as it is wide does not tell.
    """
    turned = False
    for trio in filter(_is_array, trios):
        assert trio.source.array is not None  # _is_array
        with suppress(OSError, ValueError):  # a bad file is named when it is read
            shape, size = shape_of(trio.source.array), read_grid(trio.image)[0]
            inner = {shape} if len(shape) == 3 else {shape[-4:][1:], shape[:-1]}
            if size in inner and size[::-1] not in inner:
                return False
            turned |= size[::-1] in inner and size not in inner
    return turned


def _by_stem(folder: Path, dims: int) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in images_in(folder) if dims == 2 else volumes_in(folder):
        stem = path.stem if dims == 2 else volume_stem(path)
        if stem in found:
            raise ValueError(f"{found[stem]} and {path} have one name; keep one of them.")
        found[stem] = path
    return found


def _some(stems: Sequence[str]) -> str:
    return ", ".join(stems[:5]) + (f" and {len(stems) - 5} more" if len(stems) > 5 else "")


def _stacked(source: Source, labels: int | None, names: Sequence[str] | None, coding: Coding | None) -> Maps:
    """One picture per label as (L, H, W)."""
    files = source.classes
    if all(stem.isdigit() for stem in files):
        found = {int(stem): path for stem, path in files.items()}
        if coding is not None and set(found) == set(coding.ids):
            found = {label: found[given] for label, given in enumerate(coding.ids)}
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
    maps = [grey(found[label]) for label in range(count)]
    if len({(m.shape, m.dtype) for m in maps}) > 1:
        raise DataError(f"The pictures of {source.stem!r} differ in size or bits; save all alike.", source.path, "size")
    return np.stack(maps)
