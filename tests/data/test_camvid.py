import numpy as np
import pytest

from deepmrf.data import CAMVID, DataError, camvid
from deepmrf.data.camvid import PUBLISHED


def test_reduced_layout(tmp_path, pair):
    for name in ("0006R0_f00930", "0006R0_f00960", "0016E5_00390"):
        pair(tmp_path / "train" / f"{name}.jpg", tmp_path / "trainannot" / f"{name}.png", range(12))
    dataset = camvid(tmp_path, "train")
    assert dataset.labels == CAMVID
    assert [(item.sequence, item.frame) for item in dataset] == [("0006R0", 930), ("0006R0", 960), ("0016E5", 390)]
    assert set(np.unique(dataset.read(dataset[0])[1])) == {*range(11), 255}
    dataset.check_pairs()


def test_reduced_layout_in_pieces(tmp_path, pair, save):
    pair(tmp_path / "val" / "a_1.png", tmp_path / "valannot" / "a_1.png", (12,))
    save(tmp_path / "valannot" / "a_2.png", np.zeros((4, 6)))
    dataset = camvid(tmp_path, "val")
    with pytest.raises(DataError, match=r"a_1\.png holds the id 12"):
        dataset.read(dataset[0])
    with pytest.raises(FileNotFoundError, match=r"a_2\.png has no image"):
        dataset.check_pairs()
    (tmp_path / "test").mkdir()
    with pytest.raises(FileNotFoundError, match="no testannot"):
        camvid(tmp_path, "test")
    (tmp_path / "testannot").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no images for split 'test'"):
        camvid(tmp_path, "test")
    with pytest.raises(ValueError, match="no split 'trainval'; give one of train, val, test"):
        camvid(tmp_path, "trainval")


def published(root, save, *names):
    """The published layout, each mask with all 32 colours in a row."""
    colours = [colour for group in PUBLISHED.values() for colour in group.values()]
    for name in names:
        save(root / "701_StillsRaw_full" / f"{name}.png", np.zeros((1, 32, 3)))
        save(root / "LabeledApproved_full" / f"{name}_L.png", [colours])


def test_published_layout_reduces_32_classes(tmp_path, save):
    published(tmp_path, save, "0001TP_006690")
    dataset = camvid(tmp_path, "train")
    _, mask = dataset.read(dataset[0])
    expected = [i if name != "void" else 255 for i, (name, g) in enumerate(PUBLISHED.items()) for _ in g]
    np.testing.assert_array_equal(mask[0], expected)
    assert len({colour for group in PUBLISHED.values() for colour in group.values()}) == 32
    assert tuple(PUBLISHED)[:11] == CAMVID.names


def test_published_layout_is_split_as_usual(tmp_path, save):
    published(tmp_path, save, "0001TP_008520", "0001TP_008550", "0016E5_07920", "0016E5_07959", "Seq05VD_f00000")
    names = {split: [item.name for item in camvid(tmp_path, split)] for split in ("train", "val", "test")}
    assert names == {
        "train": ["0001TP_008520", "0016E5_07920"],
        "val": ["0016E5_07959"],
        "test": ["0001TP_008550", "Seq05VD_f00000"],
    }


def test_published_layout_with_lists(tmp_path, save):
    published(tmp_path, save, "0001TP_006690", "0001TP_006720")
    (tmp_path / "val.txt").write_text("0001TP_006720.png\nabsent.png\n")
    dataset = camvid(tmp_path, "val")
    assert [item.name for item in dataset] == ["0001TP_006720", "absent"]
    with pytest.raises(FileNotFoundError, match=r"absent\.png and 1 more are missing"):
        dataset.check_pairs()


def test_coloured_split_folders(tmp_path, save):
    save(tmp_path / "train" / "a_1.png", np.zeros((1, 2, 3)))
    path = save(tmp_path / "train_labels" / "a_1_L.png", [[(128, 128, 128), (0, 0, 0)]])
    dataset = camvid(tmp_path, "train")
    np.testing.assert_array_equal(dataset.read(dataset[0])[1], [[0, 255]])
    save(path, [[(1, 2, 3), (0, 0, 0)]])
    with pytest.raises(DataError, match=r"a_1_L\.png holds the colour \(1, 2, 3\)"):
        dataset.read(dataset[0])


def test_not_camvid(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a layout of CamVid; give"):
        camvid(tmp_path, "train")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        camvid(tmp_path / "nowhere", "train")
