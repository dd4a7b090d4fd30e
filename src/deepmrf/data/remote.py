"""Files at URLs, such as s3://bucket/photos/x.jpg: listed, fetched and uploaded through fsspec.

    with Mirror() as mirror:
        folder = mirror.add("s3://bucket/photos")     # a local folder with the names of those files, all empty
        url = mirror.names.url(folder / "x.jpg")      # s3://bucket/photos/x.jpg
        fetch(url, Path("x.jpg"))

Code for local folders chooses files by their names in a mirror; who needs their content fetches them. Object stores
show an object when it is complete. Where files grow in their place, as over sftp, `upload` renames a complete one.
"""

from __future__ import annotations

import glob
import os
import re
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

from deepmrf.data.files import one_line

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "cos", "memory")
"""Protocols that show a file when it is complete."""
LOCAL = ("file", "local")
"""Protocols of this machine's files, which are read and written as such."""
VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems call that which changes with a file's content; the first one counts."""
MAX_NAME_BYTES = 255
"""Bytes of a file's name on this machine."""


class URL(str):
    """A URL, with the parts of a path."""

    @property
    def name(self) -> str:
        """What comes after the last slash."""
        return self.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The name's ending."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> URL:
        """What comes before the last slash."""
        return URL(self.rpartition("/")[0])


def path_or_url(text: str | os.PathLike[str]) -> Path | URL:
    """A path of this machine, file:// included, or a URL."""
    text = os.fspath(text)
    scheme, separator, rest = text.partition("://")
    if not separator or re.fullmatch(r"[A-Za-z][\w+.-]*", scheme) is None:
        return Path(text)
    if scheme in LOCAL:
        return Path(rest)
    return URL(text.rstrip("/") if rest.strip("/") else text)


@contextmanager
def _files_at(url: str, doing: str) -> Iterator[tuple[Any, str]]:
    """The file system of a URL, and the URL's name there; what it raises becomes an OSError: each has its own."""
    files, name = _open(url)
    try:
        yield files, name
    except Exception as error:
        missing = isinstance(error, FileNotFoundError) and doing == "fetched"
        raise OSError(f"{url} could not be {doing} ({'it is missing' if missing else _reason(error)}).") from error


def _open(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the URL's name there."""
    import fsspec  # here, since local files do not need it
    from fsspec.registry import known_implementations

    scheme = url.partition("://")[0]
    try:
        files, name = fsspec.core.url_to_fs(url)
        return files, str(name)
    except ImportError as error:
        package = known_implementations.get(scheme, {}).get("class", "").partition(".")[0]
        remedy = f"pip install {package}" if package not in ("", "fsspec") else _reason(error)
        raise ImportError(f"{url} needs a package that is not installed: {remedy}") from None
    except Exception as error:
        raise OSError(f"{url} cannot be opened ({_reason(error)}).") from error


def _reason(error: BaseException) -> str:
    """What an error says, shortened: some repeat all that was tried."""
    return textwrap.shorten(one_line(error), 200, placeholder=" ...")


def fetch(url: str, path: Path) -> None:
    """Copy the file at a URL to this machine."""
    with _files_at(url, "fetched") as (files, name):
        files.get_file(name, str(path))


def upload(path: Path, url: str) -> None:
    """Copy a file of this machine to a URL, where it appears complete or not at all."""
    with _files_at(url, "written") as (files, name):
        if url.partition("://")[0] in OBJECT_STORES:
            files.put_file(str(path), name)
            return
        folder, _, last = name.rpartition("/")
        files.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.{last}.{os.urandom(4).hex()}.part"
        files.put_file(str(path), temporary)
        files.mv(temporary, name)


def remove(url: str) -> None:
    """Delete the file at a URL."""
    with _files_at(url, "removed") as (files, name):
        files.rm_file(name)


def exists(url: str) -> bool:
    """Is there a file at this URL?"""
    with _files_at(url, "looked for") as (files, name):
        files.invalidate_cache()
        return bool(files.isfile(name))


def read_part(url: str, start: int, end: int | None) -> bytes | None:
    """Bytes of the file at a URL, as a slice takes them; None where there is no file."""
    with _files_at(url, "read") as (files, name):
        files.invalidate_cache()
        try:
            return bytes(files.cat_file(name, start=start, end=end))
        except FileNotFoundError:
            return None
        except Exception:
            if files.size(name) == 0:  # of which object stores give no part
                return b""
            raise


@contextmanager
def local_copy(path: Path | URL) -> Iterator[Path]:
    """The file itself, or a copy that lasts for the `with` block of what is at a URL."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="deepmrf-") as folder:
        copy = Path(folder, f"copy{path.suffix}")
        fetch(path, copy)
        yield copy


@dataclass(frozen=True)
class Names:
    """The URLs that local paths stand for."""

    urls: dict[str, str] = field(default_factory=dict)
    """Of files, and of folders for all below them."""

    def url(self, path: Path | URL) -> URL | None:
        """The URL that a path stands for; None for a path that is meant itself."""
        below = ""
        text = str(path)
        while text not in self.urls:
            text, name = os.path.split(text)
            if not name:
                return None
            below = f"/{name}{below}"
        return URL(self.urls[text] + below)

    def shown(self, path: Path | URL) -> Path | URL:
        """What a user calls this path."""
        return self.url(path) or path

    def in_words(self, text: str) -> str:
        """A sentence with URLs instead of the paths that stand for them."""
        for path in sorted(self.urls, key=len, reverse=True):
            text = text.replace(path, self.urls[path])
        return text


class Mirror:
    """A temporary local tree that has the names of remote files and folders. The files are empty."""

    def __init__(self) -> None:
        self.names = Names()
        self.versions: dict[str, str] = {}
        """What changes with a file's content, by its path in the mirror."""
        self.failed: list[tuple[Path | URL, str]] = []
        """URLs that can have no file here, and in one sentence why."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def root(self) -> Path:
        """The folder of the tree, which is created when it is first needed."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="deepmrf-")
        return Path(os.path.realpath(self._folder.name))

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._folder is None:
            return
        self._folder.cleanup()
        if isinstance(error, ValueError | OSError) and str(self.root) in str(error):
            error_type = OSError if isinstance(error, OSError) else ValueError
            raise error_type(self.names.in_words(str(error))) from None

    def add(self, url: URL, depth: int | None = None) -> Path:
        """List what a URL names, a file, a folder or a pattern, as so many levels of folders; return its path here."""
        path, base = self._paths(url)
        with _files_at(url, "listed") as (files, name):
            prefix = _open(self.names.urls[str(base)])[1].rstrip("/") + "/"
            files.invalidate_cache()
            try:
                matches = {name: files.info(name)}
            except FileNotFoundError:
                matches = files.glob(name, detail=True) if path != base else {}
            for match, facts in matches.items():
                below = match.removeprefix(prefix) if path != base else ""
                if facts["type"] == "file":
                    self._add_file(base, below, facts)
                    continue
                base.joinpath(*below.split("/")).mkdir(parents=True, exist_ok=True)
                for child, child_facts in files.find(match, maxdepth=depth, detail=True).items():
                    if child_facts["type"] == "file":
                        self._add_file(base, child.removeprefix(prefix), child_facts)
        return path

    def add_output(self, url: URL) -> Path:
        """A path for results: a folder if there is one at the URL. Raise an OSError where nothing can be written."""
        path, _ = self._paths(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _files_at(url, "written into") as (files, name):
            files.invalidate_cache()
            if files.isdir(name):
                path.mkdir(exist_ok=True)
            elif files.isfile(name):
                path.touch()
        folder = url
        if url.suffix.lower() == ".png":  # one label map
            folder = url.parent
            self.names.urls.setdefault(str(path.parent), folder)
        probe = path.parent / f"{path.name}.part"
        probe.touch()
        try:
            upload(probe, f"{folder}/.deepmrf")
        except OSError as error:
            raise OSError(f"{error} Give another place for the results.".replace("/.deepmrf", "", 1)) from error
        with suppress(Exception):  # some users may write, but not delete
            files.rm_file(_open(f"{folder}/.deepmrf")[1])
        return path

    def _paths(self, url: URL) -> tuple[Path, Path]:
        """The path of a URL, and the part of it before the first star."""
        scheme, _, rest = url.partition("://")
        steps = [step for step in rest.split("/") if step]
        plain = next((index for index, step in enumerate(steps) if glob.has_magic(step)), len(steps))
        if not plain or not all(map(_is_name, steps)):
            raise ValueError(f"{url} names no folder: give a URL such as {scheme}://bucket/photos.")
        folder = self.root / scheme
        path, base = folder.joinpath(*steps), folder.joinpath(*steps[:plain])
        self.names.urls[str(folder)] = f"{scheme}:/"
        self.names.urls[str(base)] = url.rsplit("/", len(steps) - plain)[0]
        return path, base

    def _add_file(self, base: Path, below: str, facts: dict[str, Any]) -> None:
        path = base.joinpath(*below.split("/"))
        try:
            if below and not all(map(_is_name, below.split("/"))):
                raise ValueError(below)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except (OSError, ValueError):  # both x and x/y may be there, or a name with a zero byte
            url = f"{self.names.urls[str(base)]}/{below}"
            self.failed.append((URL(url), f"{url} has a name that no file here can have: rename it."))
            return
        version = next((str(facts[key]) for key in VERSIONS if facts.get(key)), "")
        text = f"{self.names.url(path)} {facts.get('size')} {version}"
        self.versions[str(path)] = blake2b(os.fsencode(text), digest_size=8).hexdigest()


def _is_name(step: str) -> bool:
    return step not in ("", ".", "..") and len(os.fsencode(step)) <= MAX_NAME_BYTES
