"""Trained models by name: a bundled one, one in a folder, one on the Hugging Face hub.

`open_model` reads a model. `summarise` says what its folder tells of it, without building it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import LocalEntryNotFoundError

from deepmrf.data.labels import LabelSet
from deepmrf.data.spelling import did_you_mean
from deepmrf.models.folder import (
    CONFIG,
    WEIGHTS,
    damaged,
    download,
    first_line,
    read_config,
    refusing_damage,
    saved_path,
)
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model
from deepmrf.unary.own import OwnNetwork

PRETRAINED = Path(__file__).parents[1] / "pretrained"
"""The folder of the bundled models."""
CODE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
"""Files that can run code when they are read."""
MAX_IMAGES = 10**12
"""More images than any data set has."""
NETWORK_ALONE = "network alone"
"""How the names of scores without the MRF end."""


def bundled() -> list[str]:
    """The names of the models that are part of the package."""
    return sorted(path.parent.name for path in PRETRAINED.glob(f"*/{CONFIG}"))


def open_model(name: str | os.PathLike[str], network: OwnNetwork | None = None) -> DeepParsingNetwork:
    """Read a bundled model, one in a folder, or one on the hub; network: of a folder saved around one's own."""
    return from_folder(find_folder(name), network)


def find_folder(name: str | os.PathLike[str]) -> Path:
    """The folder of the model of that name; a model on the hub is downloaded.

    The folder of a model goes before a bundled model of its name; any other folder, such as data, does not.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text in bundled() and model_below(path) is None:
        return PRETRAINED / text
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
        try:
            return download(text)
        except Exception as error:  # the hub's client raises what its transport does
            reason = "it cannot be reached" if isinstance(error, LocalEntryNotFoundError) else first_line(error)
            raise ValueError(
                f"There is no folder {text} here, and the hub did not give such a model ({reason}): "
                "check the name, and that the network is up."
            ) from None
    known = ", ".join(bundled()) or "none in this installation"
    raise ValueError(
        f"There is no model {text!r}{did_you_mean(text, bundled())}: give a bundled one ({known}), a folder with "
        f"{CONFIG}, or OWNER/NAME."
    )


def from_folder(folder: Path, network: OwnNetwork | None = None) -> DeepParsingNetwork:
    """Read the model for images or clips in a folder, or in its folder "model", where deepmrf train writes it."""
    folder = _with_config(folder)
    mrf = read_config(folder)["mean_field"] or {}
    spatial, temporal = mrf.get("dims", 2) == 2, mrf.get("dims") == 3 and mrf.get("temporal") is True
    if not (spatial or temporal) or mrf.get("features", 3) not in (0, 3):
        raise ValueError(damaged(folder, "its mean field is not made for images or clips"))
    return read_model(folder, network)


def model_below(folder: Path) -> Path | None:
    """The folder itself or its folder "model", whichever holds a model; None where neither does."""
    return next((path for path in (folder, folder / "model") if saved_path(path, CONFIG).is_file()), None)


def _with_config(folder: Path) -> Path:
    path = model_below(folder)
    if path is not None:
        return path
    unread = [path.name for path in sorted(folder.iterdir()) if path.suffix.lower() in CODE_SUFFIXES]
    code = f" ({unread[0]} is not read: such files can run code)" if unread else ""
    raise FileNotFoundError(f"{folder} holds no {CONFIG}{code}: give a folder that deepmrf train wrote.")


@dataclass(frozen=True)
class ModelSummary:
    """A trained model in a few words and numbers; None for what its folder does not say."""

    name: str
    folder: Path
    labels: LabelSet
    network: str | None
    """The unary network; None for one of the user's own."""
    mean_field: str | None
    """The MRF, in words; None for a network alone."""
    data: str | None
    """The data that it was scored on, such as "camvid val"."""
    images: int | None
    """The number of images that it was scored on."""
    miou: float | None
    """Mean intersection over union, 0 to 1."""
    miou_network_alone: float | None
    """The same without the MRF."""
    iou: dict[str, float]
    """Intersection over union of each label, as far as it is known."""
    bytes: int
    """The size of its files."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        values = {name: value for name, value in vars(self).items() if name not in ("labels", "folder")}
        return {**values, "folder": str(self.folder), **self.labels.to_dict()}


def summarise(name: str | os.PathLike[str]) -> ModelSummary:
    """Read what the folder of a model says: of a bundled one, one in a folder, or one on the hub."""
    folder = find_folder(name)
    config = read_config(folder)
    with refusing_damage(folder):
        labels = LabelSet.from_dict(config["labels"])
    final, alone = _final_scores(config["metrics"])
    per_class, images = final.get("iou_per_class"), final.get("images")
    return ModelSummary(
        name=os.fspath(name),
        folder=folder,
        labels=labels,
        network=config["unary"].get("network"),
        mean_field=_describe(config["mean_field"]),
        data=_data(config["recipe"]) if final else None,
        images=images if type(images) is int and 0 < images < MAX_IMAGES else None,
        miou=score(final.get("miou")),
        miou_network_alone=score(alone.get("miou")),
        iou=_known_scores(per_class) if isinstance(per_class, dict) else {},
        bytes=sum(saved_path(folder, file).stat().st_size for file in (CONFIG, WEIGHTS)),
    )


def _final_scores(metrics: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last scores on the validation split, with and without the MRF."""
    stages = metrics.get("val") if isinstance(metrics, dict) else None
    stages = stages if isinstance(stages, dict) else {}
    scores = {name: value for name, value in stages.items() if isinstance(value, dict)}
    alone = [value for name, value in scores.items() if name.endswith(NETWORK_ALONE)]
    final = [value for name, value in scores.items() if not name.endswith(NETWORK_ALONE)]
    return final[-1] if final else {}, alone[-1] if alone else {}


def score(value: Any) -> float | None:
    """The value as a score of 0 to 1; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= 1 else None


def _known_scores(values: dict[str, Any]) -> dict[str, float]:
    """The scores among the values."""
    scores = {name: score(value) for name, value in values.items()}
    return {name: value for name, value in scores.items() if value is not None}


def _data(recipe: Any) -> str | None:
    """The name and split of the validation data, without its path."""
    data = recipe.get("data") if isinstance(recipe, dict) else None
    if not isinstance(data, dict):
        return None
    kind = str(data.get("val") or data.get("train") or "").split(":")[0]
    return f"{kind} {data.get('val_split', '')}".strip() or None


def _describe(mean_field: dict[str, Any] | None) -> str | None:
    if mean_field is None:
        return None
    kernel, window = mean_field.get("kernel", "distance"), mean_field.get("window")
    contexts, size = mean_field.get("contexts"), mean_field.get("context_size")
    patterns = f"{contexts} context{'' if contexts == 1 else 's'} of {size}" if contexts else "no contexts"
    reach = "all pairs of pixels" if kernel == "global" else f"window {window}"
    return f"{kernel} kernel, {reach}, {patterns}"
