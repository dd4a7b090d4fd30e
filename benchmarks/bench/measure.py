"""Times and peak memory of cases.

Times: a warm-up, then the cases take turns, so that whatever else the machine does falls on all of them alike. On CUDA
a repeat is a queue of calls, as in a training or on a folder of images; one call on an idle GPU, which has slowed
down and waits for Python, is timed apart (`alone_s`).
Memory: what a call takes beyond its inputs, its result included. On CUDA the allocator tells; on the CPU a fresh
process makes the inputs, does a small call first (compilers and libraries take memory once) and reads the kernel's
high-water mark around the real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.bench.cases import Call, Case, Pool, Prepared, Unavailable, prepare

Notify = Callable[[str], None]
"""Called with a few words at every step of a run."""


QUEUE_S, LONGEST_QUEUE, ALONE = 0.02, 64, 7
"""On CUDA: how long a queue of calls should last, how many it may hold, and how often a call is timed alone."""
NOISY = 0.2
"""A spread beyond this is marked: something else was running."""


CHECKOUT = str(Path(__file__).resolve().parents[2])
"""The folder that holds benchmarks/."""


@dataclass
class Row:
    """A case and what was measured of it. axis, series, x: where it stands in a plot of the scaling."""

    case: Case
    axis: str = "table"
    series: str = ""
    x: int = 0
    chosen: str = ""
    note: str = ""
    factor: float = 1.0
    first_s: float | None = None
    alone_s: float | None = None
    """On CUDA: one call on an idle GPU, Python included; the median of a few."""
    queued: int = 1
    """Calls in a repeat, whose time is divided by it."""
    repeats_s: list[float] = field(default_factory=list)
    q_bytes: int = 0
    peak_bytes: int | None = None
    skipped: str = ""

    @property
    def seconds(self) -> float | None:
        """The median, extrapolated to the whole case where only a part was run."""
        return median(self.repeats_s) * self.factor if self.repeats_s else None

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles of the repeats, relative to their median; None for a single one."""
        if len(self.repeats_s) < 2:
            return None
        low, middle, high = quantiles(self.repeats_s, n=4, method="inclusive")
        return (high - low) / 2 / middle

    @property
    def noisy(self) -> bool:
        """Do the repeats differ so much that the median says little?"""
        return self.spread is not None and self.spread > NOISY

    @property
    def seconds_per_image(self) -> float | None:
        return None if self.seconds is None else self.seconds / self.case.batch

    @property
    def memory_over_q(self) -> float | None:
        return self.peak_bytes / self.q_bytes if self.peak_bytes is not None and self.q_bytes else None


@dataclass(frozen=True)
class Effort:
    """How long to measure: every case gets up to `rounds` turns, and stops after `budget_s` once it has `enough`."""

    rounds: int = 5
    enough: int = 3
    budget_s: float = 4.0
    burst: int = 3
    """Repeats per turn of a case that is quick."""


def one_time(call: Call, device: str, calls: int = 1) -> float:
    """Seconds of one call of several in a row: CUDA events on a GPU, the clock elsewhere."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def _queue(row: Row, call: Call) -> None:
    """On CUDA: time the call alone, and find how many make a queue."""
    row.alone_s = median(one_time(call, row.case.device) for _ in range(ALONE if (row.first_s or 0) < 1 else 1))
    row.queued = max(1, min(LONGEST_QUEUE, int(QUEUE_S / row.alone_s)))


def _warm_up(row: Row, pool: Pool, notify: Notify) -> Prepared | None:
    """Prepare and call once or twice; None, with the reason in the row, where the case cannot run."""
    notify(f"warm-up: {row.case.name}")
    try:
        prepared = prepare(row.case, pool)
        row.chosen, row.note, row.factor = prepared.chosen, prepared.note, prepared.factor
        row.q_bytes = prepared.q_bytes
        row.first_s = one_time(prepared.call, row.case.device)
        if row.first_s < 2:
            prepared.call()  # caches and clocks settle on the second
        if row.case.device == "cuda":
            _queue(row, prepared.call)
    except Unavailable as error:
        row.skipped = str(error)
        return None
    except (RuntimeError, MemoryError, ImportError) as error:  # one case that fails must not lose the others
        row.skipped = f"{type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0]}"
        return None
    return prepared


def time_rows(rows: Sequence[Row], pool: Pool, effort: Effort, notify: Notify) -> None:
    """Fill in the rows' repeats, the rows taking turns. Interrupted, what was measured stays."""
    prepared = [_warm_up(row, pool, notify) for row in rows]
    for _ in range(effort.rounds):
        for row, task in zip(rows, prepared, strict=True):
            notify(row.case.name)
            if task is None:
                continue
            spent = sum(row.repeats_s)
            # Never a single repeat, however long: on a busy machine one call may take several times its due.
            if spent > effort.budget_s and len(row.repeats_s) >= effort.enough:
                continue
            if row.queued > 1:
                one_time(task.call, row.case.device, row.queued)  # the clock rises
            for _ in range(effort.burst):
                row.repeats_s.append(one_time(task.call, row.case.device, row.queued))
                if row.repeats_s[-1] * effort.rounds * effort.burst > effort.budget_s:
                    break


def _status(key: str) -> int | None:
    """A line of /proc/self/status, in bytes: VmRSS is memory now, VmHWM its high-water mark."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


def _reset_peak() -> bool:
    """Set the high-water mark to the memory in use now, where the kernel lets us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak() -> int | None:
    """The process's largest memory so far, in bytes."""
    if (mark := _status("VmHWM")) is not None:
        return mark
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def cpu_peak(case: Case) -> dict[str, Any]:
    """Peak memory and time of one call in this process, which should be a fresh one."""
    small = dataclasses.replace(case, size=min(case.size, 40), batch=1)
    prepare(small, Pool()).call()
    prepared = prepare(case, Pool())
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory freed but kept would hide what the call takes
    baseline = _status("VmRSS") if _reset_peak() else _peak()
    start = time.perf_counter()
    result = prepared.call()
    seconds = time.perf_counter() - start
    peak = _peak()
    del result
    extra = None if peak is None or baseline is None else max(peak - baseline, 0)
    return {
        "peak_bytes": extra,
        "q_bytes": prepared.q_bytes,
        "seconds": seconds,
        "factor": prepared.factor,
        "chosen": prepared.chosen,
        "note": prepared.note,
    }


def child() -> None:
    """What the fresh process runs: a case as JSON on stdin, its figures as JSON on stdout."""
    given = json.loads(sys.stdin.read())
    if given["threads"]:
        torch.set_num_threads(given["threads"])
    print(json.dumps(cpu_peak(Case(**given["case"]))))


def in_fresh_process(case: Case, threads: int | None, timeout_s: float = 1800) -> dict[str, Any]:
    """cpu_peak(case) in a process of its own; raises Unavailable with the reason where it fails."""
    request = json.dumps({"case": dataclasses.asdict(case), "threads": threads})
    code = f"import sys; sys.path.insert(0, {CHECKOUT!r}); from benchmarks.bench.measure import child; child()"
    # glibc keeps freed blocks or not as it sees fit: the same call then peaks at anything up to twice what it holds.
    # With a fixed threshold large blocks go back at once, and the peak is what was live.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=request,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=True,
        )
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [
            f"the process ended with {error.returncode} (no memory left?)"
        ]
        raise Unavailable(last[0]) from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"not finished after {timeout_s:.0f} s") from error
    return figures


def measure_memory(row: Row, pool: Pool, threads: int | None, notify: Notify) -> None:
    """Fill in the row's peak memory, for a case that ran."""
    notify(f"memory: {row.case.name}")
    if row.skipped:
        return
    if row.case.device != "cuda":
        try:
            figures = in_fresh_process(row.case, threads)
        except Unavailable:
            return  # the time stands without it
        row.peak_bytes, row.q_bytes = figures["peak_bytes"], figures["q_bytes"]
        return
    prepared = prepare(row.case, pool)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = prepared.call()
    torch.cuda.synchronize()
    row.peak_bytes, row.q_bytes = torch.cuda.max_memory_allocated() - before, prepared.q_bytes
    del result
