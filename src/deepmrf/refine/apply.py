"""Apply an MRF to a folder of predictions, and write refined label maps and, on request, probabilities.

    OUT/STEM.png    the label ids with their colours as a palette
    OUT/STEM.npy    probabilities (L, H, W) of float16, with probabilities="npy"; or OUT/STEM.npz, compressed

Of volumes (NIfTI), OUT/STEM.nii.gz holds the label ids on the volume's own grid, and probabilities are (L, D, H, W).
They are computed in tiles, each volume with its own spacing.

A file that cannot be used is reported, and the rest goes on. Results that lie in OUT already stay as they are, so that
a run that was stopped continues. Label maps hold the labels 0 .. L-1, or the ids of a LabelIds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from deepmrf.data.files import VOID, Bytes
from deepmrf.data.folder import labels_file
from deepmrf.data.labels import LabelSet, distinct_colours
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.volumes import NiftiVolume, write_labels
from deepmrf.data.writing import check_folder, replacing
from deepmrf.layers import MeanField, dense_crf
from deepmrf.models.folder import read_mrf
from deepmrf.predict.ahead import map_ahead
from deepmrf.predict.devices import chosen_device
from deepmrf.predict.tiles import in_tiles
from deepmrf.refine.label_ids import LabelIds
from deepmrf.refine.matching import (
    MatchedFiles,
    PredictedImage,
    count_dims,
    match_files,
    read_predicted_image,
)
from deepmrf.refine.predictions import Folder, count_labels

PRESETS: dict[str, Callable[[int], MeanField]] = {"dense-crf": dense_crf}
"""MRFs that need no training, by name."""
VOLUME_PRESETS: dict[str, Callable[[int], MeanField]] = {
    "dense-crf": lambda labels: dense_crf(
        labels, dims=3, window=7, features=1, colour_width=0.1, position_width=3.0, smooth_width=1.0
    )
}
"""The same for volumes: widths are in mm and in parts of the range between the volume's percentiles."""
IMAGES_READ_AHEAD = 2
VOLUMES_READ_AHEAD = 1  # they are large
READING_THREADS = 2

Probabilities = Literal["", "npy", "npz"]


@dataclass(frozen=True)
class RefineReport:
    """What became of each image, by stem."""

    done: tuple[str, ...]
    skipped: tuple[str, ...]
    """Their results were there already."""
    failed: tuple[tuple[str, str], ...]
    """(stem, reason), a sentence each."""
    notes: tuple[str, ...]
    """Images without predictions and predictions without images."""
    kinds: tuple[str, ...]
    """What the predictions were taken for."""


def open_mrf(folder: Folder) -> tuple[MeanField, LabelSet, LabelIds | None]:
    """The MRF that `fit` saved, its labels, and their ids if these are not 0 .. L-1."""
    mean_field, config = read_mrf(Path(folder))
    ids = LabelIds(tuple(config["ids"]), tuple(config.get("void", ()))) if config.get("ids") is not None else None
    return mean_field, LabelSet.from_dict(config["labels"]), ids


def open_preset(name: str, predictions: Folder, images: Folder, labels: LabelSet | None) -> tuple[MeanField, LabelSet]:
    """A preset for these labels, or for as many as the predictions show."""
    if name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
    if labels is None:
        count = count_labels(files.prediction for files in match_files(predictions, images)[0])
        labels = LabelSet(tuple(f"label {label}" for label in range(count)), distinct_colours(count))
    presets = PRESETS if count_dims(images) == 2 else VOLUME_PRESETS
    return presets[name](len(labels)).eval(), labels


def read_label_file(path: Folder) -> tuple[LabelSet, LabelIds | None]:
    """The labels of a labels.json of any name, and their ids if these are not 0 .. L-1, as `fit` reads them."""
    labels, lookup, _ = labels_file(Path(path))
    return labels, LabelIds.from_lookup(lookup, len(labels))


def refine(
    mrf: MeanField,
    labels: LabelSet,
    predictions: Folder,
    images: Folder,
    out: Folder,
    *,
    probabilities: Probabilities = "",
    overwrite: bool = False,
    device: str = "cpu",
    progress: Progress = no_progress,
    label_ids: LabelIds | None = None,
) -> RefineReport:
    """Refine every prediction that has an image, and write the results into `out`.

    label_ids: the ids in label maps, those read and those written, where they are not the labels 0 .. L-1.
    """
    chosen_device(device)
    if probabilities not in ("", "npy", "npz"):
        raise ValueError(f"probabilities={probabilities!r} is unknown: choose 'npy', 'npz' or '' for none.")
    _check_mrf(mrf, labels, label_ids, images)
    writer = _Writer(Path(out), labels, label_ids, probabilities)
    for folder in (predictions, images):
        if writer.folder.resolve() == Path(folder).resolve():
            raise ValueError(f"The results would be written among the inputs in {folder}; choose another folder.")
    matched, notes = match_files(predictions, images)
    check_folder(writer.folder, "the results")
    todo = [files for files in matched if overwrite or not writer.has_written(files)]
    skipped = sorted({files.stem for files in matched} - {files.stem for files in todo})
    read = partial(read_predicted_image, labels=labels, label_ids=label_ids)
    read_ahead = IMAGES_READ_AHEAD if mrf.dims == 2 else VOLUMES_READ_AHEAD
    mrf, done, failed, kinds = mrf.to(device), [], [], set()
    for files, future in map_ahead(read, todo, read_ahead, READING_THREADS):
        try:
            predicted = future.result()
            _refine_image(mrf, predicted, files, writer)
            done.append(files.stem)
            kinds.add(predicted.kind)
        except (OSError, ValueError, TypeError, MemoryError, RuntimeError) as error:
            failed.append((files.stem, str(error) or type(error).__name__))
        progress(len(done) + len(failed), len(todo))
    return RefineReport(tuple(done), tuple(skipped), tuple(failed), tuple(notes), tuple(sorted(kinds)))


def _check_mrf(mrf: MeanField, labels: LabelSet, label_ids: LabelIds | None, images: Folder) -> None:
    """Raise an error where labels, ids or images are not those of the MRF."""
    if mrf.labels != len(labels):
        raise ValueError(f"The MRF has {mrf.labels} labels, the label set {len(labels)}: give both the same.")
    if label_ids is not None and len(label_ids.ids) != len(labels):
        raise ValueError(f"There are {len(labels)} labels, but {len(label_ids.ids)} ids for them: give one each.")
    dims, names = count_dims(images), {2: "pictures", 3: "volumes"}
    if mrf.dims != dims:
        raise ValueError(
            f"The MRF is for {names.get(mrf.dims, 'other maps')}, but {images} holds {names[dims]}; "
            "give what it was fitted to."
        )


def _refine_image(mrf: MeanField, predicted: PredictedImage, files: MatchedFiles, writer: _Writer) -> None:
    if predicted.volume is not None:
        writer.write_volume(files, predicted.volume, *_refine_volume(mrf, predicted, bool(writer.probabilities)))
        return
    device = mrf.triple_penalty.scale.device
    with torch.inference_mode():
        log_q = mrf(predicted.log_p[None].to(device), predicted.image[None].to(device))[0].cpu()
    writer.write_image(files, log_q)


def _refine_volume(mrf: MeanField, predicted: PredictedImage, with_p: bool) -> tuple[Tensor, Tensor | None]:
    """Labels (D, H, W) of uint8 and, if asked, probabilities (L, D, H, W) of float16."""
    assert predicted.volume is not None
    log_p = predicted.log_p
    labels = torch.empty(log_p.shape[1:], dtype=torch.uint8)
    p = torch.empty(log_p.shape, dtype=torch.float16) if with_p else None
    for region, log_q in in_tiles(mrf, log_p, predicted.image, spacing=predicted.volume.spacing):
        labels[region] = log_q.argmax(0).to(torch.uint8)
        if p is not None:
            p[(slice(None), *region)] = log_q.exp().half()
    return labels, p


class _Writer:
    """Writes the results into a folder; the label map comes last, so that it says that all is there."""

    def __init__(
        self, folder: Path, labels: LabelSet, label_ids: LabelIds | None, probabilities: Probabilities
    ) -> None:
        self.folder, self.labels, self.label_ids, self.probabilities = folder, labels, label_ids, probabilities

    def has_written(self, files: MatchedFiles) -> bool:
        """Are all results of this image there?"""
        return self._map_path(files).exists() and (not self.probabilities or self._p_path(files).exists())

    def write_image(self, files: MatchedFiles, log_q: Tensor) -> None:
        """Write the label map and the probabilities of an image."""
        picture = Image.fromarray(self._to_ids(log_q.argmax(0).to(torch.uint8)))
        picture.putpalette(self._palette().tobytes())
        if self.probabilities:
            _write_array(log_q.exp().half(), self._p_path(files))
        with replacing(self._map_path(files)) as file:
            picture.save(file, format="PNG")

    def write_volume(self, files: MatchedFiles, volume: NiftiVolume, labels: Tensor, p: Tensor | None) -> None:
        """Write the label map and the probabilities of a volume."""
        if p is not None:
            _write_array(p, self._p_path(files))
        write_labels(self._to_ids(labels), self._map_path(files), volume)

    def _map_path(self, files: MatchedFiles) -> Path:
        return self.folder / f"{files.stem}.{'png' if files.dims == 2 else 'nii.gz'}"

    def _p_path(self, files: MatchedFiles) -> Path:
        return self.folder / f"{files.stem}.{self.probabilities}"

    def _to_ids(self, labels: Tensor) -> Bytes:
        values: Bytes = labels.numpy()
        return values if self.label_ids is None else self.label_ids.to_ids(values)

    def _palette(self) -> NDArray[np.uint8]:
        """Colours (256, 3) by id."""
        palette = self.labels.palette()
        if self.label_ids is None:
            return palette
        by_id = np.repeat(palette[VOID:], 256, axis=0)
        by_id[list(self.label_ids.ids)] = self.labels.colours
        return by_id


def _write_array(p: Tensor, path: Path) -> None:
    with replacing(path) as file:
        if path.suffix == ".npy":
            np.save(file, p.numpy(), allow_pickle=False)
        else:
            np.savez_compressed(file, probabilities=p.numpy())
