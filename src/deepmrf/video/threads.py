"""Work done ahead and behind: threads with short queues, so that stages overlap and memory stays what it is.

PyAV, OpenCV and PyTorch let other threads run while they work.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

PATIENCE = 0.1
"""Seconds after which a thread that waits looks whether it is still wanted."""


class Clock:
    """How long each stage has worked, in seconds; stages overlap, so the sum may exceed the time that passed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class _Failed:
    def __init__(self, why: BaseException) -> None:
        self.why = why


_END = object()


def ahead(items: Iterator[T], size: int) -> Generator[T, None, None]:
    """The same items, made in a thread, at most `size` before they are wanted. Closing it stops the thread.

    An error among them is raised where its item would have come. `items` is closed in its own thread.
    """
    line: queue.Queue[Any] = queue.Queue(size)
    unwanted = threading.Event()

    def put(item: Any) -> bool:
        while not unwanted.is_set():
            try:
                line.put(item, timeout=PATIENCE)
                return True
            except queue.Full:
                continue
        return False

    def make() -> None:
        try:
            for item in items:
                if not put(item):
                    break
            put(_END)
        except BaseException as why:
            put(_Failed(why))
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while (item := line.get()) is not _END:
            if isinstance(item, _Failed):
                raise item.why
            yield item
    finally:
        unwanted.set()
        thread.join()


class Behind(Generic[T]):
    """work(item) in a thread, in order, with at most `size` items waiting."""

    def __init__(self, work: Callable[[T], None], size: int) -> None:
        self._work, self._line = work, queue.Queue[Any](size)
        self._why: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._line.get()) is not _END:
            if self._why is None:
                try:
                    self._work(item)
                except BaseException as why:
                    self._why = why

    def put(self, item: T) -> None:
        """Hand an item over, once there is room; raises what an earlier one failed with."""
        if self._why is not None:
            raise self._why
        self._line.put(item)

    def finish(self) -> None:
        """Wait until all is done; raises what failed."""
        if self._thread.is_alive():
            self._line.put(_END)
            self._thread.join()
        if self._why is not None:
            raise self._why
