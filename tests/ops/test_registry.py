"""Choosing an implementation, forcing one, and what the registered operators promise to PyTorch."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import deepmrf
from deepmrf import ops
from deepmrf.ops import contexts, distance, gaussian, learned, registry
from deepmrf.ops.registry import Implementation, Operator

KERNELS = {"triton": "triton_that_suits_nothing", "numba": "numba_that_suits_all"}


@pytest.fixture
def choose(monkeypatch):
    """`choose` of an operator with two kernels: triton, which suits nothing, and numba, which suits everything."""
    monkeypatch.setattr(registry, "installed", lambda tool: True)
    for (name, module), suits in zip(KERNELS.items(), (False, True), strict=True):
        kernel = Implementation(name, max, max, lambda *_, suits=suits: suits)
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(IMPLEMENTATION=kernel))
    operator = object.__new__(Operator)
    operator.kernels, operator.plain = KERNELS, Implementation("torch", max, max)
    return lambda *arguments: operator.choose(arguments)


def test_the_first_that_suits_is_chosen(choose):
    assert choose().name == "numba"


def test_use_forces_one(choose):
    with ops.use("torch"):
        assert choose().name == "torch"
    assert choose().name == "numba"


def test_nested_blocks_restore_what_was_before(choose):
    with ops.use("torch"):
        with ops.use("numba"):
            assert choose().name == "numba"
        assert choose().name == "torch"
        with ops.use(None):
            assert choose().name == "numba"
        assert choose().name == "torch"


def test_an_error_inside_the_block_restores_too(choose):
    with pytest.raises(ZeroDivisionError), ops.use("torch"):
        raise ZeroDivisionError
    assert choose().name == "numba"


def test_unknown_names_are_an_error():
    with pytest.raises(ValueError, match=r"no implementation 'cuda': choose one of torch, numba, triton"):
        ops.use("cuda").__enter__()


def test_forcing_what_is_not_there_says_what_to_do(choose, monkeypatch):
    monkeypatch.setattr(registry, "installed", lambda tool: False)
    with (
        ops.use("numba"),
        pytest.raises(RuntimeError, match=r"numba .* not available .* cpu tensors of 1 axes: "),
    ):
        choose(torch.zeros(1))


def test_forcing_what_cannot_run_says_so(choose, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ops.use("triton"), pytest.raises(RuntimeError, match=r"triton .* not available .* cpu tensors of 4 axes"):
        choose(torch.zeros(1, 1, 1, 1))
    with ops.use("numba"), pytest.raises(RuntimeError, match=r"numba .* not available .* cpu tensors of 6 axes"):
        choose(torch.zeros(1, 1, 1, 1, 1, 1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with ops.use("triton"):
        assert choose(torch.zeros(1, 1, 1, 1)).name == "triton"


def test_a_forced_torch_runs_torch(monkeypatch):
    """A kernel put before "torch" takes over, unless torch is forced."""
    other = Implementation("numba", lambda a: (torch.full_like(a.q, 7), a.q.new_empty(0)))
    monkeypatch.setitem(sys.modules, "other_kernel", SimpleNamespace(IMPLEMENTATION=other))
    monkeypatch.setattr(distance.operator, "kernels", {"numba": "other_kernel"})
    q, image, weights = torch.rand(1, 2, 3, 3), torch.rand(1, 3, 3, 3), torch.ones(3)
    assert (ops.distance_penalty(q, image, weights, (3, 3)) == 7).all()
    with ops.use("torch"):
        assert not (ops.distance_penalty(q, image, weights, (3, 3)) == 7).any()


@pytest.mark.parametrize("module", [contexts, distance, gaussian, learned])
def test_the_last_implementation_is_torch_which_suits_everything(module):
    *_, last = module.operator.implementations()
    assert last.name == "torch"
    assert last.suits(())


def test_an_operator_without_kernels_runs_in_torch_whatever_is_forced():
    with ops.use("numba"):
        assert learned.operator.choose(()).name == "torch"


def test_needs_gradient():
    open_, closed = torch.zeros(1, requires_grad=True), torch.zeros(1)
    assert registry.needs_gradient(closed, open_)
    assert not registry.needs_gradient(closed)
    with torch.no_grad():
        assert not registry.needs_gradient(open_)


def arguments(name, dims):
    size = (4, 5, 3)[:dims]
    q = torch.rand(2, 2, *size, dtype=torch.float64, requires_grad=True)
    features = torch.rand(2, 3, *size, dtype=torch.float64, requires_grad=True)
    window, spacing = [3, 2, 2][:dims], [1.0, 2.0, 0.5][:dims]

    def parameter(*shape):
        return torch.rand(*shape, dtype=torch.float64, requires_grad=True)

    return {
        "distance_penalty": (q, features, parameter(3), window, spacing, True, True),
        "gaussian_penalty": (q, features, parameter(2), parameter(2), window, spacing, True, True),
        "local_sum": (q, parameter(*window, *size)),
        "label_contexts": (q, parameter(6, 2, *window), parameter(6), 3),
    }[name]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", ["distance_penalty", "gaussian_penalty", "local_sum", "label_contexts"])
def test_operators_keep_their_promises_to_pytorch(name, dims):
    """Schema, fake tensors, autograd registration and tracing."""
    torch.library.opcheck(getattr(torch.ops.deepmrf, name).default, arguments(name, dims))


@pytest.mark.parametrize("name", ["distance_penalty", "gaussian_penalty"])
def test_operators_without_gate_and_without_gradient(name):
    gate, keep = False, False
    inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments(name, 2)[:-2]]
    torch.library.opcheck(getattr(torch.ops.deepmrf, name).default, (*inputs, gate, keep))


@pytest.mark.parametrize("name", ["distance_penalty", "gaussian_penalty"])
def test_a_gated_gradient_needs_the_kept_sum(name):
    inputs = [*arguments(name, 2)[:-1], False]
    t, _ = getattr(torch.ops.deepmrf, name).default(*inputs)
    with pytest.raises(RuntimeError, match=r"needs keep=True"):
        t.sum().backward()


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_inference_mode_gives_the_same(kernel):
    mrf = deepmrf.MeanField(4, window=5, kernel=kernel, contexts=2, context_size=3)
    log_p, image = torch.randn(1, 4, 9, 11), torch.rand(1, 3, 9, 11)
    with torch.no_grad():
        expected = mrf(log_p, image)
    with torch.inference_mode():
        torch.testing.assert_close(mrf(log_p, image), expected, rtol=0, atol=0)


def test_prediction_imports_no_compiler_that_it_does_not_need():
    code = """
import sys, torch, deepmrf
from deepmrf.ops.contexts import cpu, gpu
from deepmrf.ops.distance import cpu, gpu
from deepmrf.ops.gaussian import cpu, gpu
print("numba" in sys.modules, any(name.endswith("gpu_kernels") for name in sys.modules))
mrf = deepmrf.MeanField(3, window=5, contexts=1, context_size=3)
with torch.inference_mode():
    mrf(torch.randn(1, 3, 8, 8), torch.rand(1, 3, 8, 8))
print("torch._dynamo" in sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert process.stdout.split() == ["False"] * 3
