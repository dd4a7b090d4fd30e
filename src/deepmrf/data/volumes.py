"""Read and write volumes as NIfTI files, .nii or .nii.gz, with nibabel.

    volume = read_volume(Path("brain.nii.gz"))      # values (D, H, W) with D, H, W the file's axes i, j, k
    write_labels(ids, Path("labels.nii.gz"), volume)

No axis is turned or resampled: a written file has the grid, affine and units of the volume it belongs to.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.extras import optional
from deepmrf.data.files import VOID, Bytes, DataError, map_ids, reading
from deepmrf.data.writing import write_bytes

SUFFIXES = (".nii.gz", ".nii")
"""File name endings of volumes, in lower case."""
PERCENTILES = (1.0, 99.0)
"""Percentiles of the intensities that become 0 and 1, so that a few bright voxels do not darken all others."""
PERCENTILE_VOXELS = 1 << 20
"""About how many voxels, evenly spread, the percentiles are computed from."""

Spacing = tuple[float, float, float]


@dataclass(frozen=True)
class NiftiVolume:
    """The content of a NIfTI file."""

    path: Path
    values: NDArray[Any]
    """(D, H, W), or (D, H, W, L) for one map per label."""
    spacing: Spacing
    """Distance between voxels along D, H and W from the header (pixdim), usually in mm."""
    affine: NDArray[np.float64]
    """The map (4, 4) from voxels to the world."""
    header: Any
    """nibabel's, for files on the same grid."""


def is_volume(path: Path) -> bool:
    """Return whether the file name has an ending of NIfTI files."""
    return path.name.lower().endswith(SUFFIXES)


def stem(path: Path) -> str:
    """Return the name without .nii or .nii.gz."""
    for suffix in SUFFIXES:
        if path.name.lower().endswith(suffix):
            return path.name[: -len(suffix)]
    return path.stem


def volumes_in(folder: Path) -> list[Path]:
    """List the NIfTI files directly in a folder, sorted by name, without hidden files."""
    return sorted(p for p in folder.iterdir() if is_volume(p) and not p.name.startswith("."))


def _nibabel() -> Any:
    return optional("nibabel", "NIfTI volumes need", "volumes")


def _opened(path: Path) -> Any:
    """Open a file with nibabel, which reads its values later."""
    nibabel = _nibabel()
    with reading(path, "a NIfTI volume"):
        return nibabel.load(path)


def _size(shape: tuple[int, ...], path: Path, several: bool) -> tuple[int, ...]:
    """Drop axes of length 1 behind the third, and check: (D, H, W), or also (D, H, W, L) with `several`."""
    if len(shape) > 3:
        shape = shape[:3] + tuple(n for n in shape[3:] if n != 1)
    if len(shape) < 3 or not math.prod(shape):
        raise DataError(f"{path} has shape {shape}; save a volume of three axes.", path, "size")
    if len(shape) > (4 if several else 3):
        content = "one map per label along the fourth axis" if several else "one volume per file"
        raise DataError(f"{path} has shape {shape}; save {content}.", path, "size")
    return shape


def _spacing(image: Any, path: Path) -> Spacing:
    zooms = [float(zoom) for zoom in image.header.get_zooms()[:3]]
    if not all(0 < zoom < math.inf for zoom in zooms):  # fall back on the affine
        zooms = [float(length) for length in np.sqrt((image.affine[:3, :3] ** 2).sum(0))]
    if not all(0 < zoom < math.inf for zoom in zooms):
        raise DataError(f"{path} gives no distance between its voxels; correct pixdim.", path, "unreadable")
    return zooms[0], zooms[1], zooms[2]


def read_grid(path: Path) -> tuple[tuple[int, ...], Spacing]:
    """Read shape and spacing of a file from its header alone."""
    image = _opened(path)
    return _size(tuple(image.shape), path, several=True), _spacing(image, path)


def read_volume(path: Path, several: bool = False) -> NiftiVolume:
    """Read a volume (D, H, W) or, with `several`, also one map per label (D, H, W, L)."""
    image = _opened(path)
    with reading(path, "a NIfTI volume"):
        values = np.asanyarray(image.dataobj)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{path} holds {values.dtype} values; save one number per voxel.", path, "unreadable")
    values = values.reshape(_size(values.shape, path, several))
    return NiftiVolume(path, values, _spacing(image, path), np.asarray(image.affine, np.float64), image.header)


def whole_numbers(values: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return the values as ints, or None if any of them is not a whole number."""
    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    if not np.isfinite(values).all() or (values != np.round(values)).any():
        return None
    return values.astype(np.int64)


def read_volume_mask(
    path: Path, lookup: NDArray[np.int16], labels_json: Path | None = None
) -> tuple[Bytes, NiftiVolume]:
    """Read a file of label ids as labels (D, H, W) by `lookup`, as read_mask does; return the volume too."""
    volume = read_volume(path)
    ids = whole_numbers(volume.values)
    if ids is None:
        raise DataError(f"{path} holds fractions, but a mask needs label ids; save whole numbers.", path, "id")
    wrong = ids[(ids < 0) | (ids > VOID)]
    if wrong.size:
        raise DataError(f"{path} holds the id {int(wrong[0])}; save ids of 0 to 255, where 255 is void.", path, "id")
    return map_ids(ids.astype(np.uint8), lookup, path, labels_json), volume


def unit_range(values: NDArray[Any]) -> NDArray[np.float32]:
    """Scale intensities so that their 1st and 99th percentile are 0 and 1, and clip; NaN becomes 0."""
    flat = values.reshape(-1)[:: max(1, values.size // PERCENTILE_VOXELS)]
    finite = flat[np.isfinite(flat)].astype(np.float64)
    low, high = np.percentile(finite, PERCENTILES) if finite.size else (0.0, 1.0)
    if high <= low:  # nearly all voxels are equal, as in a mask
        low, high = finite.min(), finite.max()
    scale = 1 / (high - low) if high > low else 1.0
    scaled = (values.astype(np.float32) - np.float32(low)) * np.float32(scale)
    filled: NDArray[np.float32] = np.nan_to_num(scaled, nan=0.0, posinf=1.0, neginf=0.0, copy=False)
    return np.clip(filled, 0, 1, out=filled)


def write_labels(ids: Bytes, path: Path, like: NiftiVolume) -> None:
    """Write label ids (D, H, W) atomically on the grid of `like`; .nii.gz is compressed, .nii is not."""
    nibabel = _nibabel()
    header = like.header.copy()
    header.set_data_dtype(np.uint8)
    for field in ("cal_min", "cal_max", "glmin", "glmax"):  # they describe intensities
        if field in header:
            header[field] = 0
    kind = nibabel.Nifti2Image if header["sizeof_hdr"] == 540 else nibabel.Nifti1Image
    content = kind(np.ascontiguousarray(ids, np.uint8), like.affine, header).to_bytes()
    if path.name.lower().endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    write_bytes(path, content)
