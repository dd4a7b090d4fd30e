import numpy as np
import pytest

from deepmrf.data import DataError, add_sbd, animals, voc


@pytest.fixture
def root(tmp_path, pair):
    top = tmp_path / "VOCdevkit" / "VOC2012"
    pair(top / "JPEGImages" / "a.jpg", top / "SegmentationClass" / "a.png", range(21), "P")
    pair(top / "JPEGImages" / "b.jpg", top / "SegmentationClass" / "b.png", (8, 15, 255), "P")
    lists = top / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("a\n")
    (lists / "val.txt").write_text("b\n")
    return top


def test_any_folder_above_will_do(root):
    for top in (root, root.parent, root.parent.parent, str(root)):
        dataset = voc(top, "train")
        assert [item.name for item in dataset] == ["a"]
    assert set(np.unique(dataset.read(dataset[0])[1])) == set(range(21))
    dataset.check_pairs()


def test_augmented_masks_come_first(root, save):
    save(root / "SegmentationClassAug" / "a.png", np.full((4, 6), 3))
    train, val = voc(root, "train"), voc(root, "val")
    assert (train.read(train[0])[1] == 3).all()
    assert set(np.unique(val.read(val[0])[1])) == {8, 15, 255}


def test_animals_keep_six_classes(root):
    train, val = animals(root, "train"), animals(root, "val")
    expected = {8: 1, 12: 2, 13: 3, 10: 4, 17: 5, 15: 6}
    ids = np.resize(range(21), (4, 6))
    np.testing.assert_array_equal(train.read(train[0])[1], np.vectorize(lambda i: expected.get(i, 0))(ids))
    assert set(np.unique(val.read(val[0])[1])) == {1, 6, 255}


def test_bad_trees(root, tmp_path, save):
    with pytest.raises(
        FileNotFoundError, match=r"train9\.txt does not exist; give a split that has a list there: train, val"
    ):
        voc(root, "train9")
    with pytest.raises(FileNotFoundError, match="add_sbd"):
        voc(root, "trainaug")
    with pytest.raises(FileNotFoundError, match="does not exist; give the folder"):
        voc(tmp_path / "nowhere", "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no JPEGImages"):
        voc(tmp_path / "empty", "train")
    save(root / "SegmentationClass" / "a.png", np.full((4, 6), 21))
    with pytest.raises(DataError, match=r"a\.png holds the id 21"):
        voc(root, "train").read(voc(root, "train")[0])


def test_sbd_is_added(root, tmp_path, save):
    io = pytest.importorskip("scipy.io")
    sbd = tmp_path / "sbd"
    (sbd / "cls").mkdir(parents=True)
    for name in ("a", "b", "c"):
        save(root / "JPEGImages" / f"{name}.jpg", np.zeros((4, 6, 3)))
        io.savemat(sbd / "cls" / f"{name}.mat", {"GTcls": {"Segmentation": np.full((4, 6), 7, dtype=np.uint8)}})
    (sbd / "train.txt").write_text("a\nb\n")
    (sbd / "val.txt").write_text("c\n")
    add_sbd(root, sbd)
    dataset = voc(root, "trainaug")
    assert [item.name for item in dataset] == ["a", "c"]  # b is in VOC's val
    assert set(np.unique(dataset.read(dataset[0])[1])) == set(range(21))  # VOC's own mask wins
    assert (dataset.read(dataset[1])[1] == 7).all()
    assert {item.mask.parent.name for item in dataset} == {"SegmentationClassAug"}
