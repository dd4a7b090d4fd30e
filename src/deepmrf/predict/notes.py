"""What a label map says of itself: a text field of its PNG file tells which model made it, of which image, with what.

So a second run knows what is done and what was found there, no result is taken for an image, and no file of another
kind is taken for a result and replaced.
"""

from __future__ import annotations

import json
import os
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

FIELD = "deepmrf"
"""The text field of label maps, and the comment of overlays and archives."""
OVERLAY = "_overlay.jpg"
"""How the name of an overlay ends."""
_HEAD = 16384
"""Bytes of a PNG file in which its palette and texts lie."""


@dataclass(frozen=True)
class Note:
    """What is written into a label map."""

    by: str
    """The identity of models and settings."""
    of: str
    """The image: see `image_key`."""
    beside: tuple[str, ...]
    """What was written with it: "overlay", "probabilities"."""
    pixels: tuple[int, ...]
    """Of each label."""
    confidences: tuple[float, ...]
    """Summed over those pixels."""

    def text(self) -> str:
        """As one line."""
        return json.dumps(asdict(self), separators=(",", ":"))


def image_key(path: Path) -> str:
    """A few letters that differ for other files, and for this one once it has changed."""
    facts = os.stat(path)
    name = os.fsencode(os.path.realpath(path))
    return blake2b(b"%s %d %d" % (name, facts.st_size, facts.st_mtime_ns), digest_size=8).hexdigest()


def read_note(path: Path) -> tuple[Note, tuple[int, int]] | None:
    """The note of a label map, and its (height, width); None where there is none that can be read."""
    from PIL import Image

    with suppress(OSError, ValueError, TypeError, KeyError, SyntaxError, Image.DecompressionBombError):
        with Image.open(path, formats=["PNG"]) as made:
            found = json.loads(made.info[FIELD])
            size = made.height, made.width
        pixels, sums = tuple(map(int, found["pixels"])), tuple(map(float, found["confidences"]))
        return Note(str(found["by"]), str(found["of"]), tuple(map(str, found["beside"])), pixels, sums), size
    return None


def is_label_map(path: Path, note: str = "") -> bool:
    """Was this file written as a label map by a run of ours, with a note that begins so?

    By its first bytes alone: cheap for thousands of files.
    """
    with suppress(OSError), open(path, "rb") as file:
        head = file.read(_HEAD)
        return head.startswith(b"\x89PNG") and f"iTXt{FIELD}\0\0\0\0\0{note}".encode() in head
    return False


def is_result(path: Path) -> bool:
    """Is this a label map or an overlay of ours, and so no image to segment?"""
    name = path.name.lower()
    return is_label_map(path) if name.endswith(".png") else name.endswith(OVERLAY) and _is_overlay(path)


def foreign(labels: Path, companions: list[Path]) -> Path | None:
    """The first of these files that is there and was not written by us; what our label map names is ours."""
    if holds(labels) and not is_label_map(labels):
        return labels
    known = read_note(labels)
    named = () if known is None else known[0].beside
    for path in companions:
        kind, ours = ("overlay", _is_overlay) if path.name.endswith(OVERLAY) else ("probabilities", _is_probabilities)
        if kind not in named and holds(path) and not ours(path):
            return path
    return None


def holds(path: Path) -> bool:
    """Is there something that could be lost? Empty files are nobody's: a crash may leave them."""
    return path.exists() and (not path.is_file() or path.stat().st_size > 0)


def _is_overlay(path: Path) -> bool:
    with suppress(OSError), open(path, "rb") as file:
        return b"\xff\xfe" in (head := file.read(_HEAD)) and FIELD.encode() in head
    return False


def _is_probabilities(path: Path) -> bool:
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as file:
        return file.comment == FIELD.encode()
    return False
