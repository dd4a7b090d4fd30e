"""Load ImageNet weights from safetensors files, and report which parameters they filled."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

VGG16_CONVOLUTIONS = (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)
"""Indices of the thirteen convolutions in torchvision's VGG-16: features.N."""
BATCH_COUNTER = "num_batches_tracked"
"""The name of batch norm's counter of batches, which no result depends on."""


@dataclass(frozen=True)
class Loaded:
    """What a file of weights filled. Parameters have their names in state_dict, tensors those in the file."""

    path: str
    loaded: tuple[str, ...]
    """Parameters with tensors of the file."""
    adapted: tuple[str, ...]
    """Parameters with some of the file's filters."""
    missing: tuple[str, ...]
    """Parameters that the file lacks, at their initial values."""
    unused: tuple[str, ...]
    """Tensors of the file that no parameter uses."""

    def __str__(self) -> str:
        parts = [f"{Path(self.path).name}: {len(self.loaded)} tensors loaded into {_modules(self.loaded)}"]
        if self.adapted:
            parts.append(f"{_modules(self.adapted)} made from some of the file's filters")
        if self.missing:
            parts.append(f"{_modules(self.missing)} not in the file, left at their starting values")
        if self.unused:
            parts.append(f"{len(self.unused)} tensors of the file not used ({_modules(self.unused)})")
        return "; ".join(parts) + "."


def _modules(names: Iterable[str]) -> str:
    """Return the outermost modules of these names, each once: "b1, b3"."""
    return ", ".join(dict.fromkeys(name.split(".")[0] for name in names)) or "nothing"


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file, by name."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {os.fspath(path)!r}: pass the path of a .safetensors file.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{os.fspath(path)!r} is no safetensors file ({error}): convert it with safetensors.torch.save_file."
        ) from error


@torch.no_grad()
def transfer(
    module: nn.Module,
    path: str | os.PathLike[str],
    source: Mapping[str, Tensor],
    names: Mapping[str, str],
    adapted: Collection[str] = (),
) -> Loaded:
    """Copy source[name] into the parameter names[name]. adapted: parameters that get a choice of the file's filters."""
    state = module.state_dict()
    absent = [name for name in names if name not in source]
    if absent:
        raise ValueError(
            f"{os.fspath(path)!r} lacks {absent[0]!r} and {len(absent) - 1} more of {len(names)} tensors: "
            f"pass weights of the architecture {type(module).__name__} is built on."
        )
    tensors = {names[name]: source[name] for name in names}
    for name, tensor in tensors.items():
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"{os.fspath(path)!r} has shape {tuple(tensor.shape)} for {name}, but the network needs "
                f"{tuple(state[name].shape)}: pass weights of the architecture {type(module).__name__} is built on."
            )
    for name, tensor in tensors.items():
        state[name].copy_(tensor)
    return Loaded(
        path=os.fspath(path),
        loaded=tuple(n for n in tensors if n not in adapted),
        adapted=tuple(adapted),
        missing=tuple(n for n in state if n not in tensors and not n.endswith(BATCH_COUNTER)),
        unused=tuple(n for n in source if n not in names and not n.endswith(BATCH_COUNTER)),
    )
