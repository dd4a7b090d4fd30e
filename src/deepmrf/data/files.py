"""Read image and mask files of many formats; errors say in one sentence what is wrong with the file."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, UnidentifiedImageError

from deepmrf.data.colours import Colour

Bytes = NDArray[np.uint8]

VOID = 255
"""The id of void in every mask that this package returns."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".gif")
"""File name endings of images, in lower case."""
LOSSY = (".jpg", ".jpeg", ".webp")
"""Endings of formats that change label ids."""
CITYSCAPES_OBJECTS = 1000
"""Cityscapes numbers objects as class id * 1000 + number."""
ORIENTATION = 0x0112
"""The EXIF tag for which way is up."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What brings a picture with this value of the tag upright."""
LYING, LAST_ROW_FIRST = (5, 6, 7, 8), (3, 4, 6, 7)
"""Values of the tag whose rows become columns, and those whose last row, or column, becomes the first."""
MAX_IDS_DESCRIBED = 5
"""A file of more unknown ids is probably no mask."""
PIXELS_AT_A_TIME = 1 << 22
"""Pixels that are converted to RGB together."""

_pillow_limit = threading.Lock()
"""Guards Image.MAX_IMAGE_PIXELS and the next list."""
_lifted_limits: list[int | None] = []
"""The first is the limit to come back to; there are as many as blocks that need none."""


class DataError(ValueError):
    """A file that cannot be used."""

    def __init__(self, message: str, path: Path, kind: Literal["unreadable", "size", "id"]) -> None:
        super().__init__(message)
        self.path, self.kind = path, kind

    def __reduce__(self) -> tuple[type[DataError], tuple[object, ...]]:
        return type(self), (str(self), self.path, self.kind)  # for worker processes


def images_in(folder: Path) -> list[Path]:
    """List the images directly in a folder, sorted by name, without hidden files."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def read_list(path: Path, full_lines: bool = False) -> list[str]:
    """Return the names in a list of images, without their endings; full_lines: a line is one name, with folders."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text; write one image name per line in UTF-8.", path, "unreadable") from None
    names = []
    for line in lines:
        if line.strip():
            name = line.strip() if full_lines else line.split()[0].replace("\\", "/").rsplit("/", 1)[-1]
            stem, dot, ending = name.rpartition(".")
            names.append(stem if dot and f".{ending.lower()}" in SUFFIXES else name)
    return names


@contextmanager
def reading(path: Path, kind: str = "an image", remedy: str = "replace the file") -> Iterator[None]:
    """Refuse folders, pipes, devices and empty files; turn what decoders raise for a bad file into a DataError."""
    with _explaining(path, kind, remedy):
        facts = path.stat()
        if stat.S_ISDIR(facts.st_mode):
            raise ValueError("it is a folder")
        if not stat.S_ISREG(facts.st_mode):  # a pipe would block without end
            raise ValueError("it is no regular file")
        if facts.st_size == 0:
            raise ValueError("the file is empty")
        yield


@contextmanager
def _explaining(path: Path, kind: str = "an image", remedy: str = "replace the file") -> Iterator[None]:
    """Turn what decoders and the system raise for a bad file of this kind into a DataError."""
    try:
        yield
    except FileNotFoundError:
        files = f"{kind.split()[-1]}s"
        raise FileNotFoundError(f"{path} does not exist: check its name, or take it off the list of {files}.") from None
    except (DataError, MemoryError, ImportError):
        raise
    except Exception as error:  # a broken file makes decoders raise nearly anything
        reason = one_line(error).replace(str(path), "it")
        if isinstance(error, UnidentifiedImageError):
            reason = "its content is no image format that is known here"
        if reason == os.strerror(errno.EACCES):
            remedy = "allow reading it"
        raise DataError(f"{path} cannot be read as {kind} ({reason}); {remedy}.", path, "unreadable") from error


def one_line(error: BaseException) -> str:
    """Return what an error says, in one line: without the system's error numbers, or its type where it says nothing."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].rstrip(".: ")


@contextmanager
def decoded(path: Path, max_pixels: int | None = None) -> Iterator[Image.Image]:
    """Open an image and decode it, or raise a DataError."""
    with opened(path, max_pixels) as picture:
        with _explaining(path):
            picture.load()
        yield picture


@contextmanager
def opened(path: Path, max_pixels: int | None = None) -> Iterator[Image.Image]:
    """Read the header of an image, and refuse one of more pixels; None is Pillow's own limit, 179 million."""
    with ExitStack() as stack:
        if max_pixels is not None:
            stack.enter_context(_without_pillow_limit())
        with reading(path):
            picture = stack.enter_context(Image.open(path, formats=_formats()))
        width, height = picture.size
        if max_pixels is not None and width * height > max_pixels:
            sizes = f"{width} x {height} pixels, more than {max_pixels / 1e6:,.4g} million"
            remedy = "make it smaller, cut it up or raise max_pixels"
            raise DataError(f"{path} has {sizes}, and was not read; {remedy}.", path, "unreadable")
        yield picture


@contextmanager
def _without_pillow_limit() -> Iterator[None]:
    """Lift Image.MAX_IMAGE_PIXELS, which all threads share, until the last of them leaves this block."""
    with _pillow_limit:
        _lifted_limits.append(Image.MAX_IMAGE_PIXELS)
        Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        with _pillow_limit:
            if len(_lifted_limits) == 1:
                Image.MAX_IMAGE_PIXELS = _lifted_limits[0]
                _lifted_limits.clear()
            else:
                _lifted_limits.pop()


@cache
def _formats() -> tuple[str, ...]:
    newer = ("AVIF",) if find_spec("PIL.AvifImagePlugin") else ()
    return ("PNG", "JPEG", "PPM", "GIF", "BMP", "DIB", "TIFF", "WEBP", "JPEG2000", *newer)


def image_size(path: Path, max_pixels: int | None = None) -> tuple[int, int, bool]:
    """Read (height, width, has it several frames) from the header alone, before EXIF turns the image."""
    with opened(path, max_pixels) as picture:
        animated = False
        with suppress(Exception):  # the second frame may be broken
            animated = bool(getattr(picture, "is_animated", False))
        return picture.height, picture.width, animated


def read_image(path: Path, max_pixels: int | None = None) -> Bytes:
    """Read an image file as RGB (H, W, 3), turned upright by its EXIF tag; 16 bits become 8, transparent becomes white.

    Of an animation, the first frame. max_pixels: refuse larger images before decoding; None is Pillow's own limit.
    """
    with decoded(path, max_pixels) as picture:
        return to_rgb(picture, path)


def to_rgb(picture: Image.Image, path: Path) -> Bytes:
    """Convert a Pillow image of any mode to RGB (H, W, 3), in bands to save memory; `path`: its name in errors."""
    turn = 1
    with suppress(Exception):  # ignore a broken EXIF block
        turn = picture.getexif().get(ORIENTATION, 1)
    with _explaining(path):
        is_deep = picture.mode.startswith("I") or picture.mode == "F"
        convert = partial(_from_16_bits, shift=_shift_of(picture, path)) if is_deep else _from_8_bits
        width, height = picture.size
        lies = turn in LYING
        image = np.empty((width, height, 3) if lies else (height, width, 3), np.uint8)
        for top, band in _bands(picture):
            converted = convert(band)
            if turn in TURNS:
                converted = converted.transpose(TURNS[turn])
            start = height - top - band.height if turn in LAST_ROW_FIRST else top
            part = slice(start, start + band.height)
            values = np.asarray(converted)  # (h, w, 3), or (h, w) if grey
            image[(slice(None), part) if lies else part] = values if values.ndim == 3 else values[..., None]
        return image


def _bands(picture: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield (first row, band) of a picture from top to bottom."""
    rows = max(1, PIXELS_AT_A_TIME // picture.width)
    for top in range(0, picture.height, rows):
        yield top, picture.crop((0, top, picture.width, min(top + rows, picture.height)))


def _shift_of(picture: Image.Image, path: Path) -> int:
    """Return the bits to drop from 16-bit values; 8-bit values in a wider type stay as they are."""
    bands = (np.asarray(band) for _, band in _bands(picture))
    extrema = np.array([(values.min(), values.max()) for values in bands])
    if picture.mode == "F" or extrema.min() < 0 or extrema.max() > 65535:
        message = f"{path} holds {picture.mode!r} values beyond 16 bits; convert it to 8 or 16 bits."
        raise DataError(message, path, "unreadable")
    return 8 if extrema.max() > 255 else 0


def _from_16_bits(picture: Image.Image, shift: int) -> Image.Image:
    return Image.fromarray((np.asarray(picture).astype(np.uint32) >> shift).astype(np.uint8))


def _from_8_bits(picture: Image.Image) -> Image.Image:
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    if picture.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        converted = ImageCms.profileToProfile(picture, lab, srgb, outputMode="RGB")
        assert converted is not None  # it is only when converted in place
        return converted
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def read_mask(
    path: Path,
    lookup: NDArray[np.int16] | None,
    colours: Mapping[Colour, int] | None,
    labels_json: Path | None = None,
) -> Bytes:
    """Read a mask as labels (H, W): 8-bit ids by `lookup` (256,), where -1 is an error, or colours by `colours`.

    labels_json: the file that describes the labels, or would, for errors to name.
    """
    with decoded(path) as picture:
        if lookup is not None and picture.mode in ("1", "L", "P"):
            return map_ids(np.array(picture, dtype=np.uint8), lookup, path, labels_json)
        if colours is not None and picture.mode in ("P", "RGB", "RGBA"):
            return _map_colours(np.array(picture.convert("RGB")), colours, path, labels_json)
        if lookup is not None and picture.mode == "RGB":
            channels = np.array(picture)
            if (channels == channels[..., :1]).all():  # a grey mask saved as RGB
                return map_ids(channels[..., 0], lookup, path, labels_json)
        needed = "colours of the label set" if lookup is None else "8-bit ids, grey or palette"
        if labels_json is not None and picture.mode in ("RGB", "RGBA"):
            needed += f', or write the "colours" of the labels into {labels_json}'
        raise DataError(f"{path} is a mask of mode {picture.mode}; save it as PNG with {needed}.", path, "unreadable")


def read_objects(path: Path) -> NDArray[np.int32]:
    """Read the number of each pixel's object (H, W), 0 for none.

    8-bit files are VOC's: 255 is void. Others are Cityscapes': numbers below 1000 are classes whose objects are not
    told apart.
    """
    with decoded(path) as picture:
        numbers = np.array(picture).astype(np.int32)
        if numbers.ndim != 2:
            raise DataError(f"{path} has mode {picture.mode}; save object numbers as grey.", path, "unreadable")
        numbers[numbers == VOID if picture.mode in ("1", "L", "P") else numbers < CITYSCAPES_OBJECTS] = 0
        return numbers


def map_ids(ids: Bytes, lookup: NDArray[np.int16], path: Path, labels_json: Path | None = None) -> Bytes:
    """Replace ids by labels through `lookup` (256,); -1 there is an error, which names labels_json."""
    mapped = lookup[ids]
    if mapped.size and mapped.min() < 0:
        wrong = sorted(set(ids[mapped < 0].tolist()))
        known = _ranges(np.flatnonzero(lookup >= 0).tolist())
        remedy = "correct the mask" if labels_json is None else _describe_ids(wrong, lookup, labels_json)
        if path.suffix.lower() in LOSSY:
            remedy = "its format is lossy, which changes ids: save masks as PNG"
        raise DataError(f"{path} holds the id {shortened(wrong)}, but the ids here are {known}; {remedy}.", path, "id")
    return mapped.astype(np.uint8)


def _describe_ids(wrong: Sequence[int], lookup: NDArray[np.int16], labels_json: Path) -> str:
    """What to write into labels.json so that these ids have a meaning; so many have none, as in a grey photograph."""
    if len(wrong) > MAX_IDS_DESCRIBED:
        return f"this is probably a picture, no mask (label ids): give its mask, or name these labels in {labels_json}"
    void = sorted({*wrong, *np.flatnonzero(lookup == VOID).tolist()} - {VOID})
    ignore = f'"ignore": {void[0] if len(void) == 1 else void}'
    if labels_json.is_file():
        return f"write {ignore} into {labels_json} if this is void, or add names there if these are labels"
    names = [f"label {label}" for label in sorted({*lookup[lookup >= 0].tolist()} - {VOID})]
    return f'if this is void, write {{"names": {json.dumps(names)}, {ignore}}} into {labels_json}, with your names'


def _map_colours(rgb: Bytes, colours: Mapping[Colour, int], path: Path, labels_json: Path | None) -> Bytes:
    weights = np.array([65536, 256, 1], dtype=np.int32)
    codes = rgb.astype(np.int32) @ weights  # (H, W): one int per colour
    ordered = sorted(colours)  # by their codes
    known_codes = np.array(ordered, dtype=np.int32) @ weights
    index = np.searchsorted(known_codes, codes).clip(max=len(ordered) - 1)
    wrong = known_codes[index] != codes
    if wrong.any():
        unknown = shortened(sorted({tuple(colour) for colour in rgb[wrong].tolist()}))
        remedy = "paint it without smooth edges"
        if labels_json is not None:
            remedy += f", or add names and colours to {labels_json}"
        message = (
            f"{path} holds the colour {unknown}, which is none of the {len(ordered)} colours known here; {remedy}."
        )
        raise DataError(message, path, "id")
    labels: Bytes = np.array([colours[colour] for colour in ordered], dtype=np.uint8)[index]
    return labels


def shortened(values: Sequence[object]) -> str:
    """Return the first five values, and how many more there are."""
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
