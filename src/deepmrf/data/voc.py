"""voc: PASCAL VOC 2012 segmentation, with SBD's extra training masks; animals: its animals and persons alone.

VOC2012/JPEGImages/NAME.jpg
VOC2012/SegmentationClassAug/NAME.png    SBD and VOC together; where it is absent, SegmentationClass/NAME.png
VOC2012/SegmentationObject/NAME.png      object numbers, where present
VOC2012/ImageSets/Segmentation/{train,trainaug,val}.txt
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from deepmrf.data.dataset import Dataset, Item, lookup_table, need_folder, need_items
from deepmrf.data.files import DataError, read_list
from deepmrf.data.labels import ANIMALS, VOC


def voc(root: str | os.PathLike[str], split: str) -> Dataset:
    """Open a list such as "train", "trainaug" or "val"; `root` is the VOC2012 folder or a folder above it."""
    return Dataset(_items(Path(root), split), VOC)


def animals(root: str | os.PathLike[str], split: str) -> Dataset:
    """Open the same images with cats, dogs, horses, cows, sheep and persons as labels; all else is background."""
    ids = {label: ANIMALS.names.index(name) if name in ANIMALS.names else 0 for label, name in enumerate(VOC.names)}
    return Dataset(_items(Path(root), split), ANIMALS, lookup_table(ids))


def _voc_folder(root: Path) -> Path:
    need_folder(root, "VOC2012's JPEGImages and ImageSets")
    for folder in (root, root / "VOC2012", root / "VOCdevkit" / "VOC2012"):
        if (folder / "JPEGImages").is_dir():
            return folder
    raise FileNotFoundError(f"{root} holds no JPEGImages; give the VOC2012 folder, VOCdevkit or the folder above it.")


def _items(root: Path, split: str) -> list[Item]:
    folder = _voc_folder(root)
    lists = folder / "ImageSets" / "Segmentation"
    path = lists / f"{split}.txt"
    if not path.is_file():
        splits = ", ".join(sorted(p.stem for p in lists.glob("*.txt"))) or "none"
        remedy = f"give a split that has a list there: {splits}"
        if split == "trainaug":
            remedy = f"make it with deepmrf data get sbd, or deepmrf.data.add_sbd, or {remedy}"
        raise FileNotFoundError(f"{path} does not exist; {remedy}.")
    voc_masks, all_masks = folder / "SegmentationClass", folder / "SegmentationClassAug"
    if not voc_masks.is_dir() and not all_masks.is_dir():
        raise FileNotFoundError(f"{folder} has neither SegmentationClassAug nor SegmentationClass; add the masks.")
    items = []
    for name in read_list(path):
        mask = all_masks / f"{name}.png"
        if voc_masks.is_dir() and not mask.is_file():
            mask = voc_masks / f"{name}.png"
        objects = folder / "SegmentationObject" / mask.name
        items.append(
            Item(name, folder / "JPEGImages" / f"{name}.jpg", mask, objects=objects if objects.is_file() else None)
        )
    return need_items(items, folder, f"split {split!r}")


def mat_reader() -> Callable[[str], Any]:
    """Return SciPy's reader of the .mat files that SBD's masks are in."""
    try:
        reader: Callable[[str], Any] = importlib.import_module("scipy.io").loadmat
    except ImportError:
        raise ImportError("Reading SBD's .mat files needs SciPy: pip install scipy") from None
    return reader


def merge_sbd(folder: Path) -> list[Path]:
    """Add FOLDER/sbd to FOLDER/voc and FOLDER/animals, whichever are there; return those that have trainaug.txt."""
    merged = []
    for root in (folder / "voc", folder / "animals"):
        try:
            trainaug = _voc_folder(root) / "ImageSets" / "Segmentation" / "trainaug.txt"
        except FileNotFoundError:
            continue
        if (folder / "sbd" / "cls").is_dir() and not trainaug.exists():
            add_sbd(root, folder / "sbd")
            print(f"SBD's masks are merged: {trainaug} lists {len(read_list(trainaug)):,} images.")
        if trainaug.exists():
            merged.append(root)
    return merged


def add_sbd(root: str | os.PathLike[str], sbd: str | os.PathLike[str]) -> Path:
    """Write SegmentationClassAug and trainaug.txt from SBD's `dataset` folder (cls/*.mat, train.txt, val.txt).

    trainaug is VOC's train and all of SBD without VOC's val: 10,582 images. VOC's own masks come first.
    """
    loadmat = mat_reader()
    folder, sbd_folder = _voc_folder(Path(root)), need_folder(Path(sbd), "SBD's cls, train.txt and val.txt")
    need_folder(sbd_folder / "cls", "SBD's .mat files")
    lists, target = folder / "ImageSets" / "Segmentation", folder / "SegmentationClassAug"
    train, val = read_list(lists / "train.txt"), read_list(lists / "val.txt")
    extra = set(read_list(sbd_folder / "train.txt")) | set(read_list(sbd_folder / "val.txt"))
    target.mkdir(exist_ok=True)
    for name in sorted(extra.union(train, val)):
        own = folder / "SegmentationClass" / f"{name}.png"
        if own.is_file():
            (target / own.name).write_bytes(own.read_bytes())
            continue
        path = sbd_folder / "cls" / f"{name}.mat"
        try:
            ids = loadmat(str(path))["GTcls"]["Segmentation"][0, 0]
        except (KeyError, ValueError, OSError) as error:
            raise DataError(f"{path} is not a mask of SBD ({error}); unpack SBD again.", path, "unreadable") from error
        picture = Image.fromarray(ids.astype(np.uint8), mode="L")
        picture.putpalette(VOC.palette().tobytes())
        picture.save(target / f"{name}.png")
    path = lists / "trainaug.txt"
    path.write_text("\n".join(sorted(extra.union(train) - set(val))) + "\n", encoding="utf-8")
    return path
