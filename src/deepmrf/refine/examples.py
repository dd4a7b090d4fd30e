"""The images or volumes that a fit learns from: read, checked, and kept in memory as far as they fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.dataset import lookup_table
from deepmrf.data.files import VOID, DataError, read_image, read_mask
from deepmrf.data.folder import read_labels
from deepmrf.data.labels import LabelSet, distinct_colours
from deepmrf.data.progress import Progress
from deepmrf.data.volumes import Spacing, Volume, read_grid, read_volume, read_volume_mask, unit_range
from deepmrf.refine.decode import ids_of, load
from deepmrf.refine.predictions import Coding, Trio, check_size, count_labels, read_with_kind, shown_labels

MEMORY = 4 << 30
"""Bytes of predictions and images that are kept in memory; what is beyond is read again when needed."""
MARKS = 1024
"""Places of foreground that are remembered of each volume."""
UNEVEN = 1.05
"""Spacings that differ by more than this factor get a note."""


@dataclass(frozen=True)
class Sample:
    """One image: log_p (L, H, W) of float16, image (3, H, W) and mask (H, W) of uint8.

    Or one volume: log_p (L, D, H, W) of float16, image (1, D, H, W) of float32 in [0, 1], mask (D, H, W) of uint8.
    """

    stem: str
    log_p: Tensor
    image: Tensor
    mask: Tensor
    spacing: Spacing | None = None
    """Of a volume's voxels."""
    marks: Tensor | None = None
    """Some of a volume's foreground voxels, (M, 3)."""


def open_samples(trios: list[Trio], masks: Path, count: int | None = None) -> Samples:
    """With the labels that labels.json describes (beside the masks or among them), `count`, or as predictions show."""
    for top in (masks, masks.parent):
        if (top / "labels.json").is_file():
            labels, lookup, colours = read_labels(top)
            return Samples(trios, labels, lookup, colours)
    known = count_labels(trio.source for trio in trios) if count is None else count
    labels = LabelSet(tuple(f"label {label}" for label in range(known)), distinct_colours(known))
    samples = Samples(trios, labels, lookup_table({label: label for label in range(known)}), None)
    samples.inferred = count is None
    return samples


class Samples(Sequence[Sample]):
    """The images to learn from, kept in memory as far as they fit."""

    def __init__(self, trios: Sequence[Trio], labels: LabelSet, lookup: Any, colours: Any) -> None:
        self.trios, self.labels, self.lookup, self.colours = list(trios), labels, lookup, colours
        self.kept: dict[str, Sample] = {}
        self.room = MEMORY
        self.coding = None if lookup is None else Coding.of(lookup, len(labels))
        self.inferred = False
        """Are the labels as many as the predictions show?"""
        self.kinds: dict[str, set[str]] = {}
        """What the predictions were taken for, with the names of each kind."""
        self.turned: list[str] = []
        """Volumes whose masks lie otherwise in the world."""

    def __len__(self) -> int:
        return len(self.trios)

    def __getitem__(self, index: Any) -> Any:
        trio = self.trios[index]
        return self.kept.get(trio.stem) or self._read(trio)

    @property
    def kind(self) -> str:
        """What the predictions were taken for; all of it where they differ."""
        return "; ".join(sorted(self.kinds))

    @property
    def dims(self) -> int:
        """2, or 3 for volumes."""
        return self.trios[0].dims if self.trios else 2

    @cached_property
    def grids(self) -> list[tuple[tuple[int, ...], Spacing]]:
        """Size and spacing of each volume."""
        return [read_grid(trio.image) for trio in self.trios]

    @property
    def spacing(self) -> Spacing | None:
        """The median of the volumes' spacings; None for images."""
        if self.dims == 2:
            return None
        middle = np.median([spacing for _, spacing in self.grids], axis=0)
        return float(middle[0]), float(middle[1]), float(middle[2])

    def crop(self, side: int) -> tuple[int, ...]:
        """The size of crops: `side` along each axis, but no more than the largest volume has."""
        if self.dims == 2:
            return side, side
        return tuple(min(side, max(size[axis] for size, _ in self.grids)) for axis in range(3))

    def _read(self, trio: Trio) -> Sample:
        if trio.dims == 3:
            return self._read_volume(trio)
        image = read_image(trio.image)
        assert trio.mask is not None  # match() was given the masks
        with self._remedy(trio):
            mask = read_mask(trio.mask, self.lookup, self.colours)
        log_p = self._prediction(trio)
        check_size(log_p, image.shape[:2], trio.source, trio.image)
        if mask.shape != image.shape[:2]:
            sizes = f"{mask.shape[1]} x {mask.shape[0]} pixels but its image {image.shape[1]} x {image.shape[0]}"
            raise DataError(f"{trio.mask} is {sizes}; make the mask as large as the image.", trio.mask, "size")
        chw = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        return Sample(trio.stem, log_p.half(), chw, torch.from_numpy(mask))

    def _read_volume(self, trio: Trio) -> Sample:
        assert trio.mask is not None  # match() was given the masks
        volume = read_volume(trio.image)
        with self._remedy(trio):
            mask, masks = read_volume_mask(trio.mask, self._ids())
        log_p = self._prediction(trio)
        check_size(log_p, volume.values.shape, trio.source, trio.image)
        if mask.shape != volume.values.shape:
            sizes = " x ".join(map(str, mask.shape)), " x ".join(map(str, volume.values.shape))
            raise DataError(
                f"{trio.mask} is {sizes[0]} voxels but its volume {sizes[1]}; make the mask as large as the volume.",
                trio.mask,
                "size",
            )
        if _axes(volume) != _axes(masks) and trio.stem not in self.turned:
            self.turned.append(trio.stem)
        image = torch.from_numpy(unit_range(volume.values))[None]
        marks = np.argwhere((mask != 0) & (mask != VOID))
        marks = marks[:: max(1, len(marks) // MARKS)]
        return Sample(
            trio.stem, log_p.half(), image, torch.from_numpy(mask), volume.spacing, torch.from_numpy(marks.copy())
        )

    def _prediction(self, trio: Trio) -> Tensor:
        log_p, kind = read_with_kind(trio.source, len(self.labels), self.labels.names, self.coding)
        self.kinds.setdefault(kind, set()).add(trio.stem)
        return log_p

    @contextmanager
    def _remedy(self, trio: Trio) -> Iterator[None]:
        """Label maps need not use the last labels: where they alone told how many there are, the mask may be right."""
        try:
            yield
        except DataError as why:
            sizable = self.inferred and not trio.source.classes and not shown_labels(trio.source)[1]
            highest = max(map(_highest_id, self.trios)) if sizable and why.kind == "id" else 0
            if highest < len(self.labels):
                raise
            raise DataError(
                f"{trio.mask} holds ids that no predicted label map has (those use 0 to {len(self.labels) - 1}); "
                f"give labels={highest + 1} (--labels {highest + 1}), or correct the mask.",
                why.path,
                "id",
            ) from why

    def _ids(self) -> NDArray[np.int16]:
        if self.lookup is None:
            raise ValueError("labels.json describes masks by colours, but volumes hold ids; leave the colours out.")
        table: NDArray[np.int16] = self.lookup
        return table

    def check(self, progress: Progress) -> list[str]:
        """Read every image once; one that is all void teaches nothing and is left out. Returns sentences on these."""
        empty = []
        for done, trio in enumerate(list(self.trios), start=1):
            sample = self._read(trio)
            if bool((sample.mask == VOID).all()):
                empty.append(trio)
            else:
                self.room -= sum(t.nbytes for t in (sample.log_p, sample.image, sample.mask))
                if self.room >= 0:
                    self.kept[trio.stem] = sample
            progress(done, len(self.trios) + len(empty))
        self.trios = [trio for trio in self.trios if trio not in empty]
        self.__dict__.pop("grids", None)
        notes = [f"{len(empty)} of the masks are void throughout: {empty[0].stem} ..."] if empty else []
        if len(self.kinds) > 1:
            told = "; ".join(f"{len(stems)} as {kind} ({min(stems)} ...)" for kind, stems in sorted(self.kinds.items()))
            notes.append(f"The predictions were not all read alike: {told}; save them all alike if that is wrong.")
        return notes + self._notes_on_volumes()

    def _notes_on_volumes(self) -> list[str]:
        if self.dims == 2 or not self.trios:
            return []
        notes = []
        if self.turned:
            notes.append(
                f"{len(self.turned)} of the masks have their axes in other directions than their volumes, by their "
                f"headers: {self.turned[0]} ...; voxels were matched as they lie in the files."
            )
        least, most = (f([spacing for _, spacing in self.grids], axis=0) for f in (np.min, np.max))
        if (most > UNEVEN * least).any():
            low, high = (" x ".join(f"{step:.3g}" for step in steps) for steps in (least, most))
            notes.append(
                f"The volumes' spacings differ, {low} to {high}: the triple penalty measures each volume with its own, "
                "but windows and label contexts count voxels; resample them to one spacing if that is too rough."
            )
        return notes


def _highest_id(trio: Trio) -> int:
    """Of a mask that can be read, void left out; else 0."""
    assert trio.mask is not None  # match() was given the masks
    with suppress(OSError, ValueError):
        ids = ids_of(trio.mask) if trio.dims == 2 else load(trio.mask)
        return int(ids[(ids >= 0) & (ids < VOID)].max(initial=0))
    return 0


def _axes(volume: Volume) -> list[tuple[int, bool]]:
    """Which way each axis of the array points in the world."""
    directions = volume.affine[:3, :3]
    main = np.abs(directions).argmax(0)
    return [(int(row), bool(directions[row, axis] > 0)) for axis, row in enumerate(main)]
