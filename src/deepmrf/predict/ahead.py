"""Work in threads, ahead of and behind the main thread, with bounded memory and in order.

    for frame in ahead(decode(path), 4): ...                       # an iterator, up to 4 items before they are needed
    for path, future in map_ahead(read, paths, 4, threads=2): ...  # calls, up to 4 before their results are needed
    writer = Behind(write, 4)                                      # calls after the fact, at most 4 waiting
    writer.put(result); writer.finish()
    with Cores() as cores:
        for labels in cores.map(segment, frames): ...              # calls that compute, as many at a time as cores

All rest on calls that threads carry out, and results that are taken in the order of the calls.
Threads pay off because PyTorch, NumPy, PIL, PyAV and OpenCV release the interpreter while they work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

MAX_AT_ONCE = 4
"""Items that `Cores` computes at a time, at most: each takes memory."""
_END: Any = object()
_open_pools: set[ThreadPoolExecutor] = set()
"""Pools that were not shut down. Were they garbage, in an iterator that nobody holds any more, their threads would end
before the iterator is closed, and closing it would wait for them for ever."""


class WorkQueue(Generic[T, R]):
    """Calls for a few threads, each with the item it is for. Leaving its `with` block drops calls not yet begun."""

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads)
        _open_pools.add(self._pool)
        self._calls: deque[tuple[T, Future[R]]] = deque()

    def __len__(self) -> int:
        """How many calls were put and not yet taken."""
        return len(self._calls)

    def put(self, item: T, function: Callable[..., R], *arguments: Any) -> None:
        """Have a thread call function(*arguments) for this item."""
        self._calls.append((item, self._pool.submit(function, *arguments)))

    @property
    def ready(self) -> bool:
        """Is the oldest call finished?"""
        return bool(self._calls) and self._calls[0][1].done()

    def take(self) -> tuple[T, Future[R]]:
        """The oldest call: its item, and its future, whose result() waits for it and raises what went wrong."""
        return self._calls.popleft()

    def cancel(self) -> None:
        """Drop the calls that no thread has begun."""
        self._calls = deque(call for call in self._calls if not call[1].cancel())

    def __enter__(self) -> WorkQueue[T, R]:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        _open_pools.discard(self._pool)


def map_ahead(
    function: Callable[[T], R], items: Iterable[T], count: int, threads: int = 1
) -> Generator[tuple[T, Future[R]], None, None]:
    """Yield each item with the future of function(item), which threads compute up to `count` items ahead."""
    with WorkQueue[T, R](threads) as queue:
        for item in items:
            queue.put(item, function, item)
            if len(queue) > count:
                yield queue.take()
        while queue:
            yield queue.take()


class Cores:
    """Computes a few items at a time, each with its share of PyTorch's threads. Leave its `with` block to end threads.

    Two calls of one thread each, side by side, end sooner than two of two threads, one after the other: threads that
    share a call wait for each other.
    """

    def __init__(self, workers: int | None = None) -> None:
        """workers: how many items at a time; None for as many as there are threads, up to MAX_AT_ONCE."""
        self._threads = torch.get_num_threads()
        self._workers = workers or min(self._threads, MAX_AT_ONCE)
        self._pool = ThreadPoolExecutor(self._workers)
        _open_pools.add(self._pool)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
        """Yield function(item) of each item in order. All maps of these cores share their threads.

        Where `items` fails, the results of the items before come first.
        """

        def work(item: T) -> R:
            torch.set_num_threads(max(1, self._threads // self._workers))  # of this thread's kernels
            return function(item)

        iterator, calls, error = iter(items), deque[Future[R]](), None
        while error is None:
            try:
                calls.append(self._pool.submit(work, next(iterator)))
            except StopIteration:
                break
            except BaseException as failure:  # Ctrl-C ends a camera
                error = failure
            else:
                if len(calls) > self._workers:
                    yield calls.popleft().result()
        while calls:
            yield calls.popleft().result()
        if error is not None:
            raise error

    def __enter__(self) -> Cores:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        _open_pools.discard(self._pool)
        torch.set_num_threads(self._threads)  # new threads, too, start with as many


def ahead(items: Iterator[T], count: int) -> Generator[T, None, None]:
    """Yield the same items, which one thread makes, up to `count` of them before they are needed.

    An error is raised in place of the item that failed. `items` is closed in the thread that made them.
    """
    with WorkQueue[None, T]() as queue:
        try:
            for _ in range(count):
                queue.put(None, next, items, _END)
            while (item := queue.take()[1].result()) is not _END:
                queue.put(None, next, items, _END)
                yield item
        finally:
            queue.cancel()
            close = getattr(items, "close", None)
            if close is not None:
                queue.put(None, close)
                while queue:  # the last call closes; earlier ones may still be under way
                    queue.take()[1].exception()


class Behind(Generic[T]):
    """Calls work(item) in one thread, in order, with at most `count` items waiting; nothing more after an error."""

    def __init__(self, work: Callable[[T], None], count: int) -> None:
        self._work, self._count = work, count
        self._queue = WorkQueue[None, None]()
        self._error: BaseException | None = None

    def _call(self, item: T) -> None:
        if self._error is None:
            try:
                self._work(item)
            except BaseException as error:
                self._error = error

    def put(self, item: T) -> None:
        """Hand an item over, once there is room; raise what an earlier one failed with."""
        while self._error is None and len(self._queue) > self._count:
            self._queue.take()[1].result()
        if self._error is not None:
            raise self._error
        self._queue.put(None, self._call, item)

    def finish(self) -> None:
        """Wait until all is done; raise what failed."""
        while self._queue:
            self._queue.take()[1].result()
        self._queue.__exit__()
        if self._error is not None:
            raise self._error
