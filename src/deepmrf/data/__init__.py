"""Images, videos and their masks, from the datasets of the field or a folder of one's own.

    dataset = open_data("camvid:data/camvid", "train")
    image, mask = dataset.read(dataset[0])          # (H, W, 3) and (H, W) of uint8, void is 255

labels       LabelSet: names, colours and the void id; VOC, ANIMALS, CITYSCAPES, CAMVID
files        reading image and mask files of any kind
dataset      Item and Dataset: a list of images and how to read them
voc, camvid, cityscapes, coco, folder, synthetic    a function each that gives a Dataset
transforms   Augment: random views of whole clips; class_frequencies
motion       moved: a clip of one image that moves, with its exact flow
check        check: all that is wrong with a dataset, as a Report
download     get: fetch a dataset from its publisher; unpack does so safely
"""

from __future__ import annotations

import re

from deepmrf.data.camvid import camvid
from deepmrf.data.check import Report, check
from deepmrf.data.cityscapes import cityscapes
from deepmrf.data.coco import coco
from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.download import get
from deepmrf.data.files import DataError
from deepmrf.data.folder import folder, write_folder
from deepmrf.data.labels import ANIMALS, CAMVID, CITYSCAPES, VOC, LabelSet
from deepmrf.data.synthetic import synthetic
from deepmrf.data.transforms import Augment, class_frequencies
from deepmrf.data.voc import add_sbd, animals, voc

__all__ = [
    "ANIMALS",
    "CAMVID",
    "CITYSCAPES",
    "VOC",
    "Augment",
    "DataError",
    "Dataset",
    "Item",
    "LabelSet",
    "Report",
    "add_sbd",
    "animals",
    "camvid",
    "check",
    "cityscapes",
    "class_frequencies",
    "coco",
    "folder",
    "get",
    "open_data",
    "synthetic",
    "voc",
    "write_folder",
]

_KINDS = {"camvid": camvid, "voc": voc, "animals": animals, "cityscapes": cityscapes, "coco": coco}
_SPECS = ", ".join([*(f"{kind}:PATH" for kind in _KINDS), "folder:PATH", "synthetic:SIZE"])


def open_data(spec: str, split: str) -> Dataset:
    """The dataset that a spec such as "voc:PATH" names.

    A folder takes the split "all" too. The SIZE of synthetic scenes is 64, 64x96 (H, W) or, for videos, 5x64x96.
    """
    kind, colon, place = spec.partition(":")
    if not colon or not place or kind not in (*_KINDS, "folder", "synthetic"):
        raise ValueError(f"The dataset {spec!r} is not known; give one of {_SPECS}.")
    if kind == "synthetic":
        return _open_synthetic(place, split)
    if kind == "folder":
        return folder(place, None if split in ("", "all") else split)
    return _KINDS[kind](place, split)


def _open_synthetic(size: str, split: str) -> Dataset:
    if not re.fullmatch(r"\d+(x\d+){0,2}", size):
        raise ValueError(f"The size of synthetic scenes is {size!r}; give 64, 64x96 (H, W) or 5x64x96 (T, H, W).")
    numbers = [int(number) for number in size.split("x")]
    height, width = numbers[-2:] if len(numbers) > 1 else numbers * 2
    return synthetic((height, width), split, frames=numbers[0] if len(numbers) == 3 else 1)
