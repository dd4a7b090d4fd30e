"""LA by objects: by hand, against loops over pixels, and as a user types it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import VOC, cityscapes, voc
from deepmrf.evaluation.metrics import SegmentationMetrics
from deepmrf.evaluation.regions import object_overlaps
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model


def test_two_cats_are_two_boxes():
    target = torch.zeros(10, 20, dtype=torch.int64)
    objects = target.clone()
    objects[2:6, 2:6], objects[2:6, 12:16] = 1, 7
    target[objects > 0] = 1
    prediction = target.clone()
    prediction[2:6, 4:6] = 0  # half of the first cat
    labels, overlaps = object_overlaps(prediction, target, objects, 1)
    assert labels.tolist() == [1, 1]
    assert overlaps.tolist() == [0.5, 1.0]
    metrics = SegmentationMetrics(2, names=("background", "cat"), tag_pixels=1)
    metrics.update(prediction, target, objects)
    scores = metrics.compute()
    assert scores.la_objects == scores.la_objects_per_class[1] == 0.75
    assert scores.la == 1  # the box around both cats hides it
    assert scores.to_dict()["la_objects_per_class"] == {"background": None, "cat": 0.75}


def naive(prediction, target, objects, min_pixels):
    """Flood fill, and sets of pixels."""
    height, width = target.shape

    def box(pixels):
        rows, columns = zip(*pixels, strict=True)
        return {(y, x) for y in range(min(rows), max(rows) + 1) for x in range(min(columns), max(columns) + 1)}

    cells = {(y, x): int(prediction[y, x]) for y in range(height) for x in range(width)}
    regions, left = [], set(cells)
    while left:
        stack, region = [left.pop()], set()
        while stack:
            y, x = stack.pop()
            region.add((y, x))
            for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if near in left and cells[near] == cells[y, x]:
                    left.remove(near)
                    stack.append(near)
        regions.append(region)
    result = []
    for number in sorted(set(objects.flatten().tolist()) - {0}):
        pixels = [cell for cell in cells if int(objects[cell]) == number]
        if len(pixels) < min_pixels:
            continue
        label, best = int(target[pixels[0]]), 0.0
        for region in regions:
            if len(region) >= min_pixels and cells[next(iter(region))] == label:
                a, b = box(pixels), box(region)
                best = max(best, len(a & b) / len(a | b))
        result.append((label, best))
    return result


@pytest.mark.parametrize("everywhere", [False, True])
def test_equal_to_loops(everywhere):
    objects = torch.zeros(14, 17, dtype=torch.int64)
    for number in (3, 4, 9, 12, 40):
        top, left = int(torch.randint(0, 10, ())), int(torch.randint(0, 12, ()))
        objects[top : top + 5, left : left + 6] = number
    if everywhere:
        objects[objects == 0] = 50
    target = objects % 3
    prediction = torch.where(torch.rand(14, 17) < 0.15, torch.randint(0, 3, (14, 17)), target)
    labels, overlaps = object_overlaps(prediction, target, objects, 4)
    expected = naive(prediction, target, objects, 4)
    assert list(zip(labels.tolist(), overlaps.tolist(), strict=True)) == expected


@pytest.fixture
def data(tmp_path):
    """A tree like VOC's, of two images with a cat each."""
    folder = tmp_path / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "SegmentationObject", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    ids, numbers = np.zeros((2, 24, 32), dtype=np.uint8)
    ids[4:12, 5:20], numbers[4:12, 5:20] = VOC.names.index("cat"), 1
    ids[3], numbers[3] = 255, 255
    for name in "ab":
        Image.new("RGB", (32, 24), "grey").save(folder / "JPEGImages" / f"{name}.jpg")
        Image.fromarray(ids).save(folder / "SegmentationClass" / f"{name}.png")
        Image.fromarray(numbers).save(folder / "SegmentationObject" / f"{name}.png")
    (folder / "ImageSets" / "Segmentation" / "val.txt").write_text("a\nb\n")
    return folder


def test_objects_of_voc_as_a_user_types_it(data, tmp_path):
    images = voc(data, "val")
    numbers = images.read_objects(images[0])
    assert sorted(np.unique(numbers)) == [0, 1]
    write_model(DeepParsingNetwork.build("fast", VOC, {"width": 8}, None).eval(), tmp_path / "model")
    words = ["evaluate", str(tmp_path / "model"), "--data", f"voc:{data}", "--objects"]
    result = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "out")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert re.search(r"LA by objects +[\d.]+: cat [\d.]+", result.output)
    assert "mean of objects" in result.output
    scores = json.loads((tmp_path / "out" / "scores.json").read_text())["scores"]["whole model"]
    assert 0 <= scores["la_objects"] <= 1
    for path in (data / "SegmentationObject").iterdir():
        path.unlink()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "No image of this data has its objects numbered" in result.output.replace("\n", " ")


def test_objects_of_cityscapes(tmp_path):
    images, masks = tmp_path / "leftImg8bit" / "val" / "ulm", tmp_path / "gtFine" / "val" / "ulm"
    images.mkdir(parents=True)
    masks.mkdir(parents=True)
    name = "ulm_000000_000019"
    Image.new("RGB", (3, 1)).save(images / f"{name}_leftImg8bit.png")
    Image.fromarray(np.uint8([[7, 26, 26]])).save(masks / f"{name}_gtFine_labelIds.png")
    Image.fromarray(np.uint16([[7, 26000, 26001]])).save(masks / f"{name}_gtFine_instanceIds.png")
    data = cityscapes(tmp_path, "val")
    assert data.read_objects(data[0]).tolist() == [[0, 26000, 26001]]
