"""The state of a training run in one file: tensors as safetensors, facts as JSON in its header.

The file is replaced atomically: neither a killed process nor a full disk leaves a damaged checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.optim import Optimizer

from deepmrf.data.writing import write_bytes


def write_checkpoint(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write tensors and facts to `path`."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_bytes(path, to_bytes(plain, {"facts": json.dumps(facts)}), sync=True)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, facts); raise a ValueError if the file is damaged or no checkpoint."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no whole checkpoint ({error}): start again in a new folder.") from error


def optimiser_tensors(optimiser: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the state of an optimiser, as "PARAMETER|KEY": tensor."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}|{key}": torch.as_tensor(value)
        for parameter, state in optimiser.state.items()
        for key, value in state.items()
        if value is not None
    }


def restore_optimiser(optimiser: Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Set the state of an optimiser to what `optimiser_tensors` returned."""
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        owner, key = name.split("|")
        parameter = parameters[owner]
        on_cpu = key == "step" and not optimiser.defaults.get("fused")  # PyTorch expects the number of steps there
        optimiser.state[parameter][key] = value.clone() if on_cpu else value.to(parameter.device, copy=True)
