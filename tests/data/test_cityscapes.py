import numpy as np
import pytest

from deepmrf.data import DataError, cityscapes

NAME = "ulm_000003_000019"


@pytest.fixture
def root(tmp_path, save):
    save(tmp_path / "leftImg8bit" / "train" / "ulm" / f"{NAME}_leftImg8bit.png", np.zeros((1, 35, 3)))
    save(tmp_path / "gtFine" / "train" / "ulm" / f"{NAME}_gtFine_labelIds.png", [[*range(34), 255]])
    return tmp_path


def test_label_ids_become_train_ids(root):
    dataset = cityscapes(root, "train")
    item = dataset[0]
    assert (item.name, item.sequence, item.frame) == (NAME, "ulm_000003", 19)
    _, mask = dataset.read(item)
    labels = {7: 0, 8: 1, 11: 2, 12: 3, 13: 4, 17: 5, 19: 6, 20: 7, 21: 8, 22: 9, 23: 10}
    labels |= {24: 11, 25: 12, 26: 13, 27: 14, 28: 15, 31: 16, 32: 17, 33: 18}
    np.testing.assert_array_equal(mask[0], [labels.get(i, 255) for i in [*range(34), 255]])


def test_frames_around_a_labelled_one(root, save):
    for frame in (17, 18, 19, 20):
        name = f"ulm_000003_{frame:06d}_leftImg8bit.png"
        save(root / "leftImg8bit_sequence" / "train" / "ulm" / name, np.zeros((1, 35, 3)))
    dataset = cityscapes(root, "train")
    assert [item.mask is not None for item in dataset] == [False, False, True, False]
    assert [[item.frame for item in clip] for clip in dataset.clips(5)] == [[17, 18, 19, 20, 20]]
    dataset.check_pairs()


def test_bad_trees(root, tmp_path, save):
    with pytest.raises(ValueError, match="no split 'trian'"):
        cityscapes(root, "trian")
    with pytest.raises(FileNotFoundError, match=r"unpack leftImg8bit_trainvaltest\.zip"):
        cityscapes(root, "val")
    mask = root / "gtFine" / "train" / "ulm" / f"{NAME}_gtFine_labelIds.png"
    save(mask, np.full((1, 35), 40))
    with pytest.raises(DataError, match="holds the id 40"):
        cityscapes(root, "train").read(cityscapes(root, "train")[0])
    mask.rename(mask.with_name("ulm_000004_000019_gtFine_labelIds.png"))
    dataset = cityscapes(root, "train")
    assert len(dataset.missing()) == len(dataset.unpaired) == 1
