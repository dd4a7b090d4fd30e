"""Label maps as COCO's JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepmrf.data.labels import ANIMALS, CAMVID
from deepmrf.predict.coco import categories, write_coco
from deepmrf.predict.files import ResultFiles
from deepmrf.predict.report import ImageReport


@pytest.fixture
def reports(tmp_path):
    """Two images in two folders, with label maps of blocks."""
    rng = np.random.default_rng(0)
    images = []
    for name in ("b/x.jpg", "a/x.jpg"):
        path = tmp_path / "out" / f"{Path(name).parent.name}.png"
        path.parent.mkdir(exist_ok=True)
        blocks = rng.integers(0, 7, (6, 8)).astype(np.uint8).repeat(5, 0).repeat(4, 1)
        Image.fromarray(blocks).save(path)
        images.append(ImageReport(tmp_path / name, ResultFiles(path, None, None), blocks.shape, []))
    return images


def test_the_file(reports, tmp_path):
    count = write_coco(tmp_path / "coco.json", reports, ANIMALS)
    content = json.loads((tmp_path / "coco.json").read_text())
    assert content["images"] == [
        {"id": 1, "file_name": "a/x.jpg", "width": 32, "height": 30},
        {"id": 2, "file_name": "b/x.jpg", "width": 32, "height": 30},
    ]
    assert [c["name"] for c in content["categories"]] == list(ANIMALS.names[1:])
    assert [c["id"] for c in content["categories"]] == [1, 2, 3, 4, 5, 6]
    annotations = content["annotations"]
    assert [a["id"] for a in annotations] == list(range(1, count + 1))
    for image, number in ((reports[1], 1), (reports[0], 2)):
        labels = np.array(Image.open(image.files.labels))
        for label in range(1, 7):
            areas = [a["area"] for a in annotations if (a["image_id"], a["category_id"]) == (number, label)]
            assert sum(areas) == (labels == label).sum()


def test_the_order_of_the_images_does_not_matter(reports, tmp_path):
    for name, images in (("one", reports), ("two", reports[::-1])):
        write_coco(tmp_path / name, images, ANIMALS)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_no_images_make_an_empty_file(tmp_path):
    assert write_coco(tmp_path / "coco.json", [], ANIMALS) == 0
    content = json.loads((tmp_path / "coco.json").read_text())
    assert content["images"] == content["annotations"] == []


def test_ids_begin_at_one_without_a_background():
    assert [c["id"] for c in categories(CAMVID)] == list(range(1, 12))
    assert categories(CAMVID)[0] == {"id": 1, "name": "sky", "supercategory": "", "color": [128, 128, 128]}


def test_pycocotools_reads_it(reports, tmp_path, capsys):
    tools = pytest.importorskip("pycocotools.coco")
    write_coco(tmp_path / "coco.json", reports, ANIMALS)
    coco = tools.COCO(str(tmp_path / "coco.json"))
    for image in coco.loadImgs(coco.getImgIds()):
        again = np.zeros((image["height"], image["width"]), int)
        for annotation in coco.loadAnns(coco.getAnnIds(imgIds=image["id"])):
            mask = coco.annToMask(annotation).astype(bool)
            assert mask.sum() == annotation["area"]
            rows, columns = np.nonzero(mask)
            left, top, width, height = annotation["bbox"]
            assert (left, top) == (columns.min(), rows.min())
            assert (width, height) == (np.ptp(columns) + 1, np.ptp(rows) + 1)
            again[mask] = annotation["category_id"]
        report = next(r for r in reports if str(r.path).endswith(image["file_name"]))
        np.testing.assert_array_equal(again, np.array(Image.open(report.files.labels)))
