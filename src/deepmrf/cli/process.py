"""How the command treats threads, memory and output. To be imported before PyTorch, which reads the first on loading.

OpenMP's threads spin while they wait for one another: a little faster on an idle machine, up to twenty times slower on
one where something else wants the cores, too. Ours sleep.

Linux's malloc returns large blocks to the system as soon as they are free and gets them back, zeroed page by page, for
the next tensor: a third of the time of a mean-field step. Ours keeps them.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""mallopt's names for: how much free memory makes it return some; from which size on a block is returned at once."""
MOST, LARGEST = (1 << 31) - 1, 1 << 25
"""The largest values it takes, in bytes."""

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_memory() -> bool:
    """Freed blocks of up to 32 MiB stay with the process. False where the C library has no such setting."""
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):  # the user's own choice
        return False
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        return bool(mallopt(TRIM_THRESHOLD, MOST) and mallopt(MMAP_THRESHOLD, LARGEST))
    return False


def load_torch() -> None:
    """Import PyTorch: two seconds in which Ctrl-C ends the process, as half a module would go on wrongly."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not ignored, as in background jobs
    if "torch" in sys.modules or not usual or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import torch  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def speak_any_encoding() -> None:
    """Names that the terminal or file cannot write become question marks instead of errors."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # some streams have no encoding
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def plain(text: str) -> str:
    """Text that a terminal can show: names of files may hold line ends, escapes and bytes of no character."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


keep_memory()
speak_any_encoding()
