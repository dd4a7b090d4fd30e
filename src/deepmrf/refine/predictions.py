"""Find and read the predictions that a network left in a folder, by the image's name (STEM).

    DIR/STEM.npy, DIR/STEM.npz              (L, H, W) or (H, W, L): probabilities, log-probabilities or logits
    DIR/STEM/ID.png or DIR/STEM/NAME.png    one grey picture per label, 8 or 16 bits
    DIR/STEM_ID.png                         the same, all in one folder
    DIR/STEM.png, DIR/STEM_confidence.png   a map of label ids (255: unknown), and how sure it is; CONFIDENCE if absent
                                            or a binary mask, 0 and 255, where all of the folder are such
                                            or a soft mask (soft_masks.py)

Predictions of volumes (NIfTI):

    DIR/STEM.npy, DIR/STEM.npz              (L, D, H, W) or (D, H, W, L), as above; or ints (D, H, W), label ids
    DIR/STEM.nii.gz, DIR/STEM.nii           one map per label along the fourth axis, or label ids

The numbers of an array tell what they mean; `open_prediction` says what they were taken for. IDs are the labels
0 .. L-1, or those of a LabelIds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deepmrf.data.dataset import need_folder
from deepmrf.data.files import VOID, DataError, images_in, shortened
from deepmrf.data.volumes import is_volume
from deepmrf.data.volumes import stem as volume_stem
from deepmrf.refine.decode import (
    CONFIDENCE,
    Array,
    LogProbabilities,
    decode_array,
    decode_ids,
    labels_first,
    read_array,
    read_grey,
    read_ids,
    read_shares,
)
from deepmrf.refine.label_ids import BINARY, LabelIds
from deepmrf.refine.soft_masks import open_soft_mask

_CONFIDENCE_ENDING = "_confidence"

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class PredictionFiles:
    """The files of one prediction: `array`, or `per_label`, or `ids` and perhaps `confidence`."""

    stem: str
    array: Path | None = None
    per_label: dict[str, Path] = field(default_factory=dict)
    """One picture per label, by the label's id or name as the file has it."""
    ids: Path | None = None
    confidence: Path | None = None
    dims: int = 2
    """3 for a volume."""
    reversed_axes: bool = False
    """The array's axes are W, H, D, as some tools for volumes save them."""

    @property
    def path(self) -> Path:
        """A file to name in messages."""
        return self.array or self.ids or next(iter(self.per_label.values()))


class PredictionFolder:
    """The predictions in a folder, listed once."""

    def __init__(self, folder: Folder, dims: int = 2) -> None:
        """dims: 3 for predictions of volumes."""
        kinds = ".npy, .npz or .png" if dims == 2 else ".npy, .npz, .nii or .nii.gz"
        self.folder, self.dims = need_folder(Path(folder), f"the predictions: {kinds} by the images' names"), dims
        entries = sorted(p for p in self.folder.iterdir() if not p.name.startswith("."))
        self.arrays = {volume_stem(p): p for p in entries if dims == 3 and is_volume(p)}
        self.arrays |= {p.stem: p for suffix in (".npz", ".npy") for p in entries if p.suffix.lower() == suffix}
        self.pictures = {p.stem: p for p in entries if dims == 2 and p.suffix.lower() == ".png"}
        self.folders = {p.name: p for p in entries if dims == 2 and p.is_dir()}
        self.numbered: dict[str, dict[str, Path]] = {}
        """Pictures STEM_ID.png by STEM and ID."""
        for stem, path in self.pictures.items():
            match = re.fullmatch(r"(.+)_(\d+)", stem)
            if match:
                self.numbered.setdefault(match[1], {})[match[2]] = path

    def find(self, stem: str, images: Container[str] = ()) -> PredictionFiles | None:
        """The prediction of an image, or None.

        images: the names of all images. Where there is an image a_0, a_0.png is no part of the prediction of a.
        """
        if stem in self.arrays:
            return PredictionFiles(stem, array=self.arrays[stem], dims=self.dims)
        if stem in self.folders:
            pictures = {p.stem: p for p in images_in(self.folders[stem]) if p.suffix.lower() == ".png"}
            if pictures:
                return PredictionFiles(stem, per_label=pictures)
        if stem in self.pictures:
            confidence = self.pictures.get(stem + _CONFIDENCE_ENDING)
            return PredictionFiles(stem, ids=self.pictures[stem], confidence=confidence)
        numbered = self.numbered.get(stem, {})
        if numbered and not any(path.stem in images for path in numbered.values()):
            return PredictionFiles(stem, per_label=numbered)
        return None

    def stems(self) -> list[str]:
        """All predictions. STEM_0.png, STEM_1.png ... are one, unless STEM.png lies there or an id is missing."""
        sets = {
            stem
            for stem, pictures in self.numbered.items()
            if stem not in self.pictures and len(pictures) > 1 and set(map(int, pictures)) == set(range(len(pictures)))
        }
        in_sets = {path.stem for stem in sets for path in self.numbered[stem].values()}
        maps = set(self.pictures) - {stem + _CONFIDENCE_ENDING for stem in self.pictures}
        folders = {stem for stem in self.folders if self.find(stem) is not None}
        return sorted(set(self.arrays) | folders | sets | (maps - in_sets))


def open_prediction(
    files: PredictionFiles,
    labels: int | None = None,
    names: Sequence[str] | None = None,
    label_ids: LabelIds | None = None,
    gt_prob: float | None = None,
    labels_json: Path | None = None,
) -> tuple[LogProbabilities, str]:
    """Log-probabilities (L, *S), and what the files were taken for: "probabilities", "logits" ...

    names: of the labels, for pictures that are named after them. label_ids: for label maps, and for pictures that are
    named after ids. gt_prob: the probability of the label that a label map without a confidence names; None: 0.9.
    labels_json: the file that says how many labels there are, for errors.
    """
    if label_ids is not None and label_ids.soft:
        return open_soft_mask(files, gt_prob)
    ids = _read_label_map(files)
    if ids is not None:
        ids = ids if label_ids is None else label_ids.to_labels(ids, files.path)
        confidence = None if files.confidence is None else read_shares(files.confidence)
        kind = "label ids" if label_ids is None else "label ids, those of the masks"
        kind = "binary masks of 0 and 255" if label_ids == BINARY else kind
        if gt_prob is not None and confidence is None:
            kind += f", right with probability {gt_prob:g}"
        return decode_ids(ids, confidence, labels, files.path, CONFIDENCE if gt_prob is None else gt_prob), kind
    if files.array is not None:
        values = labels_first(read_array(files.array, lazy=True), labels, files.array, files.dims, labels_json)
        return decode_array(values.transpose(0, 3, 2, 1) if files.reversed_axes else values, files.array)
    maps = _stack_pictures(files, labels, names, label_ids)
    return decode_array(maps, files.path)[0], f"{8 * maps.dtype.itemsize}-bit pictures, one per label"


def _read_label_map(files: PredictionFiles) -> Array | None:
    """The ids (*S) of a prediction that is a label map, else None."""
    if files.ids is not None:
        return read_ids(files.ids)
    if files.array is None:
        return None
    values = read_array(files.array, lazy=True)
    if values.ndim != files.dims or values.dtype.kind not in "biu":
        return None
    values = values.astype(np.uint8) if values.dtype.kind == "b" else values
    return values.T if files.reversed_axes else values


def are_binary(predictions: Iterable[PredictionFiles]) -> bool:
    """Are all predictions masks that hold 0 and 255 and nothing else? A file that cannot be read does not count."""
    values: set[int] = set()
    for files in predictions:
        with suppress(DataError):
            ids = _read_label_map(files)
            if ids is None:
                return False
            values |= set(np.unique(ids).tolist())
            if not values <= set(BINARY.ids):
                return False
    return values == set(BINARY.ids)


def _stack_pictures(
    files: PredictionFiles, labels: int | None, names: Sequence[str] | None, label_ids: LabelIds | None
) -> Array:
    """One picture per label as (L, H, W)."""
    by_label = _pictures_by_label(files, names, label_ids)
    count = labels if labels is not None else len(names) if names is not None else len(files.per_label)
    missing = [str(label if names is None else names[label]) for label in range(count) if label not in by_label]
    if missing or len(by_label) > count or count < 2:
        numbers = f"{len(files.per_label)} pictures for {count} labels"
        which = f"missing: {shortened(missing)}" if missing else f"found: {shortened(list(files.per_label))}"
        raise DataError(f"The prediction {files.stem!r} has {numbers} ({which}); save one each.", files.path, "id")
    maps = [read_grey(by_label[label]) for label in range(count)]
    if len({(m.shape, m.dtype) for m in maps}) > 1:
        raise DataError(f"The pictures of {files.stem!r} differ in size or bits; save all alike.", files.path, "size")
    return np.stack(maps)


def _pictures_by_label(
    files: PredictionFiles, names: Sequence[str] | None, label_ids: LabelIds | None
) -> dict[int, Path]:
    pictures = files.per_label
    if all(stem.isdigit() for stem in pictures):
        by_id = {int(stem): path for stem, path in pictures.items()}
        if label_ids is not None and set(by_id) == set(label_ids.ids):
            return {label: by_id[id_] for label, id_ in enumerate(label_ids.ids)}
        return by_id
    if names is None:
        raise DataError(
            f"{files.path.parent} holds pictures named after labels ({shortened(list(pictures))}); "
            "give the labels' order in labels.json, or name them 0.png, 1.png ...",
            files.path,
            "id",
        )
    order = {name: label for label, name in enumerate(names)}
    return {order[stem]: path for stem, path in pictures.items() if stem in order}


def count_labels(predictions: Iterable[PredictionFiles]) -> int:
    """L: as many as the first array has, or the most that label maps or pictures show; bad files are skipped."""
    most, first_error = 0, None
    for files in predictions:
        try:
            count, exact = shown_labels(files)
        except (DataError, FileNotFoundError) as error:
            first_error = first_error or error
            continue
        if exact:
            return count
        most = max(most, count)
    if most < 2 and first_error is not None:
        raise first_error
    if most < 2:
        raise ValueError(
            f"The predictions show {most} labels, but at least 2 are needed; give a labels.json that names all labels."
        )
    return most


def shown_labels(files: PredictionFiles) -> tuple[int, bool]:
    """How many labels a prediction shows, and whether this is exact: a label map need not use the last labels."""
    ids = _read_label_map(files)
    if ids is not None:
        known = ids[ids != VOID]
        return int(known.max()) + 1 if known.size else 0, False
    if files.array is not None:
        return int(labels_first(read_array(files.array, lazy=True), None, files.array, files.dims).shape[0]), True
    return len(files.per_label), False
