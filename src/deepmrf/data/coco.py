"""coco: COCO with VOC's 20 classes. Masks are drawn from the annotations when they are read.

    annotations/instances_{train,val}2017.json
    {train,val}2017/NUMBER.jpg                  or under images/

Smaller objects are drawn over larger ones, crowds are void, and images with few labelled pixels are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepmrf.data.dataset import Dataset, Item, need_folder, need_items
from deepmrf.data.extras import optional
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
    """A Dataset that draws its masks; an item's mask path is the file of annotations."""

    def __init__(
        self, items: Iterable[Item], annotations: Path, outlines: dict[str, tuple[int, int, list[Outline]]]
    ) -> None:
        super().__init__(items, VOC)
        self.annotations, self.outlines = annotations, outlines

    def read_mask(self, item: Item) -> Bytes | None:
        height, width, outlines = self.outlines[item.name]
        mask = np.zeros((height, width), dtype=np.uint8)
        # Crowds first, so that only pixels without a single object stay void.
        for outline in sorted(outlines, key=lambda o: (o.label != VOID, -o.area)):
            mask[_draw(outline.shape, height, width, item.name, self.annotations) > 0] = outline.label
        return mask


def coco(root: str | os.PathLike[str], split: str, min_pixels: int = 1000) -> Dataset:
    """Open "train" or "val" (2017, else 2014); min_pixels: leave out images whose objects have no larger area."""
    folder = need_folder(Path(root), "COCO's annotations and images")
    split, annotations = _annotations(folder, split)
    candidates = [folder / split, folder / "images" / split]
    images = next((path for path in candidates if path.is_dir()), None)
    if images is None:
        raise FileNotFoundError(f"{candidates[0]} does not exist; unpack {split}.zip there.")
    try:
        content = json.loads(annotations.read_text(encoding="utf-8"))
        names = {category["id"]: RENAMED.get(category["name"], category["name"]) for category in content["categories"]}
        labels = {number: VOC.names.index(name) for number, name in names.items() if name in VOC.names}
        outlines: dict[int, list[Outline]] = {}
        for a in content["annotations"]:
            if a["category_id"] in labels:
                label = VOID if a.get("iscrowd") else labels[a["category_id"]]
                outlines.setdefault(a["image_id"], []).append(Outline(label, a["segmentation"], float(a["area"])))
        items, sized_outlines = [], {}
        for picture in sorted(content["images"], key=lambda p: str(p["file_name"])):
            objects = outlines.get(picture["id"], [])
            if sum(outline.area for outline in objects if outline.label != VOID) > min_pixels:
                item = Item(Path(picture["file_name"]).stem, images / picture["file_name"], annotations)
                items.append(item)
                sized_outlines[item.name] = (int(picture["height"]), int(picture["width"]), objects)
    except (ValueError, KeyError, TypeError) as error:
        message = f"{annotations} is not a file of COCO instances ({error!r}); unpack the annotations again."
        raise DataError(message, annotations, "unreadable") from error
    return CocoDataset(need_items(items, folder, f"split {split!r}"), annotations, sized_outlines)


def _annotations(folder: Path, split: str) -> tuple[str, Path]:
    for name in (split, f"{split}2017", f"{split}2014"):
        path = folder / "annotations" / f"instances_{name}.json"
        if path.is_file():
            return name, path
    splits = sorted(p.stem.removeprefix("instances_") for p in (folder / "annotations").glob("instances_*.json"))
    expected = folder / "annotations" / f"instances_{split}2017.json"
    known = ", ".join(splits) or "none"
    raise FileNotFoundError(f"{expected} does not exist; give a split whose annotations are there: {known}.")


def _draw(shape: Any, height: int, width: int, name: str, path: Path) -> Bytes:
    """Draw polygons or run lengths: 1 inside the outline (H, W); `name` is the image, `path` the annotations' file."""
    coco_mask = optional("pycocotools.mask", "Masks of COCO need", "coco")
    try:
        if isinstance(shape, list):
            # Fewer than 3 points have no area, and pycocotools takes 2 points for a box.
            shape = [polygon for polygon in shape if len(polygon) >= 6]
            if not shape:
                return np.zeros((height, width), dtype=np.uint8)
            shape = coco_mask.merge(coco_mask.frPyObjects(shape, height, width))
        elif isinstance(shape["counts"], list):
            shape = coco_mask.frPyObjects(shape, height, width)
        drawn: Bytes = coco_mask.decode(shape)
    except Exception as error:  # pycocotools raises bare Exceptions
        message = f"{path} has an outline for {name} that cannot be drawn ({error}); unpack the annotations again."
        raise DataError(message, path, "unreadable") from error
    if drawn.shape != (height, width):
        sizes = f"{drawn.shape[1]} x {drawn.shape[0]} for {name}, which is {width} x {height}"
        raise DataError(f"{path} has run lengths of {sizes}; unpack the annotations again.", path, "size")
    return drawn
