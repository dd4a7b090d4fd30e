"""Model folders: config.json and model.safetensors. Only this module reads and writes them.

config.json of a whole model                        of an MRF alone, as `deepmrf fit` writes it
    format       1; 3 for clips or with "video"         format       1 or 3
    unary        {"network": name, "options": {...}}, or {"network": null, "options": {...}, "source": {...}}
    mean_field   MeanField's arguments, or null         mean_field   MeanField's arguments
    video        VideoPart's arguments; may be missing
    labels       names, colours, ignored id             labels       the same
    metrics      scores by stage or data set            metrics      scores of cross-validation
    recipe       the recipe it was trained with         settings     how it was fitted; further keys of its own

"network" is null where the network is not one of deepmrf.unary. "options" are then those of its wrapper, and "source"
says where it comes from: {"library", "class", "config"} of a network that another library can build again, or {"code"},
the name of the user's own code. Reading imports no such code.

A folder may be damaged, or ask for more memory than there is. So config.json is checked by schema.py, and the weights
are compared with it by name and shape, before anything is built or read.

Both files are replaced together. They are written into a folder of another name, which becomes `.saved` in one step;
then they move to their places. Readers look into `.saved` first, so that a process that is killed between two moves
leaves the new model, and one that is killed earlier the old one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from deepmrf.data.labels import LabelSet
from deepmrf.data.writing import write_bytes
from deepmrf.layers import MeanField
from deepmrf.models.schema import MEAN_FIELD, VIDEO, WRAPPER, check_settings, network_schema, shortened, skeleton

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT, FORMAT_OF_IMAGES = 3, 1
"""Raised when older versions can no longer read a saved config. Models of single images have the older one."""
MAX_CONFIG_BYTES = 2**24
MAX_MRF_WEIGHT = 1e12
MAX_LOG_WIDTH = 40.0
"""Beyond these, the sums of an MRF overflow or are divided by 0."""
SAVED = ".saved"
"""The folder of files that are whole, and not yet in their places."""
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
    _replace(folder, {CONFIG: (json.dumps(config, indent=1) + "\n").encode(), WEIGHTS: to_bytes(plain)})


def _replace(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace all these files of a folder, or none."""
    folder.mkdir(parents=True, exist_ok=True)
    _move_saved(folder)  # of a process that was killed
    written = folder / f".{os.getpid()}.{os.urandom(4).hex()}.part"
    written.mkdir()
    try:
        for name, content in files.items():
            write_bytes(written / name, content, sync=True)
        written.rename(folder / SAVED)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise
    _move_saved(folder)


def _move_saved(folder: Path) -> None:
    """Move files that were saved to their places."""
    for name in (CONFIG, WEIGHTS):
        if (folder / SAVED / name).is_file():
            (folder / SAVED / name).replace(folder / name)
    if (folder / SAVED).is_dir():
        (folder / SAVED).rmdir()


def saved_path(folder: Path, name: str) -> Path:
    """Where the newest file of that name in a model folder is."""
    newest = folder / SAVED / name
    return newest if newest.is_file() else folder / name


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a whole model and check that all its parts are there."""
    for name in (CONFIG, WEIGHTS):
        if not saved_path(folder, name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}: give one that deepmrf train or save_pretrained wrote.")
    try:
        config = _parse(saved_path(folder, CONFIG))
    except (ValueError, RecursionError) as error:
        raise ValueError(damaged(folder, f"{CONFIG} is no readable JSON, {first_line(error)}")) from None
    if not isinstance(config, dict) or not isinstance(config.get("unary"), dict):
        raise ValueError(damaged(folder, f"{CONFIG} does not describe a model"))
    missing = [key for key in ("format", "unary", "mean_field", "labels", "metrics", "recipe") if key not in config]
    if missing:
        raise ValueError(damaged(folder, f"{CONFIG} has no {missing[0]!r}"))
    if not isinstance(config["mean_field"], dict | None):
        raise ValueError(damaged(folder, f"{CONFIG} describes no mean field"))
    _check_format(folder, config)
    return config


def read_weights(folder: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a folder, real ones as float32; a ValueError where names or shapes are not as expected."""
    with safe_open(saved_path(folder, WEIGHTS), framework="pt") as file:
        names = set(file.keys())
        for name in (*expected, *sorted(names)):
            if name not in names or name not in expected:
                differs = "lacks" if name in expected else "also holds"
                raise ValueError(f"{WEIGHTS} {differs} {shortened(name)}: it is of another model than {CONFIG}")
            shape, needed = tuple(file.get_slice(name).get_shape()), tuple(expected[name].shape)
            if shape != needed:
                raise ValueError(f"size mismatch for {name}: {WEIGHTS} has {shape}, {CONFIG} describes {needed}")
        tensors = {name: file.get_tensor(name) for name in expected}
    tensors = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    for name, value in tensors.items():
        # Masks of networks may hold infinities, which count only in their sum; NaN is always damage.
        if value.is_floating_point() and not bool(value.sum().isfinite()) and bool(value.isnan().any()):
            raise ValueError(f"{name} holds NaN")
    return tensors


def is_half(folder: Path) -> bool:
    """Does the folder store filters as float16?"""
    with safe_open(saved_path(folder, WEIGHTS), framework="pt") as file:
        return any(file.get_slice(name).get_dtype() == "F16" for name in file.keys())  # noqa: SIM118


def check_config(config: Mapping[str, Any]) -> LabelSet:
    """Return the labels of a config; raise a ValueError where something is not as the schema has it."""
    labels = LabelSet.from_dict(config["labels"])
    if config["mean_field"] is not None:
        check_settings(config["mean_field"], MEAN_FIELD, "mean_field")
        if config["mean_field"].get("labels") != len(labels):
            raise ValueError(f"mean_field.labels is not {len(labels)}, the number of labels")
    if config.get("video") is not None:
        check_settings(config["video"], VIDEO, "video")
    unary = config.get("unary")
    if unary is not None:
        name = unary.get("network")
        schema = WRAPPER if name in (None, "wrapped") else network_schema(name)
        if schema is None:
            raise ValueError(f"there is no unary network {shortened(name)}")
        check_settings(unary.get("options"), schema, "unary.options")
    return labels


def check_mrf_weights(part: nn.Module) -> None:
    """Raise a ValueError where weights of an MRF, or its part for video, are so large that it would compute NaN."""
    for name, value in (*part.named_parameters(), *part.named_buffers()):
        most = MAX_LOG_WIDTH if name.endswith("_width") else MAX_MRF_WEIGHT
        if not bool((value.detach().abs() <= most).all()):  # NaN fails, too
            raise ValueError(f"{name} holds NaN, infinity or values beyond {most:g}")


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
    if not _hub_has_an_address():
        options = {"local_files_only": True, **options}
    folder = Path(huggingface_hub.hf_hub_download(name, CONFIG, **options)).parent
    huggingface_hub.hf_hub_download(name, WEIGHTS, **options)
    return folder


def _hub_has_an_address() -> bool:
    """Can the hub be asked? Where there is no network, its client would try for half a minute."""
    if urllib.request.getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT).hostname, 443))
    except OSError:
        return False


def check_mrf_folder(folder: Path) -> bool:
    """Return whether a folder holds an MRF; raise a ValueError where `write_mrf` would write over something else."""
    if _mrf_config(folder) is not None:
        return True
    for name in (CONFIG, WEIGHTS):
        if os.path.lexists(saved_path(folder, name)):
            raise ValueError(f"{folder} holds a {name} that deepmrf fit did not write; choose another folder.")
    return False


def write_mrf(folder: Path, mean_field: MeanField, config: Mapping[str, Any]) -> None:
    """Write an MRF alone; `config` holds what to save besides its settings: labels, metrics, ..."""
    check_mrf_folder(folder)
    described = {"mean_field": mean_field.settings, **config}
    write_folder(folder, {"format": format_of(described), **described}, mean_field.state_dict())


def read_mrf(folder: Path) -> tuple[MeanField, dict[str, Any]]:
    """Read an MRF alone, ready to be applied, and its config."""
    if not all(saved_path(folder, name).is_file() for name in (CONFIG, WEIGHTS)):
        raise FileNotFoundError(f"{folder} holds no {CONFIG} and {WEIGHTS}; give {FITTED}.")
    config = _mrf_config(folder)
    if config is None:
        raise ValueError(f"{folder / CONFIG} does not describe an MRF alone; give {FITTED}.")
    _check_format(folder, config)
    try:
        check_config(config)
        weights = read_weights(folder, skeleton(lambda: MeanField(**config["mean_field"])))
        mean_field = MeanField(**config["mean_field"])
        mean_field.load_state_dict(weights)
        check_mrf_weights(mean_field)
    except (SafetensorError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} is damaged, or its {CONFIG} and {WEIGHTS} are of two MRFs ({first_line(error)}); "
            "copy it again or repeat deepmrf fit."
        ) from error
    return mean_field.eval().requires_grad_(False), config


def _mrf_config(folder: Path) -> dict[str, Any] | None:
    """The config of an MRF alone; None where it is missing, broken or of a whole model."""
    try:
        config = _parse(saved_path(folder, CONFIG))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict) or "unary" in config:
        return None
    return config if all(isinstance(config.get(part), dict) for part in ("mean_field", "labels")) else None


def _parse(path: Path) -> Any:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError("it is too large")
    return json.loads(path.read_text(encoding="utf-8"))


def format_of(config: Mapping[str, Any]) -> int:
    """The format of a model with this config."""
    mean_field = config["mean_field"] or {}
    return FORMAT if config.get("video") or mean_field.get("temporal") else FORMAT_OF_IMAGES


def _check_format(folder: Path, config: Mapping[str, Any]) -> None:
    number = config.get("format", 0)
    if not isinstance(number, int) or number > FORMAT:
        raise ValueError(f"{folder / CONFIG} has format {shortened(number)}, newer than {FORMAT}: upgrade deepmrf.")
    if number < format_of(config):
        raise ValueError(
            f"{folder} was written by an earlier deepmrf, whose links between frames had another meaning: "
            "train its links again, as recipes/camvid-3d.toml does, or give the model before it had them."
        )
