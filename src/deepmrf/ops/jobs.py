"""Compile CPU kernels with numba, and share their jobs between threads.

A kernel is a serial function that releases the GIL and does one job: a part of the output that no other job writes.
Plain Python threads share the jobs. numba's own parallel loops are not used: their default layer breaks when two Python
threads call it, and the OpenMP layer stops a process that forks.

PyTorch's threads must not occupy the cores meanwhile. After each operation the threads of OpenMP spin for some
milliseconds, in case another one follows: beside other programs, that made predictions seven times slower.
OMP_WAIT_POLICY=PASSIVE prevents it, but only if it is set before PyTorch is imported. libgomp, which PyTorch brings,
spins only briefly once a process has more OpenMP threads than processors. So one thread here owns some idle ones, which
sleep until the process ends.

Importing this module does not import numba, which takes most of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from deepmrf.ops.notice import announce_compilations
from deepmrf.ops.registry import installed

Result = TypeVar("Result")

FUSED = ("contract",)
"""A product that is added or subtracted is rounded only once, where the processor can."""
EXACT = ()
"""Every operation is rounded, where a comparison must come out alike on every machine."""
ANY_ORDER = ("contract", "reassoc")
"""Sums may be reordered, so that they run in vector lanes."""

MAX_PROCESSORS = 64
"""On larger machines OpenMP's threads go on spinning: so many idle ones may be more than a container allows."""

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def compiled_before() -> bool:
    """Did an earlier process leave compiled kernels on the disk? May be a wrong False, never a wrong True."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(chosen) if chosen else Path(__file__).parent
    return installed("numba") and next(folder.glob("**/gaussian*/**/cpu_kernels.*.nbi"), None) is not None


def suits_window_sums(a: Any) -> bool:
    """Can a compiled sum of b12 run on these arguments? 1-D to 3-D floating-point maps on the CPU, by numba."""
    return (
        installed("numba")
        and a.q.device.type == a.features.device.type == a.weights.device.type == "cpu"
        and 3 <= a.q.dim() <= 5
        and len(a.window) == a.q.dim() - 2
        and a.q.is_floating_point()
        and a.q.numel() > 0
        and not a.features.is_complex()
    )


def compiled(function: Callable[..., Any], fastmath: Collection[str] = FUSED) -> Any:
    """The function compiled by numba at its first call, cached on disk if possible; fastmath: such as FUSED."""
    import numba

    announce_compilations()
    # numba recompiles a function when its own file changes, not when the intrinsics it is made of do. The cache knows
    # a function by its name, so the name includes a digest of all those files.
    function.__qualname__ += f"_{_digest(Path(function.__code__.co_filename).parent)}"
    kernel = numba.njit(nogil=True, fastmath=set(fastmath), error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # no folder can be written: compile in every process
        kernel._cache = _cache_class()(function)
    return kernel


@cache
def _digest(folder: Path) -> str:
    """A digest of the kernels of an operator's folder and of the vectors they use."""
    digest = hashlib.sha256()
    for file in (Path(__file__).with_name("vectors.py"), *sorted(folder.glob("cpu*.py"))):
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


@cache
def _cache_class() -> Any:
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):  # type: ignore[misc, unused-ignore]
        """numba's cache on disk; a damaged file or a full disk costs a compilation, not the result."""

        def load_overload(self, *arguments: Any) -> Any:
            try:
                return super().load_overload(*arguments)
            except Exception:  # unpickling a damaged file may raise anything
                with contextlib.suppress(OSError):
                    self.flush()
                return None

        def save_overload(self, *arguments: Any) -> None:
            with contextlib.suppress(Exception):
                super().save_overload(*arguments)

    return Cache


def cache_folder() -> Path | None:
    """The folder below which compiled kernels lie; None without numba, or where no folder can be written."""
    if not installed("numba"):
        return None
    try:
        folder = Path(_cache_class()(empty).cache_path)
    except RuntimeError:
        return None
    return folder.parent  # __pycache__ of each operator, or a folder of each operator below a common one


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """torch.empty for a kernel's result, in large pages.

    The system hands out a fresh tensor page by page, at the first access to each: 5,000 stops for 21 maps of 512 x 512
    pixels. NumPy asks Linux for pages of 2 MiB, PyTorch does not.
    """
    return torch.from_numpy(np.empty(tuple(shape), torch.empty(0, dtype=dtype).numpy().dtype))


def _forget_pool() -> None:
    """Start without threads: a forked child has none of its parent's.

    OpenMP does not know that, and would wait for them for ever. So PyTorch uses one thread in a child of a process that
    has computed with several.
    """
    global _pool, _lock
    if _pool is not None:
        torch.set_num_threads(1)
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that outlive the call, at least `count` of them."""
    global _pool, _pool_size
    wait_without_spinning()
    with _lock:
        if _pool is None or _pool_size < count:
            _pool, _pool_size = ThreadPoolExecutor(count, thread_name_prefix="deepmrf"), count
        return _pool


def run_in_parts(work: Callable[[int, int], Result], count: int, parts: int) -> list[Result]:
    """[work(start, stop), ..] over 0 .. count - 1 cut into about equal parts, shared between threads."""
    parts = max(1, min(parts, count))
    return run_jobs(lambda part: work(count * part // parts, count * (part + 1) // parts), parts)


@contextlib.contextmanager
def _telling_interruptions() -> Iterator[None]:
    """Raise the KeyboardInterrupt that numba's dispatcher has turned into a SystemError."""
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            cause = cause.__cause__ or cause.__context__
        raise


@_telling_interruptions()
def run_jobs(job: Callable[[int], Result], count: int) -> list[Result]:
    """[job(0), .., job(count - 1)], on as many threads as PyTorch uses; a free thread takes the next job."""
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        return [job(index) for index in range(count)]
    tickets = itertools.count()  # next() on it is atomic
    results: dict[int, Result] = {}

    def work() -> None:
        while (index := next(tickets)) < count:
            results[index] = job(index)

    futures = [_helpers(threads - 1).submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for future in futures:
            # A helper that has not begun finds no job left, unless this thread failed: then it must not begin.
            if not future.cancel():
                future.result()
    return [results[index] for index in range(count)]


@cache
def wait_without_spinning() -> bool:
    """Make OpenMP's threads sleep after their work, unless the user has chosen otherwise; False if impossible."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    library = next(Path(torch.__file__).parent.glob("lib/libgomp*"), None)
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_THREAD_LIMIT"} & os.environ.keys()
    if library is None or chosen or not 1 < processors <= MAX_PROCESSORS:
        return False
    started = threading.Event()
    threading.Thread(target=_own_threads, args=(library, processors, started), daemon=True, name="deepmrf-idle").start()
    return started.wait(timeout=10)


def _own_threads(library: Path, count: int, started: threading.Event) -> None:
    """Start `count` OpenMP threads that belong to the calling thread, and keep it alive."""
    with contextlib.suppress(OSError, AttributeError):
        openmp = ctypes.CDLL(str(library))
        openmp.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        nothing = ctypes.cast(openmp.omp_in_parallel, ctypes.c_void_p)  # a function that each thread may call
        openmp.GOMP_parallel(nothing, None, count + 1, 0)
        started.set()
        threading.Event().wait()
