"""Dataset: a list of images and masks, and how to read them as arrays.

Images are (H, W, 3) of uint8, masks (H, W) of uint8 with the ids 0 .. L-1 and 255 for void, whatever the files hold.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.colours import Colour
from deepmrf.data.files import VOID, Bytes, DataError, read_image, read_mask, read_objects
from deepmrf.data.labels import LabelSet

SPLITS = ("train", "val", "test")
"""The splits that most datasets have."""


@dataclass(frozen=True)
class Item:
    """One image of a dataset."""

    name: str
    """Unique in its dataset."""
    image: Path
    mask: Path | None
    """The file with its labels; None for an image without labels."""
    sequence: str = ""
    """The video that it is a frame of; "" for a single image."""
    frame: int = 0
    """Its number in the video."""
    objects: Path | None = None
    """The file that numbers its objects (instances), if there is one."""


def lookup_table(ids: Mapping[int, int]) -> NDArray[np.int16]:
    """Return the table (256,) from ids in files to labels. 255 is void unless `ids` has it; others are -1, an error."""
    table = np.full(256, -1, dtype=np.int16)
    table[VOID] = VOID
    for id_in_file, label in ids.items():
        table[id_in_file] = label
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
        labels_json: Path | None = None,
    ) -> None:
        """lookup (256,): from ids in 8-bit masks to labels. colours: from colours in masks to labels.

        Without both, ids are labels. unpaired: mask files without an image. labels_json: for errors about masks.
        """
        self.items = tuple(items)
        self.labels = replace(labels, ignore=VOID)  # what the masks hold once they are read
        self.lookup = lookup
        if lookup is None and colours is None:
            self.lookup = lookup_table({**{i: i for i in range(len(labels))}, labels.ignore: VOID})
        self.colours = colours
        self.unpaired = tuple(unpaired)
        self.labels_json = labels_json

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Dataset: ...
    def __getitem__(self, index: int | slice) -> Item | Dataset:
        return self.subset(self.items[index]) if isinstance(index, slice) else self.items[index]

    def spread(self, count: int) -> Dataset:
        """Return the same dataset with `count` items at most, spread evenly over it."""
        count = min(count, len(self))
        return self.subset(self.items[index * len(self) // count] for index in range(count))

    def subset(self, items: Iterable[Item]) -> Dataset:
        """Return the same dataset with these items only."""
        other = copy.copy(self)
        other.items = tuple(items)
        return other

    def read_image(self, item: Item) -> Bytes:
        """Read the image (H, W, 3)."""
        return read_image(item.image)

    def read_mask(self, item: Item) -> Bytes | None:
        """Read the mask (H, W), or None if the item has no labels."""
        return None if item.mask is None else read_mask(item.mask, self.lookup, self.colours, self.labels_json)

    def read_objects(self, item: Item) -> NDArray[np.int32] | None:
        """Read the number of each pixel's object (H, W), 0 for none; None if the item has no such file."""
        return None if item.objects is None else read_objects(item.objects)

    def read(self, item: Item) -> tuple[Bytes, Bytes | None]:
        """Read the image (H, W, 3) and its mask (H, W), or None if the item has no labels."""
        image, mask = self.read_image(item), self.read_mask(item)
        if mask is not None:
            check_mask(item, image, mask)
        return image, mask

    def read_clip(self, clip: Sequence[Item]) -> tuple[Bytes, Bytes]:
        """Read frames (T, H, W, 3) and masks (T, H, W) of a clip; a frame without labels is all void."""
        frames = {item: self.read(item) for item in dict.fromkeys(clip)}  # they repeat at the edges of a sequence
        size = frames[clip[0]][0].shape[:2]
        for item, (image, _) in frames.items():
            check_frame(item, image.shape, size)
        void = np.full(size, VOID, dtype=np.uint8)
        images, masks = zip(*(frames[item] for item in clip), strict=True)
        return np.stack(images), np.stack([void if mask is None else mask for mask in masks])

    def clips(self, length: int, labelled_only: bool = True, max_step: int | None = None) -> list[tuple[Item, ...]]:
        """Return a clip of `length` consecutive frames for every labelled frame, or every frame, at index length // 2.

        max_step: largest difference of two consecutive frame numbers; None is twice the median of the sequence.
        Beyond the first and the last frame of a run, that frame repeats.
        """
        if length < 1:
            raise ValueError(f"A clip of {length} frames was asked for; give a length of 1 or more.")
        clips: dict[Item, tuple[Item, ...]] = {}
        for run in self.sequences(max_step):
            for centre, item in enumerate(run):
                indices = range(centre - length // 2, centre - length // 2 + length)
                clips[item] = tuple(run[min(max(index, 0), len(run) - 1)] for index in indices)
        return [clips[item] for item in self.items if item.mask is not None or not labelled_only]

    def sequences(self, max_step: int | None = None) -> Iterator[list[Item]]:
        """Yield the frames of each unbroken sequence, in order; an image on its own is a sequence of one."""
        videos: dict[str, list[Item]] = {}
        for item in self.items:
            if item.sequence:
                videos.setdefault(item.sequence, []).append(item)
            else:
                yield [item]
        for items in videos.values():
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
        """List the files of items that do not exist."""
        paths = dict.fromkeys(path for item in self.items for path in (item.image, item.mask) if path is not None)
        return [path for path in paths if not path.exists()]

    def check_pairs(self) -> None:
        """Raise an error for the first missing file, or the first mask without an image."""
        missing = self.missing()
        if missing:
            others = f" and {len(missing) - 1} more are missing" if len(missing) > 1 else " is missing"
            raise FileNotFoundError(f"{missing[0]}{others}; put every image and its mask in place.")
        if self.unpaired:
            others = f" and {len(self.unpaired) - 1} more have" if len(self.unpaired) > 1 else " has"
            raise FileNotFoundError(f"The mask {self.unpaired[0]}{others} no image; add the image or remove the mask.")


def check_mask(item: Item, image: Bytes, mask: Bytes) -> None:
    """Raise a DataError where the mask (H, W) has another size than its image (H, W, 3)."""
    other = f"its image {item.image} is"
    _check_size(item.mask or item.image, mask.shape, image.shape, other, "make the mask as large as the image")


def check_frame(item: Item, size: Sequence[int], first: Sequence[int]) -> None:
    """Raise a DataError where a frame has another size (H, W) than the first one of its clip or sequence."""
    _check_size(item.image, size, first, "the clip began with", "give all frames of a sequence one size")


def _check_size(path: Path, size: Sequence[int], needed: Sequence[int], other: str, remedy: str) -> None:
    if tuple(size[:2]) != tuple(needed[:2]):
        sizes = f"{size[1]} x {size[0]} pixels but {other} {needed[1]} x {needed[0]}"
        raise DataError(f"{path} is {sizes}; {remedy}.", path, "size")


def need_folder(path: Path, content: str) -> Path:
    """Return `path` if it is a folder; the error says what it should hold."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {problem}; give the folder with {content}.")
    return path


def check_split(split: str, dataset: str) -> None:
    """Raise a ValueError where `split` is none of SPLITS."""
    if split not in SPLITS:
        raise ValueError(f"{dataset} has no split {split!r}; give one of {', '.join(SPLITS)}.")


def sequence_and_frame(name: str) -> tuple[str, int]:
    """Split a name: 0006R0_f02640, or 0006R0_02640, is frame 2640 of the video 0006R0."""
    match = re.fullmatch(r"(.+)_f?(\d+)", name)
    return (match[1], int(match[2])) if match else ("", 0)


def need_items(items: list[Item], root: Path, split: str) -> list[Item]:
    """Return `items` if there are any, all with different names."""
    if not items:
        raise FileNotFoundError(f"{root} holds no images for {split}; check the path and the layout (docs/formats.md).")
    by_name: dict[str, Item] = {}
    for item in items:
        if item.name in by_name:
            both = f"{by_name[item.name].image} and {item.image}"
            raise ValueError(f"{both} are both called {item.name!r} in {split}; keep one of them.")
        by_name[item.name] = item
    return items
