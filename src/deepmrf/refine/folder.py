"""What a fit is asked for, what it found, and the folder it is saved in: config.json and model.safetensors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from deepmrf.data.labels import LabelSet
from deepmrf.evaluation.dice import Dice, mean, per_label
from deepmrf.evaluation.metrics import Scores
from deepmrf.layers import MeanField
from deepmrf.layers.triple_penalty import Kernel
from deepmrf.models.folder import check_mrf_folder, read_mrf, write_mrf
from deepmrf.refine.predictions import Coding, Folder

Part = Literal["nothing", "triple penalty", "label contexts"]


@dataclass(frozen=True)
class FitSettings:
    """How an MRF is learned. The defaults take minutes for a hundred images on two cores."""

    window: int = 21
    """Of the triple penalty, in pixels."""
    kernel: Kernel = "gaussian"
    contexts: int = 3
    """Patterns per label; 0 learns the triple penalty alone."""
    context_size: int = 7
    folds: int = 3
    crop: int = 128
    """Side of the square crops that are learned from."""
    batch: int = 2
    penalty_steps: int = 60
    contexts_steps: int = 120
    penalty_rate: float = 0.15
    contexts_rate: float = 5e-3
    labels: int | None = None
    """How many there are, where neither labels.json nor the predictions tell."""
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        least = {"window": 2, "contexts": 0, "context_size": 1, "folds": 2, "crop": 16, "batch": 1}
        for name, bound in {**least, "penalty_steps": 1, "contexts_steps": 1, "seed": 0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < bound:
                raise ValueError(f"{name}={value!r} must be a whole number, at least {bound}.")
        count = self.labels
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 2 <= count <= 255):
            raise ValueError(
                f"labels={count!r} must be a whole number from 2 to 255; leave it out to have them counted."
            )
        for name in ("penalty_rate", "contexts_rate"):
            if not 0 < getattr(self, name) < 10:
                raise ValueError(f"{name}={getattr(self, name)!r} must be above 0 and below 10.")
        if self.kernel not in ("gaussian", "distance"):
            raise ValueError(f"kernel={self.kernel!r} is not for images of any size: choose 'gaussian' or 'distance'.")

    def build(self, labels: int, contexts: int, spacing: Sequence[float] | None = None) -> MeanField:
        """An MRF that still returns its input; for volumes if a spacing is given."""
        gaussian = self.kernel == "gaussian"
        dims, axes = (2, (1.0, 1.0)) if spacing is None else (3, tuple(spacing))
        return MeanField(
            labels,
            dims=dims,
            features=3 if dims == 2 else 1,
            spacing=spacing,
            window=voxels(self.window, axes),
            kernel=self.kernel,
            gate=not gaussian,
            smoothness=gaussian,
            normalize=gaussian,
            contexts=contexts,
            context_size=voxels(self.context_size, axes),
        )


VOLUMES = FitSettings(window=5, context_size=3, crop=48, penalty_steps=40, contexts_steps=300, contexts_rate=2e-3)
"""The defaults for volumes; `window` and `context_size` count voxels along the finest axis."""


def voxels(size: int, spacing: Sequence[float]) -> int | list[int]:
    """A size along the finest axis, as voxels along each: an odd number, at least 3, where they are farther apart.

    One int where all axes are alike.
    """
    finest = min(spacing)
    if all(step <= 1.01 * finest for step in spacing):
        return size
    made = []
    for step in spacing:
        fitting = int(size * finest / step)
        made.append(size if step <= 1.01 * finest else min(size, max(3, fitting - 1 + fitting % 2)))
    return made


@dataclass(frozen=True)
class Fold:
    """The scores of images that were held out."""

    held_out: tuple[str, ...]
    scores: dict[Part, Scores]
    """"nothing" is the network as it came."""


@dataclass(frozen=True)
class FitReport:
    """A fitted MRF and what cross-validation says of it."""

    mean_field: MeanField
    """Learned from all images."""
    kept: Part
    """How far it goes; "nothing" returns the predictions as they are."""
    labels: LabelSet
    scores: dict[Part, Scores]
    """Over all images, each scored by an MRF that had not seen it."""
    folds: tuple[Fold, ...]
    settings: FitSettings
    kind: str
    """What the predictions were taken for."""
    notes: tuple[str, ...] = field(default=())
    """Files that were left out, a sentence each."""
    dice: dict[Part, Dice] = field(default_factory=dict)
    """Of volumes: each one's Dice, scored like `scores`; empty for images."""
    coding: Coding | None = None
    """The ids of the masks, and so of label maps, where they are not the labels 0 .. L-1."""

    @property
    def before(self) -> Scores:
        """The network as it came."""
        return self.scores["nothing"]

    @property
    def after(self) -> Scores:
        """What was kept."""
        return self.scores[self.kept]

    @property
    def verdict(self) -> str:
        """What came of it, in a sentence."""
        if self.dice:
            return self._verdict_on_volumes()
        before = self.before
        count = f"{before.images} images, each held out once"
        if self.kept == "nothing":
            tried = ", ".join(f"{part} {100 * s.miou:.2f}" for part, s in self.scores.items() if part != "nothing")
            return (
                f"No gain: mIoU is {100 * before.miou:.2f} without and no better with an MRF ({tried}; {count}), "
                "so what is saved returns the predictions unchanged."
            )
        change = f"mIoU {100 * before.miou:.2f} to {100 * self.after.miou:.2f}"
        accuracy = f"pixel accuracy {100 * before.pixel_accuracy:.2f} to {100 * self.after.pixel_accuracy:.2f}"
        contexts = self.scores.get("label contexts")
        without = ""
        if self.kept == "triple penalty" and contexts is not None:
            without = f"; label contexts gave {100 * contexts.miou:.2f} and were left out"
        return f"{change}, {accuracy} ({count}){without}."

    def _verdict_on_volumes(self) -> str:
        values = {part: mean(found) for part, found in self.dice.items()}
        count = f"{self.before.images} volumes, each held out once"
        tried = ", ".join(f"{part} {100 * value:.2f}" for part, value in values.items() if part != "nothing")
        if self.kept == "nothing":
            return (
                f"No gain: the foreground's mean Dice is {100 * values['nothing']:.2f} without and no better with an "
                f"MRF ({tried}; {count}), so what is saved returns the predictions unchanged."
            )
        change = f"{100 * values['nothing']:.2f} to {100 * values[self.kept]:.2f}"
        miou = f"mIoU {100 * self.before.miou:.2f} to {100 * self.after.miou:.2f}"
        without = "" if list(values)[-1] == self.kept else f"; label contexts were left out ({tried})"
        return f"The foreground's mean Dice goes from {change}, {miou} ({count}){without}."

    def to_dict(self) -> dict[str, Any]:
        """The measurements, for JSON."""
        dice = {
            part: {"mean": mean(found), "per_label": per_label(found), "per_volume": found}
            for part, found in self.dice.items()
        }
        return {
            "kept": self.kept,
            **({"dice": dice} if dice else {}),
            "cross_validation": {part: scores.to_dict() for part, scores in self.scores.items()},
            "folds": [
                {"held_out": list(f.held_out), "scores": {part: s.to_dict() for part, s in f.scores.items()}}
                for f in self.folds
            ],
        }


def writable_folder(folder: Folder) -> Path:
    """The folder, made where it is missing; an OSError says in a sentence why nothing can be written into it."""
    top = Path(folder)
    try:
        top.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=top):
            pass
    except OSError as why:
        reason = "it is a file" if top.is_file() else why.strerror or why
        raise OSError(f"{top} cannot be written into ({reason}); choose another folder.") from why
    return top


def folder_for_mrf(folder: Folder) -> Path:
    """A folder that `save_mrf` may write into, made where it is missing; other models are not written over."""
    check_mrf_folder(Path(folder))
    return writable_folder(folder)


def save_mrf(report: FitReport, folder: Folder) -> Path:
    """Write config.json (settings, labels, scores) and model.safetensors."""
    top, coding = folder_for_mrf(folder), report.coding
    config = {
        "labels": report.labels.to_dict(),
        **({"ids": list(coding.ids), "void": list(coding.void)} if coding is not None else {}),
        "metrics": report.to_dict(),
        "settings": asdict(report.settings),
    }
    write_mrf(top, report.mean_field, config)
    return top


def load_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json that `save_mrf` wrote, checked."""
    return read_mrf(Path(folder))[1]


def load_mrf(folder: str | os.PathLike[str]) -> MeanField:
    """The MRF that `save_mrf` wrote."""
    return read_mrf(Path(folder))[0]


def load_coding(folder: str | os.PathLike[str]) -> Coding | None:
    """The ids of the masks that an MRF was fitted to; None where they are the labels 0 .. L-1."""
    config = load_config(folder)
    if config.get("ids") is None:
        return None
    return Coding(tuple(config["ids"]), tuple(config.get("void", ())))
