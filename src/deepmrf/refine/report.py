"""The result of a fit: the MRF, and the scores of cross-validation with and without it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepmrf.data.labels import LabelSet
from deepmrf.data.writing import check_folder
from deepmrf.evaluation.dice import VolumeDice, dice_per_label, mean_dice
from deepmrf.evaluation.metrics import Scores
from deepmrf.layers import MeanField
from deepmrf.models.folder import check_mrf_folder, write_mrf
from deepmrf.refine.label_ids import LabelIds
from deepmrf.refine.learn import FitStage
from deepmrf.refine.predictions import Folder
from deepmrf.refine.search import MIN_GAIN, SearchResult
from deepmrf.refine.settings import FitSettings


@dataclass(frozen=True)
class Fold:
    """The scores of the images that were held out together."""

    held_out: tuple[str, ...]
    scores: dict[FitStage, Scores]
    """"nothing" is the network as it came."""


@dataclass(frozen=True)
class FitReport:
    """A fitted MRF and its scores."""

    mean_field: MeanField
    """Learned from all images."""
    stage: FitStage
    """The stage that scored best, up to which `mean_field` was learned."""
    labels: LabelSet
    scores: dict[FitStage, Scores]
    """Over all images, each scored by an MRF that never saw it."""
    folds: tuple[Fold, ...]
    settings: FitSettings
    kind: str
    """What the predictions were taken for."""
    notes: tuple[str, ...] = field(default=())
    """Sentences on files that were left out or look odd."""
    dice: dict[FitStage, VolumeDice] = field(default_factory=dict)
    """The Dice of each volume, scored like `scores`; empty for images."""
    label_ids: LabelIds | None = None
    """The ids in the masks, and so in label maps, where they are not the labels 0 .. L-1."""
    search: SearchResult | None = None
    """What was tried and chosen; None where the predictions agree with the masks no more than by chance."""

    @property
    def before(self) -> Scores:
        """The scores of the network as it came."""
        return self.scores["nothing"]

    @property
    def after(self) -> Scores:
        """The scores of the MRF."""
        return self.scores[self.stage]

    @property
    def verdict(self) -> str:
        """What the MRF gains, in a sentence or two."""
        volumes = bool(self.dice)
        values = {stage: mean_dice(self.dice[stage]) if volumes else s.miou for stage, s in self.scores.items()}
        percents = {stage: f"{100 * value:.2f}" for stage, value in values.items()}
        count = f"{self.before.images} {'volumes' if volumes else 'images'}, each held out once"
        measure = "the foreground's mean Dice" if volumes else "mIoU"
        unchanged = "what is saved returns the predictions unchanged."
        if self.search is None:
            return (
                f"No gain: the predictions agree with the masks no more than by chance ({measure} "
                f"{percents['nothing']}), so there is nothing to refine and {unchanged} If they should agree, compare "
                "the names of the files and the ids of the labels."
            )
        tried = ", ".join(f"{stage} {percent}" for stage, percent in percents.items() if stage != "nothing")
        if self.stage == "nothing":
            perfect = values["nothing"] > 1 - MIN_GAIN
            start = "No gain" if perfect or self.search.ending == "settled" else "No gain so far"
            return (
                f"{start}: {measure} is {percents['nothing']} without and no better with an MRF ({tried}; {count}), "
                f"so {unchanged}{'' if perfect else self._advice}"
            )
        change = f"{percents['nothing']} to {percents[self.stage]}"
        stages = list(self.scores)
        left_out = [f"{stage} gave {percents[stage]}" for stage in stages[stages.index(self.stage) + 1 :]]
        note = f"; {' and '.join(left_out)} and were left out" if left_out else ""
        if volumes:
            miou = f"mIoU {100 * self.before.miou:.2f} to {100 * self.after.miou:.2f}"
            return f"The foreground's mean Dice goes from {change}, {miou} ({count}){note}.{self._advice}"
        accuracy = f"pixel accuracy {100 * self.before.pixel_accuracy:.2f} to {100 * self.after.pixel_accuracy:.2f}"
        return f"mIoU {change}, {accuracy} ({count}){note}.{self._advice}"

    @property
    def _advice(self) -> str:
        """A sentence for a run that may have been too short."""
        assert self.search is not None
        minutes = "1 minute" if self.settings.minutes == 1 else f"{self.settings.minutes:g} minutes"
        if self.search.untried:
            choices = "; ".join(map(str, self.search.untried))
            return f" The {minutes} did not suffice to try all: more may gain. Not tried: {choices}."
        if self.search.ending == "budget":
            return f" The score was still changing after {minutes}: more may gain more."
        if self.search.ending == "steps" and self.stage == "nothing":
            return " The number of steps was given: more may gain."
        return ""

    def trials_table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows of what was tried, the chosen one first."""
        measure = "mean Dice" if self.dice else "mIoU"
        stages = ["triple penalty", "label contexts"] if self.settings.contexts else ["triple penalty"]
        headings = ["tried", "steps", "folds", f"{measure} before", *stages, "last gain in each fold"]
        rows = []
        for trial in self.search.trials if self.search else ():
            gains = " ".join(f"{100 * gain:+.2f}" for gain in trial.fold_gains)
            scores = (trial.before, trial.penalty_score, trial.score)[: 1 + len(stages)]
            numbers = [f"{100 * score:.2f}" for score in scores]
            rows.append([str(trial.choice), str(trial.steps), str(len(trial.fold_gains)), *numbers, gains])
        return headings, rows

    def table(self) -> tuple[list[str], list[tuple[str, list[float]]]]:
        """Headings and rows (title, one share per stage) of the scores of held-out images; of volumes, Dice first."""
        headings = ["before" if stage == "nothing" else stage for stage in self.scores]
        miou = [score.miou for score in self.scores.values()]
        accuracy = [score.pixel_accuracy for score in self.scores.values()]
        if not self.dice:
            iou = [score.iou_per_class for score in self.scores.values()]
            rows = [(name, [values[label] for values in iou]) for label, name in enumerate(self.labels.names)]
            rows += [("mIoU", miou), ("pixel accuracy", accuracy)]
            for number, fold in enumerate(self.folds, start=1):
                rows.append((f"mIoU of fold {number}", [score.miou for score in fold.scores.values()]))
            return ["IoU, held-out images", *headings], rows
        dice = [dice_per_label(values) for values in self.dice.values()]  # of the foreground
        rows = [(name, [values[label] for values in dice]) for label, name in enumerate(self.labels.names[1:])]
        rows += [("mean Dice", [mean_dice(values) for values in self.dice.values()])]
        rows += [("mIoU", miou), ("voxel accuracy", accuracy)]
        for number, fold in enumerate(self.folds, start=1):
            held_out = [{stem: values[stem] for stem in fold.held_out} for values in self.dice.values()]
            rows.append((f"mean Dice of fold {number}", [mean_dice(values) for values in held_out]))
        return ["Dice, held-out volumes", *headings], rows

    def to_dict(self) -> dict[str, Any]:
        """The measurements, for JSON."""
        dice = {
            stage: {"mean": mean_dice(values), "per_label": dice_per_label(values), "per_volume": values}
            for stage, values in self.dice.items()
        }
        search = {}
        if self.search is not None:
            search["search"] = {
                "ending": self.search.ending,
                "chosen": asdict(self.search.choice),
                "steps": self.search.steps,
                "curve": [list(point) for point in self.search.curve],
                "trials": [asdict(trial) for trial in self.search.trials],
            }
        return {
            "kept": self.stage,
            **search,
            **({"dice": dice} if dice else {}),
            "cross_validation": {stage: scores.to_dict() for stage, scores in self.scores.items()},
            "folds": [
                {"held_out": list(f.held_out), "scores": {stage: s.to_dict() for stage, s in f.scores.items()}}
                for f in self.folds
            ],
        }

    def save(self, folder: Folder) -> Path:
        """Write config.json (settings, labels, scores) and model.safetensors."""
        check_fit_folder(folder)
        ids = self.label_ids
        config = {
            "labels": self.labels.to_dict(),
            **({"ids": list(ids.ids), "void": list(ids.void)} if ids is not None else {}),
            "metrics": self.to_dict(),
            "settings": asdict(self.settings),
        }
        write_mrf(Path(folder), self.mean_field, config)
        return Path(folder)


def check_fit_folder(folder: Folder) -> bool:
    """Return whether a folder holds an MRF that `FitReport.save` would replace.

    Raise an error where it cannot write, or would write over something else.
    """
    check_folder(Path(folder), "the MRF")
    return check_mrf_folder(Path(folder))
