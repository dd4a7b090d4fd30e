"""Softmax over labels in the kernels' threads: equal to PyTorch's, NaN and -inf included; gradients by PyTorch."""

from __future__ import annotations

import math
import subprocess
import sys
import threading

import pytest
import torch

import deepmrf
from deepmrf.ops.softmax import exp, log, log_softmax_of_difference, negative, softmax, total

SIZES = [(1, 1, 1), (2, 3, 5, 7), (1, 21, 90, 95), (2, 2, 3, 40, 50)]
"""One pixel; less than a job; several jobs; volumes."""


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr("deepmrf.ops.softmax.MIN_NUMBERS", 1)


def _inputs(size, dtype):
    torch.manual_seed(0)
    return torch.randn(size, dtype=dtype) * 10, torch.randn(size, dtype=dtype)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_equals_pytorch(size, dtype):
    x, y = _inputs(size, dtype)
    with torch.no_grad():
        torch.testing.assert_close(softmax(x), x.softmax(1))
        torch.testing.assert_close(exp(x), x.exp())
        torch.testing.assert_close(negative(x), -x)
        probabilities = x.softmax(1)
        torch.testing.assert_close(log(probabilities.clone()), probabilities.log())
        torch.testing.assert_close(total(x), float(x.double().sum()), rtol=1e-3, atol=1e-2)
        expected = (x - y).log_softmax(1)
        torch.testing.assert_close(log_softmax_of_difference(x, y), expected)


def test_any_memory_order():
    x, y = (z.permute(0, 3, 1, 2) for z in _inputs((2, 30, 40, 21), torch.float32))
    with torch.no_grad():
        torch.testing.assert_close(softmax(x), x.softmax(1))
        torch.testing.assert_close(total(x), float(x.sum()), rtol=1e-4, atol=1e-2)
        expected = (x - y).log_softmax(1)
        torch.testing.assert_close(log_softmax_of_difference(x, y.clone()), expected)


@pytest.mark.filterwarnings("error")
def test_impossible_labels_and_nan():
    x = torch.zeros(1, 3, 4)
    x[0, 0, 0], x[0, :, 1], x[0, 1, 2] = -math.inf, -math.inf, math.nan
    with torch.no_grad():
        torch.testing.assert_close(softmax(x), x.softmax(1), equal_nan=True)
        result = log_softmax_of_difference(x, torch.zeros_like(x))
        torch.testing.assert_close(result, x.log_softmax(1), equal_nan=True)
        assert math.isnan(total(x))
        assert torch.isfinite(log(torch.zeros(1, 2, 3))).all()
        assert total(x[..., :1].contiguous()) == -math.inf


def test_gradients():
    x, y = (z.requires_grad_() for z in _inputs((1, 3, 4), torch.float64))
    assert torch.autograd.gradcheck(softmax, (x,))
    assert torch.autograd.gradcheck(log_softmax_of_difference, (x, y))


def test_two_threads_call_the_same_layer():
    torch.manual_seed(0)
    layer = deepmrf.MeanField(4, window=7, contexts=2, iterations=2)
    inputs = [(torch.randn(1, 4, 96, 100), torch.rand(1, 3, 96, 100)) for _ in range(2)]
    with torch.no_grad():
        expected = [layer(*given) for given in inputs]
    equal = [False, False]

    def work(index):
        with torch.no_grad():
            equal[index] = all(torch.equal(layer(*inputs[index]), expected[index]) for _ in range(10))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True, True]


STEP = """
import torch, deepmrf, threading
from pathlib import Path
tasks = lambda: len(list(Path("/proc/self/task").iterdir()))
torch.set_num_threads(1)
with torch.no_grad():
    layer, log_p, image = deepmrf.MeanField(21), torch.randn(1, 21, 128, 128), torch.rand(1, 3, 128, 128)
    photograph = (255 * image).byte()
    layer(log_p, image)  # compilers may start threads
    layer(log_p, photograph)
    torch.set_num_threads(2)
    before, ours = tasks(), threading.active_count()
    layer(log_p, image)
    layer(log_p, photograph)
    print(tasks() - before, threading.active_count() - ours)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_step_does_not_wake_threads_of_pytorch():
    pytest.importorskip("numba")
    result = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.split() == ["1", "1"]  # the kernels' own helper
