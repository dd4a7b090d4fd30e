"""LabelSet: the names and colours of the labels 0 .. L-1, and the id that means void."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.colours import VOID_COLOUR, Colour, choose_colours, voc_colours


@dataclass(frozen=True)
class LabelSet:
    """The names and colours of the labels 0 .. L-1: LabelSet(["background", "cat"]) chooses the colours."""

    names: tuple[str, ...]
    """One name per label, all different; a list becomes a tuple."""
    colours: tuple[Colour, ...] = ()
    """One (red, green, blue) of 0 .. 255 per label; none for `choose_colours`."""
    ignore: int = 255
    """The id of pixels without a label."""

    def __post_init__(self) -> None:
        if isinstance(self.names, str | Mapping) or not isinstance(self.names, Iterable):
            raise ValueError(f"The 'names' of a label set are {self.names!r}; give a list with one name per label.")
        object.__setattr__(self, "names", tuple(self.names))
        labels = len(self.names)
        if not 1 <= labels <= 255:
            raise ValueError(f"A label set has {labels} names; give between 1 and 255, since masks are 8-bit.")
        for name in self.names:
            if not isinstance(name, str) or not name.strip() or self.names.count(name) > 1:
                raise ValueError(f"The label name {name!r} is empty, repeated or not text; give each its own name.")
        object.__setattr__(self, "colours", tuple(self.colours) or choose_colours(self.names))
        if len(self.colours) != labels:
            raise ValueError(f"A label set has {labels} names but {len(self.colours)} colours; give one per label.")
        for name, colour in zip(self.names, self.colours, strict=True):
            if len(colour) != 3 or not all(isinstance(c, int) and 0 <= c <= 255 for c in colour):
                raise ValueError(f"The colour of {name!r} is {colour!r}; give red, green and blue as ints of 0 to 255.")
        if not isinstance(self.ignore, int) or not labels <= self.ignore <= 255:
            raise ValueError(f"The void id is {self.ignore!r}; give an int of {labels} to 255, behind the labels.")

    def __len__(self) -> int:
        return len(self.names)

    def check_same(self, owner: object, other: LabelSet, other_owner: object, remedy: str) -> None:
        """Raise a ValueError that names both owners, such as a model and a data set, if `other` has other names."""
        if self.names == other.names:
            return
        difference = f"{len(self)} labels, not {len(other)}"
        if len(self) == len(other):
            label = next(n for n, name in enumerate(self.names) if name != other.names[n])
            difference = f"label {label} is {self.names[label]!r}, not {other.names[label]!r}"
        raise ValueError(f"{owner} knows other labels than {other_owner} ({difference}): {remedy}.")

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, for JSON."""
        return {"names": list(self.names), "colours": [list(c) for c in self.colours], "ignore": self.ignore}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LabelSet:
        """Invert `to_dict`. Without "colours", use `choose_colours`; without "ignore", void is 255."""
        unknown = sorted(set(values) - {"names", "colours", "ignore"})
        if unknown or "names" not in values:
            problem = f"has the unknown key {unknown[0]!r}" if unknown else "has no 'names'"
            raise ValueError(f"The description of a label set {problem}; it takes 'names', 'colours' and 'ignore'.")
        colours = values.get("colours")
        try:
            triples = () if colours is None else tuple(tuple(colour) for colour in colours)
        except TypeError:
            raise ValueError(f"The 'colours' of labels are {colours!r}; give [red, green, blue] per label.") from None
        return cls(values["names"], triples, values.get("ignore", 255))

    @classmethod
    def numbered(cls, count: int) -> LabelSet:
        """Return labels without names: "label 0", "label 1" and so on."""
        return cls(tuple(f"label {label}" for label in range(count)))

    def palette(self) -> NDArray[np.uint8]:
        """Return the colours (256, 3) to index with any mask; ids that are no labels are cream."""
        table = np.full((256, 3), VOID_COLOUR, dtype=np.uint8)
        table[: len(self)] = self.colours
        return table


VOC = LabelSet(
    names=(
        *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
        *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
    ),
    colours=voc_colours(21),
)

ANIMALS = LabelSet(
    names=("background", "cat", "dog", "horse", "cow", "sheep", "person"),
    # VOC's colours of these are dark. Here they are of Okabe and Ito, and a cat is blue, unlike its fur.
    colours=((0, 0, 0), (86, 180, 233), (230, 159, 0), (0, 158, 115), (240, 228, 66), (213, 94, 0), (204, 121, 167)),
)

CITYSCAPES = LabelSet(
    names=(
        *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
        *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
    ),
    colours=(
        *((128, 64, 128), (244, 35, 232), (70, 70, 70), (102, 102, 156), (190, 153, 153), (153, 153, 153)),
        *((250, 170, 30), (220, 220, 0), (107, 142, 35), (152, 251, 152), (70, 130, 180), (220, 20, 60)),
        *((255, 0, 0), (0, 0, 142), (0, 0, 70), (0, 60, 100), (0, 80, 100), (0, 0, 230), (119, 11, 32)),
    ),
)

CAMVID = LabelSet(
    names=(
        *("sky", "building", "pole", "road", "pavement", "tree"),
        *("sign", "fence", "car", "pedestrian", "bicyclist"),
    ),
    colours=(
        *((128, 128, 128), (128, 0, 0), (192, 192, 128), (128, 64, 128), (0, 0, 192), (128, 128, 0)),
        *((192, 128, 128), (64, 64, 128), (64, 0, 128), (64, 64, 0), (0, 128, 192)),
    ),
)
