"""Check and time the Triton window sums (distance, Gaussian) on a GPU: python benchmarks/gpu_window_sums.py OUT.json

Two more numbers, I N, take every N-th step from the I-th on: several processes then fill Triton's cache at once.
Checks compare with plain PyTorch in float64; every output buffer is filled with NaN before. Times are medians by CUDA
events, preparation included:

- forward, keeping, backward: CUDA graphs of the launches, replayed, so that Python plays no part
- queued: ten calls of the operator in a row, as inside a network
- alone: one call of the operator on an idle GPU, with the time that Python takes to launch it

A step that fails prints its error, and the next one runs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from deepmrf.ops import distance, distance_penalty, gaussian, gaussian_penalty
from deepmrf.ops.distance import gpu as distance_gpu
from deepmrf.ops.gaussian import gpu as gaussian_gpu
from deepmrf.ops.registry import gradients

BUDGET_S = 110.0
"""Seconds after which no further step starts."""
WARM_UP_S = 0.03
"""Seconds of calls before the first that counts."""
BIG = (10, 21, 512, 512)
START_S = time.perf_counter()
report: dict[str, Any] = {"date": "", "device": "", "versions": {}, "checks": [], "times": [], "errors": []}
lines: list[str] = []
steps = 0


def say(line: str) -> None:
    print(line, flush=True)
    lines.append(line)


def save() -> None:
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({**report, "lines": lines}, indent=1))


def attempt(name: str, step: Callable[[], None]) -> None:
    global steps
    steps += 1
    if len(sys.argv) > 3 and steps % int(sys.argv[3]) != int(sys.argv[2]):
        return
    if time.perf_counter() - START_S > BUDGET_S:
        say(f"SKIP  {name}: out of time")
        return
    try:
        step()
    except Exception as error:
        torch.cuda.synchronize()
        say(f"ERROR {name}: {type(error).__name__}: {str(error)[-600:]}")
        report["errors"].append({"name": name, "error": traceback.format_exc()[-3000:]})
    save()


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN inside."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def milliseconds(call: Callable[[], Any], repeats: int = 15, queued: int = 1) -> float:
    """Median time of a call, `queued` of them at a time."""
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < WARM_UP_S:  # the clock rises
        call()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(queued):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / queued)
    return statistics.median(times)


def kernel_milliseconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """The same without Python: the launches of a call, recorded and replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return milliseconds(graph.replay, repeats, queued=5)


def error(result: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Relative error by norms, and largest error over the largest magnitude of its plane."""
    result, wanted = result.double(), wanted.double()
    if not wanted.numel():
        return 0.0, 0.0
    if result.shape != wanted.shape or not torch.isfinite(result).all():
        return float("nan"), float("nan")
    if wanted.norm() == 0:
        return result.norm().item(), result.abs().max().item()
    by_norm = ((result - wanted).norm() / wanted.norm()).item()
    if wanted.dim() < 3:
        return by_norm, by_norm
    planes = tuple(range(2, wanted.dim()))
    largest = (result - wanted).abs().amax(planes) / wanted.abs().amax(planes).clamp_min(1e-30)
    return by_norm, largest.max().item()


class Case:
    """An operator with inputs, and both of its implementations."""

    def __init__(
        self,
        kind: str,
        shape: tuple[int, ...],
        window: int,
        dtype: torch.dtype = torch.float32,
        gate: bool = True,
        frames: int = 3,
    ) -> None:
        torch.manual_seed(len(shape) + shape[-1])
        self.kind, self.shape, self.dtype, self.gate = kind, shape, dtype, gate
        dims = len(shape) - 2
        sides = (window,) * dims if dims < 3 else (frames, window, window)
        over = "x".join(map(str, sides if dims == 3 else sides[:1]))
        self.name = f"{kind} {'x'.join(map(str, shape))} window {over} {str(dtype)[6:]}{'' if gate else ' ungated'}"
        q = torch.rand(shape, device="cuda").softmax(1).to(dtype)
        features = torch.rand(shape[0], 3, *shape[2:], device="cuda") * 255
        if kind == "distance":
            self.inputs = [q, features, torch.tensor([1e-3, 0.5, 0.1], device="cuda")]
            self.triton, self.torch = distance_gpu.IMPLEMENTATION, distance.operator.plain
            if dtype == torch.float16:  # sums of 255^2 over a window do not fit
                self.inputs[1] = features / 255
                self.inputs[2] = torch.tensor([1.0, 1e-3, 0.1], device="cuda")
        else:
            weights, bandwidths = torch.tensor([0.5, 0.1], device="cuda"), torch.tensor([60.0, 20.0], device="cuda")
            self.inputs = [q, features, weights, bandwidths]
            self.triton, self.torch = gaussian_gpu.IMPLEMENTATION, gaussian.operator.plain
        self.rest = (sides, (1.0,) * dims, gate)
        self.grad = (torch.randn(shape, device="cuda") + 0.5).to(dtype)  # not centred: sums of it are not small by luck

    def arguments(self, tensors: list[Tensor], keep: bool) -> Any:
        kind = distance.Arguments if self.kind == "distance" else gaussian.Arguments
        return kind(*tensors, *self.rest, keep)

    def forward(self, keep: bool) -> Any:
        return self.triton.forward(self.arguments(self.inputs, keep))

    def backward(self, kept: Tensor, features_too: bool = False) -> Any:
        needed = (True, features_too, True, True)
        return gradients(self.triton, self.grad, kept, self.arguments(self.inputs, True), needed)

    def check(self, limit: float, features_too: bool = False) -> None:
        assert self.triton.suits(self.arguments(self.inputs, True)), "suits answers False"
        with poisoned():
            out, kept = self.forward(True)
            back = self.backward(kept, features_too)
            again, back_again = self.forward(True), self.backward(kept, features_too)
        exact = self.arguments([t.double() for t in self.inputs], True)
        want, want_kept = self.torch.forward(exact)
        needed = (True, features_too, True, True)
        want_back = gradients(self.torch, self.grad.double(), kept.double(), exact, needed)
        errors = {"t": error(out, want), "kept": error(kept, want_kept)}
        names = ["grad_q", "grad_features", "grad_weights", "grad_bandwidths"]
        for name, result, wanted in zip(names, back, want_back, strict=False):
            errors[name] = error(result, wanted)
        # Sums over all pixels cancel more than the planes do: judge those gradients ten times milder.
        fine = all(e[1] < limit * (10 if name in names[2:] else 1) for name, e in errors.items())
        bitwise = torch.equal(out, again[0]) and all(
            torch.equal(a, b) for a, b in zip(back, back_again, strict=True) if not torch.isnan(a).any()
        )
        shown = "  ".join(
            f"{k} {a:.0e}/{b:.0e}" for k, (a, b) in errors.items() if k != "grad_features" or features_too
        )
        say(f"{'ok  ' if fine else 'BAD '} {'repeats' if bitwise else 'DIFFERS'}  {self.name}:  {shown}")
        report["checks"].append({"case": self.name, "errors": errors, "fine": fine, "repeats": bitwise})

    def operator(self) -> Tensor:
        return (distance_penalty if self.kind == "distance" else gaussian_penalty)(*self.inputs, *self.rest)

    def time(self, label: str, features_too: bool = False, operator_too: bool = False) -> None:
        """The kernels' times; `operator_too`: also those of the operator."""
        times = {"forward": kernel_milliseconds(lambda: self.forward(False))}
        kept = self.forward(True)[1]
        times["keeping"] = kernel_milliseconds(lambda: self.forward(True))
        times["backward"] = kernel_milliseconds(lambda: self.backward(kept, features_too))
        times["training"] = (times["keeping"] + times["backward"]) / times["forward"]  # a ratio
        if operator_too:
            with torch.no_grad():
                times["queued"] = milliseconds(self.operator, queued=10)
                times["alone"] = milliseconds(self.operator, repeats=25)
        say(f"time  {self.name}  {label:44s} " + "  ".join(f"{name} {value:.3f}" for name, value in times.items()))
        report["times"].append({"case": self.name, "variant": label, **times})


def copy_bandwidth() -> None:
    x = torch.rand(BIG, device="cuda")
    y = torch.empty_like(x)
    spent = milliseconds(lambda: y.copy_(x))
    say(f"copy  {2 * x.numel() * 4 / spent / 1e9:.2f} TB/s ({spent:.3f} ms for q)")


HALVES = [torch.bfloat16, torch.float16]
SMALL = [
    (1, 1, 1, 1),
    (2, 3, 63, 63),
    (1, 5, 40, 513),
    (1, 2, 513, 63),
    (2, 4, 513),
    (1, 70, 20, 36),
    (1, 2, 20, 1500),
    (1, 2, 20, 2100),
]
VIDEOS = [(1, 2, 1, 1, 1), (2, 3, 4, 63, 65), (1, 5, 7, 20, 513)]
CLIP = (1, 21, 8, 512, 512)


def checks() -> None:
    attempt("distance check", lambda: Case("distance", BIG, 50).check(2e-5, features_too=True))
    attempt("gaussian check", lambda: Case("gaussian", (1, *BIG[1:]), 51).check(3e-3, features_too=True))
    for shape in SMALL + VIDEOS:
        for window in (50, 5):
            attempt(f"distance {shape}", lambda s=shape, w=window: Case("distance", s, w).check(2e-5, True))
        wide = 51 if len(shape) < 5 else 11  # plain torch takes a pass for every offset
        attempt(f"gaussian {shape}", lambda s=shape, w=wide: Case("gaussian", s, w).check(3e-3, features_too=True))
    attempt("distance ungated", lambda: Case("distance", (2, 3, 63, 63), 50, gate=False).check(2e-5, True))
    attempt("gaussian ungated", lambda: Case("gaussian", (2, 3, 63, 63), 11, gate=False).check(3e-3, features_too=True))
    for dtype in HALVES:
        attempt("distance half", lambda d=dtype: Case("distance", (2, 3, 63, 512), 50, d).check(2e-2))
        attempt("gaussian half", lambda d=dtype: Case("gaussian", (2, 3, 63, 63), 51, d).check(2e-2))
        attempt("distance half video", lambda d=dtype: Case("distance", (2, 3, 3, 20, 63), 11, d).check(2e-2))
        attempt("gaussian half video", lambda d=dtype: Case("gaussian", (2, 3, 3, 20, 63), 11, d).check(2e-2))


def times() -> None:
    attempt("distance", lambda: Case("distance", BIG, 50).time("default", operator_too=True))
    attempt("gaussian", lambda: Case("gaussian", BIG, 51).time("default", operator_too=True))
    attempt("distance features", lambda: Case("distance", BIG, 50).time("with features", features_too=True))
    attempt("gaussian features", lambda: Case("gaussian", BIG, 51).time("with features", features_too=True))
    for dtype in HALVES:
        attempt("distance half", lambda d=dtype: Case("distance", BIG, 50, d).time("default", operator_too=True))
        attempt("gaussian half", lambda d=dtype: Case("gaussian", BIG, 51, d).time("default", operator_too=True))
    attempt("distance clip", lambda: Case("distance", CLIP, 50).time("default", operator_too=True))
    attempt("gaussian clip", lambda: Case("gaussian", CLIP, 51).time("default", operator_too=True))
    attempt("distance clip by torch", clip_by_torch)


def clip_by_torch() -> None:
    case = Case("distance", CLIP, 50)
    spent = milliseconds(lambda: case.torch.forward(*case.inputs, *case.rest, False), repeats=3)
    say(f"time  {case.name}  box sums in plain torch: forward {spent:.3f}")
    report["times"].append({"case": case.name, "variant": "box sums in plain torch", "forward": spent})


def main() -> None:
    import triton

    report["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report["device"] = torch.cuda.get_device_name()
    report["versions"] = {"torch": torch.__version__, "triton": triton.__version__}
    say(f"{report['device']}, torch {torch.__version__}, triton {triton.__version__}")
    torch.backends.cuda.matmul.allow_tf32 = False
    attempt("copy", copy_bandwidth)
    times()
    checks()
    say(f"{time.perf_counter() - START_S:.0f} s in all")
    print("\n".join(["", "SUMMARY", *[x for x in lines if not x.startswith("ok")]]))
    save()


if __name__ == "__main__":
    main()
