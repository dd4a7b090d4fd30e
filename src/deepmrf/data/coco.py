"""COCO with VOC's 20 classes: masks are drawn from the annotations when they are read.

    annotations/instances_{train,val}2017.json
    {train,val}2017/NUMBER.jpg                  or under images/

Smaller objects are drawn over larger ones, crowds are void, and images with few labelled pixels are left out.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepmrf.data.dataset import Dataset, Item, need_folder, need_items
from deepmrf.data.files import VOID, Bytes, DataError
from deepmrf.data.labels import VOC

RENAMED = {
    "airplane": "aeroplane",
    "dining table": "diningtable",
    "motorcycle": "motorbike",
    "potted plant": "pottedplant",
    "couch": "sofa",
    "tv": "tvmonitor",
}
"""COCO's names of VOC classes, where they differ."""


@dataclass(frozen=True)
class Outline:
    """One object: its label, its polygons or run lengths, and its area in pixels."""

    label: int
    shape: Any
    area: float


class CocoDataset(Dataset):
    """A Dataset whose masks are drawn; an item's mask path is the file of annotations."""

    def __init__(self, items: Iterable[Item], outlines: dict[str, tuple[int, int, list[Outline]]]) -> None:
        super().__init__(items, VOC)
        self.outlines = outlines

    def read_mask(self, item: Item) -> Bytes | None:
        height, width, outlines = self.outlines[item.name]
        mask = np.zeros((height, width), dtype=np.uint8)
        # Crowds first, so that they void only what no single object claims.
        for outline in sorted(outlines, key=lambda o: (o.label != VOID, -o.area)):
            mask[_draw(outline.shape, height, width, item) > 0] = outline.label
        return mask


def coco(root: str | os.PathLike[str], split: str, min_pixels: int = 1000) -> Dataset:
    """The images of "train", "val" (2017, else 2014) or a split named in full that show over `min_pixels` of objects.

    `min_pixels` is held against the sum of the areas that the annotations state, crowds left out.
    """
    folder = need_folder(Path(root), "COCO's annotations and images")
    split, annotations = _annotations(folder, split)
    places = [folder / split, folder / "images" / split]
    images = next((place for place in places if place.is_dir()), None)
    if images is None:
        raise FileNotFoundError(f"{places[0]} does not exist; unpack {split}.zip there.")
    try:
        content = json.loads(annotations.read_text(encoding="utf-8"))
        names = {category["id"]: RENAMED.get(category["name"], category["name"]) for category in content["categories"]}
        labels = {number: VOC.names.index(name) for number, name in names.items() if name in VOC.names}
        outlines: dict[int, list[Outline]] = {}
        for a in content["annotations"]:
            if a["category_id"] in labels:
                label = VOID if a.get("iscrowd") else labels[a["category_id"]]
                outlines.setdefault(a["image_id"], []).append(Outline(label, a["segmentation"], float(a["area"])))
        items, kept = [], {}
        for picture in sorted(content["images"], key=lambda p: str(p["file_name"])):
            found = outlines.get(picture["id"], [])
            if sum(o.area for o in found if o.label != VOID) > min_pixels:
                item = Item(Path(picture["file_name"]).stem, images / picture["file_name"], annotations)
                items.append(item)
                kept[item.name] = (int(picture["height"]), int(picture["width"]), found)
    except (ValueError, KeyError, TypeError) as why:
        message = f"{annotations} is not a file of COCO instances ({why!r}); unpack the annotations again."
        raise DataError(message, annotations, "unreadable") from why
    return CocoDataset(need_items(items, folder, f"split {split!r}"), kept)


def _annotations(folder: Path, split: str) -> tuple[str, Path]:
    for name in (split, f"{split}2017", f"{split}2014"):
        path = folder / "annotations" / f"instances_{name}.json"
        if path.is_file():
            return name, path
    known = sorted(p.stem.removeprefix("instances_") for p in (folder / "annotations").glob("instances_*.json"))
    wanted = folder / "annotations" / f"instances_{split}2017.json"
    raise FileNotFoundError(f"{wanted} does not exist; the annotations there are: {', '.join(known) or 'none'}.")


def _draw(shape: Any, height: int, width: int, item: Item) -> Bytes:
    """1 inside the outline (H, W), from polygons or run lengths."""
    try:
        coco_mask: Any = importlib.import_module("pycocotools.mask")
    except ImportError:
        raise ImportError("Drawing COCO's masks needs pycocotools; install it with: pip install pycocotools") from None

    try:
        if isinstance(shape, list):
            shape = [polygon for polygon in shape if len(polygon) >= 6]  # fewer are no area, and pycocotools sees a box
            if not shape:
                return np.zeros((height, width), dtype=np.uint8)
            runs = coco_mask.merge(coco_mask.frPyObjects(shape, height, width))
        elif isinstance(shape["counts"], list):
            runs = coco_mask.frPyObjects(shape, height, width)
        else:
            runs = shape
        drawn: Bytes = coco_mask.decode(runs)
    except Exception as why:  # pycocotools raises bare Exceptions
        assert item.mask is not None
        message = (
            f"{item.mask} has an outline for {item.name} that cannot be drawn ({why}); unpack the annotations again."
        )
        raise DataError(message, item.mask, "unreadable") from why
    if drawn.shape != (height, width):
        assert item.mask is not None
        given = f"{drawn.shape[1]} x {drawn.shape[0]}"
        message = f"{item.mask} has run lengths of {given} for {item.name}, which is {width} x {height}; correct it."
        raise DataError(message, item.mask, "size")
    return drawn
