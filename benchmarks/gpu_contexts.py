"""Check and time the label contexts by Triton on one GPU, with cuDNN beside them: python benchmarks/gpu_contexts.py OUT

The checks compare with float64 and run in parallel processes, since compilation takes most of their time. Times are
medians by CUDA events. OUT is a JSON file; a check or a time that fails is written there and passed over.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops import contexts
from deepmrf.ops.contexts import gpu
from deepmrf.ops.launch import largest_bits
from deepmrf.ops.registry import gradients

Case = tuple[int, int, tuple[int, int], int, tuple[int, int]]
CASES: list[Case] = [  # batch, labels, size, K, window
    (10, 21, (512, 512), 5, (9, 9)),
    (1, 2, (1, 1), 1, (1, 1)),
    (2, 2, (63, 63), 3, (3, 3)),
    (1, 2, (513, 513), 5, (9, 9)),
    (3, 11, (63, 513), 8, (5, 5)),
    (2, 11, (513, 63), 5, (9, 9)),
    (1, 21, (1, 513), 1, (9, 9)),
    (1, 21, (513, 513), 3, (9, 9)),
    (2, 21, (63, 63), 8, (4, 7)),
    (1, 21, (513, 1), 5, (2, 6)),
    (2, 21, (128, 130), 5, (1, 1)),
    (1, 60, (63, 63), 5, (3, 3)),
    (1, 60, (65, 63), 1, (9, 5)),
    (1, 150, (63, 63), 5, (3, 3)),
    (1, 150, (33, 40), 3, (9, 9)),
    (1, 21, (64, 200), 16, (3, 3)),
]
MAX_ERRORS = {True: 1e-3, False: 1e-5}
"""Largest relative error: numbers rounded to float16 (allow_tf32), and split in two."""
PROCESSES = 8


def data(case: Case, seed: int = 0) -> tuple[Tensor, ...]:
    """(t, weight, bias, gradient)"""
    batch, labels, size, k, window = case
    options: dict[str, Any] = {"device": "cuda", "generator": torch.Generator("cuda").manual_seed(seed)}
    t = torch.rand(batch, labels, *size, **options)
    weight = torch.randn(labels * k, labels, *window, **options) * 0.05
    return t, weight, torch.randn(labels * k, **options) * 0.1, torch.randn(batch, labels, *size, **options)


def error(result: Tensor, wanted: Tensor) -> float:
    """Relative error by norms; NaN where anything is missing."""
    if result.shape != wanted.shape:
        return float("nan")
    return ((result.double() - wanted).norm() / wanted.norm().clamp_min(1e-300)).item()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN (255 for whole numbers), so that a number that nobody wrote shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else 255)

    torch.empty = lambda *a, **k: fill(empty(*a, **k))  # type: ignore[assignment]
    torch.empty_like = lambda *a, **k: fill(empty_like(*a, **k))  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def forward(t: Tensor, weight: Tensor, bias: Tensor, patterns: int, by: Any = gpu.IMPLEMENTATION) -> Any:
    return by.forward(contexts.Arguments(t, weight, bias, patterns))


def backward(
    grad: Tensor, active: Tensor, t: Tensor, weight: Tensor, patterns: int, t_too: bool, weight_too: bool,
    by: Any = gpu.IMPLEMENTATION,
) -> Any:  # fmt: skip
    arguments = contexts.Arguments(t, weight, weight.new_zeros(len(weight)), patterns)
    return gradients(by, grad, active, arguments, (t_too, weight_too, True))


def check(case: Case, rounded: bool) -> dict[str, Any]:
    """Errors against float64, and whether two runs agree to the bit."""
    line: dict[str, Any] = {"case": str(case), "rounded": rounded}
    torch.backends.cudnn.allow_tf32 = rounded
    try:
        k = case[3]
        t, weight, bias, grad = data(case)
        with poisoned():
            runs = [forward(t, weight, bias, k) for _ in range(2)]
        (out, active), repeats = runs[0], all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        errors = {"out": 0.0, "active": 0.0}
        for i in range(len(t)):  # one image at a time: o13 in float64 is large
            o13 = contexts.window_convolution(t[i : i + 1].double(), weight.double()) + bias.double()[:, None, None]
            o13 = o13.unflatten(1, (-1, k))
            o14 = o13.min(2).values
            chosen = o13.gather(2, active[i : i + 1].long().unsqueeze(2)).squeeze(2)
            for name, result in (("out", out[i : i + 1]), ("active", chosen)):
                errors[name] = max(errors[name], error(result, o14), key=lambda x: (x != x, x))
            del o13, chosen
        if rounded:
            if t.numel() > 30_000_000:
                t, grad, active = t[:1], grad[:1], active[:1]
            with poisoned():
                runs = [backward(grad, active, t, weight, k, True, True) for _ in range(2)]
            repeats = repeats and all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
            wanted = backward(
                grad.double(), active, t.double(), weight.double(), k, True, True, by=contexts.operator.plain
            )
            for name, result, exact in zip(("grad_t", "grad_weight", "grad_bias"), runs[0], wanted, strict=True):
                errors[name] = error(result, exact)
        line.update(errors=errors, repeats=repeats)
        line["ok"] = repeats and all(e < MAX_ERRORS[rounded] for e in errors.values())
    except Exception:
        line.update(ok=False, problem=traceback.format_exc()[-3000:])
    torch.cuda.empty_cache()
    return line


def median_ms(run: Callable[[], Any], repeats: int) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def timings() -> dict[str, Any]:
    """Medians in ms, by name."""
    ms: dict[str, Any] = {}
    case = CASES[0]
    k = case[3]
    t, weight, bias, grad = data(case)

    def timed(name: str, run: Callable[[], Any], repeats: int = 15) -> None:
        try:
            ms[name] = median_ms(run, repeats)
        except Exception as problem:
            ms[name] = f"{type(problem).__name__}: {problem}"[:300]
        print(f"{name:50s} {ms[name]}", flush=True)

    torch.backends.cudnn.allow_tf32 = True
    _, active = forward(t, weight, bias, k)
    plan = gpu.make_plan(t.shape[1], *weight.shape[2:], t.shape[1], k)
    timed("forward", lambda: forward(t, weight, bias, k))
    timed("  largest magnitude of t", lambda: largest_bits(t))
    timed("  filters", lambda: gpu._filters(weight, k, plan))
    timed("backward", lambda: backward(grad, active, t, weight, k, True, True))
    timed("  bias alone", lambda: backward(grad, active, t, weight, k, False, False))
    timed("  t and bias", lambda: backward(grad, active, t, weight, k, True, False))
    timed("  weight and bias", lambda: backward(grad, active, t, weight, k, False, True))
    torch.backends.cudnn.allow_tf32 = False
    timed("forward, numbers split in two", lambda: forward(t, weight, bias, k))
    cudnn(timed, t, weight, bias, grad, active, k)
    return ms


def cudnn(timed: Any, t: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, active: Tensor, k: int) -> None:
    """The same by cuDNN, and its convolution alone in the layouts and precisions that suit it best."""
    padding = (weight.shape[2] // 2, weight.shape[3] // 2)

    def convolution(name: str, dtype: torch.dtype, channels_last: bool, inputs: int = 0, repeats: int = 7) -> None:
        """With zeros for more input channels, if `inputs` says so."""
        extra = max(inputs - t.shape[1], 0)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        x, w = (
            functional.pad(a, (0, 0, 0, 0, 0, extra)).to(dtype).contiguous(memory_format=layout) for a in (t, weight)
        )
        timed(f"cudnn {name}: convolution", lambda: functional.conv2d(x, w, padding=padding), repeats)

    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    timed("torch tf32: forward", lambda: forward(t, weight, bias, k, by=contexts.operator.plain), 5)
    timed(
        "torch tf32: backward", lambda: backward(grad, active, t, weight, k, True, True, by=contexts.operator.plain), 3
    )
    convolution("tf32", torch.float32, channels_last=False)
    convolution("tf32, channels last", torch.float32, channels_last=True)
    convolution("bf16, channels last", torch.bfloat16, channels_last=True)
    convolution("bf16, channels last, 32 channels", torch.bfloat16, channels_last=True, inputs=32)
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = False  # trying all algorithms takes seconds
    convolution("float32", torch.float32, channels_last=False, repeats=3)


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("gpu_contexts.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    start_s = time.time()
    tasks = [(case, rounded) for rounded in (True, False) for case in CASES]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        lines = list(pool.map(check, *zip(*tasks, strict=True)))
    results = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "checks": lines, "ms": timings()}
    target.write_text(json.dumps({**results, "seconds": time.time() - start_s}, indent=1))
    for line in lines:
        errors = "  ".join(f"{name} {value:.1e}" for name, value in line.get("errors", {}).items())
        kind = "rounded" if line["rounded"] else "split"
        state = ("ok  " if line["ok"] else "FAIL") + ("" if line.get("repeats", True) else " RUNS DIFFER")
        print(f"{state} {line['case']:42s} {kind:8s} {errors} {line.get('problem', '')[-300:]}")
    print(f"{sum(not line['ok'] for line in lines)} checks failed; {time.time() - start_s:.0f} s")


if __name__ == "__main__":
    main()
