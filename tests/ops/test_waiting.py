"""PyTorch's idle threads sleep once deepmrf has threads of its own. Counted in processor time: sleeping takes none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepmrf.ops.jobs import wait_without_spinning

PROGRAM = """
import sys, time, torch
from deepmrf.ops.jobs import run_jobs
torch.set_num_threads(2)
x = torch.ones(1 << 20)
if sys.argv[1] == "jobs":
    run_jobs(abs, 4)
seconds = 0.0
for _ in range(20):
    x.clamp_(0, 1)
    start = time.process_time()
    time.sleep(0.02)
    seconds += time.process_time() - start
print(1000 * seconds / 20)
"""


def milliseconds_of_waiting(*, jobs: bool, **settings: str) -> float:
    """Processor time that a program's threads take in 20 ms after an operation, while the program sleeps."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | settings
    command = [sys.executable, "-c", PROGRAM, "jobs" if jobs else "none"]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


with_libgomp = pytest.mark.skipif(
    not any(Path(torch.__file__).parent.glob("lib/libgomp*")) or len(os.sched_getaffinity(0)) < 2,
    reason="needs PyTorch with libgomp and two processors",
)


@with_libgomp
def test_idle_threads_take_no_processor_time_after_the_first_jobs():
    assert milliseconds_of_waiting(jobs=True) < 0.5


@with_libgomp
def test_a_user_who_chose_spinning_keeps_it():
    assert milliseconds_of_waiting(jobs=True, GOMP_SPINCOUNT="10000000") > 0.5


def test_large_machines_and_chosen_policies_are_left_alone(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(500), raising=False)
    assert wait_without_spinning.__wrapped__() is False
    monkeypatch.undo()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert wait_without_spinning.__wrapped__() is False
