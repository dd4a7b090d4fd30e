"""Write files atomically: a file is replaced completely or not at all, even if the process is killed.

    with replacing(path) as file:      # a binary file beside `path`
        file.write(content)            # replaces `path` when the block ends without an error

Only regular files are replaced. What a symbolic link points to is replaced, not the link; devices, pipes
and /dev/stdout are written to directly. The temporary file that a killed process leaves behind is used
again by the next one that writes the same file.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

DEVICE_FOLDERS = ("/dev", "/dev/fd", "/proc/self/fd")
"""Folders whose names lead to devices and to files that are open already."""
BYTES_TRIED = 4096
"""Bytes that are written to see whether a disk has room."""


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` when the block ends without an error; sync: wait until it is on the disk."""
    if is_special(path):
        with path.open("wb") as device:
            yield device
        return
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, file = _open_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows renames no open file; elsewhere, its lock stays until it has its name
            os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a full disk, for example
            error.filename = str(path)
        raise


def is_special(path: Path) -> bool:
    """Is this a device or a pipe, or does it lead to one, as /dev/stdout does?"""
    if os.path.dirname(os.path.abspath(path)) in DEVICE_FOLDERS:
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _open_temporary(path: Path) -> tuple[Path, IO[bytes]]:
    """Open a file beside `path`, empty and locked: the one that a killed process left, or one of a random name.

    Its own name is short, since `path` may have the longest.
    """
    if fcntl is not None:
        digest = blake2b(os.fsencode(path.name), digest_size=6).hexdigest()
        temporary = path.with_name(f".{digest}.part")
        with suppress(OSError):  # another user's, a link, or file systems without locks
            file = os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "wb")
            with suppress(OSError):  # another process writes the same file
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                facts = os.fstat(file.fileno())
                if stat.S_ISREG(facts.st_mode) and os.path.samestat(facts, os.stat(temporary)):
                    file.truncate()
                    return temporary, file
            file.close()
    temporary = path.with_name(f".{os.getpid()}.{os.urandom(4).hex()}.part")
    return temporary, temporary.open("wb")


def write_bytes(path: Path, content: bytes, sync: bool = False) -> None:
    """Replace a file by `content`."""
    with replacing(path, sync) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replace a file by `text` in UTF-8."""
    write_bytes(path, text.encode())


def check_folder(folder: Path, content: str) -> None:
    """Raise an error where `folder`, which is to hold `content`, cannot be created or written into; create nothing."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is a file: give a folder for {content}.")
    try:
        with tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
            file.write(bytes(BYTES_TRIED))  # a full disk has room for names still
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{nearest} cannot be written into ({reason}): give another folder for {content}.") from error
