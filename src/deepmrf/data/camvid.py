"""camvid: frames of drives through Cambridge, 11 labels. Three layouts are in use:

    {train,val,test}/NAME.png + {train,val,test}annot/NAME.png          ids 0 .. 10, 11 is void
    {train,val,test}/NAME.png + {train,val,test}_labels/NAME_L.png      colours
    a folder of 701 frames + a folder of NAME_L.png                     colours, as published

Colours are the 32 published classes, reduced to the usual 11.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepmrf.data.colours import Colour
from deepmrf.data.dataset import Dataset, Item, check_split, lookup_table, need_folder, need_items, sequence_and_frame
from deepmrf.data.files import VOID, images_in, read_list
from deepmrf.data.labels import CAMVID

PUBLISHED: dict[str, dict[str, Colour]] = {
    "sky": {"Sky": (128, 128, 128)},
    "building": {
        "Building": (128, 0, 0),
        "Archway": (192, 0, 128),
        "Bridge": (0, 128, 64),
        "Tunnel": (64, 0, 64),
        "Wall": (64, 192, 0),
    },
    "pole": {"Column_Pole": (192, 192, 128), "TrafficCone": (0, 0, 64)},
    "road": {"Road": (128, 64, 128), "LaneMkgsDriv": (128, 0, 192), "LaneMkgsNonDriv": (192, 0, 64)},
    "pavement": {"Sidewalk": (0, 0, 192), "ParkingBlock": (64, 192, 128), "RoadShoulder": (128, 128, 192)},
    "tree": {"Tree": (128, 128, 0), "VegetationMisc": (192, 192, 0)},
    "sign": {"SignSymbol": (192, 128, 128), "Misc_Text": (128, 128, 64), "TrafficLight": (0, 64, 64)},
    "fence": {"Fence": (64, 64, 128)},
    "car": {
        "Car": (64, 0, 128),
        "SUVPickupTruck": (64, 128, 192),
        "Truck_Bus": (192, 128, 192),
        "Train": (192, 64, 128),
        "OtherMoving": (128, 64, 64),
    },
    "pedestrian": {
        "Pedestrian": (64, 64, 0),
        "Child": (192, 128, 64),
        "CartLuggagePram": (64, 0, 192),
        "Animal": (64, 128, 64),
    },
    "bicyclist": {"Bicyclist": (0, 128, 192), "MotorcycleScooter": (192, 0, 192)},
    "void": {"Void": (0, 0, 0)},
}
"""The 32 published classes and their colours, by the label that each is reduced to."""


def camvid(root: str | os.PathLike[str], split: str) -> Dataset:
    """Open the "train" (367), "val" (101) or "test" (233) frames, in any of the three layouts.

    A folder of all 701 frames is split by train.txt, val.txt and test.txt or, without them, by the usual rule.
    """
    folder = need_folder(Path(root), "CamVid")
    check_split(split, "CamVid")
    if (folder / split).is_dir():
        for masks in (folder / f"{split}annot", folder / f"{split}_labels"):
            if masks.is_dir():
                return _dataset(images_in(folder / split), masks, folder, split)
        raise FileNotFoundError(f"{folder} has {split} but no {split}annot or {split}_labels; add the masks.")
    frames, masks = _published_folders(folder)
    images = images_in(frames)
    lists = [parent / f"{split}.txt" for parent in (folder, frames, masks) if (parent / f"{split}.txt").is_file()]
    if lists:
        by_name = {path.stem: path for path in images}
        # Keep a listed frame that is missing, so that check_pairs can name it.
        images = [by_name.get(name, frames / f"{name}.png") for name in read_list(lists[0])]
    else:
        images = [path for path in images if _usual_split(path.stem) == split]
    return _dataset(images, masks, folder, split)


def _dataset(images: list[Path], masks: Path, root: Path, split: str) -> Dataset:
    coloured = masks.name != f"{split}annot"
    ending = "_L.png" if coloured else ".png"
    items = []
    for image in images:
        sequence, frame = sequence_and_frame(image.stem)
        items.append(Item(image.stem, image, masks / f"{image.stem}{ending}", sequence, frame))
    need_items(items, root, f"split {split!r}")
    if not coloured:
        names = {item.name for item in items}
        unpaired = [mask for mask in images_in(masks) if mask.stem not in names]
        return Dataset(items, CAMVID, lookup_table({**{i: i for i in range(11)}, 11: VOID}), unpaired=unpaired)
    ids = {name: label for label, name in enumerate(CAMVID.names)} | {"void": VOID}
    return Dataset(items, CAMVID, colours={c: ids[name] for name, group in PUBLISHED.items() for c in group.values()})


def _published_folders(root: Path) -> tuple[Path, Path]:
    """Find the folder with the frames and the folder with NAME_L.png, at most two levels down."""
    folders = [root, *sorted(p for p in [*root.glob("*"), *root.glob("*/*")] if p.is_dir())]
    for masks in folders:
        first = next(masks.glob("*_L.png"), None)
        if first is not None:
            for frames in folders:
                if any(path.stem == first.stem.removesuffix("_L") for path in images_in(frames)):
                    return frames, masks
    raise FileNotFoundError(
        f"{root} is not a layout of CamVid; give a folder with train and trainannot, "
        "or with the published frames and their *_L.png masks."
    )


def _usual_split(stem: str) -> str:
    """Return the split that the literature uses: 367, 101 and 233 frames, by drive and frame number."""
    sequence, frame = sequence_and_frame(stem)
    if sequence == "Seq05VD" or (sequence == "0001TP" and frame >= 8550):
        return "test"
    return "val" if sequence == "0016E5" and 7959 <= frame <= 8159 else "train"
