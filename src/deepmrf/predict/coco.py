"""COCO: the regions of label maps as a JSON file that annotation tools and pycocotools read.

    {"info": {...}, "images": [{"id", "file_name", "width", "height"}], "categories": [{"id", "name", ...}],
     "annotations": [{"id", "image_id", "category_id", "segmentation": [[x1, y1, x2, y2, ...]], "area", "bbox", ...}]}

An annotation is a connected region of one label, as one polygon that is exact to the pixel. COCO's polygons know no
holes: a cut leads to each hole and back on the same line, and pycocotools decodes the very mask. The background is no
category. Category ids are label ids; where label 0 is not the background, they are one higher, since COCO's begin at 1.
File names are relative to the folder that all images lie in. The file is made from label maps alone, so that a run that
is continued gives the same file as one that is not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.colours import BACKGROUND
from deepmrf.data.files import decoded
from deepmrf.data.labels import LabelSet
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.remote import URL, local_copy
from deepmrf.data.writing import replacing
from deepmrf.predict.polygons import find_polygons
from deepmrf.predict.report import ImageReport


def write_coco(path: Path, images: Sequence[ImageReport], labels: LabelSet, progress: Progress = no_progress) -> int:
    """Write the regions in the label maps of segmented images to a JSON file; return their number."""
    images = sorted(images, key=lambda image: str(image.path))
    ids = category_ids(labels)
    names = _file_names([image.path for image in images])
    described: list[dict[str, Any]] = []
    count = 0
    with replacing(path) as file:
        file.write(b'{"info": {"description": "Regions of label maps by deepmrf"}, "licenses": [],\n"annotations": [')
        for number, (image, name) in enumerate(zip(images, names, strict=True), 1):
            height, width = image.size
            described.append({"id": number, "file_name": name, "width": width, "height": height})
            with local_copy(image.files.labels) as copy, decoded(copy, height * width) as picture:
                label_map = np.array(picture)
            for annotation in _annotations(label_map, labels, ids):
                count += 1
                file.write(b",\n" if count > 1 else b"\n")
                file.write(json.dumps({"id": count, "image_id": number, **annotation}).encode())
            progress(number, len(images))
        rest = {"images": described, "categories": categories(labels)}
        file.write(b"],\n" + json.dumps(rest)[1:].encode() + b"\n")
    return count


def categories(labels: LabelSet) -> list[dict[str, Any]]:
    """COCO's description of the labels; "color" is a key of its panoptic format."""
    colours = dict(zip(labels.names, labels.colours, strict=True))
    return [
        {"id": number, "name": name, "supercategory": "", "color": list(colours[name])}
        for name, number in category_ids(labels).items()
    ]


def category_ids(labels: LabelSet) -> dict[str, int]:
    """The category id of each label but the background."""
    shift = int(labels.names[0] != BACKGROUND)
    return {name: label + shift for label, name in enumerate(labels.names) if name != BACKGROUND}


def _annotations(label_map: NDArray[Any], labels: LabelSet, ids: dict[str, int]) -> Iterator[dict[str, Any]]:
    for polygon in find_polygons(label_map, labels.names):
        if polygon.name in ids:
            yield {
                "category_id": ids[polygon.name],
                "segmentation": [polygon.single_ring().reshape(-1).tolist()],
                "area": polygon.area,
                "bbox": list(polygon.box()),
                "iscrowd": 0,
            }


def _file_names(paths: Sequence[Path | URL]) -> list[str]:
    """The paths below the folder that all lie in."""
    absolute = [os.path.abspath(path) for path in paths]
    try:
        root = os.path.commonpath([os.path.dirname(path) for path in absolute]) if absolute else ""
    except ValueError:  # several drives
        return [Path(path).as_posix() for path in absolute]
    return [Path(os.path.relpath(path, root)).as_posix() for path in absolute]
