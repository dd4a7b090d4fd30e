"""Dataset: a list of images with their masks, read one at a time as arrays.

Images are (H, W, 3) of uint8, masks (H, W) of uint8 with the ids 0 .. L-1 and 255 for void, whatever the files hold.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.files import VOID, Bytes, DataError, read_image, read_mask
from deepmrf.data.labels import Colour, LabelSet


@dataclass(frozen=True)
class Item:
    """One image of a dataset."""

    name: str
    """Unique in its dataset."""
    image: Path
    mask: Path | None
    """Where its labels come from; None for a frame without labels."""
    sequence: str = ""
    """The video that it is a frame of; "" for an image on its own."""
    frame: int = 0
    """Its number in the video."""


def lookup_table(ids: Mapping[int, int]) -> NDArray[np.int16]:
    """The table (256,) from the ids in files to labels: 255 is void unless `ids` has it, the rest -1, an error."""
    table = np.full(256, -1, dtype=np.int16)
    table[VOID] = VOID
    for given, label in ids.items():
        table[given] = label
    return table


class Dataset(Sequence[Item]):
    """Items and how to read them; a slice of it is again a Dataset."""

    def __init__(
        self,
        items: Iterable[Item],
        labels: LabelSet,
        lookup: NDArray[np.int16] | None = None,
        colours: Mapping[Colour, int] | None = None,
        unpaired: Iterable[Path] = (),
    ) -> None:
        """8-bit masks are mapped by `lookup` (256,), colour masks by `colours`; with neither, ids are the labels.

        `unpaired` are mask files that were found without an image.
        """
        self.items = tuple(items)
        self.labels = labels
        self.lookup = lookup
        if lookup is None and colours is None:
            self.lookup = lookup_table({**{i: i for i in range(len(labels))}, labels.ignore: VOID})
        self.colours = colours
        self.unpaired = tuple(unpaired)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Dataset: ...
    def __getitem__(self, index: int | slice) -> Item | Dataset:
        return self.subset(self.items[index]) if isinstance(index, slice) else self.items[index]

    def subset(self, items: Iterable[Item]) -> Dataset:
        """The same dataset with these items only."""
        other = copy.copy(self)
        other.items = tuple(items)
        return other

    def read_image(self, item: Item) -> Bytes:
        """The image (H, W, 3)."""
        return read_image(item.image)

    def read_mask(self, item: Item) -> Bytes | None:
        """The mask (H, W), or None where the item has no labels."""
        return None if item.mask is None else read_mask(item.mask, self.lookup, self.colours)

    def read(self, item: Item) -> tuple[Bytes, Bytes | None]:
        """The image (H, W, 3) and its mask (H, W), or None where the item has no labels."""
        image, mask = self.read_image(item), self.read_mask(item)
        if mask is not None and mask.shape != image.shape[:2]:
            assert item.mask is not None
            (height, width), (mask_height, mask_width) = image.shape[:2], mask.shape
            raise DataError(
                f"{item.mask} is {mask_width} x {mask_height} pixels but its image {item.image} is {width} x {height}; "
                "make the mask as large as the image.",
                item.mask,
                "size",
            )
        return image, mask

    def read_clip(self, clip: Sequence[Item]) -> tuple[Bytes, Bytes]:
        """Frames (T, H, W, 3) and masks (T, H, W) of a clip; a frame without labels is void throughout."""
        images: list[Bytes] = []
        masks: list[Bytes] = []
        seen: dict[Item, tuple[Bytes, Bytes]] = {}  # frames repeat at the edges of a sequence
        for item in clip:
            if item not in seen:
                image, mask = self.read(item)
                seen[item] = image, np.full(image.shape[:2], VOID, dtype=np.uint8) if mask is None else mask
            image, mask = seen[item]
            if images and image.shape != images[0].shape:
                raise DataError(
                    f"{item.image} is {image.shape[1]} x {image.shape[0]} pixels but the clip began with "
                    f"{images[0].shape[1]} x {images[0].shape[0]}; give all frames of a sequence one size.",
                    item.image,
                    "size",
                )
            images.append(image)
            masks.append(mask)
        return np.stack(images), np.stack(masks)

    def clips(self, length: int, labelled_only: bool = True, max_step: int | None = None) -> list[tuple[Item, ...]]:
        """A run of `length` consecutive frames around every labelled frame (or every frame), which is at length // 2.

        Frames are consecutive when they follow each other in one sequence and their numbers are at most `max_step`
        apart; None means twice the usual step of that sequence. Beyond an edge the last frame repeats.
        """
        if length < 1:
            raise ValueError(f"A clip of {length} frames was asked for; give a length of 1 or more.")
        clips: dict[Item, tuple[Item, ...]] = {}
        for run in self._runs(max_step):
            for centre, item in enumerate(run):
                places = range(centre - length // 2, centre - length // 2 + length)
                clips[item] = tuple(run[min(max(place, 0), len(run) - 1)] for place in places)
        return [clips[item] for item in self.items if item.mask is not None or not labelled_only]

    def _runs(self, max_step: int | None) -> Iterator[list[Item]]:
        sequences: dict[str, list[Item]] = {}
        for item in self.items:
            if item.sequence:
                sequences.setdefault(item.sequence, []).append(item)
            else:
                yield [item]
        for items in sequences.values():
            items.sort(key=lambda item: item.frame)
            steps = np.diff([item.frame for item in items])
            limit = max_step if max_step is not None else 2 * float(np.median(steps)) if len(steps) else 0
            run = items[:1]
            for item, step in zip(items[1:], steps, strict=True):
                if step > limit:
                    yield run
                    run = []
                run.append(item)
            yield run

    def missing(self) -> list[Path]:
        """The files that items name and that do not exist."""
        paths = dict.fromkeys(path for item in self.items for path in (item.image, item.mask) if path is not None)
        return [path for path in paths if not path.exists()]

    def check_pairs(self) -> None:
        """An error that names the first file missing, or the first mask without an image."""
        missing = self.missing()
        if missing:
            others = f" and {len(missing) - 1} more are missing" if len(missing) > 1 else " is missing"
            raise FileNotFoundError(f"{missing[0]}{others}; put every image and its mask in place.")
        if self.unpaired:
            others = f" and {len(self.unpaired) - 1} more have" if len(self.unpaired) > 1 else " has"
            raise FileNotFoundError(f"The mask {self.unpaired[0]}{others} no image; add the image or remove the mask.")


def need_folder(path: Path, what: str) -> Path:
    """`path` if it is a folder, else an error that says what should lie there."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {found}; give the folder with {what}.")
    return path


def need_items(items: list[Item], root: Path, what: str) -> list[Item]:
    """`items` unless there are none, and no two of one name."""
    if not items:
        raise FileNotFoundError(f"{root} holds no images for {what}; check the path and the layout.")
    seen: dict[str, Item] = {}
    for item in items:
        if item.name in seen:
            both = f"{seen[item.name].image} and {item.image}"
            raise ValueError(f"{both} are both called {item.name!r} in {what}; keep one of them.")
        seen[item.name] = item
    return items
