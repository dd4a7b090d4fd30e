"""Which cases a run holds, and the run itself: pure functions of the settings that return rows."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.bench.cases import Case, Kind, Pool, Unavailable
from benchmarks.bench.inputs import IMAGES
from benchmarks.bench.measure import Effort, Notify, Row, in_fresh_process, measure_memory, time_rows

DTYPES = ("float32", "float64", "bfloat16", "float16")
LARGE = 4096
"""Side of the large case: 16.8 million pixels."""
DIRECT_LOOP, DENSE_CRF = "direct window loop, 50 x 50", "pydensecrf2, 10 iterations"
"""What the ratios are to: the first on a GPU, the second on the CPU."""


@dataclass(frozen=True)
class Settings:
    """What to run. Make it with `of`, which fills in what depends on the device and checks."""

    device: str
    size: int
    labels: int
    batch: int
    dtype: str
    threads: int | None
    quick: bool
    implementations: bool
    scaling: bool
    memory: bool
    large: bool
    seed: int
    image: str = "photo"

    @classmethod
    def of(
        cls,
        device: str = "cpu",
        *,
        size: int | None = None,
        labels: int | None = None,
        batch: int | None = None,
        dtype: str = "float32",
        threads: int | None = None,
        quick: bool = False,
        implementations: bool = False,
        scaling: bool = True,
        memory: bool = True,
        large: bool = False,
        seed: int = 0,
        image: str = "photo",
    ) -> Settings:
        """Settings with the paper's sizes for what is None (small ones with quick). ValueError says what to pass."""
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r} is unknown: choose 'cpu' or 'cuda'.")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda' needs a GPU that PyTorch sees, and there is none: choose 'cpu'.")
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r} is unknown: choose one of {', '.join(DTYPES)}.")
        if image not in IMAGES:
            raise ValueError(f"image={image!r} is unknown: choose one of {', '.join(IMAGES)}.")
        if large and device != "cpu":
            raise ValueError("large is a case for the CPU's memory: choose device='cpu'.")
        size = size if size is not None else (48 if quick else 512)
        labels = labels if labels is not None else (4 if quick else 21)
        batch = batch if batch is not None else (10 if device == "cuda" and not quick else 1)
        for name, value, least in (("size", size, 16), ("labels", labels, 2), ("batch", batch, 1)):
            if value < least:
                raise ValueError(f"{name}={value} is too small: pass at least {least}.")
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads} must be at least 1.")
        if threads is None and quick and device == "cpu":
            threads = 1  # on small images threads wait for each other more than they work
        return cls(
            device, size, labels, batch, dtype, threads, quick, implementations, scaling, memory, large, seed, image
        )

    @property
    def effort(self) -> Effort:
        return Effort(rounds=3, enough=2, budget_s=0.05, burst=1) if self.quick else Effort()

    def case(self, name: str, kind: Kind, **changes: object) -> Case:
        """A case of this run's size; `changes` go to Case."""
        base = Case(name, kind, self.size, self.labels, self.batch, device=self.device, dtype=self.dtype)
        base = dataclasses.replace(base, seed=self.seed, image=self.image)
        return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@dataclass
class Results:
    """A run: its settings and every row, measured or not yet."""

    settings: Settings
    rows: list[Row] = field(default_factory=list)
    finished: bool = False
    load: list[float] = field(default_factory=list)
    """Processes that wanted a core, over the last minute, at the start and at the end of the run."""

    def on(self, axis: str) -> list[Row]:
        """The rows of one part: "table", "pixels", "labels", "window" or "large"."""
        return [row for row in self.rows if row.axis == axis]

    @property
    def steps(self) -> int:
        """How often `run` will call notify."""
        timed = [row for row in self.rows if row.axis != "large"]
        memory = sum(_wants_memory(row, self.settings) for row in timed)
        return len(timed) * (self.settings.effort.rounds + 1) + memory + len(self.rows) - len(timed)

    @property
    def baseline(self) -> Row | None:
        """What the table's ratios are to; None where it was not measured."""
        wanted = DENSE_CRF if self.settings.device == "cpu" else DIRECT_LOOP
        return next((row for row in self.on("table") if row.case.name == wanted and row.repeats_s), None)

    def times_faster(self, row: Row) -> float | None:
        """Per image, how many times the baseline takes of this row's time."""
        base = self.baseline.seconds_per_image if self.baseline is not None else None
        return base / row.seconds_per_image if base and row.seconds_per_image else None

    def over_forward(self, row: Row) -> float | None:
        """For a row with gradients: its time over the forward pass's alone."""
        if not row.case.backward or row.seconds is None:
            return None
        ahead = dataclasses.replace(row.case, backward=False)
        for other in self.on("table"):  # plain PyTorch's forward pass may stand among the peers
            if dataclasses.replace(other.case, name=ahead.name, peer=False) == ahead and other.seconds:
                return row.seconds / other.seconds
        return None


def _ours(settings: Settings) -> list[Case]:
    case = settings.case
    # Loops over offsets in plain PyTorch take a call per offset, however small the image: quick has fewer.
    wide, near = (15, 5) if settings.quick else (51, 11)
    cases = [case(f"b12 distance, {w} x {w}", "distance", window=w) for w in (11, 50, 101)]
    cases += [
        case(f"b12 gaussian, {wide} x {wide}", "gaussian", window=wide),
        case("b12-b15, exact, 5 contexts of 9 x 9", "step"),
        case("b12-b15, compressed contexts", "compressed"),
        case(f"dense_crf, {near} x {near}, 5 iterations", "dense_crf", window=near, iterations=5),
        case("b12 distance, 50 x 50, and gradients", "distance", backward=True),
        case(f"b12 gaussian, {wide} x {wide}, and gradients", "gaussian", window=wide, backward=True),
        case("b12-b15, exact, and gradients", "step", backward=True),
    ]
    all_pairs = case("dense CRF, all pairs, 10 iterations", "all_pairs", window=0, iterations=10)
    if not settings.implementations:
        return [*cases, all_pairs]
    compiled = "triton" if settings.device == "cuda" else "numba"
    there = importlib.util.find_spec(compiled) is not None
    forced = [dataclasses.replace(row, implementation=name) for row in cases for name in ("torch", *[compiled] * there)]
    # Box sums in plain PyTorch stand among the peers.
    plain = _peers(settings)[0]
    return [
        *cases,
        all_pairs,
        *(row for row in forced if dataclasses.replace(row, name=plain.name, peer=True) != plain),
    ]


def _peers(settings: Settings) -> list[Case]:
    case, near = settings.case, 5 if settings.quick else 11
    return [
        case("box sums in plain PyTorch, 50 x 50", "distance", implementation="torch", peer=True),
        case(DIRECT_LOOP, "direct_loop", peer=True),
        case(
            f"windowed CRF by unfolding, {near} x {near}, 5 iterations",
            "unfolded_crf",
            window=near,
            iterations=5,
            peer=True,
        ),
        *[
            case(f"pydensecrf2, {n} iterations", "pydensecrf2", batch=1, window=0, iterations=n, peer=True)
            for n in (5, 10)
        ],
    ]


def _points(settings: Settings, axis: str) -> Iterable[int]:
    points = {"pixels": (128, 256, 512, 1024), "labels": (2, 4, 8, 16, 32, 64), "window": (5, 11, 25, 51, 101, 201)}
    few = {"pixels": (32, 48, 64), "labels": (2, 4, 8), "window": (5, 15, 45)}
    return (few if settings.quick else points)[axis]


def _scaling(settings: Settings, axis: str) -> list[Row]:
    """b12 with the distance kernel along one axis, with the peers as far as they are affordable."""
    rows = []
    for x in _points(settings, axis):
        changes: dict[str, object] = {"size" if axis == "pixels" else axis: x}
        value = x * x if axis == "pixels" else x
        series: list[tuple[str, Kind, dict[str, object]]] = [
            ("deepmrf", "distance", {}),
            ("box sums in plain PyTorch", "distance", {"implementation": "torch", "peer": True}),
            ("direct window loop", "direct_loop", {"peer": True}),
        ]
        affordable = (axis == "pixels" and x <= 512) or (axis == "labels" and x <= 21)
        if settings.device == "cpu" and affordable:
            series.append(
                (DENSE_CRF, "pydensecrf2", {"peer": True, "batch": 1, "iterations": 10}),
            )
        for name, kind, more in series:
            case = settings.case(f"{name}, {axis} {value}", kind, **changes, **more)
            rows.append(Row(case, axis, name, value))
    return rows


def plan(settings: Settings) -> list[Row]:
    """Every row of a run, nothing measured yet."""
    rows = [Row(case) for case in (*_ours(settings), *_peers(settings))]
    if settings.scaling:
        rows += [row for axis in ("pixels", "labels", "window") for row in _scaling(settings, axis)]
    if settings.large:
        for name, kind in (("b12 distance, 50 x 50", "distance"), ("b12-b15, exact, 5 contexts of 9 x 9", "step")):
            case = settings.case(name, kind, size=LARGE, batch=1)  # type: ignore[arg-type]
            rows.append(Row(case, "large"))
    return rows


def _wants_memory(row: Row, settings: Settings) -> bool:
    """Every row of the table and our own scaling; on the CPU each costs a process, so `quick` takes a single one."""
    if not settings.memory:
        return False
    if settings.quick and settings.device == "cpu":
        return row.axis == "table" and row.case.kind == "distance" and not row.case.peer and row.case.window == 50
    return row.axis == "table" or settings.device == "cuda" or row.series == "deepmrf"


def run(results: Results, notify: Notify = lambda _: None) -> None:
    """Measure every row of `results` in place: after an interruption, what was measured is there."""
    settings = results.settings
    before = torch.get_num_threads()
    results.load += _load()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        for axis in ("table", "pixels", "labels", "window"):
            rows, pool = results.on(axis), Pool()
            time_rows(rows, pool, settings.effort, notify)
            for row in rows:
                if _wants_memory(row, settings):
                    measure_memory(row, pool, settings.threads, notify)
        for row in results.on("large"):
            _run_large(row, settings, notify)
        results.finished = True
    finally:
        results.load += _load()
        torch.set_num_threads(before)


def _load() -> list[float]:
    return [os.getloadavg()[0]] if hasattr(os, "getloadavg") else []


def free_memory() -> int | None:
    """Bytes that a process may still take without swapping, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _run_large(row: Row, settings: Settings, notify: Notify) -> None:
    """Time and memory of one call in a fresh process, if it will fit: judged by a smaller image's memory."""
    notify(f"large: {row.case.name}")
    q_bytes = row.case.labels * row.case.size**2 * torch.empty(0, dtype=getattr(torch, row.case.dtype)).element_size()
    try:
        small = in_fresh_process(dataclasses.replace(row.case, size=LARGE // 4), settings.threads)
        free, multiple = free_memory(), (small["peak_bytes"] or 0) / small["q_bytes"]
        needed = q_bytes * (multiple + 2) + 3 * row.case.size**2 * 8  # and log_p, q and the image
        if free is not None and needed > 0.95 * free:
            row.skipped = f"it needs about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free."
            return
        figures = in_fresh_process(row.case, settings.threads)
    except Unavailable as error:
        row.skipped = str(error)
        return
    row.repeats_s, row.factor = [figures["seconds"]], figures["factor"]
    row.peak_bytes, row.q_bytes = figures["peak_bytes"], figures["q_bytes"]
    row.chosen, row.note = figures["chosen"], "; ".join(filter(None, (figures["note"], "one call in a fresh process")))
