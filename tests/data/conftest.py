"""Tiny image trees."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from deepmrf.data import VOC


def _save(path, array, mode=None):
    """Write an array as an image; `mode` "P" adds VOC's palette."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(np.asarray(array, dtype=np.uint8))
    if mode == "P":
        picture.putpalette(VOC.palette().tobytes())
    elif mode is not None:
        picture = picture.convert(mode)
    picture.save(path)
    return path


@pytest.fixture
def save():
    return _save


@pytest.fixture
def pair():
    """pair(image_path, mask_path, ids): a grey image and a mask of 4 x 6 pixels that counts through `ids`."""

    def make(image, mask, ids=(0, 1), mode="L"):
        _save(image, np.full((4, 6, 3), 99))
        return _save(mask, np.resize(ids, (4, 6)), mode)

    return make
