"""Finding a trained model by name: bundled, in a folder, or on the hub; and judging it before anything is built.

A saved model is JSON and safetensors, so that reading it runs no code. One from a stranger may still be broken, or ask
for more memory than there is: config.json is read with suspicion before a network is built by it.
"""

from __future__ import annotations

import json
import math
import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from deepmrf.data.labels import LabelSet
from deepmrf.models.parsing_network import CONFIG, FORMAT, WEIGHTS, DeepParsingNetwork
from deepmrf.models.parsing_network import load as load_folder

PRETRAINED = Path(__file__).parents[1] / "pretrained"
"""Where the bundled models lie, a folder each."""
CODE = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
"""Files that can run code when they are read."""
MOST = {"width": 1024, "channels": 8192, "window": 1001, "context_size": 255, "contexts": 255, "iterations": 100}
"""The largest settings that a saved model may ask for."""
PARAMETERS = 2**27
"""The most parameters of its mean field."""
CONFIG_BYTES = 2**24
"""A config.json larger than this is no config."""


def bundled() -> list[str]:
    """The names of the models that are part of the package."""
    return sorted(path.parent.name for path in PRETRAINED.glob(f"*/{CONFIG}"))


def open_model(name: str | os.PathLike[str]) -> DeepParsingNetwork:
    """The model of that name: a bundled one, a folder that deepmrf train or save_pretrained wrote, or a hub id."""
    text = os.fspath(name)
    if text in bundled():
        return load_folder(PRETRAINED / text)  # our own: nothing to judge
    path = Path(text).expanduser()
    if path.is_dir():
        return from_folder(path)
    if path.suffix.lower() in CODE:
        raise ValueError(
            f"{text} is refused: files of this kind can run code when they are read; "
            f"save the model with save_pretrained, as {CONFIG} and {WEIGHTS}."
        )
    if path.is_file():
        if path.name in (CONFIG, WEIGHTS):
            return from_folder(path.parent)
        raise ValueError(f"{text} is a file: give the folder that holds {CONFIG} and {WEIGHTS}.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.startswith("."):
        return _from_hub(text)
    near = get_close_matches(text, bundled(), 1)
    guess = f" Did you mean {near[0]}?" if near else ""
    known = ", ".join(bundled()) or "none in this installation"
    raise ValueError(
        f"There is no model {text!r}: give a bundled one ({known}), a folder with {CONFIG}, or OWNER/NAME.{guess}"
    )


def from_folder(folder: Path) -> DeepParsingNetwork:
    """The model in a folder (or in its folder "model", where deepmrf train puts it), judged first."""
    if not (folder / CONFIG).is_file() and (folder / "model" / CONFIG).is_file():
        folder = folder / "model"
    if not (folder / CONFIG).is_file():
        held = [path.name for path in sorted(folder.iterdir()) if path.suffix.lower() in CODE]
        code = f" ({held[0]} is not read: such files can run code)" if held else ""
        raise FileNotFoundError(f"{folder} holds no {CONFIG}{code}: give a folder that deepmrf train wrote.")
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} holds no {WEIGHTS}: copy it there, too, from where the model was saved.")
    config = _read_config(folder / CONFIG)
    try:
        judge(config)
        return load_folder(folder)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError, SafetensorError) as why:
        raise ValueError(_damaged(folder, _gist(why))) from why


def judge(config: dict[str, Any]) -> None:
    """Would this config build a model for images, and one of a sensible size?"""
    labels = LabelSet.from_dict(config["labels"])
    settings = {**config["unary"]["options"], **(config["mean_field"] or {})}
    for key, most in MOST.items():
        for value in _numbers(settings.get(key)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise ValueError(f"{key} is {settings[key]!r}, it must be 0 to {most}")
    mrf = config["mean_field"]
    if mrf is None:
        return
    dims = mrf.get("dims", 2)
    if (dims != 2 and not (dims == 3 and mrf.get("temporal") is True)) or mrf.get("features", 3) not in (0, 3):
        raise ValueError("its mean field is not made for images or clips")
    sizes = {key: math.prod((_numbers(mrf.get(key)) * dims)[:dims]) for key in ("window", "context_size", "size")}
    patterns = len(labels) ** 2 * mrf.get("contexts", 5) * sizes["context_size"]
    if max(patterns, sizes["window"] * sizes["size"] if mrf.get("size") else 0) > PARAMETERS:
        raise ValueError(f"its mean field would have more than {PARAMETERS:,} parameters")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > CONFIG_BYTES:
            raise ValueError("it is too large")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as why:  # json and utf-8 errors are ValueErrors
        raise ValueError(_damaged(path.parent, f"{CONFIG} is no readable JSON, {_gist(why)}")) from None
    if not isinstance(config, dict) or not isinstance(config.get("unary"), dict):
        raise ValueError(_damaged(path.parent, f"{CONFIG} does not describe a model"))
    missing = [key for key in ("format", "unary", "mean_field", "labels", "metrics", "recipe") if key not in config]
    if missing:
        raise ValueError(_damaged(path.parent, f"{CONFIG} has no {missing[0]!r}"))
    if not isinstance(config["format"], int) or config["format"] > FORMAT:
        raise ValueError(f"{path} has format {config['format']!r}, this deepmrf reads up to {FORMAT}: upgrade deepmrf.")
    if not config["unary"].get("network") or not isinstance(config["unary"].get("options"), dict):
        raise ValueError(
            f"{path.parent} was saved around a network of one's own: load it in Python, with "
            "DeepParsingNetwork.from_pretrained(folder, unary=network)."
        )
    if not isinstance(config["mean_field"], dict | None):
        raise ValueError(_damaged(path.parent, f"{CONFIG} describes no mean field"))
    return config


def _from_hub(name: str) -> DeepParsingNetwork:
    from huggingface_hub import hf_hub_download

    try:
        folder = Path(hf_hub_download(name, CONFIG)).parent
        hf_hub_download(name, WEIGHTS)
    except Exception as why:  # the hub's client raises what its transport does
        raise ValueError(
            f"There is no folder {name} here, and the hub did not give such a model ({_gist(why)}): "
            "check the name, and that the network is up."
        ) from None
    return from_folder(folder)


def _numbers(value: Any) -> list[Any]:
    """A setting of one number or one per axis; one that is left out counts as 1."""
    return list(value) if isinstance(value, list | tuple) else [1 if value is None else value]


def _gist(why: BaseException) -> str:
    """One line of an error; PyTorch's of weights that do not fit begins with a title."""
    text = str(why.args[0] if isinstance(why, KeyError) and why.args else why).strip() or type(why).__name__
    lines = [line.strip() for line in text.splitlines()]
    return lines[1 if lines[0].startswith("Error(s) in loading") and len(lines) > 1 else 0].rstrip(".:")[:200]


def _damaged(folder: Path, reason: str) -> str:
    return f"The model in {folder} cannot be used ({reason}): get it again from where it came."
