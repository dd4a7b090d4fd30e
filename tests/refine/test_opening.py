"""Presets by name, for images and volumes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from deepmrf.layers.crf import PRESETS
from deepmrf.refine.opening import open_preset


@pytest.fixture
def folders(tmp_path):
    for name in ("predictions", "images"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).save(tmp_path / name / "a.png")
    return tmp_path / "predictions", tmp_path / "images"


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "medical3d"] + ["dense-crf"])
def test_every_preset_of_images_has_its_settings(folders, name):
    mrf, labels, label_ids = open_preset(name, *folders)
    assert (mrf.dims, len(labels), label_ids) == (2, 12, None)
    settings = PRESETS["voc" if name == "dense-crf" else name]
    penalty = mrf.triple_penalty
    assert penalty.kernel == "global"
    assert mrf.iterations == settings["iterations"]
    position, colour, weight = settings["pairs"]
    assert math.isclose(float(penalty.widths()[0]), colour / 255, rel_tol=1e-5)
    assert math.isclose(float(penalty.widths()[1]), position, rel_tol=1e-5)
    assert float(penalty.scale) == weight
    width, smoothness = settings["smooth"]
    assert math.isclose(float(penalty.log_smooth_width.exp()), width, rel_tol=1e-5)
    assert math.isclose(float(penalty.smooth_weight * penalty.scale), smoothness, rel_tol=1e-5)


def test_what_is_no_preset_here_is_named(folders):
    with pytest.raises(ValueError, match="no preset 'magic': choose one of voc, irn"):
        open_preset("magic", *folders)
    with pytest.raises(ValueError, match=r"medical3d is for volumes, but .* holds images: choose one of voc"):
        open_preset("medical3d", *folders)
    (folders[1] / "a.png").rename(folders[1] / "a.nii.gz")
    with pytest.raises(ValueError, match=r"voc is for images, but .* holds volumes: choose one of medical3d"):
        open_preset("voc", *folders)
    with pytest.raises(ValueError, match="There is no preset 'magic'"):
        open_preset("magic", *folders)
