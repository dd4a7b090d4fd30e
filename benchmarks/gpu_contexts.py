"""Label contexts by Triton on one GPU: checks against float64, tuning variants, and cuDNN beside them.

python3 benchmarks/gpu_contexts.py results.json    (in the repository root; the checks run in parallel processes)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.ops import contexts
from deepmrf.ops.contexts import gpu as ct

# batch, labels, size, K, window
CASES: list[tuple[int, int, tuple[int, int], int, tuple[int, int]]] = [
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
WORKERS = len(CASES)
START = time.time()


def data(case: tuple[Any, ...], seed: int = 0) -> tuple[Tensor, ...]:
    batch, labels, size, k, window = case
    draw = torch.Generator("cuda").manual_seed(seed)
    made = {"device": "cuda", "generator": draw}
    t = torch.rand(batch, labels, *size, **made)
    weight = torch.randn(labels * k, labels, *window, **made) * 0.05
    return t, weight, torch.randn(labels * k, **made) * 0.1, torch.randn(batch, labels, *size, **made)


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative, of the whole; NaN where anything is missing."""
    if got.shape != wanted.shape:
        return float("nan")
    return ((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-300)).item()


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN (255 for whole numbers), so that what nobody wrote shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else 255)

    torch.empty = lambda *a, **k: fill(empty(*a, **k))  # type: ignore[assignment]
    torch.empty_like = lambda *a, **k: fill(empty_like(*a, **k))  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def reference(t: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """o13 in float64."""
    return contexts.window_convolution(t.double(), weight.double()) + bias.double()[:, None, None]


def check(case: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """One line per precision: errors, and whether two runs agree to the bit."""
    k = case[3]
    large = case[0] * case[2][0] * case[2][1] > 1_000_000
    limits = {"fp16": 1e-3, "bf16": 1e-2, "fp16x3": 1e-5}
    if CASES.index(case) % 3:  # compiled apart, so only for some
        del limits["bf16"]
    for name, limit in limits.items():
        line: dict[str, Any] = {"case": str(case), "precision": name}
        try:
            t, weight, bias, grad = data(case, seed=len(name))
            with ct.precision(name), poisoned():
                out, active = ct._forward(t, weight, bias, k)
                again, active_again = ct._forward(t, weight, bias, k)
                line["same"] = torch.equal(out, again) and torch.equal(active, active_again)
                softmax = ct.forward_softmax(t, weight, bias, k, grad)
            worst = forward = soft = 0.0
            for i in range(len(t)):  # one image at a time: o13 in float64 is large
                o13 = reference(t[i : i + 1], weight, bias).unflatten(1, (-1, k))
                o14 = o13.min(2).values
                forward = max(forward, error(out[i : i + 1], o14), key=lambda x: (x != x, x))
                chosen = o13.gather(2, active[i : i + 1].long().unsqueeze(2)).squeeze(2)
                worst = max(worst, ((chosen - o14).norm() / o14.norm()).item())
                wanted = torch.log_softmax(grad[i : i + 1].double() - o14, 1)
                soft = max(soft, error(softmax[i : i + 1], wanted), key=lambda x: (x != x, x))
                del o13, chosen
            line.update(out=forward, active=worst, softmax=soft)
            errors = [forward, worst, soft]
            if name != "fp16x3":
                if large:
                    t, grad, active = t[:1], grad[:1], active[:1]
                with ct.precision(name), poisoned():
                    got = ct._backward(grad, active, t, weight, k, True, True)
                    more = ct._backward(grad, active, t, weight, k, True, True)
                line["same"] = line["same"] and all(torch.equal(a, b) for a, b in zip(got, more, strict=True))
                wanted_all = contexts._backward(grad.double(), active, t.double(), weight.double(), k, True, True)
                for key, one, other in zip(("grad_t", "grad_w", "grad_b"), got, wanted_all, strict=True):
                    line[key] = error(one, other)
                    errors.append(line[key])
            line["ok"] = bool(line["same"]) and all(e < limit for e in errors)
        except Exception as problem:
            line.update(ok=False, problem=f"{type(problem).__name__}: {problem}"[:600])
            line["trace"] = traceback.format_exc()[-3000:]
        yield line
        torch.cuda.empty_cache()


def warm(number: int) -> None:
    """Run the variants once on one image, for their compiled kernels: Triton keeps them on disk for the timings."""
    t, weight, bias, grad = data((1, *CASES[0][1:]))
    k = CASES[0][3]

    def once(name: str, run: Callable[[], Any], repeats: int = 0) -> None:
        try:
            run()
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {problem}"[:200])

    with ct.precision("fp16"):
        out, active = ct._forward(t, weight, bias, k)
        if number == 0:
            variants(once, t, weight, bias, out, active, k)
        else:
            backward_variants(once, t, weight, grad, active, k)
    torch.cuda.synchronize()


def worker(number: int, path: str) -> None:
    if number >= WORKERS:
        warm(number - WORKERS)
        return
    lines = []
    for case in CASES[number::WORKERS]:
        for line in check(case):
            lines.append(line)
            Path(path).write_text(json.dumps(lines))  # what is done stays if the rest is cut off


def checks(folder: Path, limit: float) -> list[dict[str, Any]]:
    """All cases, in parallel: compilation is most of the time."""
    paths = [folder / f"contexts_check_{i}.json" for i in range(WORKERS)]
    here = str(Path(__file__).resolve())
    running = []
    for i, path in enumerate(paths):
        path.unlink(missing_ok=True)
        running.append(subprocess.Popen([sys.executable, here, "--worker", str(i), str(path)]))
    for i in range(WORKERS, WORKERS + 2):
        running.append(subprocess.Popen([sys.executable, here, "--worker", str(i), ""]))
    for one in running:
        try:
            one.wait(max(1.0, limit - (time.time() - START)))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()
    lines = []
    for i, path in enumerate(paths):
        got = json.loads(path.read_text()) if path.exists() else []
        path.unlink(missing_ok=True)
        lines += got
        done = {line["case"] for line in got}
        lines += [
            {"case": str(case), "ok": False, "problem": "not finished"}
            for case in CASES[i::WORKERS]
            if str(case) not in done
        ]
    return lines


def median_ms(run: Callable[[], Any], repeats: int = 15, warm: int = 3) -> float:
    for _ in range(warm):
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


def timings(results: dict[str, Any], limit: float) -> None:
    """Medians in ms, by name, in results["ms"]; what fails is noted and passed over."""
    ms: dict[str, Any] = results.setdefault("ms", {})
    case = CASES[0]
    k = case[3]
    t, weight, bias, grad = data(case, seed=9)

    def timed(name: str, run: Callable[[], Any], repeats: int = 15) -> None:
        if time.time() - START > limit:
            ms[name] = "no time left"
            return
        try:
            ms[name] = median_ms(run, repeats)
        except Exception as problem:
            ms[name] = f"{type(problem).__name__}: {problem}"[:300]
        print(f"{name:58s} {ms[name]}", flush=True)

    with ct.precision("fp16"):
        timed("forward, default", lambda: ct._forward(t, weight, bias, k))
        timed("forward, default, once more", lambda: ct._forward(t, weight, bias, k))
        out, active = ct._forward(t, weight, bias, k)
        timed("backward, default", lambda: ct._backward(grad, active, t, weight, k, True, True))
        timed("forward_softmax", lambda: ct.forward_softmax(t, weight, bias, k, grad))
        stages(timed, t, weight, bias, grad, out, active, k)
    cudnn(timed, t, weight, bias, grad, active, k)
    variants(timed, t, weight, bias, out, active, k)
    backward_variants(timed, t, weight, grad, active, k)
    for name in ("bf16", "fp16x3"):
        with ct.precision(name):
            timed(f"forward, {name}", lambda: ct._forward(t, weight, bias, k))


def prepared(t: Tensor, weight: Tensor, k: int, plan: Any, tile: Any) -> tuple[Any, ...]:
    tall, wide = weight.shape[2:]
    lines = ct._lines(plan, t.shape[2], tall)
    slack = ct._slack(plan, tile, t.shape[3] + wide // 2)
    rows = ct._rows(
        t, None, k, plan, (tall, wide), (tall // 2, wide // 2), lines, slack, 1, torch.float16
    )  # fmt: skip
    return rows, *ct._filters(weight, k, plan, False, 1, torch.float16)


def stages(timed: Any, t: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, out: Any, active: Any, k: int) -> None:
    """Where the default forward and backward spend their time."""
    plan = ct._plan(t.shape[1], *weight.shape[2:], t.shape[1], k, 1, False)
    tile = ct._tile(plan, t)
    timed("  largest of t", lambda: ct.largest_bits(t))
    timed("  filters (with largest)", lambda: ct._filters(weight, k, plan, False, 1, torch.float16))
    timed("  rows + largest + filters", lambda: prepared(t, weight, k, plan, tile))
    timed("  bias gradient", lambda: ct._bias_gradient(grad, active, k))
    timed("  backward, t only", lambda: ct._backward(grad, active, t, weight, k, True, False))
    timed("  backward, weight only", lambda: ct._backward(grad, active, t, weight, k, False, True))


def variants(timed: Any, t: Tensor, weight: Tensor, bias: Tensor, out: Any, active: Any, k: int) -> None:
    """The product alone (with the minimum), in every cut; each is compared with the default's result."""
    tall, wide = weight.shape[2:]
    default = ct._plan(t.shape[1], tall, wide, t.shape[1], k, 1, False)
    plans = {
        "g3 k64": default,
        "g3 k32": ct._Plan(3, 64, 32, 18, 54, 128, 1, 1),
        "g1 k32": ct._Plan(1, 24, 32, 7, 63, 128, 1, 1),
    }
    tries = [
        ("g3 k64", ct.Tile(256, 8, 3)),
        ("g3 k64", ct.Tile(256, 8, 4)),
        ("g3 k64", ct.Tile(128, 4, 3)),
        ("g3 k64", ct.Tile(128, 4, 4)),
        ("g3 k64", ct.Tile(128, 8, 3)),
        ("g3 k64", ct.Tile(256, 8, 3, tma_b=True)),
        ("g3 k64", ct.Tile(256, 8, 3, tma_a=True, tma_b=True)),
        ("g3 k64", ct.Tile(256, 8, 4, tma_a=True, tma_b=True)),
        ("g3 k64", ct.Tile(128, 4, 3, tma_a=True, tma_b=True)),
        ("g3 k64", ct.Tile(128, 4, 3, tma_b=True)),
        ("g3 k32", ct.Tile(256, 8, 4)),
        ("g3 k32", ct.Tile(256, 8, 5)),
        ("g3 k32", ct.Tile(128, 4, 4)),
        ("g1 k32", ct.Tile(256, 8, 4)),
        ("g1 k32", ct.Tile(256, 8, 4, tma_a=True, tma_b=True)),
        ("g1 k32", ct.Tile(128, 4, 4)),
    ]
    wanted = out.double()
    for name, tile in tries:
        plan = plans[name]
        kind = "".join((" tma_a" * tile.tma_a, " tma_b" * tile.tma_b))
        label = f"  product {name} m{tile.block_m} w{tile.warps} s{tile.stages}{kind}"
        to, index = torch.full_like(out, float("nan")), torch.full_like(active, 255)
        try:
            rows, packed, bits = prepared(t, weight, k, plan, tile)

            def run(
                rows: Any = rows, packed: Any = packed, bits: Any = bits,
                plan: Any = plan, tile: Any = tile, to: Any = to, index: Any = index,
            ) -> None:  # fmt: skip
                ct._correlate(rows, packed, bits, bias, None, t.shape, k, plan, tile, to, index)

            run()
            off = error(to, wanted)
            timed(label + ("" if off < 1e-4 else f" WRONG {off:.1e}"), run)
        except Exception as problem:

            def fail(problem: Exception = problem) -> None:
                raise problem

            timed(label, fail)


def backward_variants(timed: Any, t: Tensor, weight: Tensor, grad: Tensor, active: Tensor, k: int) -> None:
    with ct.precision("fp16"):
        for tile in (
            ct.Tile(256, 8, 3),
            ct.Tile(256, 8, 4),
            ct.Tile(128, 4, 4),
            ct.Tile(256, 8, 3, tma_a=True, tma_b=True),
            ct.Tile(256, 8, 4, tma_a=True, tma_b=True),
            ct.Tile(128, 4, 4, tma_a=True, tma_b=True),
        ):
            name = f"  grad_t m{tile.block_m} w{tile.warps} s{tile.stages}{' tma' * tile.tma_a}"
            timed(name, lambda tile=tile: ct._backward(grad, active, t, weight, k, True, False, tile))
        for cut in (
            ct.GradientTile(128, 256, 64, 8, 4, 264),
            ct.GradientTile(128, 256, 64, 8, 4, 528),
            ct.GradientTile(128, 256, 64, 8, 4, 1056),
            ct.GradientTile(128, 256, 64, 8, 3, 528),
            ct.GradientTile(128, 128, 64, 4, 3, 528),
        ):
            name = f"  grad_w n{cut.block_n} p{cut.block_p} w{cut.warps} s{cut.stages} x{cut.programs}"
            timed(name, lambda cut=cut: ct._backward(grad, active, t, weight, k, False, True, None, cut))


def cudnn(timed: Any, t: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, active: Tensor, k: int) -> None:
    last = torch.channels_last
    padding = (weight.shape[2] // 2, weight.shape[3] // 2)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.benchmark = True
    try:
        torch.backends.cudnn.allow_tf32 = True
        timed("cudnn tf32: convolution", lambda: functional.conv2d(t, weight, padding=padding), 7)
        x, w = t.contiguous(memory_format=last), weight.contiguous(memory_format=last)
        timed("cudnn tf32 channels last: convolution", lambda: functional.conv2d(x, w, padding=padding), 7)
        timed("torch tf32: forward with the minimum", lambda: contexts._forward(t, weight, bias, k), 5)
        timed("torch tf32: backward", lambda: contexts._backward(grad, active, t, weight, k, True, True), 3)
        xb, wb = x.bfloat16(), w.bfloat16()
        timed("cudnn bf16 channels last: convolution", lambda: functional.conv2d(xb, wb, padding=padding), 7)
        extra = 32 - t.shape[1]
        xp = functional.pad(t, (0, 0, 0, 0, 0, extra)).bfloat16().contiguous(memory_format=last)
        wp = functional.pad(weight, (0, 0, 0, 0, 0, extra)).bfloat16().contiguous(memory_format=last)
        timed("cudnn bf16, 32 channels: convolution", lambda: functional.conv2d(xp, wp, padding=padding), 7)
        wq = functional.pad(wp, (0, 0, 0, 0, 0, 0, 0, 128 - weight.shape[0])).contiguous(memory_format=last)
        timed("cudnn bf16, 32 -> 128 channels: convolution", lambda: functional.conv2d(xp, wq, padding=padding), 7)
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False  # trying every float32 algorithm would cost seconds
        timed("cudnn float32: convolution", lambda: functional.conv2d(t, weight, padding=padding), 3)
    finally:
        torch.backends.cudnn.allow_tf32 = before


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("gpu_contexts.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}

    def save() -> None:
        results["seconds"] = time.time() - START
        target.write_text(json.dumps(results, indent=1))

    try:
        results["checks"] = checks(target.parent, 110)
        save()
        print(f"checks took {results['seconds']:.0f} s", flush=True)
        timings(results, 215)
    except Exception:
        results["broken"] = traceback.format_exc()
        print(results["broken"])
    save()
    print("\nchecks (relative errors against float64)")
    for line in results.get("checks", []):
        errors = {key: value for key, value in line.items() if isinstance(value, float)}
        shown = errors.items() if not line["ok"] else [("worst", max(errors.values()))]
        numbers = " ".join(f"{key} {value:.1e}" for key, value in shown)
        state = "ok  " if line["ok"] else "FAIL"
        same = "" if line.get("same", True) else " RUNS DIFFER"
        print(
            f"{state} {line['case']:42s} {line.get('precision', ''):7s} {numbers}{same} {line.get('problem', '')[:200]}"
        )
    ms = results.get("ms", {})
    forward, backward = ms.get("forward, default"), ms.get("backward, default")
    if isinstance(forward, float) and isinstance(backward, float):
        print(
            f"\nforward {forward:.2f} ms (target 3.0), forward + backward {1 + backward / forward:.2f} x (target 3.5)"
        )
    failed = sum(not line["ok"] for line in results.get("checks", []))
    print(f"{failed} checks failed; {results['seconds']:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] == "--worker":
        os.environ.pop("TRITON_INTERPRET", None)
        worker(int(sys.argv[2]), sys.argv[3])
    else:
        main()
