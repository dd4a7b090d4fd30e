import json
import pickle

import numpy as np
import pytest

from deepmrf.data import VOC, DataError, coco

CAT, SOFA = VOC.names.index("cat"), VOC.names.index("sofa")


def box(left, top, right, bottom):
    return [[left, top, right, top, right, bottom, left, bottom]]


@pytest.fixture
def root(tmp_path, save):
    for name in ("1", "2", "3"):
        save(tmp_path / "train2017" / f"{name}.jpg", np.zeros((60, 80, 3)))
    images = [{"id": n, "file_name": f"{n}.jpg", "height": 60, "width": 80} for n in (1, 2, 3)]
    categories = [{"id": 17, "name": "cat"}, {"id": 63, "name": "couch"}, {"id": 88, "name": "teddy bear"}]
    runs = {"counts": [60 * 70, 60 * 10], "size": [60, 80]}  # the ten columns on the right
    annotations = [
        {"image_id": 1, "category_id": 17, "segmentation": box(10, 10, 20, 20), "area": 100, "iscrowd": 0},
        {"image_id": 1, "category_id": 63, "segmentation": box(0, 0, 40, 60), "area": 2400, "iscrowd": 0},
        {"image_id": 1, "category_id": 17, "segmentation": runs, "area": 600, "iscrowd": 1},
        {"image_id": 2, "category_id": 17, "segmentation": box(0, 0, 10, 10), "area": 100, "iscrowd": 0},
        {"image_id": 3, "category_id": 88, "segmentation": box(0, 0, 60, 60), "area": 3600, "iscrowd": 0},
    ]
    (tmp_path / "annotations").mkdir()
    content = {"images": images, "categories": categories, "annotations": annotations}
    (tmp_path / "annotations" / "instances_train2017.json").write_text(json.dumps(content))
    return tmp_path


def test_only_images_with_enough_of_a_voc_class(root):
    assert [item.name for item in coco(root, "train")] == ["1"]
    assert [item.name for item in coco(root, "train2017", min_pixels=50)] == ["1", "2"]


def test_masks_are_drawn(root):
    pytest.importorskip("pycocotools")
    dataset = pickle.loads(pickle.dumps(coco(root, "train")))
    image, mask = dataset.read(dataset[0])
    assert mask.shape == image.shape[:2]
    assert mask[15, 15] == CAT  # the smaller object lies in front
    assert mask[40, 5] == SOFA
    assert mask[0, 60] == 0
    assert (mask[:, 70:] == 255).all()  # a crowd
    dataset.check_pairs()


def test_bad_outlines(root):
    pytest.importorskip("pycocotools")
    path = root / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    content["annotations"][2]["segmentation"]["size"] = [30, 160]
    content["annotations"][0]["segmentation"] = [[1, 2, 3, 4]]  # a line: drawn as nothing
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"json has (run lengths|an outline)"):
        coco(root, "train").read(coco(root, "train")[0])


def test_bad_trees(root):
    with pytest.raises(FileNotFoundError, match=r"instances_val2017\.json does not exist; give a split .*: train2017"):
        coco(root, "val")
    (root / "annotations" / "instances_val2017.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"val2017 does not exist; unpack val2017\.zip"):
        coco(root, "val")
    (root / "val2017").mkdir()
    with pytest.raises(DataError, match="is not a file of COCO instances"):
        coco(root, "val")
