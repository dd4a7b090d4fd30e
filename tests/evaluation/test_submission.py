"""`deepmrf evaluate --submission`: what the servers of Cityscapes and VOC take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import VOC, cityscapes, synthetic, voc
from deepmrf.data.labels import CITYSCAPES
from deepmrf.evaluation.submission import write_submission
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model


@pytest.fixture
def cities(tmp_path):
    """Test images without labels, one of them a frame between."""
    for kind in ("leftImg8bit", "leftImg8bit_sequence", "gtFine"):
        (tmp_path / kind / "test" / "bonn").mkdir(parents=True)
    Image.new("RGB", (40, 24)).save(tmp_path / "leftImg8bit" / "test" / "bonn" / "bonn_000001_000019_leftImg8bit.png")
    between = tmp_path / "leftImg8bit_sequence" / "test" / "bonn" / "bonn_000001_000018_leftImg8bit.png"
    Image.new("RGB", (40, 24)).save(between)
    return tmp_path


@pytest.fixture
def pascal(tmp_path):
    """VOC's test images: no masks."""
    folder = tmp_path / "VOC2012"
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (folder / name).mkdir(parents=True)
    for name, size in (("2008_1", (31, 22)), ("2008_2", (20, 33))):
        Image.new("RGB", size).save(folder / "JPEGImages" / f"{name}.jpg")
    (folder / "ImageSets" / "Segmentation" / "test.txt").write_text("2008_1\n2008_2\n")
    return folder


def every_label(labels):
    """A predictor: pixel (y, x) has label (y + x) % labels."""

    def predict(image):
        height, width = image.shape[-2:]
        ids = (torch.arange(height)[:, None] + torch.arange(width)) % labels
        return torch.nn.functional.one_hot(ids, labels).movedim(-1, 0)[None].float().log()

    return predict


def test_cityscapes_ids_at_full_size(cities, tmp_path):
    (path,) = write_submission(every_label(19), cityscapes(cities, "test"), tmp_path / "out")
    assert path == tmp_path / "out" / "bonn_000001_000019.png"
    picture = Image.open(path)
    assert (picture.mode, picture.size) == ("L", (40, 24))
    written = np.array(picture)
    published = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    assert written[0, :19].tolist() == published
    assert set(np.unique(written)) == set(published)


def test_voc_palette_and_folders(pascal, tmp_path):
    paths = write_submission(every_label(21), voc(pascal, "test"), tmp_path / "out")
    folder = tmp_path / "out" / "results" / "VOC2012" / "Segmentation" / "comp6_test_cls"
    assert paths == [folder / "2008_1.png", folder / "2008_2.png"]
    picture = Image.open(paths[1])
    assert (picture.mode, picture.size) == ("P", (20, 33))
    assert np.array(picture)[1, :5].tolist() == [1, 2, 3, 4, 5]
    assert picture.getpalette()[3 * 15 : 3 * 16] == list(VOC.colours[15])


def test_as_a_user_types_it(cities, pascal, tmp_path):
    for name, labels in (("city", CITYSCAPES), ("voc", VOC)):
        write_model(DeepParsingNetwork.build("fast", labels, {"width": 8}, None).eval(), tmp_path / name)
    for model, data, count in (("city", f"cityscapes:{cities}", 1), ("voc", f"voc:{pascal}", 2)):
        words = ["evaluate", str(tmp_path / model), "--data", data, "--split", "test", "--flip"]
        result = CliRunner().invoke(app, [*words, "--submission", str(tmp_path / "out" / model)])
        assert result.exit_code == 0, result.output
        assert f"Wrote {count} label maps into" in result.output
        assert len([*(tmp_path / "out" / model).rglob("*.png")]) == count
    result = CliRunner().invoke(app, [*words, "--submission", str(tmp_path / "x"), "--stages"])
    assert result.exit_code == 2
    assert "--submission writes label maps of images alone" in result.output


def test_other_labels_have_no_server(tmp_path):
    with pytest.raises(ValueError, match="Submissions are for the labels of Cityscapes and VOC"):
        write_submission(every_label(7), synthetic((24, 32), "val", count=1), tmp_path)
