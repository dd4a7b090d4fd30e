"""Unpack archives from the web; nothing is ever written outside the target folder."""

from __future__ import annotations

import lzma
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

from deepmrf.data.files import one_line

DECODING_ERRORS = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error),
    *(OSError, EOFError, RuntimeError, UnicodeError, OverflowError, IndexError, KeyError),
)
"""What broken archives raise. RuntimeError: encrypted, or of an unknown method. OSError: broken gzip and bzip2."""


def unpack(path: Path, to: Path, inside: str = "") -> None:
    """Unpack the files of a zip or tar archive into the folder `to`; refuse links and names that lead outside.

    inside: unpack only what is below this folder of the archive, without the folder's own name.
    Whatever is wrong with the archive is a ValueError.
    """
    if not hasattr(tarfile, "data_filter"):
        raise ImportError("Unpacking archives safely needs Python 3.10.12, 3.11.4 or 3.12 or newer: update Python.")
    try:
        _unpack(path, to, inside)
    except DECODING_ERRORS as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the disk
        reason = one_line(error).replace(str(path), "it")
        raise ValueError(f"{path} is not an archive that can be unpacked ({reason}); fetch it again.") from error


def _unpack(path: Path, to: Path, inside: str) -> None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir() and (name := _name_below(inside, info.filename, path)):
                    info.filename = name
                    archive.extract(info, to)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            if not member.isdir() and (name := _name_below(inside, member.name, path)):
                if not member.isfile():
                    raise ValueError(f"{path} holds {name!r}, a link or a device; do not trust this archive.")
                tar.extract(member.replace(name=name, deep=False), to, filter="data")
        while tar.fileobj is not None and tar.fileobj.read(1 << 20):
            pass  # up to the checksum, which tarfile does not read


def _name_below(inside: str, name: str, path: Path) -> str:
    """Return the member's name below the folder `inside`, or "" if it is not there; an error if it leads outside."""
    parts = [part for part in name.replace("\\", "/").split("/") if part != "."]
    if not parts or any(part in ("", "..") or ":" in part or "\0" in part for part in parts):
        raise ValueError(f"{path} holds {name!r}, which would land outside its folder; do not trust this archive.")
    name = "/".join(parts)
    return name.removeprefix(f"{inside}/") if not inside or name.startswith(f"{inside}/") else ""
