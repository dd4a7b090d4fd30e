"""How a command treats threads, memory and output. Nothing changes on import; `prepare` does it when a command runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
"""mallopt's names: how much free memory makes malloc return some; from which size on a block has its own mapping; how
many heaps threads may have."""
MAX_TRIM_BYTES, MAX_MMAP_BYTES = (1 << 31) - 1, 1 << 25
"""The largest values that mallopt takes."""

PILLOW_BLOCK_SIZE = "64m"
"""Pillow holds pictures in blocks of up to this size, which malloc then returns; it would keep blocks of 16 MiB."""


def prepare(torch: bool = True, heaps: int | None = None) -> None:
    """Set up the process for a command, and import PyTorch unless told otherwise.

    heaps: how many the threads share; each heap keeps what was freed in it, which adds up where threads are many.
    """
    # Threads of OpenMP spin while they wait. On a machine with other work that makes everything up to 20 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _keep_freed_memory(heaps)
    _replace_unprintable()
    if torch:
        _import_torch()


def _keep_freed_memory(heaps: int | None) -> None:
    """Let malloc keep freed blocks of up to 32 MiB: it would return them, and get them back zeroed page by page."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):  # the user has chosen
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(TRIM_THRESHOLD, MAX_TRIM_BYTES)
        mallopt(MMAP_THRESHOLD, MAX_MMAP_BYTES)
        if heaps is not None:
            mallopt(ARENA_MAX, heaps)
        os.environ.setdefault("PILLOW_BLOCK_SIZE", PILLOW_BLOCK_SIZE)


def _replace_unprintable() -> None:
    """Print question marks for letters that the terminal cannot show, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # some streams have no encoding
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _import_torch() -> None:
    """Import PyTorch. It takes two seconds, in which Ctrl-C ends the process: half a module would fail later."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as in background jobs
    if "torch" in sys.modules or not usual or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import torch  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
