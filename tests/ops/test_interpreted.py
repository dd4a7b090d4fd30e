"""The Triton kernels without a GPU: all tests of them in one process, in which Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
runs_here = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs in a process that interprets: test_interpreted")
FILES = sorted(Path(__file__).parent.glob("test_*_gpu.py"))


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the tests run here")
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter():
    assert len(FILES) == 4
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-rs", *map(str, FILES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}  # NumPy's threads would only wait
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "test_interpreted" not in done.stdout  # nothing was left to another process
