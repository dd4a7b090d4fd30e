"""Open the MRF to refine with: one that `fit` saved, or a preset, which needs no training.

Both come with their labels, and with the ids of these in label maps where they are not 0 .. L-1. Presets are dense CRFs
with the settings of a field. Widths of colours are of 255 here, as pydensecrf and the papers have them; dense_crf takes
them of 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deepmrf.data.folder import labels_file
from deepmrf.data.labels import LabelSet
from deepmrf.layers import MeanField
from deepmrf.layers.crf import PRESETS, preset, preset_settings
from deepmrf.models.folder import damaged, first_line, read_mrf
from deepmrf.refine.label_ids import BINARY, SOFT, LabelIds, numbered_labels
from deepmrf.refine.matching import count_dims, match_files
from deepmrf.refine.predictions import Folder, PredictionFiles, are_binary, count_labels
from deepmrf.refine.soft_masks import are_soft, check_not_painted

OpenedMRF = tuple[MeanField, LabelSet, LabelIds | None]
ALIASES = {2: {"dense-crf": "voc"}, 3: {"dense-crf": "medical3d"}}
"""Other names of presets, for images and for volumes."""
MAX_COLOUR = 255
PARAMETERS = {
    "smooth_width": "how far a pixel's neighbours pull it to their label, whatever their colour: pixels, of volumes mm",
    "smoothness": "how strongly they pull; 0 leaves this out",
    "position_width": "how far apart two pixels of similar colour pull each other: pixels, of volumes mm",
    "colour_width": "how different their colours may be, of 255: less keeps finer edges",
    "appearance": "how strongly they pull",
    "iterations": "how often all labels are updated",
}
"""The numbers of a preset, by the names of dense_crf's settings, and what they mean."""


def open_mrf(folder: Folder) -> OpenedMRF:
    """The MRF that `fit` saved."""
    mean_field, config = read_mrf(Path(folder))
    try:
        ids = LabelIds(tuple(config["ids"]), tuple(config.get("void", ()))) if config.get("ids") is not None else None
    except (TypeError, ValueError) as error:
        raise ValueError(damaged(Path(folder), first_line(error))) from error
    return mean_field, LabelSet.from_dict(config["labels"]), ids


def open_preset(
    name: str,
    predictions: Folder,
    images: Folder,
    labels: Folder | None = None,
    changes: Mapping[str, float] | None = None,
    soft: bool | None = None,
) -> OpenedMRF:
    """A dense CRF with the settings of that name.

    labels: a labels.json; without it there are as many labels as the predictions show, and masks that hold 0 and 255
    alone are binary. changes: values of PARAMETERS that replace the preset's. soft: are the predictions soft
    masks? None finds out, unless there is a labels.json.
    """
    chosen = check_preset(name, count_dims(images), images)
    build_preset(chosen, 2, changes or {})  # before files are read
    if labels is not None:
        label_set, label_ids = read_label_file(labels)
        if soft:
            label_ids = replace(label_ids or LabelIds(tuple(range(len(label_set)))), soft=True)
    else:
        files = [matched.prediction for matched in match_files(predictions, images)[0]]
        label_ids = ids_shown(files, soft)
        label_set = LabelSet(("background", "foreground"))
        if label_ids is None:
            label_set = numbered_labels(count_labels(files), [file.ids for file in files if file.ids is not None])
    return build_preset(chosen, len(label_set), changes or {}), label_set, label_ids


def ids_shown(predictions: Sequence[PredictionFiles], soft: bool | None = None) -> LabelIds | None:
    """The ids of binary and of soft masks; None for other predictions."""
    if soft or (soft is None and are_soft(predictions)):
        return SOFT
    if are_binary(predictions):
        return BINARY
    if soft is None:
        check_not_painted(predictions)
    return None


def read_label_file(path: Folder) -> tuple[LabelSet, LabelIds | None]:
    """The labels of a labels.json of any name, and their ids if these are not 0 .. L-1, as `fit` reads them."""
    labels, lookup, _ = labels_file(Path(path))
    return labels, LabelIds.from_lookup(lookup, len(labels))


def preset_values(name: str) -> dict[str, float]:
    """The value of each of PARAMETERS in the preset of that name."""
    settings = preset_settings(name)
    settings["colour_width"] *= MAX_COLOUR
    return {parameter: settings[parameter] for parameter in PARAMETERS}


def check_preset(name: str, dims: int, images: object) -> str:
    """The preset that a name or alias means for images of 2 or volumes of 3 axes, if it is made for them."""
    name = ALIASES[dims].get(name, name)
    if preset_settings(name).get("dims", 2) != dims:
        others = ", ".join(other for other in PRESETS if PRESETS[other].get("dims", 2) == dims)
        kind, given = ("volumes", "images") if dims == 2 else ("images", "volumes")
        raise ValueError(f"The preset {name} is for {kind}, but {images} holds {given}: choose one of {others}.")
    return name


def build_preset(name: str, labels: int, changes: Mapping[str, float]) -> MeanField:
    """The dense CRF of that name; `changes` are values of PARAMETERS that replace the preset's."""
    settings = dict(changes)
    for parameter, value in changes.items():
        if parameter not in PARAMETERS:
            raise ValueError(f"A preset has no parameter {parameter!r}: choose from {', '.join(PARAMETERS)}.")
        if not 0 <= value < math.inf:  # NaN fails, too
            raise ValueError(f"{parameter}={value:g} must be at least 0 and finite.")
    if "colour_width" in settings:
        if settings["colour_width"] < 1:
            raise ValueError(f"colour_width={settings['colour_width']:g} is below 1, and it is of 255: 13 is usual.")
        settings["colour_width"] /= MAX_COLOUR
    if "iterations" in settings:
        if settings["iterations"] < 1 or settings["iterations"] != int(settings["iterations"]):
            raise ValueError(f"iterations={settings['iterations']:g} must be a whole number of at least 1.")
        settings["iterations"] = int(settings["iterations"])
    return preset(name, labels, **settings).eval()
