"""The ids that stand for labels in masks and label maps, and the colours that label maps bring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.colours import Colour
from deepmrf.data.files import VOID, Bytes, DataError, opened
from deepmrf.data.labels import LabelSet
from deepmrf.refine.decode import MAX_PIXELS


@dataclass(frozen=True)
class LabelIds:
    """The ids that stand for the labels 0 .. L-1 where they are others."""

    ids: tuple[int, ...]
    """One id of 0 to 255 per label."""
    void: tuple[int, ...] = (VOID,)
    """The ids that stand for no label."""
    soft: bool = False
    """Predictions are soft masks of two labels, see soft_masks.py; results hold the ids."""

    def __post_init__(self) -> None:
        for value in (*self.ids, *self.void):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
                raise ValueError(f"The id {value!r} of a label is no int of 0 to 255; correct 'ids' or 'ignore'.")
        if self.soft and len(self.ids) != 2:
            raise ValueError(f"Soft masks have two labels, but there are {len(self.ids)} ids; give two labels.")
        if len({*self.ids, *self.void}) != len(self.ids) + len(self.void):
            raise ValueError(f"The ids {self.ids} and {self.void} of labels and void repeat; give each its own.")

    @classmethod
    def from_lookup(cls, lookup: NDArray[np.int16], labels: int) -> LabelIds | None:
        """The ids in a table (256,) from ids to labels; None where each id is its label."""
        by_label = {int(lookup[i]): int(i) for i in np.flatnonzero((lookup >= 0) & (lookup < labels))}
        ids = tuple(by_label[label] for label in range(labels))
        void = tuple(np.flatnonzero(lookup == VOID).tolist())
        return None if (ids, void) == (tuple(range(labels)), (VOID,)) else cls(ids, void)

    def to_labels(self, ids: NDArray[Any], path: Path) -> Bytes:
        """The labels of a map of ids, with void as 255; `path` is the map's name in errors."""
        wrong = ids[~np.isin(ids, [*self.ids, *self.void])]
        if wrong.size:
            allowed = ", ".join(map(str, self.ids[:10])) + (" ..." if len(self.ids) > 10 else "")
            raise DataError(
                f"{path} holds the id {int(wrong[0])}, but the masks' ids in labels.json are {allowed}; "
                "save label maps with the ids of the masks.",
                path,
                "id",
            )
        table = np.full(256, VOID, np.uint8)
        table[list(self.ids)] = np.arange(len(self.ids))
        labels: Bytes = table[ids]
        return labels

    def to_ids(self, labels: Bytes) -> Bytes:
        """The ids of a map of labels 0 .. L-1."""
        return np.array(self.ids, dtype=np.uint8)[labels]


BINARY = LabelIds((0, 255), ())
"""Of masks that hold 0 for the background and 255 for the foreground."""
SOFT = LabelIds((0, 255), (), soft=True)
"""Of soft masks, whose results hold 0 and 255."""


def numbered_labels(count: int, label_maps: Sequence[Path]) -> LabelSet:
    """Labels "label 0", "label 1" ..., in the colours of the first label map, if it is in colour, else chosen ones."""
    return LabelSet(LabelSet.numbered(count).names, _palette(label_maps[0], count) if label_maps else ())


def _palette(path: Path, count: int) -> tuple[Colour, ...]:
    """The first colours of a palette; none where they do not tell so many labels apart, or are grey."""
    values: list[int] = []
    with suppress(OSError, ValueError), opened(path, MAX_PIXELS) as picture:  # reading a bad file later names it
        values = (picture.mode == "P" and picture.getpalette()) or []
    colours = tuple(zip(values[::3], values[1::3], values[2::3], strict=False))[:count]
    in_colour = len(set(colours)) == count and any(len(set(colour)) > 1 for colour in colours)
    return colours if in_colour else ()
