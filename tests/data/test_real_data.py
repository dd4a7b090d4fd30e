"""The published data, where it is on this machine: in the folder DEEPMRF_DATA, else in ../shared/data."""

import os
from pathlib import Path

import numpy as np
import pytest

from deepmrf.data import animals, camvid, voc

ROOT = Path(os.environ.get("DEEPMRF_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
need_camvid = pytest.mark.skipif(not (ROOT / "camvid").is_dir(), reason="CamVid is not here")
need_animals = pytest.mark.skipif(not (ROOT / "voc-animals").is_dir(), reason="VOC-animals is not here")


def ids_of_a_sample(dataset):
    dataset.check_pairs()
    ids = set()
    for item in dataset[:: max(1, len(dataset) // 20)]:
        image, mask = dataset.read(item)
        assert image.shape[:2] == mask.shape
        ids |= set(np.unique(mask).tolist())
    return ids


@need_camvid
@pytest.mark.parametrize("split, count", [("train", 367), ("val", 101)])
def test_camvid(split, count):
    dataset = camvid(ROOT / "camvid", split)
    assert len(dataset) == count
    assert {255, *range(9)} <= ids_of_a_sample(dataset) <= {255, *range(11)}


@need_camvid
def test_camvid_clips():
    clips = camvid(ROOT / "camvid", "val").clips(5)
    assert [item.frame for item in clips[0]] == [7959, 7959, 7959, 7961, 7963]
    assert [item.frame for item in clips[-1]] == [8155, 8157, 8159, 8159, 8159]
    for clip in camvid(ROOT / "camvid", "train").clips(3):
        assert clip[2].frame - clip[0].frame <= 62  # about a second a step, and never across a cut


@need_animals
@pytest.mark.parametrize("split, count", [("trainaug", 3131), ("val", 180)])
def test_animals(split, count):
    dataset = animals(ROOT / "voc-animals", split)
    assert len(dataset) == count
    assert {0, 255} < ids_of_a_sample(dataset) <= {255, *range(7)}
    assert ids_of_a_sample(voc(ROOT / "voc-animals", split)[:100]) <= {255, *range(21)}
