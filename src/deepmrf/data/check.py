"""Check: look at every file of a dataset and report all that is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deepmrf.data.dataset import Dataset
from deepmrf.data.files import VOID, DataError
from deepmrf.data.labels import LabelSet
from deepmrf.data.transforms import Progress, label_counts

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class Report:
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
    """Files and what is wrong with each, a sentence."""
    wrong_sizes: list[tuple[Path, str]] = field(default_factory=list)
    wrong_ids: list[tuple[Path, str]] = field(default_factory=list)
    unopened: str = ""
    """Why the dataset could not be opened at all."""

    @property
    def problems(self) -> list[str]:
        """Everything wrong, a sentence each."""
        return [
            *([self.unopened] if self.unopened else []),
            *(f"{path} is missing." for path in self.missing),
            *(f"The mask {path} has no image." for path in self.unpaired),
            *(sentence for _, sentence in self.unreadable + self.wrong_sizes + self.wrong_ids),
        ]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def table(self, most: int = 10) -> Table:
        """The report as a table of rich, with at most `most` of the problems spelt out."""
        from rich.markup import escape
        from rich.table import Table

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
        for kind, found in kinds.items():
            if found:
                table.add_row(kind, str(len(found)), style="bold red")
        problems = self.problems
        for problem in problems[:most]:
            table.add_row("problem", escape(problem))
        if len(problems) > most:
            table.add_row("", f"and {len(problems) - most} more")
        if not problems:
            table.add_row("problems", "none", style="green")
        return table


def check(dataset: Dataset | str, split: str = "train", progress: Progress | None = None) -> Report:
    """Read every image and mask of a dataset, or of a spec of `open_data`, and report; never stop at a problem."""
    if isinstance(dataset, str):
        from deepmrf.data import open_data

        name = f"{dataset} {split}"
        try:
            dataset = open_data(dataset, split)
        except (OSError, ValueError) as why:
            return Report(name, unopened=str(why))
    else:
        name = type(dataset).__name__
    missing = dataset.missing()
    report = Report(
        name,
        dataset.labels,
        images=len(dataset),
        labelled=sum(item.mask is not None for item in dataset),
        sequences=len({item.sequence for item in dataset if item.sequence}),
        missing=missing,
        unpaired=list(dataset.unpaired),
    )
    counts, absent = np.zeros(256, dtype=np.int64), set(missing)
    for done, item in enumerate(dataset, start=1):
        image = mask = None
        # Image and mask are read apart, so that a bad image does not hide a bad mask.
        try:
            if item.image not in absent:
                image = dataset.read_image(item)
                report.sizes[image.shape[0], image.shape[1]] += 1
        except (DataError, OSError) as why:
            _file(report, why, item.image)
        try:
            if item.mask not in absent:
                mask = dataset.read_mask(item)
        except (DataError, OSError) as why:
            _file(report, why, item.mask or item.image)
        if mask is not None:
            counts += label_counts(mask)
            if image is not None and mask.shape != image.shape[:2]:
                sizes = f"{mask.shape[1]} x {mask.shape[0]} pixels, the image {image.shape[1]} x {image.shape[0]}"
                path = item.mask or item.image
                report.wrong_sizes.append((path, f"The mask {path} is {sizes}."))
        if progress is not None:
            progress(done, len(dataset))
    labelled = counts[: len(dataset.labels)]
    for label, count in zip(dataset.labels.names, labelled, strict=True):
        report.frequencies[label] = float(count / max(labelled.sum(), 1))
    report.void = float(counts[VOID] / max(counts.sum(), 1))
    return report


def _file(report: Report, why: DataError | OSError, path: Path) -> None:
    kind = why.kind if isinstance(why, DataError) else "unreadable"
    where = {"unreadable": report.unreadable, "size": report.wrong_sizes, "id": report.wrong_ids}[kind]
    where.append((path, str(why)))
