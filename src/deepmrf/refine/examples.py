"""The images or volumes that a fit learns from: read, checked, and cached in memory as far as they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.colours import Colour
from deepmrf.data.dataset import lookup_table
from deepmrf.data.files import LOSSY, VOID, Bytes, DataError, read_mask
from deepmrf.data.folder import LABELS_FILE, read_labels
from deepmrf.data.labels import LabelSet
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.volumes import NiftiVolume, Spacing, read_grid, read_volume_mask
from deepmrf.refine.decode import read_array, read_ids
from deepmrf.refine.label_ids import LabelIds, numbered_labels
from deepmrf.refine.matching import MatchedFiles, PredictedImage, describe_size, read_predicted_image
from deepmrf.refine.predictions import count_labels, shown_labels

MAX_BYTES_IN_MEMORY = 4 << 30
"""Predictions and images are cached up to this many bytes; the others are read again when needed."""
FOREGROUND_VOXELS = 1024
"""About this many foreground voxels of each volume are remembered, as places for crops."""
SPACING_TOLERANCE = 1.05
"""Spacings that differ by more than this factor get a note."""


@dataclass(frozen=True)
class Example:
    """One image: log_p (L, H, W) of float16, image (3, H, W) and mask (H, W) of uint8.

    Or one volume: log_p (L, D, H, W) of float16, image (1, D, H, W) of float32 in [0, 1], mask (D, H, W) of uint8.
    """

    stem: str
    log_p: Tensor
    image: Tensor
    mask: Tensor
    spacing: Spacing | None = None
    """Distance between a volume's voxels."""
    foreground: Tensor | None = None
    """Some of a volume's foreground voxels, (N, 3)."""


def open_examples(matched: list[MatchedFiles], masks: Path, labels: int | None = None) -> Examples:
    """The examples of a folder of masks; labels.json in or above it, `labels` or the predictions tell the labels."""
    for folder in (masks, masks.parent):
        if (folder / LABELS_FILE).is_file():
            return Examples(matched, *read_labels(folder), labels_json=folder / LABELS_FILE)
    count = count_labels(files.prediction for files in matched) if labels is None else labels
    lookup, labels_json = lookup_table({label: label for label in range(count)}), masks / LABELS_FILE
    label_set = numbered_labels(count, [files.mask_path for files in matched if files.dims == 2])
    return Examples(matched, label_set, lookup, labels_counted=labels is None, labels_json=labels_json)


class Examples:
    """Images with predictions and masks, cached in memory as far as they fit."""

    def __init__(
        self,
        matched: Sequence[MatchedFiles],
        labels: LabelSet,
        lookup: NDArray[np.int16],
        colours: Mapping[Colour, int] | None = None,
        labels_counted: bool = False,
        labels_json: Path | None = None,
    ) -> None:
        """lookup, colours: from masks to labels. labels_counted: in the predictions. labels_json: for errors."""
        self.files, self.labels, self.lookup, self.colours = list(matched), labels, lookup, colours
        self.label_ids = LabelIds.from_lookup(lookup, len(labels))
        self.labels_counted, self.labels_json = labels_counted, labels_json
        self.cached: dict[str, Example] = {}
        self.bytes_left = MAX_BYTES_IN_MEMORY
        self.kinds: dict[str, set[str]] = {}
        """What the predictions were taken for, with the stems of each kind."""
        self.turned: list[str] = []
        """Volumes whose masks have their axes in other directions."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Example:
        files = self.files[index]
        return self.cached.get(files.stem) or self._read(files)

    @property
    def kind(self) -> str:
        """What the predictions were taken for; all kinds where they differ."""
        return "; ".join(sorted(self.kinds))

    @property
    def dims(self) -> int:
        """2, or 3 for volumes."""
        return self.files[0].dims if self.files else 2

    @cached_property
    def grids(self) -> list[tuple[tuple[int, ...], Spacing]]:
        """Size and spacing of each volume."""
        return [read_grid(files.image) for files in self.files]

    @property
    def spacing(self) -> Spacing | None:
        """The median of the volumes' spacings; None for images."""
        if self.dims == 2:
            return None
        median = np.median([spacing for _, spacing in self.grids], axis=0)
        return float(median[0]), float(median[1]), float(median[2])

    def crop_size(self, side: int) -> tuple[int, ...]:
        """`side` along each axis, but no more than the largest volume has."""
        if self.dims == 2:
            return side, side
        return tuple(min(side, max(size[axis] for size, _ in self.grids)) for axis in range(3))

    def read_all(self, progress: Progress = no_progress) -> list[str]:
        """Read every example once and drop those whose masks are all void; returns notes."""
        empty, counts = [], np.zeros(VOID + 1, np.int64)
        for done, files in enumerate(list(self.files), start=1):
            example = self._read(files)
            counts += np.bincount(example.mask.flatten().numpy(), minlength=VOID + 1)
            if bool((example.mask == VOID).all()):
                empty.append(files)
            else:
                self.bytes_left -= sum(t.nbytes for t in (example.log_p, example.image, example.mask))
                if self.bytes_left >= 0:
                    self.cached[files.stem] = example
            progress(done, len(self.files))
        self.files = [files for files in self.files if files not in empty]
        self.__dict__.pop("grids", None)
        notes = [f"{len(empty)} of the masks are void throughout: {empty[0].stem} ..."] if empty else []
        lossy = [files.mask for files in self.files if files.dims == 2 and files.mask_path.suffix.lower() in LOSSY]
        if lossy:
            notes.append(
                f"The format of {lossy[0]} may be lossy, which changes ids without a trace: save masks as PNG."
            )
        missing = [name for name, count in zip(self.labels.names, counts, strict=False) if not count]
        if missing and self.labels_counted and self.files:
            names = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
            notes.append(
                f"The predictions have {len(self.labels)} labels, of which no mask holds {names}: is that right?"
            )
        if len(self.kinds) > 1:
            kinds = "; ".join(
                f"{len(stems)} as {kind} ({min(stems)} ...)" for kind, stems in sorted(self.kinds.items())
            )
            notes.append(f"The predictions were not all read alike: {kinds}; save them all alike if that is wrong.")
        return notes + (self._volume_notes() if self.dims == 3 and self.files else [])

    def _volume_notes(self) -> list[str]:
        notes = []
        if self.turned:
            notes.append(
                f"{len(self.turned)} of the masks have their axes in other directions than their volumes, by their "
                f"headers: {self.turned[0]} ...; voxels were matched as they lie in the files."
            )
        least, most = (f([spacing for _, spacing in self.grids], axis=0) for f in (np.min, np.max))
        if (most > SPACING_TOLERANCE * least).any():
            low, high = (" x ".join(f"{step:.3g}" for step in steps) for steps in (least, most))
            notes.append(
                f"The volumes' spacings differ, {low} to {high}: the triple penalty measures each volume with its own, "
                "but windows and label contexts count voxels; resample them to one spacing if that is too rough."
            )
        return notes

    def _read(self, files: MatchedFiles) -> Example:
        named_in = self.labels_json if self.labels_json is not None and self.labels_json.is_file() else None
        predicted = read_predicted_image(files, self.labels, self.label_ids, labels_json=named_in)
        self.kinds.setdefault(predicted.kind, set()).add(files.stem)
        mask = self._read_mask(files, predicted)
        size = predicted.image.shape[1:]
        if mask.shape != size:
            given, needed = describe_size(mask.shape), describe_size(size)
            unit, image = ("pixels", "image") if files.dims == 2 else ("voxels", "volume")
            raise DataError(
                f"{files.mask} is {given} {unit} but its {image} {needed}; make the mask as large as the {image}.",
                files.mask_path,
                "size",
            )
        spacing, foreground = None, None
        if predicted.volume is not None:
            spacing = predicted.volume.spacing
            voxels = np.argwhere((mask != 0) & (mask != VOID))
            foreground = torch.from_numpy(voxels[:: max(1, len(voxels) // FOREGROUND_VOXELS)].copy())
        maps = predicted.log_p.tensor().half(), predicted.image.contiguous(), torch.from_numpy(mask)
        return Example(files.stem, *maps, spacing, foreground)

    def _read_mask(self, files: MatchedFiles, predicted: PredictedImage) -> Bytes:
        path = files.mask_path
        try:
            if predicted.volume is None:
                return read_mask(path, self.lookup, self.colours, self.labels_json)
            mask, volume = read_volume_mask(path, self.lookup, self.labels_json)
        except DataError as error:
            # Advise to give the number of labels if it was counted in label maps, which need not use the last labels.
            maps_told = self.labels_counted and not files.prediction.per_label and not shown_labels(files.prediction)[1]
            highest = max(map(_highest_id, self.files)) if maps_told and error.kind == "id" else 0
            if highest < len(self.labels):
                if not self.labels_counted or error.kind != "id":
                    raise
                count = f"If it is a label, give predictions that have it: these have {len(self.labels)} labels."
                raise DataError(f"{error} {count}", error.path, "id") from error
            raise DataError(
                f"{files.mask} holds ids that no predicted label map has (those use 0 to {len(self.labels) - 1}); "
                f"give --labels {highest + 1} (Python: labels={highest + 1}), or name them all in {self.labels_json}.",
                error.path,
                "id",
            ) from error
        if _directions(predicted.volume) != _directions(volume) and files.stem not in self.turned:
            self.turned.append(files.stem)
        return mask


def _highest_id(files: MatchedFiles) -> int:
    """The highest id of a mask, void left out; 0 if the mask cannot be read."""
    with suppress(OSError, ValueError):
        ids = read_ids(files.mask_path) if files.dims == 2 else read_array(files.mask_path)
        return int(ids[(ids >= 0) & (ids < VOID)].max(initial=0))
    return 0


def _directions(volume: NiftiVolume) -> list[tuple[int, bool]]:
    """For each axis of the array, the world's axis that it follows, and whether upwards."""
    axes = volume.affine[:3, :3]
    main = np.abs(axes).argmax(0)
    return [(int(row), bool(axes[row, column] > 0)) for column, row in enumerate(main)]
