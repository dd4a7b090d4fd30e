"""Write CamVid and Cityscapes as one data set of CamVid's 11 labels, for the recipe benchmarks/camvid-mixed.toml.

    python benchmarks/mix_streets.py camvid:PATH cityscapes:PATH -o data/streets
    python benchmarks/relabel.py
    deepmrf train benchmarks/camvid-mixed.toml

CamVid has 367 images of three drives, Cityscapes 2,975 of 18 cities, so that each image of CamVid counts several times.
Labels of Cityscapes become those of CamVid (links.py); lines of wrong labels, which averaging has left in small masks,
become the nearer of the two labels beside them (errors.py). Images are linked, not copied. The split val is that of
CamVid; with `--without`, it is the drives that are left out: streets that no image has shown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from errors import sharpened
from links import CAMVID_OF_CITYSCAPES
from PIL import Image
from rich.progress import track

from deepmrf.data import open_data
from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.files import VOID
from deepmrf.data.labels import LabelSet
from deepmrf.training.samples import hold_out


def write(data: Dataset, item: Item, names: Iterable[str], labels: LabelSet, top: Path, split: str) -> None:
    """Write one image of a split under each of these names."""
    _, mask = data.read(item)
    assert mask is not None, f"{item.name} has no labels"
    if data.labels.names != labels.names:
        sharp = sharpened(torch.from_numpy(mask.astype(np.int64)), VOID).numpy()
        lookup = np.full(256, VOID, np.uint8)
        lookup[: len(data.labels)] = [labels.names.index(CAMVID_OF_CITYSCAPES[name]) for name in data.labels.names]
        mask = lookup[sharp]
    for name in names:
        (top / f"images/{split}" / f"{name}{item.image.suffix}").symlink_to(item.image.resolve())
        Image.fromarray(mask).save(top / f"masks/{split}" / f"{name}.png")


def main() -> None:
    """Write both sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("camvid")
    parser.add_argument("cityscapes")
    parser.add_argument("--repeat", type=int, default=8, help="how often each image of CamVid counts")
    parser.add_argument("--held-out", type=float, default=0.15, help="share of CamVid to leave out, as data.held_out")
    parser.add_argument("--without", default=(), nargs="*", help="drives of CamVid to leave out, such as 0001TP")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    camvid, cityscapes = (open_data(name, "train") for name in (given.camvid, given.cityscapes))
    for kind in ("images", "masks"):
        for split in ("train", "val"):
            (given.out / kind / split).mkdir(parents=True)
    (given.out / "labels.json").write_text(json.dumps(camvid.labels.to_dict() | {"ignore": VOID}))
    seen = hold_out(camvid, given.held_out)[0] if given.held_out else camvid
    drives = [item for item in seen if item.sequence not in given.without]
    others = [item for item in camvid if item.sequence in given.without]
    val = (camvid, others) if others else (open_data(given.camvid, "val"),) * 2
    parts = [("train", camvid, drives, given.repeat), ("train", cityscapes, cityscapes, 1), ("val", *val, 1)]
    with ProcessPoolExecutor(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        written = [
            pool.submit(write, data, item, [f"{item.name}_{n}" for n in range(count)], camvid.labels, given.out, split)
            for split, data, items, count in parts
            for item in items
        ]
        for result in track(written, "images"):
            result.result()
    print(f"Wrote {given.out}: {len(drives)} images of CamVid, {given.repeat} times each, and {len(cityscapes)}.")


if __name__ == "__main__":
    main()
