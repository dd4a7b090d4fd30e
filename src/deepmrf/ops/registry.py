"""Which implementation of an operator runs: one meaning, several evaluations, chosen by device and size.

Every operator of this folder is registered once with torch.library and evaluates by asking `choose` for one of its
implementations, in order of preference. Plain PyTorch ("torch") runs everywhere and is always last. A compiled kernel
plugs in by appending an `Implementation` to its operator's table: nothing else changes, neither layers nor gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_AXES = 5
"""That compiled kernels know: batch, labels and up to three of space."""
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
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    for one in table:
        if one.name == _forced and _could_run(_forced, tensors):
            return one
    kind = f"{tensors[0].device.type} tensors of {tensors[0].dim()} axes" if tensors else "these arguments"
    raise RuntimeError(
        f"The {_forced} implementation is not available here for this operator on {kind}: install it, "
        f"or leave the block deepmrf.ops.use({_forced!r})."
    )


def _could_run(name: str, tensors: Sequence[Tensor]) -> bool:
    """Whether it is worth it or not: are these tensors where a forced implementation runs, with axes it knows?"""
    place = {"numba": "cpu", "triton": "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"}.get(name)
    return place is None or all(t.device.type == place and t.dim() <= MOST_AXES for t in tensors)


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
