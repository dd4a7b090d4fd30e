"""Register an operator with PyTorch, and choose which implementation of it runs.

An operator has one meaning and several implementations: plain PyTorch ("torch"), which runs everywhere, and kernels
compiled by Triton or numba. Its arguments are the fields of a NamedTuple, which every function of an implementation
takes: their names, types and defaults stand there once. An `Operator` names the modules of its kernels in order of
preference, and imports one when it is needed. A kernel module holds an `Implementation` called IMPLEMENTATION.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from torch import Tensor

NAMES = ("torch", "numba", "triton")
MAX_AXES = 5
"""Axes that compiled kernels know: batch, labels and up to three of space."""
Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
"""The NamedTuple of an operator's arguments, tensors with a gradient first."""
Pair = tuple[Tensor, Tensor]
"""An operator's result, and what its backward pass needs again (or an empty tensor)."""
SCHEMA_TYPES = {
    Tensor: "Tensor", int: "SymInt", bool: "bool", Sequence[Tensor]: "Tensor[]", Sequence[int]: "SymInt[]",
    Sequence[float]: "float[]", Sequence[bool]: "bool[]",
}  # fmt: skip
"""Types of arguments in PyTorch's language of schemas."""
_forced: str | None = None


@dataclass(frozen=True)
class Implementation(Generic[Arguments]):
    """One way to evaluate an operator and its gradients."""

    name: str
    """"torch", or the tool that compiles it: "numba", "triton"."""
    forward: Callable[[Arguments], Pair]
    backward: Callable[[Tensor, Tensor, Arguments, Sequence[bool]], Sequence[Tensor | None]] = lambda *_: ()
    """Of (gradient to the result, second tensor of the pair, arguments, which tensors need a gradient): gradients to
    the tensors among the arguments, anything where none is needed. Operators with an adjoint need no backward."""
    suits: Callable[[Arguments], bool] = lambda _: True
    """Can it run these arguments, and is it worth it?"""


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


class Operator(Generic[Arguments]):
    """An operator of PyTorch with gradients: `deepmrf::NAME` and `deepmrf::NAME_backward`."""

    def __init__(
        self,
        name: str,
        arguments: type[Arguments],
        plain: Implementation[Arguments],
        fake: Callable[[Arguments], Pair],
        *,
        kernels: Mapping[str, str] | None = None,
        adjoint: Callable[[Tensor, Arguments], Arguments] | None = None,
        prepare: Callable[[Tensor, Tensor, Arguments], Pair] = lambda grad, memo, _: (grad, memo),
    ) -> None:
        """plain: plain PyTorch, for all arguments. fake: empty tensors of the right shape and dtype.

        kernels: name of an implementation -> module that holds it, the preferred one first.
        adjoint: where the gradient to the first tensor, the only one, is the operator itself: of which arguments.
        prepare: changes the first two arguments of `Implementation.backward` before the pass.
        """
        self.arguments, self.plain, self.kernels = arguments, plain, kernels or {}
        self._adjoint, self._prepare = adjoint, prepare
        hints = get_type_hints(arguments)
        self._tensor_count = list(hints.values()).count(Tensor)
        defaults = arguments._field_defaults  # type: ignore[attr-defined]
        self._operator = _register(name, self._evaluate, lambda *given: fake(arguments(*given)), hints, defaults, 2)
        self._operator.register_autograd(self._differentiate, setup_context=self._save)
        if adjoint is None:
            hints = {"grad": Tensor, "memo": Tensor, **hints, "needed": Sequence[bool]}
            self._backward = _register(
                f"{name}_backward", self._evaluate_backward, self._fake_backward, hints, {}, self._tensor_count
            )

    def __call__(self, *given: Any) -> Tensor:
        """The operator's result, with gradients where they are needed."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        result: Tensor = (self._evaluate if unobserved(*tensors) else self._operator)(*given)[0]
        return result

    def _evaluate(self, *given: Any) -> Pair:
        arguments = self.arguments(*given)
        return self.choose(arguments).forward(arguments)

    def _evaluate_backward(self, grad: Tensor, memo: Tensor, *given: Any) -> tuple[Tensor, ...]:
        arguments = self.arguments(*given[:-1])
        return gradients(self.choose(arguments), grad, memo, arguments, given[-1])

    def _fake_backward(self, grad: Tensor, memo: Tensor, *given: Any) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format) if need else x.new_empty(0)
            for x, need in zip(given, given[-1], strict=False)
        )

    def _save(self, ctx: Any, inputs: Any, output: Pair) -> None:
        ctx.set_materialize_grads(False)  # zeros for the gradient to the second tensor would be as large as q
        ctx.save_for_backward(output[1], *inputs[: self._tensor_count])
        ctx.others = inputs[self._tensor_count :]  # tensors in lists have no gradient

    def _differentiate(self, ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        memo, *tensors = ctx.saved_tensors
        inputs = (*tensors, *ctx.others)
        results: list[Any] = [[None] * len(x) if _tensors(x) else None for x in inputs]
        if grad is None:
            return tuple(results)
        arguments = self.arguments(*inputs)
        if self._adjoint is not None:
            results[0] = self(*self._adjoint(grad, arguments))
        else:
            needed = list(ctx.needs_input_grad[: self._tensor_count])
            computed = self._backward(*self._prepare(grad, memo, arguments), *inputs, needed)
            results[: len(needed)] = [x if need else None for x, need in zip(computed, needed, strict=True)]
        return tuple(results)

    def implementations(self, tensors: Sequence[Tensor] = ()) -> Iterator[Implementation[Arguments]]:
        """Every implementation that is installed and made for the device of the tensors, the preferred one first."""
        for tool, module in self.kernels.items():
            if installed(tool) and _could_run(tool, tensors):
                yield importlib.import_module(module).IMPLEMENTATION
        yield self.plain

    def choose(self, arguments: Arguments) -> Implementation[Arguments]:
        """The first implementation that suits the arguments, or the forced one."""
        if _forced == "torch" or not self.kernels:
            return self.plain
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        for implementation in self.implementations(tensors):
            if implementation.suits(arguments) if _forced is None else implementation.name == _forced:
                return implementation
        kind = f"{tensors[0].device.type} tensors of {tensors[0].dim()} axes" if tensors else "these arguments"
        raise RuntimeError(
            f"The {_forced} implementation is not available here for this operator on {kind}: install it, "
            f"or leave the block deepmrf.ops.use({_forced!r})."
        )


def gradients(
    implementation: Implementation[Arguments], grad: Tensor, memo: Tensor, arguments: Arguments, needed: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Gradients to the tensors among the arguments, each like its tensor; empty where none is needed."""
    results = implementation.backward(grad, memo, arguments, needed)
    return tuple(
        x.new_empty(0) if result is None or not need else result.to(x.dtype)
        for result, need, x in zip(results, needed, arguments, strict=False)
    )


def _register(
    name: str,
    evaluate: Callable[..., Any],
    fake: Callable[..., Any],
    hints: Mapping[str, Any],
    defaults: Any,
    results: int,
) -> Any:
    """Register deepmrf::name, whose arguments have these types and defaults, and which returns so many tensors."""
    fields = [
        f"{SCHEMA_TYPES[hint]} {field}" + (f"={defaults[field]}" if field in defaults else "")
        for field, hint in hints.items()
    ]
    schema = f"({', '.join(fields)}) -> ({', '.join(['Tensor'] * results)})"
    operator = torch.library.custom_op(f"deepmrf::{name}", evaluate, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


def _tensors(argument: Any) -> bool:
    """Is it a list of tensors?"""
    return isinstance(argument, list) and all(isinstance(x, Tensor) for x in argument)


def _could_run(name: str, tensors: Sequence[Tensor]) -> bool:
    """Whether it is worth it or not: are these tensors where a forced implementation runs, with axes it knows?"""
    device = "cpu" if name == "numba" or os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    return all(tensor.device.type == device and tensor.dim() <= MAX_AXES for tensor in tensors)


def forced() -> str | None:
    """Return the implementation that `use` demands; None outside its block."""
    return _forced


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
