"""Notes in result files: a text field of each label map (PNG) says which model made it, of which image, with what.

By its note, a second run knows what is done and what the labels cover, a result is not taken for an image, and a file
of another kind is not taken for a result and replaced.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from deepmrf.data.files import opened, reading

FIELD = "deepmrf"
"""The text field of label maps, and the comment of overlays and archives."""
MASK = f"{FIELD} mask"
"""The text field of masks, which holds their label."""
OVERLAY = "_overlay.jpg"
"""How the name of an overlay ends."""
HEADER_BYTES = 16384
"""Bytes at the start of a file in which palette, texts and comments lie."""
TAIL_BYTES = 22 + len(FIELD)
"""Bytes at the end of an archive that end with our comment, after ZIP's end record."""


@dataclass(frozen=True)
class Note:
    """What is written into a label map; the names of the fields are part of the file format."""

    by: str
    """The identity of models and settings."""
    of: str
    """The image: see `image_key`."""
    beside: tuple[str, ...]
    """The kinds of files that were written with it: "overlay", "probabilities", "masks"."""
    pixels: tuple[int, ...]
    """Number of pixels per label."""
    confidences: tuple[float, ...]
    """Sum of their confidences, per label."""

    def text(self) -> str:
        """The note as one line."""
        return json.dumps(asdict(self), separators=(",", ":"))


def image_key(path: Path) -> str:
    """A few letters that differ for other files, and for this one once it has changed."""
    facts = os.stat(path)
    name = os.fsencode(os.path.realpath(path))
    return blake2b(b"%s %d %d" % (name, facts.st_size, facts.st_mtime_ns), digest_size=8).hexdigest()


def read_note(path: Path) -> tuple[Note, tuple[int, int]] | None:
    """Read the note of a label map, and its (height, width); None where there is no readable one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        with opened(path, sys.maxsize) as picture:  # Pillow's own limit is 179 million pixels
            values = json.loads(picture.info[FIELD])
            size = picture.height, picture.width
        pixels, sums = tuple(map(int, values["pixels"])), tuple(map(float, values["confidences"]))
        return Note(str(values["by"]), str(values["of"]), tuple(map(str, values["beside"])), pixels, sums), size
    return None


def is_label_map(path: Path, note: str = "") -> bool:
    """Did deepmrf write this file as a label map, with a note that begins so? Reads its first bytes alone."""
    return _holds_text(path, f"{FIELD}\0\0\0\0\0{note}")


def is_mask(path: Path) -> bool:
    """Did deepmrf write this file as the mask of a label? Reads its first bytes alone."""
    return _holds_text(path, f"{MASK}\0")


def _holds_text(path: Path, *beginnings: str) -> bool:
    """Is this a PNG file with a text field that begins so, its name first?"""
    head = _head(path)
    return head.startswith(b"\x89PNG") and any(f"iTXt{text}".encode() in head for text in beginnings)


def _head(path: Path) -> bytes:
    """The first bytes of a file; none where it cannot be read or is a pipe, which would block without end."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(HEADER_BYTES)
    return b""


def is_result(path: Path) -> bool:
    """Is this a label map, a mask or an overlay that deepmrf wrote, and so no image to segment?"""
    name = path.name.lower()
    if name.endswith(".png"):
        return _holds_text(path, f"{FIELD}\0", f"{MASK}\0")
    return name.endswith(OVERLAY) and is_overlay(path)


def not_ours(labels: Path, companions: list[Path]) -> Path | None:
    """The first of these files that exists and that deepmrf did not write; what our label map names is ours."""
    if has_content(labels) and not is_label_map(labels):
        return labels
    noted = read_note(labels)
    named = () if noted is None else noted[0].beside
    for path in companions:
        if path.suffix == ".png":  # a mask: the label map does not name its label
            is_named, ours = False, is_mask
        elif path.name.endswith(OVERLAY):
            is_named, ours = "overlay" in named, is_overlay
        else:
            is_named, ours = "probabilities" in named, _is_probabilities
        if not is_named and has_content(path) and not ours(path):
            return path
    return None


def has_content(path: Path) -> bool:
    """Could something be lost? Not with an empty file: a crash may leave one."""
    return path.exists() and (not path.is_file() or path.stat().st_size > 0)


def overlay_comment(legend: bool) -> str:
    """The comment of an overlay with or without a legend."""
    return f"{FIELD} legend" if legend else FIELD


def is_overlay(path: Path, legend: bool | None = None) -> bool:
    """Did deepmrf write this overlay; if told, with or without a legend? Reads its first bytes alone."""
    head = _head(path)
    ours = b"\xff\xfe" in head and FIELD.encode() in head
    return ours and legend in (None, overlay_comment(True).encode() in head)


def _is_probabilities(path: Path) -> bool:
    """Did deepmrf write this archive? Reads its last bytes alone, which hold its comment."""
    with suppress(OSError, ValueError), reading(path), path.open("rb") as file:
        file.seek(-TAIL_BYTES, os.SEEK_END)
        tail = file.read()
        return tail.startswith(b"PK\5\6") and tail.endswith(FIELD.encode())
    return False
