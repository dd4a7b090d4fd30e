"""Register an operator with PyTorch, and choose which implementation of it runs.

An operator has one meaning and several implementations: plain PyTorch ("torch"), which runs everywhere, and kernels
compiled by Triton or numba. An `Operator` names the modules of its kernels in order of preference, and imports one when
it is needed. A kernel module holds an `Implementation` called IMPLEMENTATION.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

NAMES = ("torch", "numba", "triton")
MAX_AXES = 5
"""Axes that compiled kernels know: batch, labels and up to three of space."""
_forced: str | None = None


@dataclass(frozen=True)
class Implementation:
    """One way to evaluate an operator and its gradients."""

    name: str
    """"torch", or the tool that compiles it: "numba", "triton"."""
    forward: Callable[..., Any]
    """Same arguments and result as the operator."""
    backward: Callable[..., Any]
    """Same arguments and result as the operator's backward."""
    suits: Callable[..., bool]
    """Given the arguments that decide (`Operator.decided_by`): can it run these, and is it worth it?"""


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Force an implementation inside a `with` block: "torch", "numba" or "triton"; None chooses as always."""
    global _forced
    if name is not None and name not in NAMES:
        raise ValueError(f"There is no implementation {name!r}: choose one of {', '.join(NAMES)}, or None.")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


@cache
def installed(tool: str) -> bool:
    """Is a package installed? Asked without importing it: numba takes most of a second."""
    return importlib.util.find_spec(tool) is not None


class Operator:
    """An operator of PyTorch with gradients: `deepmrf::NAME` and `deepmrf::NAME_backward`.

    forward, backward: plain PyTorch. Their annotated arguments and results are the schemas of both operators. Without
    backward, the operator itself computes its gradient.
    fake, fake_backward: the same for tensors without data: empty results of the right shape and dtype.
    save(ctx, inputs, output), gradients(ctx, *grads): what autograd keeps, and how it calls `self.backward`.
    kernels: name of an implementation -> module that holds it, the preferred one first.
    decided_by: the arguments, of forward and backward alike, that decide which implementation runs.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        *,
        fake: Callable[..., Any],
        fake_backward: Callable[..., Any] | None = None,
        save: Callable[..., None],
        gradients: Callable[..., Any],
        kernels: Mapping[str, str] | None = None,
        decided_by: Sequence[str] = (),
    ) -> None:
        self.torch = Implementation("torch", forward, backward or forward, lambda *_: True)
        self.kernels = kernels or {}
        indices = _indices(forward, decided_by)

        def evaluate(*arguments: Any) -> Any:
            return self.choose(*[arguments[i] for i in indices]).forward(*arguments)

        self._evaluate = evaluate
        self._operator = self.backward = _register(name, evaluate, forward, fake)
        self._operator.register_autograd(gradients, setup_context=save)
        if backward is not None and fake_backward is not None:
            backward_indices = _indices(backward, decided_by)

            def evaluate_backward(*arguments: Any) -> Any:
                return self.choose(*[arguments[i] for i in backward_indices]).backward(*arguments)

            self.backward = _register(f"{name}_backward", evaluate_backward, backward, fake_backward)

    def __call__(self, *arguments: Any) -> Any:
        """The operator's result, with gradients where they are needed."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        return (self._evaluate if unobserved(*tensors) else self._operator)(*arguments)

    def implementations(self, tensors: Sequence[Tensor] = ()) -> Iterator[Implementation]:
        """Every implementation that is installed and made for the device of the tensors, the preferred one first."""
        for tool, module in self.kernels.items():
            if installed(tool) and _could_run(tool, tensors):
                yield importlib.import_module(module).IMPLEMENTATION
        yield self.torch

    def choose(self, *arguments: Any) -> Implementation:
        """The first implementation that suits the arguments that decide, or the forced one."""
        if _forced == "torch" or not self.kernels:
            return self.torch
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if _forced is None:
            return next(kernel for kernel in self.implementations(tensors) if kernel.suits(*arguments))
        if _forced in self.kernels and installed(_forced) and _could_run(_forced, tensors):
            forced: Implementation = importlib.import_module(self.kernels[_forced]).IMPLEMENTATION
            return forced
        kind = f"{tensors[0].device.type} tensors of {tensors[0].dim()} axes" if tensors else "these arguments"
        raise RuntimeError(
            f"The {_forced} implementation is not available here for this operator on {kind}: install it, "
            f"or leave the block deepmrf.ops.use({_forced!r})."
        )


def _indices(function: Callable[..., Any], names: Sequence[str]) -> list[int]:
    """The indices of the named arguments in a function's signature."""
    parameters = list(inspect.signature(function).parameters)
    return [parameters.index(name) for name in names]


def _register(name: str, evaluate: Callable[..., Any], like: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register deepmrf::name, which takes and returns what the function `like` does."""
    schema = torch.library.infer_schema(like, mutates_args=())
    operator = torch.library.custom_op(f"deepmrf::{name}", evaluate, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


def _could_run(name: str, tensors: Sequence[Tensor]) -> bool:
    """Whether it is worth it or not: are these tensors where a forced implementation runs, with axes it knows?"""
    device = "cpu" if name == "numba" or os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    return all(tensor.device.type == device and tensor.dim() <= MAX_AXES for tensor in tensors)


def needs_gradient(*tensors: Tensor) -> bool:
    """Will a backward pass follow?"""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def unobserved(*tensors: Tensor) -> bool:
    """May a kernel be called past PyTorch's dispatcher? Only on plain CPU tensors without gradients: nothing watches.

    The first dispatched call imports PyTorch's compiler, which takes longer than a whole prediction.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # inside vmap or grad
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():  # inside a mode that watches
        return False
    plain = (Tensor, torch.nn.Parameter)
    return all(type(tensor) in plain and tensor.device.type == "cpu" and not tensor.is_neg() for tensor in tensors)
