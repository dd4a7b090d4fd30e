"""Reading images and masks from files, whatever their format, or saying in one sentence why not."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.labels import Colour

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = NDArray[np.uint8]

VOID = 255
"""The id of void in every mask that this package returns."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".gif")
"""The endings, in lower case, by which a file counts as an image."""


class DataError(ValueError):
    """A file that cannot be used: `kind` says why, `path` which."""

    def __init__(self, message: str, path: Path, kind: Literal["unreadable", "size", "id"]) -> None:
        super().__init__(message)
        self.path, self.kind = path, kind

    def __reduce__(self) -> tuple[type[DataError], tuple[object, ...]]:
        return type(self), (str(self), self.path, self.kind)  # so that it crosses from a worker process


def images_in(folder: Path) -> list[Path]:
    """The images directly in a folder, sorted by name, hidden files left out."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def read_list(path: Path, whole: bool = False) -> list[str]:
    """The names in a list of one image per line, less the ending; folders and a second column go too unless `whole`."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text; write one image name per line in UTF-8.", path, "unreadable") from None
    names = []
    for line in lines:
        if line.strip():
            name = line.strip() if whole else line.split()[0].replace("\\", "/").rsplit("/", 1)[-1]
            stem, dot, ending = name.rpartition(".")
            names.append(stem if dot and f".{ending.lower()}" in SUFFIXES else name)
    return names


@contextmanager
def _opened(path: Path) -> Iterator[Image]:
    """The image, decoded; all that Pillow raises for a bad file becomes a DataError."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("Reading images needs Pillow; install it with: pip install pillow") from None

    try:
        with Image.open(path) as picture:
            picture.load()
            yield picture
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; put it there or take it off the list of images.") from None
    except DataError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError) as why:
        reason = str(why).rstrip(".").replace(str(path), "it")
        raise DataError(f"{path} cannot be read as an image ({reason}); replace the file.", path, "unreadable") from why


def read_image(path: Path) -> Bytes:
    """An image file as RGB (H, W, 3), turned upright by its EXIF tag; 16 bits become 8, see-through becomes white."""
    with _opened(path) as picture:
        from PIL import Image, ImageOps

        picture = ImageOps.exif_transpose(picture)
        if picture.mode.startswith("I") or picture.mode == "F":
            values = np.asarray(picture)
            if values.min() < 0 or values.max() > 65535 or picture.mode == "F":
                needed = "convert it to 8 or 16 bits"
                raise DataError(f"{path} holds {picture.mode!r} values beyond 16 bits; {needed}.", path, "unreadable")
            grey = (values.astype(np.uint32) >> 8).astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        return np.array(picture.convert("RGB"))


def read_mask(path: Path, lookup: NDArray[np.int16] | None, colours: Mapping[Colour, int] | None) -> Bytes:
    """A mask file as ids (H, W): 8-bit ids go through `lookup` (256,), -1 being an error, colours through `colours`."""
    with _opened(path) as picture:
        if lookup is not None and picture.mode in ("1", "L", "P"):
            return _map_ids(np.array(picture, dtype=np.uint8), lookup, path)
        if colours is not None and picture.mode in ("P", "RGB", "RGBA"):
            return _map_colours(np.array(picture.convert("RGB")), colours, path)
        if lookup is not None and picture.mode == "RGB":
            channels = np.array(picture)
            if (channels == channels[..., :1]).all():  # a grey mask that some tool saved as colour
                return _map_ids(channels[..., 0], lookup, path)
        needed = "colours of the label set" if lookup is None else "8-bit ids, grey or palette"
        raise DataError(f"{path} is a mask of mode {picture.mode}; save it as PNG with {needed}.", path, "unreadable")


def _map_ids(ids: Bytes, lookup: NDArray[np.int16], path: Path) -> Bytes:
    mapped = lookup[ids]
    if mapped.size and mapped.min() < 0:
        wrong = sorted(set(ids[mapped < 0].tolist()))
        known = _ranges(np.flatnonzero(lookup >= 0).tolist())
        raise DataError(f"{path} holds the id {_some(wrong)}, but the ids here are {known}; correct it.", path, "id")
    return mapped.astype(np.uint8)


def _map_colours(rgb: Bytes, colours: Mapping[Colour, int], path: Path) -> Bytes:
    weights = np.array([65536, 256, 1], dtype=np.int32)
    codes = rgb.astype(np.int32) @ weights  # (H, W): one int per colour
    known = np.array(sorted(colours), dtype=np.int32)  # in the order of their codes
    ids = np.array([colours[colour] for colour in sorted(colours)], dtype=np.uint8)
    place = np.searchsorted(known @ weights, codes).clip(max=len(known) - 1)
    wrong = (known @ weights)[place] != codes
    if wrong.any():
        odd = sorted({tuple(colour) for colour in rgb[wrong].tolist()})
        needed = f"the {len(known)} colours known here"
        raise DataError(f"{path} holds the colour {_some(odd)}, which is none of {needed}; correct it.", path, "id")
    mapped: Bytes = ids[place]
    return mapped


def _some(values: Sequence[object]) -> str:
    shown = ", ".join(str(value) for value in values[:5])
    return shown if len(values) <= 5 else f"{shown} and {len(values) - 5} more"


def _ranges(ids: list[int]) -> str:
    """[0, 1, 2, 255] as "0 to 2, 255"."""
    parts, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            parts.append(str(ids[start]) if end - start == 1 else f"{ids[start]} to {ids[end - 1]}")
            start = end
    return ", ".join(parts)
