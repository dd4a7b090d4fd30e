"""Write refined label maps and, on request, probabilities into a folder.

    OUT/STEM.png    the label ids with their colours as a palette; of binary and soft masks, grey 0 and 255
    OUT/STEM.npy    probabilities (L, H, W) of float16, with probabilities="npy"; or OUT/STEM.npz, compressed

Of volumes (NIfTI), OUT/STEM.nii.gz holds the label ids on the volume's own grid, and probabilities are (L, D, H, W).
Label maps hold the labels 0 .. L-1, or the ids of a LabelIds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from deepmrf.data.files import VOID, Bytes
from deepmrf.data.labels import LabelSet
from deepmrf.data.volumes import NiftiVolume, write_labels
from deepmrf.data.writing import replacing
from deepmrf.refine.label_ids import BINARY, SOFT, LabelIds
from deepmrf.refine.matching import MatchedFiles

Probabilities = Literal["", "npy", "npz"]


class ResultWriter:
    """Writes the results into a folder; the label map comes last, so that it says that all is there."""

    def __init__(
        self, folder: Path, labels: LabelSet, label_ids: LabelIds | None, probabilities: Probabilities
    ) -> None:
        self.folder, self.labels, self.label_ids, self.probabilities = folder, labels, label_ids, probabilities

    def has_written(self, files: MatchedFiles) -> bool:
        """Are all results of this image there?"""
        return self._map_path(files).exists() and (not self.probabilities or self._p_path(files).exists())

    def write(self, files: MatchedFiles, labels: Tensor, p: Tensor | None, volume: NiftiVolume | None) -> None:
        """Write labels (*S) of uint8 and perhaps probabilities (L, *S) of an image, or of a volume."""
        if p is not None:
            _write_array(p, self._p_path(files))
        if volume is not None:
            write_labels(self._to_ids(labels), self._map_path(files), volume)
            return
        picture = Image.fromarray(self._to_ids(labels))
        if self.label_ids not in (BINARY, SOFT):
            picture.putpalette(self._palette().tobytes())
        with replacing(self._map_path(files)) as file:
            picture.save(file, format="PNG")

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
