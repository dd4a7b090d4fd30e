"""What a run leaves behind: results.json, with everything needed to judge and repeat it, and plot.png."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import deepmrf
from benchmarks.bench.measure import Row
from benchmarks.bench.suite import Results

SCHEMA = 1
_AXES = {"pixels": "pixels", "labels": "labels", "window": "window's side"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """What ran; None is not installed."""
    packages = {name: _version(name) for name in ("numba", "triton", "numpy", "pydensecrf2")}
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "deepmrf": deepmrf.__version__,
        **packages,
    }


def hardware() -> dict[str, Any]:
    """CPU, memory and GPU."""
    model: str | None = None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        pass
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system tells
        memory = None
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_bytes": memory,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


def commit() -> dict[str, Any] | None:
    """The checkout this package runs from: {"id", "dirty"}; None when it is installed from elsewhere."""
    root = Path(deepmrf.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return {"id": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def row_as_dict(row: Row, results: Results) -> dict[str, Any]:
    """A row with its case, every repeat and what follows from them."""
    return {
        **dataclasses.asdict(row.case),
        "axis": row.axis,
        "series": row.series or None,
        "x": row.x or None,
        "chosen": row.chosen or None,
        "seconds": row.seconds,
        "seconds_per_image": row.seconds_per_image,
        "spread": row.spread,
        "noisy": row.noisy,
        "repeats_s": row.repeats_s,
        "first_call_s": row.first_s,
        "alone_s": row.alone_s,
        "queued": row.queued,
        "extrapolated_by": row.factor,
        "times_faster_than_baseline": results.times_faster(row) if row.axis == "table" else None,
        "over_forward": results.over_forward(row) if row.axis == "table" else None,
        "q_bytes": row.q_bytes or None,
        "peak_bytes": row.peak_bytes,
        "memory_over_q": row.memory_over_q,
        "note": row.note or None,
        "skipped": row.skipped or None,
    }


def as_dict(results: Results) -> dict[str, Any]:
    """Everything, as results.json holds it. Rows that were not reached are left out."""
    baseline = results.baseline
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "finished": results.finished,
        "command": shlex.join(["deepmrf", *sys.argv[1:]]),
        "commit": commit(),
        "hardware": hardware(),
        "load": results.load,
        "versions": versions(),
        "settings": dataclasses.asdict(results.settings),
        "effort": dataclasses.asdict(results.settings.effort),
        "baseline": baseline.case.name if baseline is not None else None,
        "rows": [row_as_dict(row, results) for row in results.rows if row.repeats_s or row.skipped],
    }


def write(results: Results, folder: Path) -> Path:
    """Write results.json into the folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps(as_dict(results), indent=1) + "\n")
    return path


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of log y against log x by least squares: 1 is linear, 0 is flat."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    rise = sum((x - x_mean) * (y - y_mean) for x, y in logs)
    return float(rise / sum((x - x_mean) * (x - x_mean) for x, _ in logs))


def in_words(value: float) -> str:
    """What a slope means, for a title."""
    words = ((-0.2, "falls"), (0.2, "flat"), (0.8, "less than linear"), (1.2, "linear"))
    word = next((word for limit, word in words if value < limit), "more than linear")
    return f"{word} (slope {value:.2f})"


def plot(results: Results, path: Path) -> bool:
    """Time and memory against pixels, labels and window as small multiples; False where there is nothing to draw."""
    axes_there = [axis for axis in _AXES if any(row.repeats_s for row in results.on(axis))]
    if not axes_there:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = ["time", *["memory"] * any(row.peak_bytes for axis in axes_there for row in results.on(axis))]
    figure = Figure(figsize=(4.2 * len(axes_there), 3.5 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(lines), len(axes_there), squeeze=False)
    for column, axis in enumerate(axes_there):
        rows = [row for row in results.on(axis) if row.repeats_s]
        for line, what in enumerate(lines):
            _draw(grid[line][column], rows, axis, what)
    grid[0][0].legend(fontsize=7, frameon=False)
    settings = results.settings
    figure.suptitle(
        f"b12, distance kernel, unless varied: {settings.batch} x {settings.labels} labels x {settings.size} x "
        f"{settings.size}, window 50, {settings.dtype}, {settings.device}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    return True


def _draw(axes: Any, rows: Sequence[Row], axis: str, what: str) -> None:
    """One panel: a line per series, and in the title how ours grows."""
    title = f"{what} against {axis}"
    for number, name in enumerate(dict.fromkeys(row.series for row in rows)):
        values = [
            (float(row.x), (row.seconds_per_image or 0.0) * 1e3 if what == "time" else (row.peak_bytes or 0) / 2**20)
            for row in rows
            if row.series == name
        ]
        points = [(x, y) for x, y in values if y > 0]
        if not points:
            continue
        ours = name == "deepmrf"
        extrapolated = any(row.factor > 1 for row in rows if row.series == name)
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=5 if ours else 3,
            linewidth=2.2 if ours else 1.2,
            linestyle="--" if extrapolated else "-",
            color=f"C{number}",
            label=name + (" (extrapolated)" if extrapolated else ""),
        )
        if ours and len(points) > 1:
            title += f": {in_words(slope(points))}"
    axes.set_title(title, fontsize=9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 10 * low:  # what is flat shall look flat
        middle = (low * high) ** 0.5
        axes.set_ylim(middle / 10**0.5, middle * 10**0.5)
    axes.set_xticks(sorted({row.x for row in rows}), [f"{x:,}" for x in sorted({row.x for row in rows})], fontsize=7)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(_AXES[axis])
    axes.set_ylabel("ms per image" if what == "time" else "peak memory beyond the inputs, MiB")
    axes.grid(True, which="both", alpha=0.25)
