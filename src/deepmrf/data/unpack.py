"""Unpacking archives that come from elsewhere: nothing is ever written outside the folder asked for."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def unpack(path: Path, to: Path, inside: str = "") -> None:
    """Unpack a zip or tar archive; a member that would land outside `to`, or is a link, is an error."""
    try:
        for name, file in _members(path):
            parts = _safe_parts(name, path)
            prefix = tuple(inside.split("/")) if inside else ()
            if parts[: len(prefix)] != prefix or len(parts) == len(prefix):
                continue
            target = to.joinpath(*parts[len(prefix) :])
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{target.name}.part")
            with part.open("wb") as out:
                shutil.copyfileobj(file, out)
            part.replace(target)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as why:
        raise ValueError(
            f"{path} is not an archive that can be unpacked ({why}); remove it and fetch it again."
        ) from why


def _members(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The name and the content of each file in an archive."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    with archive.open(info) as file:
                        yield info.filename, file
        return
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                raise ValueError(
                    f"{path} holds {member.name!r}, which is a link or a device; do not trust this archive."
                )
            yield member.name, content


def _safe_parts(name: str, path: Path) -> tuple[str, ...]:
    """The parts of a member's name, or an error if it would lead elsewhere on any system."""
    parts = tuple(part for part in name.replace("\\", "/").split("/") if part != ".")
    if not parts or any(part in ("", "..") or ":" in part or "\0" in part for part in parts):
        raise ValueError(f"{path} holds {name!r}, which would land outside its folder; do not trust this archive.")
    return parts
