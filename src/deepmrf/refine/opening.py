"""Open the MRF to refine with: one that `fit` saved, or a preset, which needs no training.

Both come with their labels, and with the ids of these in label maps where they are not 0 .. L-1.
"""

from __future__ import annotations

from pathlib import Path

from deepmrf.data.colours import voc_colours
from deepmrf.data.folder import labels_file
from deepmrf.data.labels import LabelSet
from deepmrf.layers import MeanField
from deepmrf.layers.crf import PRESETS, preset
from deepmrf.models.folder import read_mrf
from deepmrf.refine.label_ids import BINARY, LabelIds
from deepmrf.refine.matching import count_dims, match_files
from deepmrf.refine.predictions import Folder, are_binary, count_labels

ALIASES = {2: {"dense-crf": "voc"}, 3: {"dense-crf": "medical3d"}}
"""Other names of presets, for images and for volumes."""

OpenedMRF = tuple[MeanField, LabelSet, LabelIds | None]


def open_mrf(folder: Folder) -> OpenedMRF:
    """The MRF that `fit` saved."""
    mean_field, config = read_mrf(Path(folder))
    ids = LabelIds(tuple(config["ids"]), tuple(config.get("void", ()))) if config.get("ids") is not None else None
    return mean_field, LabelSet.from_dict(config["labels"]), ids


def open_preset(name: str, predictions: Folder, images: Folder, labels: Folder | None = None) -> OpenedMRF:
    """A dense CRF with the settings of that name.

    labels: a labels.json; without it there are as many labels as the predictions show, and masks that hold 0 and 255
    alone are binary.
    """
    dims = count_dims(images)
    settings = PRESETS.get(ALIASES[dims].get(name, name))
    if settings is None:
        raise ValueError(f"There is no preset {name!r}: choose one of {', '.join(PRESETS)}.")
    if settings.get("dims", 2) != dims:
        others = ", ".join(other for other in PRESETS if PRESETS[other].get("dims", 2) == dims)
        kind, needed = ("volumes", "images") if dims == 2 else ("images", "volumes")
        raise ValueError(f"The preset {name} is for {kind}, but {images} holds {needed}: choose one of {others}.")
    if labels is not None:
        label_set, label_ids = read_label_file(labels)
    else:
        files = [matched.prediction for matched in match_files(predictions, images)[0]]
        label_ids = BINARY if are_binary(files) else None
        count = 2 if label_ids == BINARY else count_labels(files)
        label_set = LabelSet(tuple(f"label {label}" for label in range(count)), voc_colours(count))
    return preset(ALIASES[dims].get(name, name), len(label_set)).eval(), label_set, label_ids


def read_label_file(path: Folder) -> tuple[LabelSet, LabelIds | None]:
    """The labels of a labels.json of any name, and their ids if these are not 0 .. L-1, as `fit` reads them."""
    labels, lookup, _ = labels_file(Path(path))
    return labels, LabelIds.from_lookup(lookup, len(labels))
