import json

import numpy as np
import pytest

from deepmrf.data import DataError, folder, synthetic, write_folder


def test_plain_pairs_with_inferred_labels(tmp_path, pair, save):
    pair(tmp_path / "images" / "a.jpg", tmp_path / "masks" / "a.png", (0, 2, 255))
    save(tmp_path / "images" / "b.png", np.zeros((4, 6, 3)))
    dataset = folder(tmp_path)
    assert [(item.name, item.mask is None) for item in dataset] == [("a", False), ("b", True)]
    assert dataset.labels.names == ("label 0", "label 1", "label 2")
    assert set(np.unique(dataset.read(dataset[0])[1])) == {0, 2, 255}


def test_labels_json(tmp_path, pair):
    pair(tmp_path / "images" / "a.png", tmp_path / "masks" / "a.png", (0, 1, 9))
    (tmp_path / "labels.json").write_text(json.dumps({"names": ["sky", "sea"], "ignore": 9}))
    dataset = folder(tmp_path)
    assert dataset.labels.names == ("sky", "sea")
    assert dataset.labels.ignore == 255
    assert set(np.unique(dataset.read(dataset[0])[1])) == {0, 1, 255}


def test_black_and_white_masks(tmp_path, pair):
    pair(tmp_path / "images" / "a.png", tmp_path / "masks" / "a.png", (0, 255))
    with pytest.raises(ValueError, match=r'hold no ids but 0 and 255, and 255 is void; write labels\.json.*"ids": '):
        folder(tmp_path)
    (tmp_path / "labels.json").write_text(json.dumps({"names": ["background", "object"], "ids": [0, 255]}))
    dataset = folder(tmp_path)
    assert set(np.unique(dataset.read(dataset[0])[1])) == {0, 1}


def test_painted_masks(tmp_path, save):
    save(tmp_path / "images" / "a.png", np.zeros((1, 2, 3)))
    save(tmp_path / "masks" / "a.png", [[(0, 0, 255), (255, 0, 0)]])
    (tmp_path / "labels.json").write_text(json.dumps({"names": ["r", "b"], "colours": [[255, 0, 0], [0, 0, 255]]}))
    dataset = folder(tmp_path)
    np.testing.assert_array_equal(dataset.read(dataset[0])[1], [[1, 0]])


def test_split_folders_agree_on_labels(tmp_path, pair):
    pair(tmp_path / "images" / "train" / "a.png", tmp_path / "masks" / "train" / "a.png", (0, 3))
    pair(tmp_path / "images" / "val" / "b.png", tmp_path / "masks" / "val" / "b.png", (0, 1))
    assert [item.name for item in folder(tmp_path, "train")] == ["a"]
    assert folder(tmp_path, "train").labels == folder(tmp_path, "val").labels
    both = folder(tmp_path)
    assert [(item.name, item.sequence) for item in both] == [("train/a", ""), ("val/b", "")]
    both.check_pairs()
    with pytest.raises(FileNotFoundError, match=r"neither a folder images/test nor a list test\.txt; .* train, val"):
        folder(tmp_path, "test")


def test_split_lists(tmp_path, pair):
    for name in ("a 1", "b", "v/c"):
        pair(tmp_path / "images" / f"{name}.png", tmp_path / "masks" / f"{name}.png")
    (tmp_path / "val.txt").write_text("a 1.png\nv/c\n")
    assert [item.name for item in folder(tmp_path, "val")] == ["a 1", "v/c"]
    folder(tmp_path, "val").check_pairs()
    (tmp_path / "val.txt").write_text("b\ngone\n")
    with pytest.raises(FileNotFoundError, match=r"gone\.png is missing"):
        folder(tmp_path, "val").check_pairs()


def test_folders_below_are_videos(tmp_path, pair, save):
    for frame in (2, 9, 10):
        save(tmp_path / "images" / "train" / "drive" / f"f{frame}.png", np.zeros((4, 6, 3)))
    pair(tmp_path / "images" / "train" / "drive" / "f9.png", tmp_path / "masks" / "train" / "drive" / "f9.png")
    dataset = folder(tmp_path, "train")
    assert {item.sequence for item in dataset} == {"drive"}
    assert [[item.frame for item in clip] for clip in dataset.clips(3)] == [[2, 9, 10]]
    assert {item.sequence for item in folder(tmp_path)} == {"drive"}


def test_masks_without_image_are_kept_in_mind(tmp_path, pair, save):
    pair(tmp_path / "images" / "a.png", tmp_path / "masks" / "a.png")
    save(tmp_path / "masks" / "lone.png", np.zeros((4, 6)))
    with pytest.raises(FileNotFoundError, match=r"lone\.png has no image"):
        folder(tmp_path).check_pairs()


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "cannot be used"),
        ("[]", "no object with the key 'names'; write one such as"),
        ('{"colours": []}', "has no 'names'"),
        ('{"names": ["a", "b"], "ids": [0]}', r"'ids' are \[0\]; give 2 different ids"),
        ('{"names": ["a", "b"], "ids": [0, 256]}', "different ids of 0 to 255"),
        ('{"names": ["a", "b"], "ignore": 1}', "void id 1 of 'ignore' is the id of a label too"),
        ('{"names": ["a", "b"], "void": 1}', "unknown key 'void'"),
    ],
)
def test_bad_labels_json(tmp_path, pair, content, message):
    pair(tmp_path / "images" / "a.png", tmp_path / "masks" / "a.png")
    (tmp_path / "labels.json").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        folder(tmp_path)
    assert caught.value.path == tmp_path / "labels.json"


def test_bad_folders(tmp_path, save, pair):
    with pytest.raises(FileNotFoundError, match="give the folder with the images"):
        folder(tmp_path)
    (tmp_path / "images").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no images"):
        folder(tmp_path)
    save(tmp_path / "images" / "a.png", np.zeros((4, 6, 3)))
    with pytest.raises(FileNotFoundError, match=r"neither masks nor labels\.json"):
        folder(tmp_path)
    (tmp_path / "labels.json").write_text('{"names": ["a", "b"]}')
    assert folder(tmp_path)[0].mask is None  # images alone are fine for prediction
    save(tmp_path / "masks" / "a.jpg", np.zeros((4, 6)))
    with pytest.raises(DataError, match=r"a\.jpg is in a lossy format"):
        folder(tmp_path)
    pair(tmp_path / "images" / "a.jpg", tmp_path / "masks" / "a.png")
    (tmp_path / "masks" / "a.jpg").unlink()
    with pytest.raises(ValueError, match=r"a\.jpg and .*a\.png are both called 'a'"):
        folder(tmp_path)


def test_written_datasets_read_back(tmp_path):
    dataset = synthetic((16, 24), count=2, frames=3)
    seen = []
    back = folder(write_folder(dataset, tmp_path, "train", lambda done, total: seen.append((done, total))), "train")
    assert seen[-1] == (6, 6)
    assert back.labels == dataset.labels
    assert [(i.name, i.sequence, i.frame) for i in back] == [(i.name, i.sequence, i.frame) for i in dataset]
    for item, other in zip(dataset, back, strict=True):
        for a, b in zip(dataset.read(item), back.read(other), strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_unknown_id_says_what_to_write_into_labels_json(tmp_path, save):
    top = tmp_path / "mine"
    save(top / "images" / "a.png", np.zeros((4, 6, 3)))
    mask = np.zeros((4, 6), np.uint8)
    mask[0, 0] = 11
    save(top / "masks" / "a.png", mask)
    (top / "labels.json").write_text('{"names": ["a", "b"]}')
    dataset = folder(top)
    remedy = rf'holds the id 11, but the ids here are 0 to 1, 255; write "ignore": 11 into {top}/labels.json if'
    with pytest.raises(DataError, match=remedy):
        dataset.read_mask(dataset[0])
    (top / "labels.json").write_text('{"names": ["a", "b"], "ignore": 11}')
    assert folder(top).read_mask(dataset[0])[0, 0] == 255
    mask[1, 1] = 12
    save(top / "masks" / "a.png", mask)
    with pytest.raises(DataError, match=r'holds the id 12, .* write "ignore": \[11, 12\] into'):
        folder(top).read_mask(dataset[0])
    save(top / "masks" / "a.png", np.arange(256).reshape(16, 16))  # a grey photograph
    with pytest.raises(DataError, match=r"the id 2, 3, 4, 5, 6 and 247 more, .*; this is probably a picture, no mask"):
        folder(top).read_mask(dataset[0])
    save(top / "masks" / "a.png", mask)
    (top / "labels.json").write_text('{"names": ["a", "b"], "ignore": [11, 12]}')
    assert np.count_nonzero(folder(top).read_mask(dataset[0]) == 255) == 2


def test_an_unknown_colour_says_what_to_do(tmp_path, save):
    save(tmp_path / "images" / "a.png", np.zeros((4, 6, 3)))
    save(tmp_path / "masks" / "a.png", np.full((4, 6, 3), (9, 8, 7)))
    (tmp_path / "labels.json").write_text('{"names": ["a"], "colours": [[0, 0, 0]]}')
    dataset = folder(tmp_path)
    with pytest.raises(DataError, match=r"\(9, 8, 7\), which is none of .*; paint it .* or add names and colours to"):
        dataset.read_mask(dataset[0])
    (tmp_path / "labels.json").write_text('{"names": ["a"]}')
    with pytest.raises(DataError, match=r'is a mask of mode RGB; .* or write the "colours" of the labels into'):
        folder(tmp_path).read_mask(dataset[0])
