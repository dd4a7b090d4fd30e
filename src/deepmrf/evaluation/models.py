"""Models by name against a data set by name: what `deepmrf evaluate` and `deepmrf calibrate` compute."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepmrf.data import open_data
from deepmrf.data.dataset import Dataset
from deepmrf.data.progress import Phases, no_phases
from deepmrf.data.writing import write_text
from deepmrf.evaluation.evaluate import Show, evaluate_parts
from deepmrf.evaluation.metrics import Scores
from deepmrf.evaluation.videos import VideoScores, evaluate_video, video_models
from deepmrf.models.names import NETWORK_ALONE, open_model
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.scales import Model, combined
from deepmrf.unary.own import OwnNetwork

NETWORK, MODEL = NETWORK_ALONE, "whole model"
"""The parts that `score_images` tells apart."""
SAME_LABELS = "choose a model and data of the same labels; for a folder, write the model's names into its labels.json"
"""What to do about a model and data of different labels."""


def open_models(
    names: Sequence[str], data: str, split: str, network: OwnNetwork | None = None
) -> tuple[list[DeepParsingNetwork], Dataset]:
    """Open the models and the data set, and check that all have the same labels.

    network: the network of folders that were saved around one of the user's own.
    """
    models = [open_model(name, copy.deepcopy(network)) for name in names]  # each model has weights of its own
    images = open_data(data, split)
    for name, model in zip(names, models, strict=True):
        model.labels.check_same(name, images.labels, data, SAME_LABELS)
    return models, images


def score_images(
    models: Sequence[DeepParsingNetwork],
    data: Dataset,
    *,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
    network_too: bool = False,
    objects: bool = False,
    device: torch.device | str = "cpu",
    phases: Phases = no_phases,
    shows: Sequence[Show] = (),
) -> dict[str, Scores]:
    """Scores of the average of the models ("whole model") and, if asked, of their networks ("network alone").

    objects: measure LA by objects, too. shows: called with the labels of each image, by the same names.
    """
    models = [model.to(device) for model in models]
    parts: dict[str, Sequence[Model]] = {NETWORK: [model.log_unary for model in models]} if network_too else {}
    parts[MODEL] = models
    predictors = {name: combined(part, scales, flip) for name, part in parts.items()}
    return evaluate_parts(predictors, data, device, phases("images"), objects=objects, shows=shows)


def score_videos(
    names: Sequence[str],
    models: Sequence[DeepParsingNetwork],
    data: Dataset,
    *,
    device: torch.device | str = "cpu",
    phases: Phases = no_phases,
) -> dict[str, VideoScores]:
    """Scores of each model by itself on frames in their order, by the name of its folder if that is unique."""
    short = [_short_name(name) for name in names]
    unique = short if len(set(short)) == len(short) else names
    measured = video_models(dict(zip(unique, [model.to(device) for model in models], strict=True)))
    return evaluate_video(measured, data, device, phases("frames"))


def _short_name(name: str) -> str:
    """The name of a model's folder, or of the run that it belongs to: "drive" of "runs/drive/model"."""
    path = Path(os.path.abspath(name))
    return (path.parent.name if path.name == "model" else path.name) or name


def write_scores(folder: Path, facts: dict[str, Any], scores: Mapping[str, Scores | VideoScores]) -> tuple[Path, Path]:
    """Write scores.json (with these facts) and scores.csv (a row per class) into a folder."""
    content = {**facts, "scores": {name: score.to_dict() for name, score in scores.items()}}
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["part", "class", "iou", "accuracy", "ta", "la", "ba"])
    for name, score in scores.items():
        writer.writerows([[name, *row] for row in score.rows()])
    write_text(folder / "scores.json", json.dumps(content, indent=1) + "\n")
    write_text(folder / "scores.csv", table.getvalue())
    return folder / "scores.json", folder / "scores.csv"
