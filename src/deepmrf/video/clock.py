"""Measure how long each stage of the work takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds of work per stage. Stages overlap, so that their sum may exceed the time that passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
