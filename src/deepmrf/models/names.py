"""Trained models by name: a bundled one, one in a folder, one on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from deepmrf.models.folder import CONFIG, WEIGHTS, damaged, download, first_line, read_config, saved_path
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model
from deepmrf.unary.own import OwnNetwork

PRETRAINED = Path(__file__).parents[1] / "pretrained"
"""The folder of the bundled models."""
CODE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
"""Files that can run code when they are read."""


def bundled() -> list[str]:
    """The names of the models that are part of the package."""
    return sorted(path.parent.name for path in PRETRAINED.glob(f"*/{CONFIG}"))


def open_model(name: str | os.PathLike[str], network: OwnNetwork | None = None) -> DeepParsingNetwork:
    """Read the model of that name: a bundled one, a folder that deepmrf train or save_pretrained wrote, or a hub id.

    network: the network of a folder that was saved around one of the user's own.
    """
    return from_folder(find_folder(name), network)


def find_folder(name: str | os.PathLike[str]) -> Path:
    """The folder of the model of that name; a model on the hub is downloaded."""
    text = os.fspath(name)
    if text in bundled():
        return PRETRAINED / text
    path = Path(text).expanduser()
    if path.is_dir():
        return _with_config(path)
    if path.suffix.lower() in CODE_SUFFIXES:
        raise ValueError(
            f"{text} is refused: files of this kind can run code when they are read; "
            f"save the model with save_pretrained, as {CONFIG} and {WEIGHTS}."
        )
    if path.is_file():
        if path.name in (CONFIG, WEIGHTS):
            return path.parent
        raise ValueError(f"{text} is a file: give the folder that holds {CONFIG} and {WEIGHTS}.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not text.startswith("."):
        return _from_hub(text)
    near = get_close_matches(text, bundled(), 1)
    guess = f" Did you mean {near[0]}?" if near else ""
    known = ", ".join(bundled()) or "none in this installation"
    raise ValueError(
        f"There is no model {text!r}: give a bundled one ({known}), a folder with {CONFIG}, or OWNER/NAME.{guess}"
    )


def from_folder(folder: Path, network: OwnNetwork | None = None) -> DeepParsingNetwork:
    """Read the model for images or clips in a folder, or in its folder "model", where deepmrf train writes it."""
    folder = _with_config(folder)
    mrf = read_config(folder)["mean_field"] or {}
    spatial, temporal = mrf.get("dims", 2) == 2, mrf.get("dims") == 3 and mrf.get("temporal") is True
    if not (spatial or temporal) or mrf.get("features", 3) not in (0, 3):
        raise ValueError(damaged(folder, "its mean field is not made for images or clips"))
    return read_model(folder, network)


def _with_config(folder: Path) -> Path:
    """The folder itself or its folder "model", whichever holds a model."""
    for path in (folder, folder / "model"):
        if saved_path(path, CONFIG).is_file():
            return path
    unread = [path.name for path in sorted(folder.iterdir()) if path.suffix.lower() in CODE_SUFFIXES]
    code = f" ({unread[0]} is not read: such files can run code)" if unread else ""
    raise FileNotFoundError(f"{folder} holds no {CONFIG}{code}: give a folder that deepmrf train wrote.")


def _from_hub(name: str) -> Path:
    try:
        return download(name)
    except Exception as error:  # the hub's client raises what its transport does
        raise ValueError(
            f"There is no folder {name} here, and the hub did not give such a model ({first_line(error)}): "
            "check the name, and that the network is up."
        ) from None
