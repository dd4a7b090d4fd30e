"""ModelSummary: what a model folder says of its model, read without building it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmrf.data.labels import LabelSet
from deepmrf.models.folder import CONFIG, WEIGHTS, read_config, refusing_damage, saved_path
from deepmrf.models.names import find_folder

NETWORK_ALONE = "network alone"
"""How the names of scores without the MRF end."""


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
    per_class = final.get("iou_per_class")
    return ModelSummary(
        name=os.fspath(name),
        folder=folder,
        labels=labels,
        network=config["unary"].get("network"),
        mean_field=_describe(config["mean_field"]),
        data=_data(config["recipe"]) if final else None,
        images=final.get("images"),
        miou=final.get("miou"),
        miou_network_alone=alone.get("miou"),
        iou=dict(per_class) if isinstance(per_class, dict) else {},
        bytes=sum(saved_path(folder, file).stat().st_size for file in (CONFIG, WEIGHTS)),
    )


def _final_scores(metrics: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last scores on the validation split, with and without the MRF."""
    stages = metrics.get("val") if isinstance(metrics, dict) else None
    scores = {name: value for name, value in stages.items() if isinstance(value, dict)} if stages else {}
    alone = [value for name, value in scores.items() if name.endswith(NETWORK_ALONE)]
    final = [value for name, value in scores.items() if not name.endswith(NETWORK_ALONE)]
    return final[-1] if final else {}, alone[-1] if alone else {}


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
    return f"{kernel} kernel, window {window}, {contexts} contexts of {size}"
