"""cityscapes: finely annotated street scenes, 19 labels.

leftImg8bit/{train,val,test}/CITY/CITY_SEQUENCE_FRAME_leftImg8bit.png
gtFine/{train,val,test}/CITY/CITY_SEQUENCE_FRAME_gtFine_labelIds.png
gtFine/{train,val,test}/CITY/CITY_SEQUENCE_FRAME_gtFine_instanceIds.png   object numbers, where present
leftImg8bit_sequence/...                                               the frames around, where present
"""

from __future__ import annotations

import os
from pathlib import Path

from deepmrf.data.dataset import Dataset, Item, check_split, lookup_table, need_folder, need_items, sequence_and_frame
from deepmrf.data.files import VOID, images_in
from deepmrf.data.labels import CITYSCAPES

LABEL_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
"""The id in *_labelIds.png of each of the 19 labels; the other ids up to 33 are void."""


def cityscapes(root: str | os.PathLike[str], split: str) -> Dataset:
    """Open the "train" (2,975), "val" (500) or "test" (1,525, all void) images, with the unlabelled frames around."""
    folder = need_folder(Path(root), "Cityscapes' leftImg8bit and gtFine")
    check_split(split, "Cityscapes")
    images, masks = folder / "leftImg8bit" / split, folder / "gtFine" / split
    sequences = folder / "leftImg8bit_sequence" / split
    if not images.is_dir() and not sequences.is_dir():
        raise FileNotFoundError(f"{images} does not exist; unpack leftImg8bit_trainvaltest.zip in {folder}.")
    need_folder(masks, "the masks, from gtFine_trainvaltest.zip")
    items: dict[str, Item] = {}
    for source in (images, sequences):
        if source.is_dir():
            for city in sorted(p for p in source.iterdir() if p.is_dir()):
                for image in images_in(city):
                    item = _item(image, masks / city.name, labelled=source == images)
                    items.setdefault(item.name, item)
    ids = dict.fromkeys(range(34), VOID) | {id_in_file: label for label, id_in_file in enumerate(LABEL_IDS)}
    ordered = sorted(items.values(), key=lambda item: (item.sequence, item.frame))
    paired = {item.mask for item in ordered}
    unpaired = [path for path in sorted(masks.glob("*/*_labelIds.png")) if path not in paired]
    return Dataset(need_items(ordered, folder, f"split {split!r}"), CITYSCAPES, lookup_table(ids), unpaired=unpaired)


def _item(image: Path, masks: Path, labelled: bool) -> Item:
    name = image.stem.removesuffix("_leftImg8bit")
    mask = masks / f"{name}_gtFine_labelIds.png"
    objects = masks / f"{name}_gtFine_instanceIds.png"
    return Item(
        name,
        image,
        mask if labelled or mask.is_file() else None,
        *sequence_and_frame(name),
        objects if objects.is_file() else None,
    )
