"""A plain folder: images and masks of equal names.

    images/NAME.jpg  masks/NAME.png   everything is one set; or
    images/train/..  masks/train/..   a folder for each split; or
    train.txt, val.txt                a list of names for each split
    labels.json                       {"names": [...], "colours": [[r, g, b], ...], "ids": [...], "ignore": 255}

A folder below those is a video, its images the frames in order of name. All but "names" may be left out of labels.json:
"ids" are the ids in the masks where they are not 0, 1, 2 ...; with "colours", masks may be painted in them. Without
labels.json the labels are the ids found. Images without a mask are unlabelled; 255 is void.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.dataset import Dataset, Item, lookup_table, need_folder, need_items
from deepmrf.data.files import SUFFIXES, VOID, DataError, images_in, read_list, read_mask
from deepmrf.data.labels import Colour, LabelSet, distinct_colours

_LOSSY = (".jpg", ".jpeg", ".webp")
_SPLITS = ("train", "val", "test")


def folder(root: str | os.PathLike[str], split: str | None = None) -> Dataset:
    """The images of one split, or all of them."""
    top = need_folder(Path(root), "images and masks")
    images, masks = need_folder(top / "images", "the images"), top / "masks"
    chosen, known = _choice(top, split)
    found = _masks(masks / split if split and (images / split).is_dir() else masks)
    start = images / split if split and (images / split).is_dir() else images
    items = []
    for place in [start, *sorted(p for p in start.rglob("*") if p.is_dir())]:
        paths = images_in(place)
        frames = _frame_numbers(paths)
        for path, frame in zip(paths, frames, strict=True):
            name = path.relative_to(start).with_suffix("").as_posix()
            if chosen is None or name in chosen or path.stem in chosen:
                video = _video(place.relative_to(start).parts, split)
                items.append(Item(name, path, found.pop(name, None), video, frame if video else 0))
            else:
                found.pop(name, None)
    if chosen is not None:
        absent = sorted(chosen - {item.image.stem for item in items} - {item.name for item in items})
        # Kept, so that check_pairs names them.
        items += [Item(name, images / f"{name}{_usual_suffix(items)}", None) for name in absent]
    need_items(items, top, f"split {split!r} (splits found: {known})" if split else "any split")
    labels, lookup, colours = read_labels(top)
    return Dataset(items, labels, lookup, colours, unpaired=found.values())


def write_folder(
    dataset: Dataset, to: str | os.PathLike[str], split: str, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write any dataset as images/SPLIT, masks/SPLIT (palette PNG) and labels.json, for `folder` to read."""
    from PIL import Image

    top = Path(to)
    top.mkdir(parents=True, exist_ok=True)
    described = json.dumps(dataset.labels.to_dict() | {"ignore": VOID}, indent=2)
    (top / "labels.json").write_text(described + "\n", encoding="utf-8")
    palette = dataset.labels.palette().tobytes()
    for done, item in enumerate(dataset, start=1):
        image, mask = dataset.read(item)
        path = top / "images" / split / f"{item.name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
        if mask is not None:
            path = top / "masks" / split / f"{item.name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray(mask)
            picture.putpalette(palette)
            picture.save(path)
        if progress is not None:
            progress(done, len(dataset))
    return top


def _choice(top: Path, split: str | None) -> tuple[set[str] | None, str]:
    """The names in the list of the split (None for all of its folder), and the splits that there are."""
    images = top / "images"
    lists = {path.stem: path for path in top.glob("*.txt")}
    known = sorted({path.name for path in images.iterdir() if path.is_dir()} | set(lists))
    if split is None or (images / split).is_dir():
        return None, ", ".join(known)
    if split in lists:
        return set(read_list(lists[split], whole=True)), ", ".join(known)
    raise FileNotFoundError(
        f"{top} has neither a folder images/{split} nor a list {split}.txt; "
        f"the splits there are: {', '.join(known) or 'none'}; or ask for 'all'."
    )


def _masks(place: Path) -> dict[str, Path]:
    """Mask files by their name below the folder, without the ending."""
    if not place.is_dir():
        return {}
    found: dict[str, Path] = {}
    for path in sorted(place.rglob("*")):
        if path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
            if path.suffix.lower() in _LOSSY:
                raise DataError(f"The mask {path} is in a lossy format; save masks as PNG.", path, "unreadable")
            found[path.relative_to(place).with_suffix("").as_posix()] = path
    return found


def _video(parts: tuple[str, ...], split: str | None) -> str:
    if split is None and parts and parts[0] in _SPLITS:
        parts = parts[1:]  # images/train is a split even when all splits are asked for
    return "/".join(parts)


def _frame_numbers(paths: list[Path]) -> list[int]:
    """The numbers that the names end in where all differ, so that gaps show; else 0, 1, 2 ..."""
    ends = [re.search(r"\d+$", path.stem) for path in paths]
    numbers = [int(end[0]) for end in ends if end]
    return numbers if len(set(numbers)) == len(paths) else list(range(len(paths)))


def _usual_suffix(items: list[Item]) -> str:
    return items[0].image.suffix if items else ".png"


def read_labels(top: Path) -> tuple[LabelSet, NDArray[np.int16], dict[Colour, int] | None]:
    """The labels of a folder, the table from ids in its masks to them, and colours that stand for labels, if any."""
    path = top / "labels.json"
    return labels_file(path) if path.is_file() else (*_inferred(top), None)


def labels_file(path: Path) -> tuple[LabelSet, NDArray[np.int16], dict[Colour, int] | None]:
    """The same from the file itself."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(values, dict):
            raise ValueError("It is not an object with the key 'names'.")
        ids, ignore = values.pop("ids", None), values.pop("ignore", VOID)
        painted = values.get("colours") is not None
        labels = LabelSet.from_dict(values)
        ids = list(range(len(labels))) if ids is None else list(ids)
        valid = all(isinstance(i, int) and 0 <= i <= 255 for i in ids) and len(set(ids)) == len(ids) == len(labels)
        if not valid:
            raise ValueError(f"The 'ids' are {ids}; give {len(labels)} different ids of 0 to 255.")
        if ignore is not None and (not isinstance(ignore, int) or not 0 <= ignore <= 255 or ignore in ids):
            if ignore != VOID:  # where 255 is a label, the usual void is simply not used
                raise ValueError(f"The void id 'ignore' is {ignore!r}; give an id of 0 to 255 that is no label.")
            ignore = None
    except (ValueError, TypeError) as why:
        raise DataError(f"{path} cannot be used: {why}", path, "unreadable") from why
    mapping = {} if ignore is None else {ignore: VOID}
    lookup = lookup_table(mapping | {given: label for label, given in enumerate(ids)})
    colours = {colour: label for label, colour in enumerate(labels.colours)} if painted else None
    return labels, lookup, colours


def _inferred(top: Path) -> tuple[LabelSet, NDArray[np.int16]]:
    """Labels 0 .. the highest id that any mask of any split holds, 255 left out, so that all splits agree."""
    every, highest, masks = np.arange(256, dtype=np.int16), -1, _masks(top / "masks").values()
    if not masks:
        wanted = "add masks, or write labels.json with the 'names' of the labels"
        raise FileNotFoundError(f"{top} has neither masks nor labels.json; {wanted}.")
    for path in masks:
        try:
            ids = read_mask(path, every, None)
        except DataError:
            continue  # reading that item will say so; the other masks still tell the labels
        highest = max([highest, *np.unique(ids[ids != VOID]).tolist()])
    if highest < 1:
        found = "0 and 255" if highest == 0 else "255"
        raise ValueError(
            f"The masks in {top} hold no ids but {found}, and 255 is void; "
            'write labels.json, for example {"names": ["background", "object"], "ids": [0, 255]}.'
        )
    names = tuple(f"label {label}" for label in range(highest + 1))
    labels = LabelSet(names, distinct_colours(highest + 1))
    return labels, lookup_table({label: label for label in range(highest + 1)})
