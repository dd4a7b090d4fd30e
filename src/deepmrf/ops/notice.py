"""Say that kernels are being compiled, where that takes more than a moment.

numba reports the start and end of each compilation. Kernels that come from the cache on disk are not compiled.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import cache
from typing import Any

SECONDS_OF_SILENCE = 1.5
MESSAGE = "deepmrf: compiling kernels that this machine uses for the first time"


@cache
def announce_compilations() -> None:
    """From now on, print one line to stderr while kernels of this package compile."""
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc, unused-ignore]
        def on_start(self, event: Any) -> None:
            _clock.count(event, 1)

        def on_end(self, event: Any) -> None:
            _clock.count(event, -1)

    event.register("numba:compile", Listener())


class _Clock:
    """Count the compilations that run, and let a thread print while there are any."""

    def __init__(self) -> None:
        self.running, self.last, self.announced = 0, 0.0, False
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None

    def count(self, event: Any, change: int) -> None:
        """A compilation begins (1) or ends (-1); only those of this package count."""
        function = getattr(event.data.get("dispatcher"), "py_func", None)
        if not str(getattr(function, "__module__", "")).startswith("deepmrf."):
            return
        with self.lock:
            self.running += change
            self.last = time.monotonic()
            if self.thread is None and change > 0:
                self.thread = threading.Thread(target=self.print, daemon=True, name="deepmrf-notice")
                self.thread.start()

    def busy(self) -> bool:
        """Kernels compile one after the other: a short pause between two is no end."""
        with self.lock:
            active = self.running > 0 or time.monotonic() - self.last < 0.5
            if not active:
                self.thread = None
            return active

    def print(self) -> None:
        start = time.monotonic()
        counts = sys.stderr is sys.__stderr__ and sys.stderr is not None and sys.stderr.isatty()
        printed = False
        while self.busy():
            seconds = time.monotonic() - start
            if seconds > SECONDS_OF_SILENCE and sys.stderr is not None:
                if counts:
                    print(f"\r{MESSAGE}: {seconds:.0f} s", end="", file=sys.stderr, flush=True)
                elif not self.announced:
                    print(f"{MESSAGE}; this takes up to half a minute.", file=sys.stderr, flush=True)
                    self.announced = True  # once a process
                printed = True
            time.sleep(0.25)
        if printed and counts:
            print(file=sys.stderr, flush=True)


_clock = _Clock()
