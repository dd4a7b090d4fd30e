"""Write files atomically: a file is replaced completely or not at all, even if the process is killed.

    with replacing(path) as file:      # a binary file beside `path`
        file.write(content)            # replaces `path` when the block ends without an error

Only regular files are replaced. What a symbolic link points to is replaced, not the link; devices and pipes are
written to directly.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` at the end of the block; after an error, `path` is as before.

    sync: wait until the content is on the disk. Missing folders are created.
    """
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as device:
            yield device
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{os.urandom(4).hex()}.part")  # short: `path` may use the longest name
    try:
        with temporary.open("wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{nearest} cannot be written into ({reason}): give another folder for {content}.") from error
