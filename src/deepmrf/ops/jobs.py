"""What the compiled CPU kernels share: is numba there, how a function is compiled, how jobs are spread over threads.

A kernel is a serial function that releases the GIL and does one job, a part of the output nobody else writes. Plain
Python threads then share the jobs. numba's own parallel loops are not used: their default layer breaks when two Python
threads call it, and the OpenMP layer stops a process that forks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


@cache
def available() -> bool:
    """Is numba installed? Asked without importing it, which takes most of a second."""
    return importlib.util.find_spec("numba") is not None


def compiled_before() -> bool:
    """Did an earlier process leave compiled kernels on the disk? Found out without importing numba.

    A place of numba's that is not looked at makes this False, never True.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    place = Path(chosen) if chosen else Path(__file__).parent
    return available() and next(place.glob("**/gaussian*/**/cpu_kernels.*.nbi"), None) is not None


def _compile(function: Function, fastmath: set[str]) -> Function:
    import numba

    options = {"nogil": True, "fastmath": fastmath, "error_model": "numpy"}
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast(Function, numba.njit(**options)(function))


def compiled(function: Function) -> Function:
    """The function compiled on its first call, kept on disk where there is a place to write."""
    return _compile(function, {"contract"})


def compiled_exactly(function: Function) -> Function:
    """The same with every operation rounded, where a comparison must come out alike on every machine."""
    return _compile(function, set())


def compiled_from(*modules: ModuleType) -> Callable[[Function], Function]:
    """The same for a function made of intrinsics of other modules: numba would keep it when only those change.

    The compiled code on disk has the function's name, so it gets one that their source decides.
    """
    digest = hashlib.sha256()
    for module in modules:
        with contextlib.suppress(OSError):  # where there is no source, numba keeps nothing on disk
            digest.update(inspect.getsource(module).encode())

    def decorate(function: Function) -> Function:
        function.__qualname__ += f"_{digest.hexdigest()[:8]}"
        return compiled(function)

    return decorate


def compiled_sums(function: Function) -> Function:
    """The same for a sum whose order does not matter, so that it may run in lanes."""
    return _compile(function, {"contract", "reassoc"})


def _forget_pool() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that outlive the call, at least `count` of them."""
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < count:
            _pool, _pool_size = ThreadPoolExecutor(count, thread_name_prefix="deepmrf"), count
        return _pool


def run_jobs(job: Callable[[int], None], count: int) -> None:
    """job(0) .. job(count - 1), on as many threads as PyTorch uses; whoever is free takes the next."""
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        for index in range(count):
            job(index)
        return
    tickets = itertools.count()  # next() on it is atomic

    def work() -> None:
        while (index := next(tickets)) < count:
            job(index)

    futures = [_helpers(threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for future in futures:
            # A helper that has not begun finds no job left, unless this thread failed: then it must not begin.
            if not future.cancel():
                future.result()
