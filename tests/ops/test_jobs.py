"""Compiling without a cache or with a damaged one, naming cached code, and sharing jobs between threads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import deepmrf
from deepmrf.ops import jobs

pytest.importorskip("numba")

RUN_ALL = """
import torch
from deepmrf import ops
from deepmrf.ops.contexts import cpu_kernels as contexts
from deepmrf.ops.distance import cpu_kernels as distance
from deepmrf.ops.gaussian import cpu_kernels as gaussian
q, image = torch.rand(1, 2, 9, 10), torch.rand(1, 3, 9, 10)
with ops.use("numba"), torch.inference_mode():
    results = [
        ops.distance_penalty(q, image, torch.ones(3), (3, 3)),
        ops.gaussian_penalty(q, image, torch.ones(2), torch.ones(2), (3, 3)),
        ops.label_contexts(q, torch.ones(4, 2, 3, 3), torch.zeros(4), 2),
    ]
print(all(torch.isfinite(result).all() for result in results))
print([kernel.stats.cache_path for kernel in (contexts.forward_tiles, distance.job, gaussian.job)])
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the package in which no folder can hold a cache: root may write everywhere, but not below a file."""
    copy = tmp_path / "src" / "deepmrf"
    shutil.copytree(Path(deepmrf.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "pretrained"))
    for name in ("ops", "ops/contexts", "ops/distance", "ops/gaussian"):
        (copy / name / "__pycache__").write_text("a file where a folder should be")
    return tmp_path / "src"


def test_every_operator_runs_where_no_cache_can_be_written(package):
    nowhere = dict.fromkeys(("NUMBA_CACHE_DIR", "HOME", "XDG_CACHE_HOME"), "/dev/null/x")
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        env={**os.environ, **nowhere, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["True", "[None, None, None]"]


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A function that compiles a kernel as a new process does, with a cache of its own."""
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "cpu_kernels.py"
    source.write_text("def double(x):\n    return 2 * x\n")

    def compile_kernel():
        names = {}
        exec(compile(source.read_text(), source, "exec"), names)
        return jobs.compiled(names["double"])

    return compile_kernel


def test_a_second_process_finds_the_compiled_code(kernel):
    assert kernel()(3) == 6
    second = kernel()
    assert second(3) == 6
    assert len(second.stats.cache_hits) == 1


@pytest.mark.parametrize("content", [b"", b"damaged"])
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_cache_is_written_anew(kernel, tmp_path, suffix, content):
    assert kernel()(3) == 6
    [file] = tmp_path.glob(f"cache/*/*.{suffix}")
    file.write_bytes(content)
    second, third = kernel(), kernel()
    assert second(3) == third(3) == 6
    assert not second.stats.cache_hits
    assert len(third.stats.cache_hits) == 1


def test_a_cache_that_can_no_longer_be_written_costs_nothing(kernel, tmp_path):
    double = kernel()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert double(3) == 6


def test_cached_code_is_named_after_the_files_it_is_made_of(tmp_path):
    (tmp_path / "cpu_sums.py").write_text("LANES = 8")
    before = jobs._digest(tmp_path)
    jobs._digest.cache_clear()
    assert jobs._digest(tmp_path) == before
    (tmp_path / "cpu_sums.py").write_text("LANES = 4")
    jobs._digest.cache_clear()
    assert jobs._digest(tmp_path) != before
    assert (
        len({jobs._digest(Path(jobs.__file__).with_name(name)) for name in ("distance", "gaussian", "contexts")}) == 3
    )


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_order(threads):
    assert jobs.run_jobs(lambda index: index * index, 20) == [index * index for index in range(20)]
    assert jobs.run_jobs(lambda index: index, 0) == []


def test_an_error_in_a_job_is_raised(threads):
    def job(index: int) -> None:
        if index == 7:
            raise ValueError("job 7")

    with pytest.raises(ValueError, match="job 7"):
        jobs.run_jobs(job, 20)


def test_ctrl_c_within_numba_stays_ctrl_c(threads):
    """numba's dispatcher raises a SystemError from it; other errors of that kind are raised as they are."""

    def interrupted(index):
        try:
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as error:
                raise SystemError("unpickling returned a result with an exception set") from error
        except SystemError as error:
            raise SystemError("the dispatcher returned a result with an exception set") from error

    def broken(index):
        raise SystemError("another one")

    with pytest.raises(KeyboardInterrupt):
        jobs.run_jobs(interrupted, 3)
    with pytest.raises(SystemError, match="another one"):
        jobs.run_jobs(broken, 3)


def test_jobs_share_the_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    barrier = threading.Barrier(2, timeout=20)
    try:
        jobs.run_jobs(lambda _: barrier.wait(), 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_of_a_process_with_threads_computes():
    """PyTorch's OpenMP would wait in the child for threads that only the parent has."""
    program = """
import os, signal, torch
from deepmrf.ops.jobs import run_jobs

torch.set_num_threads(2)
image, filters = torch.rand(4, 16, 64, 64), torch.rand(16, 16, 3, 3)

def compute():
    run_jobs(lambda job: job, 4)
    return torch.nn.functional.conv2d(image, filters).sin().sum()

expected = compute()
child = os.fork()
if not child:
    signal.alarm(20)
    torch.testing.assert_close(compute(), expected, rtol=1e-4, atol=1e-3)  # threads may sum in another order
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)
    assert done.stdout.split() == ["0", "2"], done.stderr


IMPORTED_SIDE_BY_SIDE = """
import importlib, threading
import deepmrf.ops.jobs
modules = ["cpu_linked", "lattice.cpu_rows", "gaussian.cpu_sums", "contexts.cpu_tiles", "distance.cpu_rows"]
errors, barrier = [], threading.Barrier(len(modules))
def load(name):
    barrier.wait()
    try:
        importlib.import_module(f"deepmrf.ops.{name}")
    except BaseException as error:
        errors.append(f"{name}: {error}")
threads = [threading.Thread(target=load, args=(name,), daemon=True) for name in modules]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
assert not errors and not any(thread.is_alive() for thread in threads), errors or "a deadlock"
"""


def test_kernels_may_be_imported_by_several_threads_at_once():
    """As in a video whose frames are computed side by side. Parts of numba, imported so, hung or were not finished."""
    command = [sys.executable, "-c", IMPORTED_SIDE_BY_SIDE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_kernels_import_parts_of_numba_from_the_whole():
    files = [path for path in Path(jobs.__file__).parent.rglob("*.py") if path.name not in ("jobs.py", "notice.py")]
    parts = [path.name for path in files if re.search(r"^(from|import) numba\.", path.read_text(), re.MULTILINE)]
    assert not parts, f"{parts}: take it from deepmrf.ops.vectors, which says why"
