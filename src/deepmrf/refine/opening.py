"""Open the MRF to refine with: one that `fit` saved, or a preset, which needs no training.

Both come with their labels, and with the ids of these in label maps where they are not 0 .. L-1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deepmrf.data.colours import voc_colours
from deepmrf.data.folder import labels_file
from deepmrf.data.labels import LabelSet
from deepmrf.layers import MeanField
from deepmrf.models.folder import damaged, first_line, read_mrf
from deepmrf.refine.label_ids import BINARY, SOFT, LabelIds
from deepmrf.refine.matching import count_dims, match_files
from deepmrf.refine.predictions import Folder, PredictionFiles, are_binary, count_labels
from deepmrf.refine.presets import build_preset, check_preset
from deepmrf.refine.soft_masks import are_soft, check_not_painted

OpenedMRF = tuple[MeanField, LabelSet, LabelIds | None]


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
    alone are binary. changes: values of presets.PARAMETERS that replace the preset's. soft: are the predictions soft
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
        count = count_labels(files) if label_ids is None else 2
        label_set = LabelSet(tuple(f"label {label}" for label in range(count)), voc_colours(count))
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
