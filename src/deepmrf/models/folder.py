"""Model folders: config.json and model.safetensors. Only this module reads and writes them.

config.json of a whole model                        of an MRF alone, as `deepmrf fit` writes it
    format       1                                      format       1
    unary        {"network": name, "options": {...}}, or {"network": null, "options": {...}, "source": {...}}
    mean_field   MeanField's arguments, or null         mean_field   MeanField's arguments
    labels       names, colours, ignored id             labels       the same
    metrics      scores by stage or data set            metrics      scores of cross-validation
    recipe       the recipe it was trained with         settings     how it was fitted; further keys of its own

"network" is null where the network is not one of deepmrf.unary. "options" are then those of its wrapper, and "source"
says where it comes from: {"library", "class", "config"} of a network that another library can build again, or {"code"},
the name of the user's own code. Reading imports no such code. A folder may be damaged, or ask for more memory than
there is, so config.json is checked before anything is built from it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from deepmrf.data.labels import LabelSet
from deepmrf.data.writing import replacing
from deepmrf.layers import MeanField

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = 1
"""Raised when older versions can no longer read a saved config."""
MAX_SETTINGS = {
    **{"width": 1024, "channels": 8192, "window": 1001},
    **{"context_size": 255, "contexts": 255, "iterations": 100},
}
"""The largest settings that a saved model may ask for."""
MAX_MRF_PARAMETERS = 2**27
MAX_CONFIG_BYTES = 2**24
FITTED = "a folder written by deepmrf fit"


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], half: bool = False) -> None:
    """Replace weights and config together; `half` stores the weights as float16, at half the size."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    addresses: set[int] = set()
    for name, value in plain.items():  # safetensors refuses weights that two layers share
        if value.data_ptr() in addresses:
            plain[name] = value.clone()
        addresses.add(value.data_ptr())
    if half:
        plain = {n: v.half() if v.dtype == torch.float32 and v.dim() > 1 else v for n, v in plain.items()}
    text = json.dumps(config, indent=1) + "\n"
    # Both are whole on the disk before either replaces its older version.
    with replacing(folder / WEIGHTS, sync=True) as weights, replacing(folder / CONFIG, sync=True) as described:
        weights.write(to_bytes(plain))
        described.write(text.encode())


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a whole model and check that all its parts are there."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder} holds no {name}: give a folder that deepmrf train or save_pretrained wrote."
            )
    try:
        config = _parse(folder / CONFIG)
    except (ValueError, RecursionError) as error:
        raise ValueError(damaged(folder, f"{CONFIG} is no readable JSON, {first_line(error)}")) from None
    if not isinstance(config, dict) or not isinstance(config.get("unary"), dict):
        raise ValueError(damaged(folder, f"{CONFIG} does not describe a model"))
    missing = [key for key in ("format", "unary", "mean_field", "labels", "metrics", "recipe") if key not in config]
    if missing:
        raise ValueError(damaged(folder, f"{CONFIG} has no {missing[0]!r}"))
    _check_format(folder, config)
    if not isinstance(config["mean_field"], dict | None):
        raise ValueError(damaged(folder, f"{CONFIG} describes no mean field"))
    return config


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a folder, real ones as float32."""
    tensors = load_file(folder / WEIGHTS)
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise a ValueError where a whole model's config would build something far too large."""
    labels = LabelSet.from_dict(config["labels"])
    mrf = config["mean_field"]
    settings = {**config["unary"]["options"], **(mrf or {})}
    for key, largest in MAX_SETTINGS.items():
        for value in _numbers(settings.get(key)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
                raise ValueError(f"{key} is {settings[key]!r}, it must be 0 to {largest}")
    if mrf is None:
        return
    dims = mrf.get("dims", 2)
    sizes = {key: math.prod((_numbers(mrf.get(key)) * dims)[:dims]) for key in ("window", "context_size", "size")}
    patterns = len(labels) ** 2 * mrf.get("contexts", 5) * sizes["context_size"]
    if max(patterns, sizes["window"] * sizes["size"] if mrf.get("size") else 0) > MAX_MRF_PARAMETERS:
        raise ValueError(f"its mean field would have more than {MAX_MRF_PARAMETERS:,} parameters")


@contextmanager
def refusing_damage(folder: Path) -> Iterator[None]:
    """Turn what goes wrong while a model is built from a folder into one sentence about that folder."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, SafetensorError) as error:
        raise ValueError(damaged(folder, first_line(error))) from error


def damaged(folder: Path, reason: str) -> str:
    """The sentence about a folder that cannot be used."""
    return f"The model in {folder} cannot be used ({reason}): get it again from where it came."


def first_line(error: BaseException) -> str:
    """The line of an error that matters: PyTorch's about weights that do not fit begins with a title."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip() or type(error).__name__
    lines = [line.strip() for line in text.splitlines()]
    return lines[1 if lines[0].startswith("Error(s) in loading") and len(lines) > 1 else 0].rstrip(".:")[:200]


def download(name: str, **options: Any) -> Path:
    """Fetch a model from the Hugging Face hub, OWNER/NAME, and return the folder it lies in."""
    folder = Path(huggingface_hub.hf_hub_download(name, CONFIG, **options)).parent
    huggingface_hub.hf_hub_download(name, WEIGHTS, **options)
    return folder


def check_mrf_folder(folder: Path) -> None:
    """Raise a ValueError where `write_mrf` would write over something else than an MRF."""
    if _mrf_config(folder) is None:
        for name in (CONFIG, WEIGHTS):
            if os.path.lexists(folder / name):
                raise ValueError(f"{folder} holds a {name} that deepmrf fit did not write; choose another folder.")


def write_mrf(folder: Path, mean_field: MeanField, config: Mapping[str, Any]) -> None:
    """Write an MRF alone; `config` holds what to save besides its settings: labels, metrics, ..."""
    check_mrf_folder(folder)
    described = {"format": FORMAT, "mean_field": mean_field.settings, **config}
    write_folder(folder, described, mean_field.state_dict())


def read_mrf(folder: Path) -> tuple[MeanField, dict[str, Any]]:
    """Read an MRF alone, ready to be applied, and its config."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG} and {WEIGHTS}; give {FITTED}.")
    config = _mrf_config(folder)
    if config is None:
        raise ValueError(f"{folder / CONFIG} does not describe an MRF alone; give {FITTED}.")
    _check_format(folder, config)
    try:
        mean_field = MeanField(**config["mean_field"])
        mean_field.load_state_dict(read_weights(folder))
    except (SafetensorError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} is damaged, or its {CONFIG} and {WEIGHTS} are of two MRFs; copy it again or repeat deepmrf fit."
        ) from error
    return mean_field.eval().requires_grad_(False), config


def _mrf_config(folder: Path) -> dict[str, Any] | None:
    """The config of an MRF alone; None where it is missing, broken or of a whole model."""
    try:
        config = _parse(folder / CONFIG)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or "unary" in config:
        return None
    return config if all(isinstance(config.get(part), dict) for part in ("mean_field", "labels")) else None


def _parse(path: Path) -> Any:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError("it is too large")
    return json.loads(path.read_text(encoding="utf-8"))


def _check_format(folder: Path, config: Mapping[str, Any]) -> None:
    number = config.get("format", 0)
    if not isinstance(number, int) or number > FORMAT:
        raise ValueError(
            f"{folder / CONFIG} has format {number!r}, newer than this deepmrf reads ({FORMAT}): upgrade deepmrf."
        )


def _numbers(value: Any) -> list[Any]:
    """A setting of one number or one per axis, as a list; a missing one counts as 1."""
    return list(value) if isinstance(value, list | tuple) else [1 if value is None else value]
