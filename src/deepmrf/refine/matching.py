"""Match predictions, images and masks by their names, and read an image with its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from deepmrf.data.dataset import need_folder
from deepmrf.data.files import DataError, images_in, read_image, shortened
from deepmrf.data.labels import LabelSet
from deepmrf.data.volumes import NiftiVolume, is_volume, read_grid, read_volume, unit_range, volumes_in
from deepmrf.data.volumes import stem as volume_stem
from deepmrf.refine.decode import MAX_PIXELS, LogProbabilities, read_shape
from deepmrf.refine.label_ids import LabelIds
from deepmrf.refine.predictions import Folder, PredictionFiles, PredictionFolder, open_prediction


@dataclass(frozen=True)
class MatchedFiles:
    """The files of one image: its prediction, itself and, where masks were asked for, its mask."""

    stem: str
    prediction: PredictionFiles
    image: Path
    mask: Path | None = None

    @property
    def dims(self) -> int:
        """2, or 3 for a volume."""
        return self.prediction.dims

    @property
    def mask_path(self) -> Path:
        """The mask, where masks were asked for."""
        assert self.mask is not None
        return self.mask


@dataclass(frozen=True)
class PredictedImage:
    """An image or a volume with its prediction, in memory."""

    log_p: LogProbabilities
    """(L, *S) of float32, computed where they are asked for."""
    image: Tensor
    """(3, H, W) of uint8, or of a volume (1, D, H, W) of float32 in [0, 1]."""
    kind: str
    """What the prediction was taken for."""
    volume: NiftiVolume | None
    """The volume as its file has it; None for an image."""


def count_dims(images: Folder) -> int:
    """2 for a folder of pictures, 3 for one of NIfTI volumes."""
    folder = need_folder(Path(images), "the images")
    volumes, pictures = volumes_in(folder), images_in(folder)
    if volumes and pictures:
        raise ValueError(
            f"{folder} holds both volumes ({volumes[0].name}) and pictures ({pictures[0].name}); keep one kind."
        )
    return 3 if volumes else 2


def match_files(
    predictions: Folder, images: Folder, masks: Folder | None = None
) -> tuple[list[MatchedFiles], list[str]]:
    """All images that have a prediction (and a mask), and a note on each kind of file that is missing, with counts.

    Where masks stand for the images, too, the folder is given twice, and notes and errors name masks alone.
    """
    dims = count_dims(images)
    folder = PredictionFolder(predictions, dims)
    mask_paths = None if masks is None else _paths_by_stem(need_folder(Path(masks), "the masks"), dims)
    matched: list[MatchedFiles] = []
    unpredicted: list[str] = []
    unmasked: list[str] = []
    used: set[str] = set()
    image_paths = _paths_by_stem(Path(images), dims)
    for stem, image in image_paths.items():
        prediction = folder.find(stem, image_paths)
        if prediction is None:
            unpredicted.append(stem)
            continue
        used |= {stem} | {path.stem for path in prediction.per_label.values()}
        if mask_paths is not None and stem not in mask_paths:
            unmasked.append(stem)
        else:
            matched.append(MatchedFiles(stem, prediction, image, None if mask_paths is None else mask_paths[stem]))
    masks_alone = masks is not None and Path(masks) == Path(images)
    article, noun = ("a", "mask") if masks_alone else ("an", "image")
    missing = {
        f"of the {noun}s have no prediction": unpredicted,
        "of the predicted images have no mask": unmasked,
        f"of the predictions have no {noun}": _without_image(folder, used),
    }
    notes = [f"{len(stems)} {text}: {shortened(stems)}." for text, stems in missing.items() if stems]
    if not matched:
        reasons = " ".join(notes) or f"There are no {noun}s in {images}."
        needed, folders = f"{article} {noun} and a prediction", f"{predictions} and {images}"
        if masks is not None and not masks_alone:
            needed, folders = "an image, a prediction and a mask", f"{predictions}, {images} and {masks}"
        raise FileNotFoundError(f"No name has {needed} in {folders}; give them equal names. {reasons}")
    if dims == 3 and _have_reversed_axes(matched):
        matched = [
            replace(files, prediction=replace(files.prediction, reversed_axes=_is_array(files))) for files in matched
        ]
        notes.append("The predictions' axes are W, H, D (as nnU-Net and SimpleITK save arrays) and were turned.")
    return matched, notes


def read_predicted_image(
    files: MatchedFiles,
    labels: LabelSet,
    label_ids: LabelIds | None,
    gt_prob: float | None = None,
    labels_json: Path | None = None,
) -> PredictedImage:
    """Read an image, open its prediction, and check that they have one size; labels_json: see `open_prediction`."""
    volume = read_volume(files.image) if files.dims == 3 else None
    if volume is not None:
        image = torch.from_numpy(unit_range(volume.values))[None]
    else:
        image = torch.from_numpy(read_image(files.image, MAX_PIXELS)).permute(2, 0, 1)
    log_p, kind = open_prediction(files.prediction, len(labels), labels.names, label_ids, gt_prob, labels_json)
    if log_p.shape[1:] != image.shape[1:]:
        given, needed = describe_size(log_p.shape[1:]), describe_size(image.shape[1:])
        unit, noun = "pixels" if files.dims == 2 else "voxels", "mask" if files.image == files.mask else "image"
        raise DataError(
            f"The prediction {files.prediction.path} is {given} {unit} but its {noun} {files.image} is {needed}; "
            f"save predictions at the {noun}'s size.",
            files.prediction.path,
            "size",
        )
    return PredictedImage(log_p, image, kind, volume)


def describe_size(size: Sequence[int]) -> str:
    """(H, W) as "W x H", (D, H, W) as "D x H x W"."""
    return " x ".join(map(str, reversed(size) if len(size) == 2 else size))


def _paths_by_stem(folder: Path, dims: int) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for path in images_in(folder) if dims == 2 else volumes_in(folder):
        stem = path.stem if dims == 2 else volume_stem(path)
        if stem in paths:
            raise ValueError(f"{paths[stem]} and {path} have one name; keep one of them.")
        paths[stem] = path
    return paths


def _without_image(folder: PredictionFolder, used: set[str]) -> list[str]:
    """The predictions that no image uses, given the stems of those that are used.

    "a_0.png" may be the map of the image "a_0" or a part of the image "a": what some image uses is not listed.
    """
    unused = [stem for stem in folder.stems() if stem not in used]
    return [stem for stem in unused if not {f"{stem}_{number}" for number in folder.numbered.get(stem, ())} & used]


def _is_array(files: MatchedFiles) -> bool:
    return files.prediction.array is not None and not is_volume(files.prediction.array)


def _have_reversed_axes(matched: Sequence[MatchedFiles]) -> bool:
    """Do arrays have their volumes' sizes only when read from the last axis to the first, and none as it is?

    Asked of the whole folder, since a volume that is as deep as it is wide does not tell.
    """
    is_reversed = False
    for files in filter(_is_array, matched):
        assert files.prediction.array is not None  # _is_array
        with suppress(OSError, ValueError):  # reading a bad file later names it
            shape, size = read_shape(files.prediction.array), read_grid(files.image)[0]
            sizes = {shape} if len(shape) == 3 else {shape[-4:][1:], shape[:-1]}
            if size in sizes and size[::-1] not in sizes:
                return False
            is_reversed |= size[::-1] in sizes and size not in sizes
    return is_reversed
