"""open_data: the dataset that a spec names, such as "voc:PATH"."""

from __future__ import annotations

import re
from pathlib import Path

from deepmrf.data.camvid import camvid
from deepmrf.data.cityscapes import cityscapes
from deepmrf.data.coco import coco
from deepmrf.data.dataset import Dataset
from deepmrf.data.folder import folder
from deepmrf.data.synthetic import synthetic
from deepmrf.data.voc import animals, voc

_KINDS = {"camvid": camvid, "voc": voc, "animals": animals, "cityscapes": cityscapes, "coco": coco}
_SPECS = ", ".join([*(f"{kind}:PATH" for kind in _KINDS), "folder:PATH", "synthetic:SIZE"])


def open_data(spec: str, split: str) -> Dataset:
    """Open the dataset that a spec such as "voc:PATH" names.

    A folder also takes the split "all". The SIZE of synthetic scenes is 64, 64x96 (H, W) or, for videos, 5x64x96.
    """
    kind, _, path = spec.partition(":")
    if not path or kind not in (*_KINDS, "folder", "synthetic"):
        guess = f", such as folder:{spec}" if Path(spec).is_dir() else ""
        raise ValueError(f"The dataset {spec!r} is not known; give one of {_SPECS}{guess}.")
    if kind == "synthetic":
        return _open_synthetic(path, split)
    if kind == "folder":
        return folder(path, None if split in ("", "all") else split)
    if not Path(path).exists():
        raise FileNotFoundError(
            f"{path} does not exist; give the folder of {kind} as {kind}:PATH, or fetch it into data/{kind} with: "
            f"deepmrf data get {kind}"
        )
    return _KINDS[kind](path, split)


def _open_synthetic(size: str, split: str) -> Dataset:
    if not re.fullmatch(r"\d+(x\d+){0,2}", size):
        raise ValueError(f"The size of synthetic scenes is {size!r}; give 64, 64x96 (H, W) or 5x64x96 (T, H, W).")
    numbers = [int(number) for number in size.split("x")]
    height, width = numbers[-2:] if len(numbers) > 1 else numbers * 2
    return synthetic((height, width), split, frames=numbers[0] if len(numbers) == 3 else 1)
