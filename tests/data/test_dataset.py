import pickle
from pathlib import Path

import numpy as np
import pytest

from deepmrf.data import DataError, Dataset, Item, LabelSet

AB = LabelSet.from_dict({"names": ["a", "b"]})


def frames(*numbers, sequence="s", unlabelled=()):
    return [
        Item(f"{sequence}{n}", Path(f"{sequence}{n}.png"), None if n in unlabelled else Path("m.png"), sequence, n)
        for n in numbers
    ]


def numbers(clips):
    return [[item.frame for item in clip] for clip in clips]


def test_reads_pairs(tmp_path, pair):
    mask = pair(tmp_path / "a.png", tmp_path / "m.png", (0, 1, 255))
    dataset = Dataset([Item("a", tmp_path / "a.png", mask), Item("b", tmp_path / "a.png", None)], AB)
    image, ids = dataset.read(dataset[0])
    assert image.shape == (4, 6, 3)
    assert (image.dtype, ids.dtype) == (np.uint8, np.uint8)
    np.testing.assert_array_equal(ids[0], [0, 1, 255, 0, 1, 255])
    assert dataset.read(dataset[1])[1] is None


def test_own_void_id_becomes_255(tmp_path, pair):
    mask = pair(tmp_path / "a.png", tmp_path / "m.png", (0, 1, 2))
    dataset = Dataset([Item("a", tmp_path / "a.png", mask)], LabelSet(AB.names, AB.colours, ignore=2))
    assert set(np.unique(dataset.read(dataset[0])[1])) == {0, 1, 255}


def test_sizes_must_agree(tmp_path, save):
    item = Item("a", save(tmp_path / "a.png", np.zeros((4, 6, 3))), save(tmp_path / "m.png", np.zeros((6, 4))))
    with pytest.raises(DataError, match=r"m\.png is 4 x 6 pixels but its image .*a\.png is 6 x 4"):
        Dataset([item], AB).read(item)


def test_is_a_sequence_and_slices_are_datasets():
    dataset = Dataset(frames(0, 1, 2), AB)
    assert len(dataset) == 3
    assert [item.frame for item in dataset] == [0, 1, 2]
    assert dataset[-1].frame == 2
    assert isinstance(dataset[1:], Dataset)
    assert len(dataset[1:]) == 2
    assert dataset[1] in dataset
    assert len(pickle.loads(pickle.dumps(dataset))) == 3


def test_clips_repeat_frames_at_the_borders_of_a_sequence():
    dataset = Dataset([*frames(1, 2, 3, 4), *frames(1, 2, sequence="t")], AB)
    clips = dataset.clips(3)
    assert numbers(clips) == [[1, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 4], [1, 1, 2], [1, 2, 2]]
    assert all(len({item.sequence for item in clip}) == 1 for clip in clips)
    assert numbers(dataset.clips(4))[2] == [1, 2, 3, 4]
    assert numbers(dataset.clips(1)) == [[1], [2], [3], [4], [1], [2]]


def test_clips_centre_on_labelled_frames():
    dataset = Dataset(frames(3, 1, 2, unlabelled=(1, 3)), AB)
    assert numbers(dataset.clips(3)) == [[1, 2, 3]]
    assert numbers(dataset.clips(3, labelled_only=False)) == [[2, 3, 3], [1, 1, 2], [1, 2, 3]]


def test_clips_do_not_cross_a_gap():
    dataset = Dataset(frames(0, 30, 61, 900, 930), AB)
    assert numbers(dataset.clips(3)) == [[0, 0, 30], [0, 30, 61], [30, 61, 61], [900, 900, 930], [900, 930, 930]]
    assert numbers(dataset.clips(3, max_step=30))[1] == [0, 30, 30]
    assert numbers(dataset.clips(3, max_step=1000))[2] == [30, 61, 900]


def test_single_images_are_their_own_clip():
    dataset = Dataset([Item("a", Path("a"), Path("m")), Item("b", Path("b"), Path("m"))], AB)
    assert [[item.name for item in clip] for clip in dataset.clips(3)] == [["a"] * 3, ["b"] * 3]
    with pytest.raises(ValueError, match="clip of 0 frames"):
        dataset.clips(0)


def test_read_clip_voids_frames_without_labels(tmp_path, pair, save):
    mask = pair(tmp_path / "a.png", tmp_path / "m.png")
    items = [Item("a", tmp_path / "a.png", mask, "s", 0), Item("b", tmp_path / "a.png", None, "s", 1)]
    dataset = Dataset(items, AB)
    images, masks = dataset.read_clip(dataset.clips(3)[0])
    assert images.shape == (3, 4, 6, 3)
    assert (masks[2] == 255).all()
    assert (masks[:2] < 2).all()
    other = Item("c", save(tmp_path / "c.png", np.zeros((5, 6, 3))), None, "s", 2)
    with pytest.raises(DataError, match=r"c\.png is 6 x 5 pixels but the clip began with 6 x 4"):
        dataset.read_clip([*items, other])


def test_check_pairs(tmp_path, pair):
    mask = pair(tmp_path / "a.png", tmp_path / "m.png")
    good, bad = Item("a", tmp_path / "a.png", mask), Item("b", tmp_path / "b.png", tmp_path / "n.png")
    Dataset([good], AB).check_pairs()
    with pytest.raises(FileNotFoundError, match=r"b\.png and 1 more are missing"):
        Dataset([good, bad], AB).check_pairs()
    with pytest.raises(FileNotFoundError, match=r"mask lone\.png has no image"):
        Dataset([good], AB, unpaired=[Path("lone.png")]).check_pairs()
