"""The state of a run in one file that is always whole: safetensors with a JSON of facts in its header.

It is written beside the old one and takes its place in one step, so that neither a killed process nor a full disk can
leave half a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer


def write(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Replace the file at `path` by these tensors and facts, wholly or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        try:
            save_file(plain, beside, metadata={"facts": json.dumps(facts)})
        except SafetensorError as error:  # it wraps the system's errors
            full = "os error 28" in str(error) or "StorageFull" in str(error) or "code: 28" in str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, f"{path} could not be written: {error}") from error
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["facts"])  # noqa: SIM118


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def optimiser_tensors(optimiser: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """An optimiser's state by parameter name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, state in optimiser.state.items():
        for key, value in state.items():
            if value is not None:
                tensors[f"{names[id(parameter)]}|{key}"] = torch.as_tensor(value)
    return tensors


def restore_optimiser(optimiser: Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """What `optimiser_tensors` took down, put back."""
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        owner, key = name.split("|")
        parameter = parameters[owner]
        on_cpu = key == "step" and not optimiser.defaults.get("fused")  # where PyTorch expects the number of steps
        at = value.clone() if on_cpu else value.to(parameter.device, copy=True)
        optimiser.state[parameter][key] = at
