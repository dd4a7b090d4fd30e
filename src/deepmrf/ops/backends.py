"""Which implementation of an operator runs: one meaning, several evaluations, chosen by device and size.

Every operator of this folder is registered once with torch.library and evaluates by asking `choose` for one of its
implementations, in order of preference. Plain PyTorch ("torch") runs everywhere and is always last. A compiled kernel
plugs in by appending an `Implementation` to its operator's table: nothing else changes, neither layers nor gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    """Given the tensors and the window: can it run these, and is it worth it?"""


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Force an implementation inside a `with` block: "torch", "numba" or "triton"; None chooses as always."""
    global _forced
    known = ("torch", "numba", "triton")
    if name is not None and name not in known:
        raise ValueError(f"There is no implementation {name!r}: choose one of {', '.join(known)}, or None.")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def choose(table: Sequence[Implementation], *arguments: Any) -> Implementation:
    """The first implementation that suits the arguments, or the forced one."""
    if _forced is None:
        return next(one for one in table if one.suits(*arguments))
    for one in table:
        if one.name == _forced:
            return one
    device = next((a.device.type for a in arguments if isinstance(a, Tensor)), "this")
    raise RuntimeError(
        f"The {_forced} implementation is not available here for this operator on {device} tensors: install it, "
        f"or leave the block deepmrf.ops.use({_forced!r})."
    )


def needs_gradient(*tensors: Tensor) -> bool:
    """Will a backward pass follow?"""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def at_once(*tensors: Tensor) -> bool:
    """May a kernel be called past PyTorch's dispatcher? Where nothing watches: plain CPU tensors in inference mode.

    The first dispatched call imports PyTorch's compiler, which takes longer than a whole prediction.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # inside vmap or grad
        return False
    plain = (Tensor, torch.nn.Parameter)
    return all(type(t) in plain and t.device.type == "cpu" and not t.is_neg() for t in tensors)
