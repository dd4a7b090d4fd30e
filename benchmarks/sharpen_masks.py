"""Write Cityscapes with sharpened masks for training, for benchmarks that learn from it.

    python benchmarks/sharpen_masks.py cityscapes:PATH -o data/cityscapes-sharp
    deepmrf train street --set data.train=cityscapes:data/cityscapes-sharp

Where masks were made small by averaging label ids, each border has a line of labels that are no truth (errors.py). The
split train gets the nearer of the two labels beside such a line; val stays as it is. Images are linked, not copied.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from errors import sharpened
from PIL import Image
from rich.progress import track

from deepmrf.data import open_data
from deepmrf.data.cityscapes import LABEL_IDS
from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.files import VOID

IDS = np.zeros(256, np.uint8)
IDS[: len(LABEL_IDS)] = LABEL_IDS


def write(data: Dataset, item: Item, out: Path, split: str) -> int:
    """Write an image and its mask; return how many pixels have another label."""
    _, mask = data.read(item)
    assert mask is not None, f"{item.name} has no labels"
    assert item.mask is not None
    sharp = mask
    if split == "train":
        sharp = sharpened(torch.from_numpy(mask.astype(np.int64)), VOID).numpy()
    city = item.image.parent.name
    image, target = out / "leftImg8bit" / split / city / item.image.name, out / "gtFine" / split / city / item.mask.name
    for path in (image, target):
        path.parent.mkdir(parents=True, exist_ok=True)
    image.symlink_to(item.image.resolve())
    Image.fromarray(IDS[sharp]).save(target)
    return int((sharp != mask).sum())


def main() -> None:
    """Write both splits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="cityscapes:PATH")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    for split in ("train", "val"):
        data = open_data(given.data, split)
        with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
            written = [pool.submit(write, data, item, given.out, split) for item in data if item.mask]
            changed = sum(result.result() for result in track(written, split))
        print(f"{split}: {len(written)} images, {changed} pixels with another label.")


if __name__ == "__main__":
    main()
