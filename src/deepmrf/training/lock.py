"""The lock of a run's folder: two trainings in one folder would mix their files.

The system holds the lock and gives it back when the process ends, however it ends. The lock file itself stays, and
means nothing.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from deepmrf.training.recipe import RecipeError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK_FILE = ".lock"


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created; raise a RecipeError where another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a+b") as file:
        try:
            _lock(file)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                file.seek(0)
                owner = file.read(20).decode(errors="replace")
                raise RecipeError(
                    f"{folder} is used by another training (process {owner}): wait for its end, or choose another "
                    "folder."
                ) from None
            # A file system without locks: go on without.
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        yield


def _lock(file: IO[bytes]) -> None:
    # Not flock: processes that read images inherit it, and would hold it for seconds after their parent was killed.
    if sys.platform == "win32":
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
