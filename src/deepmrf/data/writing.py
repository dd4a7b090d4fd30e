"""The state of a run in one file that is always whole: safetensors with a JSON of facts in its header.

It is written beside the old one and takes its place in one step, so that neither a killed process nor a full disk can
leave half a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.optim import Optimizer


def write(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Replace the file at `path` by these tensors and facts, wholly or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        with beside.open("wb") as file:
            file.write(to_bytes(plain, {"facts": json.dumps(facts)}))  # save_file would let nobody else read it
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a checkpoint; a ValueError for a file that is none, or no longer."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as why:
        raise ValueError(f"{path} is no whole checkpoint ({why}): start again in a new folder.") from why


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


def check_place(folder: Path, what: str) -> None:
    """A ValueError where `folder`, which is to hold `what`, cannot be made: it or a folder above it is a file."""
    for path in (folder, *folder.parents):
        if path.exists():
            if not path.is_dir():
                raise ValueError(f"{path} is a file: give a folder for {what}.")
            return


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
