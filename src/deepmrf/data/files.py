"""Reading images and masks from files, whatever their format, or saying in one sentence why not."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
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
ORIENTATION = 0x0112
"""The EXIF tag that says which way is up."""

_opening = threading.Lock()
"""Held while Pillow's limit, which all threads share, is set aside."""


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
def _sentences(path: Path) -> Iterator[None]:
    """All that Pillow and the system raise for a bad file, as a DataError."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; put it there or take it off the list of images.") from None
    except (DataError, MemoryError, ImportError):
        raise
    except Exception as why:  # a broken file makes decoders raise nearly anything
        raise _unreadable(path, _reason(why, path)) from why


@contextmanager
def _opened(path: Path, max_pixels: int | None = None) -> Iterator[Image]:
    """The image, decoded, or a DataError."""
    with ExitStack() as stack:
        with _sentences(path):
            picture = stack.enter_context(_open(path, max_pixels))
            picture.load()
        yield picture


def _check_file(path: Path) -> None:
    """A pipe would be waited for without end, and an empty file is best called so."""
    facts = path.stat()
    if stat.S_ISDIR(facts.st_mode):
        raise _unreadable(path, "it is a folder")
    if not stat.S_ISREG(facts.st_mode):
        raise _unreadable(path, "it is no regular file")
    if facts.st_size == 0:
        raise _unreadable(path, "the file is empty")


def _open(path: Path, max_pixels: int | None) -> Image:
    """The header alone: formats that run other programs are left out, and sizes are judged before anything decodes."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("Reading images needs Pillow; install it with: pip install pillow") from None

    _check_file(path)
    if max_pixels is None:
        return Image.open(path, formats=_formats())  # Pillow's own limit holds
    with _opening:
        pillows, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            picture = Image.open(path, formats=_formats())
        finally:
            Image.MAX_IMAGE_PIXELS = pillows
    width, height = picture.size
    if width * height > max_pixels:
        picture.close()
        size, most = f"{width} x {height} pixels", f"{max_pixels / 1e6:,.4g} million"
        remedy = "make it smaller, cut it up or raise max_pixels (--max-pixels)"
        raise DataError(f"{path} has {size}, more than {most}, and was not read; {remedy}.", path, "unreadable")
    return picture


@cache
def _formats() -> tuple[str, ...]:
    later = ("AVIF",) if find_spec("PIL.AvifImagePlugin") else ()
    return ("PNG", "JPEG", "PPM", "GIF", "BMP", "DIB", "TIFF", "WEBP", "JPEG2000", *later)


def _reason(why: Exception, path: Path) -> str:
    if type(why).__name__ == "UnidentifiedImageError":
        return "its content is no image format that is known here"
    text = why.strerror if isinstance(why, OSError) and why.strerror else str(why) or type(why).__name__
    return text.replace(str(path), "it").splitlines()[0].rstrip(".")


def _unreadable(path: Path, reason: str) -> DataError:
    remedy = "allow reading it" if reason == os.strerror(errno.EACCES) else "replace the file"
    return DataError(f"{path} cannot be read as an image ({reason}); {remedy}.", path, "unreadable")


def image_size(path: Path, max_pixels: int | None = None) -> tuple[int, int, bool]:
    """(height, width, has it several frames), by the header alone and before EXIF turns it; or a DataError."""
    with _sentences(path), _open(path, max_pixels) as picture:
        animated = False
        with suppress(Exception):  # looking for a second frame may meet its errors
            animated = bool(getattr(picture, "is_animated", False))
        return picture.height, picture.width, animated


def read_image(path: Path, max_pixels: int | None = None) -> Bytes:
    """An image file as RGB (H, W, 3), turned upright by its EXIF tag; 16 bits become 8, see-through becomes white.

    Of an animation, the first frame. More than `max_pixels` (Pillow's own limit unless given) are refused unread.
    """
    with _opened(path, max_pixels) as picture:
        return to_rgb(picture, path)


def to_rgb(picture: Image, path: Path) -> Bytes:
    """A Pillow image of any mode as RGB (H, W, 3); `path` is its name in errors."""
    from PIL import Image, ImageOps

    with suppress(Exception):  # a broken EXIF block says nothing about which way is up
        if picture.getexif().get(ORIENTATION, 1) != 1:  # asked first, since it makes a copy
            picture = ImageOps.exif_transpose(picture)
    try:
        if picture.mode.startswith("I") or picture.mode == "F":
            values = np.asarray(picture)
            if values.min() < 0 or values.max() > 65535 or picture.mode == "F":
                needed = "convert it to 8 or 16 bits"
                raise DataError(f"{path} holds {picture.mode!r} values beyond 16 bits; {needed}.", path, "unreadable")
            bits = 8 if values.max() > 255 else 0  # 8-bit values in a wider type are no night picture
            grey = (values.astype(np.uint32) >> bits).astype(np.uint8)
            return np.repeat(grey[..., None], 3, axis=2)
        if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        if picture.mode != "RGB":
            picture = _from_lab(picture) if picture.mode == "LAB" else picture.convert("RGB")
        return np.array(picture)
    except (DataError, MemoryError):
        raise
    except Exception as why:
        raise _unreadable(path, _reason(why, path)) from why


def _from_lab(picture: Image) -> Image:
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    made = ImageCms.profileToProfile(picture, lab, rgb, outputMode="RGB")
    assert made is not None  # not in place
    return made


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
