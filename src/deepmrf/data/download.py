"""Download datasets from their publishers: resume interrupted downloads, compare checksums, unpack archives safely.

    get("voc", "data/voc")  then  voc("data/voc", "train")

The licences are the publishers': CamVid, VOC, SBD and Cityscapes are for research.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import itertools
import lzma
import os
import shutil
import struct
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from deepmrf.data.files import one_line
from deepmrf.data.publications import PUBLICATIONS, Archive, Publication

CHUNK_BYTES = 1 << 20
"""Bytes to read at a time."""
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    DownloadColumn(),
    TransferSpeedColumn(),
    TimeRemainingColumn(),
)
"""Columns of the progress bar."""
DECODING_ERRORS = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error),
    *(OSError, EOFError, RuntimeError, UnicodeError, OverflowError, IndexError, KeyError),
)
"""What broken archives raise. RuntimeError: encrypted, or of an unknown method. OSError: broken gzip and bzip2."""


def get(
    name: str,
    to: str | os.PathLike[str],
    *,
    mirror: str | None = None,
    keep_archives: bool = False,
    progress: bool = True,
    say: Callable[[str], None] = print,
    tries: int = 5,
    pause: float = 2.0,
    sources: Mapping[str, Publication] = PUBLICATIONS,
) -> Path:
    """Download and unpack a dataset into the folder `to`, for the function that reads it.

    mirror: fetch the archives as MIRROR/NAME instead of from the publisher. keep_archives: do not delete them.
    tries, pause: how often to reconnect, and the seconds before the first time; they double each time.
    A complete archive is not fetched again.
    """
    if name not in sources:
        raise ValueError(f"There is no dataset {name!r} to download; give one of {', '.join(sources)}.")
    folder = Path(to)
    source = sources[name]
    if source.by_hand and not all(is_unpacked(a, folder) or (folder / a.name).is_file() for a in source.archives):
        raise ValueError(f"{name} needs a login, so it cannot be fetched: {source.by_hand.format(to=folder)}.")
    folder.mkdir(parents=True, exist_ok=True)
    for archive in source.archives:
        path = folder / archive.name
        if is_unpacked(archive, folder):
            say(f"{archive.name} is already unpacked in {folder}.")
            continue
        was_there = path.exists()
        if was_there and (problem := _problem(path, archive.size, archive.md5)):
            raise ValueError(f"{path} was already there but {problem}; remove it and run the same again.")
        if not was_there:
            _check_space(folder, archive)
            url = f"{mirror.rstrip('/')}/{archive.name}" if mirror else archive.url
            fetch(url, path, archive.size, archive.md5, progress=progress, say=say, tries=tries, pause=pause)
        try:
            unpack(path, folder / archive.into, archive.inside)
        except ValueError as error:
            if source.by_hand:
                raise  # the archive stays, so that half of its content is not taken for all of it
            if not was_there:
                path.unlink()  # so that the next run fetches it again
                raise
            aside = path.replace(path.with_name(f"{path.name}.bad"))
            raise ValueError(f"{str(error).rstrip('.')}, which the next run does: this one is now {aside}.") from error
        _mark(archive, folder).touch()
        if not keep_archives and not source.by_hand:
            path.unlink()
    return folder


def is_unpacked(archive: Archive, folder: Path) -> bool:
    """Is the content of an archive in the folder? An archive that lies beside its content may be half unpacked."""
    by_hand = archive.content and (folder / archive.content).is_dir() and not (folder / archive.name).exists()
    return _mark(archive, folder).exists() or bool(by_hand)


def _mark(archive: Archive, folder: Path) -> Path:
    """Return the empty file that says that an archive was unpacked completely."""
    return folder / f".{archive.name}.done"


def fetch(
    url: str,
    path: Path,
    size: int | None = None,
    md5: str = "",
    *,
    progress: bool = True,
    say: Callable[[str], None] = print,
    tries: int = 5,
    pause: float = 2.0,
) -> None:
    """Download one file; `path` appears only when it is complete and its checksum, if known, is right."""
    if urllib.parse.urlparse(url).scheme not in ("http", "https"):
        raise ValueError(f"The address {url} is not of the web; give one that begins with http:// or https://.")
    part = path.with_name(f"{path.name}.part")
    for attempt in itertools.count(1):
        resumed = part.exists()
        try:
            _fetch_rest(url, part, size, progress)
        except (OSError, http.client.HTTPException) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 429)
            disk_full = getattr(error, "errno", None) == errno.ENOSPC
            if refused or disk_full or attempt >= tries:
                count = part.stat().st_size if part.exists() else 0
                state = f"{count:,} bytes are kept in {part}, run the same again to continue"
                remedy = "see whether the publisher has moved it" if refused else state
                raise OSError(f"{url} could not be fetched ({error}); {remedy}.") from error
            time.sleep(pause * 2 ** (attempt - 1))
            continue
        problem = _problem(part, size, md5)
        if not problem:
            break
        part.unlink()
        _tag(part).unlink(missing_ok=True)
        if not resumed:
            raise ValueError(f"{url} {problem}, so it was deleted; try again later or use another mirror.")
        say(f"{path.name} {problem}, perhaps because of the part that was already there: fetching all of it again.")
    if not md5:
        say(f"No checksum is known for {path.name}; the downloaded file has the sha256 {_digest(part, 'sha256')}.")
    _tag(part).unlink(missing_ok=True)
    part.replace(path)


def _problem(path: Path, size: int | None, md5: str) -> str:
    """Return what is wrong with a downloaded file, or ""."""
    if size is not None and path.stat().st_size != size:
        return f"has {path.stat().st_size:,} bytes instead of {size:,}"
    if md5 and (digest := _digest(path, "md5")) != md5:
        return f"has the md5 {digest} instead of {md5}"
    return ""


def _digest(path: Path, kind: str) -> str:
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _tag(part: Path) -> Path:
    """Return the file with the server's tag of this version, so that parts of two versions are never joined."""
    return part.with_name(f"{part.name}.tag")


def _fetch_rest(url: str, part: Path, size: int | None, progress: bool) -> None:
    """Download what `part` lacks in one connection; all of it if the server cannot resume or has a new version."""
    start = part.stat().st_size if part.exists() else 0
    if start and start == size:
        return
    headers = {"User-Agent": "deepmrf"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if _tag(part).exists():
            headers["If-Range"] = _tag(part).read_text(encoding="ascii", errors="ignore")
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # range not satisfiable: there is nothing behind `start`
            raise
        if (error.headers.get("Content-Range") or "").endswith(f"/{start}"):
            return  # `part` was complete
        part.unlink()
        raise OSError(f"the {start:,} bytes that were there are not a part of it") from error
    with answer:
        if answer.status != 206:
            start = 0
        elif not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise OSError(f"the server did not continue at byte {start:,}")
        if tag := answer.headers.get("ETag") or answer.headers.get("Last-Modified"):
            _tag(part).write_text(tag, encoding="ascii", errors="ignore")
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length else None
        with part.open("ab" if start else "wb") as file, Progress(*COLUMNS, disable=not progress) as bar:
            task = bar.add_task(part.stem, total=total, completed=start)
            while chunk := answer.read(CHUNK_BYTES):
                file.write(chunk)
                bar.advance(task, len(chunk))
                if size is not None and file.tell() > size:
                    return  # too long, perhaps without end: `fetch` compares the sizes
    if total is not None and part.stat().st_size < total:
        raise OSError(f"the connection broke after {part.stat().st_size:,} of {total:,} bytes")


def _check_space(folder: Path, archive: Archive) -> None:
    needed, free = 2.2 * (archive.size or 0), shutil.disk_usage(folder).free
    if free < needed:
        sizes = f"{needed / 1e9:.1f} GB but {folder} has {free / 1e9:.1f} GB left"
        raise OSError(f"{archive.name} and its contents need {sizes}; make room or choose another disk.")


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
        while tar.fileobj is not None and tar.fileobj.read(CHUNK_BYTES):
            pass  # up to the checksum, which tarfile does not read


def _name_below(inside: str, name: str, path: Path) -> str:
    """Return the member's name below the folder `inside`, or "" if it is not there; an error if it leads outside."""
    parts = [part for part in name.replace("\\", "/").split("/") if part != "."]
    if not parts or any(part in ("", "..") or ":" in part or "\0" in part for part in parts):
        raise ValueError(f"{path} holds {name!r}, which would land outside its folder; do not trust this archive.")
    name = "/".join(parts)
    return name.removeprefix(f"{inside}/") if not inside or name.startswith(f"{inside}/") else ""
