"""folder: a dataset of your own, images and masks of equal names.

    images/NAME.jpg  masks/NAME.png   everything is one set; or
    images/train/..  masks/train/..   a folder for each split; or
    train.txt, val.txt                a list of names for each split
    labels.json                       {"names": [...], "colours": [[r, g, b], ...], "ids": [...], "ignore": 255}

A folder below those is a video; its images are the frames, in order of name. Only "names" is required in labels.json.
"ids" are the ids in the masks if they are not 0, 1, 2 ...; with "colours", masks may also be painted in these colours.
"ignore" is the id that means void, or a list of such ids.
Without labels.json, the labels are the ids in the masks. Images without a mask are unlabelled; 255 is void.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deepmrf.data.colours import Colour
from deepmrf.data.dataset import SPLITS, Dataset, Item, lookup_table, need_folder, need_items
from deepmrf.data.files import LOSSY, SUFFIXES, VOID, DataError, images_in, read_list, read_mask
from deepmrf.data.labels import LabelSet
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.writing import write_text

LABELS_FILE, KEYS = "labels.json", ("names", "colours", "ids", "ignore")
"""The file that describes labels, and its keys."""


def folder(root: str | os.PathLike[str], split: str | None = None) -> Dataset:
    """Open the images of a split, or all of them."""
    top = need_folder(Path(root), "images and masks")
    images, masks = need_folder(top / "images", "the images"), top / "masks"
    names, splits = _names_of(top, split)
    if split and (images / split).is_dir():
        images, masks = images / split, masks / split
    unpaired = _masks(masks)
    items = []
    for parent in [images, *sorted(path for path in images.rglob("*") if path.is_dir())]:
        folders = parent.relative_to(images).parts
        if split is None and folders and folders[0] in SPLITS:
            folders = folders[1:]  # images/train is a split even when all splits are asked for
        video = "/".join(folders)
        paths = images_in(parent)
        for path, frame in zip(paths, _frame_numbers(paths), strict=True):
            name = path.relative_to(images).with_suffix("").as_posix()
            mask = unpaired.pop(name, None)
            if names is None or name in names or path.stem in names:
                items.append(Item(name, path, mask, video, frame if video else 0))
    if names is not None:
        # Keep listed images that are missing, so that check_pairs can name them.
        missing = sorted(names - {item.image.stem for item in items} - {item.name for item in items})
        suffix = items[0].image.suffix if items else ".png"
        items += [Item(name, images / f"{name}{suffix}", None) for name in missing]
    need_items(items, top, f"split {split!r} (splits found: {splits})" if split else "any split")
    labels, lookup, colours = read_labels(top)
    return Dataset(items, labels, lookup, colours, unpaired.values(), top / LABELS_FILE)


def write_folder(dataset: Dataset, to: str | os.PathLike[str], split: str, progress: Progress = no_progress) -> Path:
    """Write any dataset as images/SPLIT, masks/SPLIT (palette PNG) and labels.json, for `folder` to read."""
    top = Path(to)
    write_text(top / LABELS_FILE, json.dumps(dataset.labels.to_dict() | {"ignore": VOID}, indent=2) + "\n")
    palette = dataset.labels.palette().tobytes()
    for done, item in enumerate(dataset, start=1):
        image, mask = dataset.read(item)
        pictures = {"images": Image.fromarray(image)}
        if mask is not None:
            pictures["masks"] = Image.fromarray(mask)
            pictures["masks"].putpalette(palette)
        for kind, picture in pictures.items():
            path = top / kind / split / f"{item.name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
        progress(done, len(dataset))
    return top


def _names_of(top: Path, split: str | None) -> tuple[set[str] | None, str]:
    """Return the names in the list of the split (None for all in its folder), and the splits that there are."""
    images = top / "images"
    lists = {path.stem: path for path in top.glob("*.txt")}
    splits = sorted({path.name for path in images.iterdir() if path.is_dir()} | set(lists))
    if split is None or (images / split).is_dir():
        return None, ", ".join(splits)
    if split in lists:
        return set(read_list(lists[split], full_lines=True)), ", ".join(splits)
    raise FileNotFoundError(
        f"{top} has neither a folder images/{split} nor a list {split}.txt; "
        f"the splits there are: {', '.join(splits) or 'none'}. All images: --split all, or data.train_split = 'all'."
    )


def _masks(folder: Path) -> dict[str, Path]:
    """Map the name below the folder, without the ending, to the file of each mask."""
    if not folder.is_dir():
        return {}
    masks: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
            if path.suffix.lower() in LOSSY:
                raise DataError(f"The mask {path} is in a lossy format; save masks as PNG.", path, "unreadable")
            masks[path.relative_to(folder).with_suffix("").as_posix()] = path
    return masks


def _frame_numbers(paths: list[Path]) -> list[int]:
    """Return the numbers at the end of the names if all differ, so that gaps show; else 0, 1, 2 ..."""
    ends = [re.search(r"\d+$", path.stem) for path in paths]
    numbers = [int(end[0]) for end in ends if end]
    return numbers if len(set(numbers)) == len(paths) else list(range(len(paths)))


def read_labels(top: Path) -> tuple[LabelSet, NDArray[np.int16], dict[Colour, int] | None]:
    """Return the labels of a folder, the table from ids in its masks to labels, and the colours of labels, if any."""
    path = top / LABELS_FILE
    return labels_file(path) if path.is_file() else (*_inferred(top), None)


def labels_file(path: Path) -> tuple[LabelSet, NDArray[np.int16], dict[Colour, int] | None]:
    """Return the same from labels.json."""
    try:
        values = _json_object(path)
        ids, ignore = values.pop("ids", None), values.pop("ignore", VOID)
        painted = values.get("colours") is not None
        labels = LabelSet.from_dict(values)
        ids = list(range(len(labels))) if ids is None else list(ids)
        valid = all(isinstance(i, int) and 0 <= i <= 255 for i in ids) and len(set(ids)) == len(ids) == len(labels)
        if not valid:
            raise ValueError(f"The 'ids' are {ids}; give {len(labels)} different ids of 0 to 255.")
        void = _void_ids(ignore, ids)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be used: {error}", path, "unreadable") from error
    mapping = dict.fromkeys(void, VOID)
    lookup = lookup_table(mapping | {id_in_file: label for label, id_in_file in enumerate(ids)})
    colours = {colour: label for label, colour in enumerate(labels.colours)} if painted else None
    return labels, lookup, colours


def _json_object(path: Path) -> dict[str, Any]:
    """The content of labels.json, with keys that it may have."""
    example = 'such as {"names": ["background", "object"]}'
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"It is no valid JSON ({error}); write an object {example}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"It holds no object with the key 'names'; write one {example}.")
    unknown = sorted(set(values) - set(KEYS))
    if unknown:
        raise ValueError(f"It has the unknown key {unknown[0]!r}; known ones are {', '.join(KEYS)}.")
    return values


def _void_ids(ignore: Any, ids: Sequence[int]) -> list[int]:
    """The ids that "ignore" names: one, or a list of them."""
    void = [] if ignore is None else list(ignore) if isinstance(ignore, list) else [ignore]
    for value in void:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
            raise ValueError(f"The void id 'ignore' is {ignore!r}; give an id of 0 to 255 that is no label, or a list.")
        if value in ids and value != VOID:  # 255 may be a label, and then there is no void
            raise ValueError(f"The void id {value} of 'ignore' is the id of a label too; give another id.")
    return [value for value in void if value not in ids]


def _inferred(top: Path) -> tuple[LabelSet, NDArray[np.int16]]:
    """Return the labels 0 .. the highest id except 255 in the masks of all splits, so that all splits agree."""
    identity, highest, masks = np.arange(256, dtype=np.int16), -1, _masks(top / "masks").values()
    if not masks:
        remedy = "add masks, or write labels.json with the 'names' of the labels"
        raise FileNotFoundError(f"{top} has neither masks nor labels.json; {remedy}.")
    for path in masks:
        try:
            ids = read_mask(path, identity, None)
        except DataError:
            continue  # reading that item raises it again
        highest = max([highest, *np.unique(ids[ids != VOID]).tolist()])
    if highest < 1:
        only = "0 and 255" if highest == 0 else "255"
        raise ValueError(
            f"The masks in {top} hold no ids but {only}, and 255 is void; "
            'write labels.json, for example {"names": ["background", "object"], "ids": [0, 255]}.'
        )
    return LabelSet.numbered(highest + 1), lookup_table({label: label for label in range(highest + 1)})
