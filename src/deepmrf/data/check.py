"""check: read every file of a dataset and report everything that is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table

from deepmrf.data.dataset import Dataset, Item, check_mask
from deepmrf.data.files import VOID, Bytes, DataError
from deepmrf.data.labels import LabelSet
from deepmrf.data.opening import open_data
from deepmrf.data.progress import Progress, no_progress

NO_MASKS = "None of the images has a mask: there is nothing to learn from or to measure by."


@dataclass
class DataReport:
    """What a dataset holds and what is wrong with it."""

    name: str
    labels: LabelSet | None = None
    images: int = 0
    labelled: int = 0
    """Images that have a mask, readable or not."""
    sequences: int = 0
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many images have each size (H, W)."""
    frequencies: dict[str, float] = field(default_factory=dict)
    """The share of each label among the labelled pixels."""
    void: float = 0.0
    """The share of void among all pixels of masks."""
    missing: list[Path] = field(default_factory=list)
    unpaired: list[Path] = field(default_factory=list)
    """Masks without an image."""
    unreadable: list[tuple[Path, str]] = field(default_factory=list)
    """Files, each with a sentence about what is wrong."""
    wrong_sizes: list[tuple[Path, str]] = field(default_factory=list)
    wrong_ids: list[tuple[Path, str]] = field(default_factory=list)
    unopened: str = ""
    """Why the dataset could not be opened at all."""
    needs_masks: bool = True
    """Whether it is wrong that no image has a mask, as it is for all splits but "test"."""

    @property
    def problems(self) -> list[str]:
        """Everything wrong, a sentence each."""
        return [
            *([self.unopened] if self.unopened else []),
            *([NO_MASKS] if self.needs_masks and self.images and not self.labelled else []),
            *(f"{path} is missing." for path in self.missing),
            *(f"The mask {path} has no image." for path in self.unpaired),
            *(sentence for _, sentence in self.unreadable + self.wrong_sizes + self.wrong_ids),
        ]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def table(self, max_problems: int = 10) -> Table:
        """Return the report as a table with the sentences of the first `max_problems` problems."""
        table = Table("", "", title=escape(self.name), show_header=False, title_justify="left")
        if not self.unopened:
            table.add_row("images", f"{self.images}, {self.labelled} with a mask, {self.sequences} sequences")
            shown = [f"{width} x {height}: {count}" for (height, width), count in self.sizes.most_common(3)]
            rest = len(self.sizes) - 3
            table.add_row("width x height", ", ".join(shown) + (f" and {rest} more sizes" if rest > 0 else ""))
            table.add_section()
            for name, share in self.frequencies.items():
                table.add_row(escape(name), f"{share:7.2%}{'  never occurs' if not share else ''}")
            table.add_row("void", f"{self.void:7.2%}")
        table.add_section()
        kinds: dict[str, Sized] = {
            "files missing": self.missing,
            "masks without image": self.unpaired,
            "files unreadable": self.unreadable,
            "masks of wrong size": self.wrong_sizes,
            "masks with wrong ids": self.wrong_ids,
        }
        for kind, files in kinds.items():
            if files:
                table.add_row(kind, str(len(files)), style="bold red")
        problems = self.problems
        for problem in problems[:max_problems]:
            table.add_row("problem", escape(problem))
        if len(problems) > max_problems:
            table.add_row("", f"and {len(problems) - max_problems} more")
        if not problems:
            table.add_row("problems", "none", style="green")
        return table


def check(dataset: Dataset | str, split: str = "train", progress: Progress = no_progress) -> DataReport:
    """Read every image and mask of a dataset, or of a spec of `open_data`, and report; never stop at a problem."""
    name = type(dataset).__name__
    if isinstance(dataset, str):
        name = f"{dataset} {split}"
        try:
            dataset = open_data(dataset, split)
        except (OSError, ValueError) as error:
            return DataReport(name, unopened=str(error))
    report = DataReport(
        name,
        dataset.labels,
        images=len(dataset),
        labelled=sum(item.mask is not None for item in dataset),
        sequences=len({item.sequence for item in dataset if item.sequence}),
        missing=dataset.missing(),
        unpaired=list(dataset.unpaired),
        needs_masks=split != "test",
    )
    counts, missing = np.zeros(256, dtype=np.int64), set(report.missing)
    for done, item in enumerate(dataset, start=1):
        mask = _check_item(dataset, item, missing, report)
        if mask is not None:
            counts += np.bincount(mask.ravel(), minlength=256)
        progress(done, len(dataset))
    labelled = counts[: len(dataset.labels)]
    for label, count in zip(dataset.labels.names, labelled, strict=True):
        report.frequencies[label] = float(count / max(labelled.sum(), 1))
    report.void = float(counts[VOID] / max(counts.sum(), 1))
    return report


def _check_item(dataset: Dataset, item: Item, missing: set[Path], report: DataReport) -> Bytes | None:
    """Read an image and its mask, add what is wrong with them to the report, and return the mask."""
    image = mask = None
    # Read image and mask apart, so that a bad image does not hide a bad mask.
    try:
        if item.image not in missing:
            image = dataset.read_image(item)
            report.sizes[image.shape[0], image.shape[1]] += 1
    except (DataError, OSError) as error:
        _add_problem(report, error, item.image)
    try:
        if item.mask not in missing:
            mask = dataset.read_mask(item)
        if mask is not None and image is not None:
            check_mask(item, image, mask)
    except (DataError, OSError) as error:
        _add_problem(report, error, item.mask or item.image)
    return mask


def _add_problem(report: DataReport, error: DataError | OSError, path: Path) -> None:
    kind = error.kind if isinstance(error, DataError) else "unreadable"
    problems = {"unreadable": report.unreadable, "size": report.wrong_sizes, "id": report.wrong_ids}[kind]
    problems.append((path, str(error)))
