"""Keep PyTorch's idle CPU threads from occupying the cores.

After each operation the threads of OpenMP spin for some milliseconds, in case another one follows. The kernels of this
package have threads of their own, and other programs need the cores, too: beside those, spinning made predictions seven
times slower. OMP_WAIT_POLICY=PASSIVE prevents it, but only if it is set before PyTorch is imported.

libgomp, which PyTorch brings, spins only briefly once a process has more OpenMP threads than processors. So one thread
here owns some idle ones, which sleep until the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from functools import cache
from pathlib import Path

import torch

MAX_PROCESSORS = 64
"""On larger machines nothing is done: that many idle threads may be more than a container allows."""


@cache
def wait_without_spinning() -> bool:
    """Make OpenMP's threads sleep soon after their work, for the rest of the process; False where that is impossible.

    The user's own choice (OMP_WAIT_POLICY, GOMP_SPINCOUNT) stays.
    """
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
