"""Masks in black and white: one file for each label in the image, and none for others, now and in later runs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from deepmrf import DeepParsingNetwork, LabelSet, Segmenter
from deepmrf.predict.files import find_images, mask_endings
from deepmrf.predict.notes import is_label_map, is_mask, is_result
from deepmrf.predict.pipeline import Options, segment_files
from deepmrf.predict.remote import segment_anywhere

NAMES = ("background", "traffic light", "cat/dog")
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
TWO = ["in/x_cat-dog.png", "in/x_traffic-light.png"]


class ByColour(nn.Module):
    """Red is the background, green a traffic light, blue a cat or a dog."""

    def forward(self, image):
        return 20 * image


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def model(names=NAMES, **settings):
    return Segmenter(DeepParsingNetwork(ByColour(), None, names), device="cpu", **settings)


@pytest.fixture
def segmenter():
    return model()


def draw(name, *colours):
    """An image with a row of each colour; the first one has two."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.repeat(np.array([colours[0], *colours], np.uint8)[:, None], 9, 1)).save(name)


def do(segmenter, *inputs, out="out", masks=True, run=segment_files, **options):
    return run(segmenter, list(inputs), Path(out), options=Options(masks=masks, **options))


def results(folder="out"):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def test_a_mask_is_white_on_black(segmenter):
    draw("x.png", RED, GREEN, BLUE)
    [image] = do(segmenter, "x.png").done
    assert results() == ["x.png", "x_cat-dog.png", "x_overlay.jpg", "x_traffic-light.png"]
    with Image.open("out/x_traffic-light.png") as mask:
        assert mask.mode == "L"
        np.testing.assert_array_equal(np.asarray(mask)[:, 0], [0, 0, 255, 0])
    with Image.open("out/x_cat-dog.png") as mask:
        np.testing.assert_array_equal(np.asarray(mask)[:, 0], [0, 0, 0, 255])
    assert image.to_dict()["masks"] == {
        "traffic light": "out/x_traffic-light.png",
        "cat/dog": "out/x_cat-dog.png",
    }
    assert do(segmenter, "x.png").earlier[0].to_dict() == image.to_dict()


def test_what_does_not_occur_has_no_mask_and_is_done(segmenter):
    draw("in/x.png", RED)
    draw("in/y.png", RED, BLUE)
    assert len(do(segmenter, "in").done) == 2
    assert results() == ["x.png", "x_overlay.jpg", "y.png", "y_cat-dog.png", "y_overlay.jpg"]
    assert len(do(segmenter, "in").skipped) == 2
    Path("out/y_cat-dog.png").unlink()
    assert [image.path.name for image in do(segmenter, "in").done] == ["y.png"]
    Image.new("L", (3, 3)).save("out/y_cat-dog.png")
    assert [path.name for path, _ in do(segmenter, "in").failed] == ["y.png"], "not ours"


def test_masks_may_be_asked_for_later(segmenter):
    draw("x.png", RED, BLUE)
    do(segmenter, "x.png", masks=False, overlay=False)
    assert results() == ["x.png"]
    assert len(do(segmenter, "x.png", overlay=False).done) == 1
    assert results() == ["x.png", "x_cat-dog.png"]
    assert len(do(segmenter, "x.png", masks=False, overlay=False).skipped) == 1, "less than there is"


def test_masks_of_an_earlier_run_go_with_it(segmenter):
    draw("x.png", RED, RED, GREEN, BLUE)
    do(segmenter, "x.png", overlay=False)
    Path("out/x_traffic-light.png").unlink()
    Image.new("L", (3, 3)).save("out/x_traffic-light.png")  # the user's own
    [image] = do(model(min_area=10), "x.png", overlay=False, overwrite=True).done
    assert image.files.masks == {}
    assert results() == ["x.png", "x_traffic-light.png"]
    with Image.open("out/x_traffic-light.png") as mine:
        assert mine.size == (3, 3)


@pytest.mark.parametrize("name", ["x_traffic-light.png", "x_cat-dog.png"])
def test_files_of_others_are_not_replaced(segmenter, name):
    draw("in/x.png", RED, GREEN)
    draw("in/y.png", RED, GREEN)
    draw(f"out/{name}", BLUE)
    report = do(segmenter, "in")
    assert [image.path.name for image in report.done] == ["y.png"]
    assert report.failed[0][1].startswith(f"out/{name} is there, and deepmrf predict did not write it")
    assert len(do(segmenter, "in", overwrite=True).done) == 2


def test_masks_are_no_images_and_no_label_maps(segmenter):
    draw("x.jpg", RED, BLUE)
    do(segmenter, "x.jpg", out=".")
    mask = Path("x_cat-dog.png")
    assert (is_mask(mask), is_result(mask), is_label_map(mask)) == (True, True, False)
    assert not is_mask(Path("x.png"))
    assert [image.path for image in find_images(["."])[0]] == [Path("x.jpg")]
    draw("x_cat-dog.jpg", RED)
    [(_, why)] = do(segmenter, "x_cat-dog.jpg", out=".", masks=False).failed
    assert why.startswith("x_cat-dog.png is there")  # the mask of another image


def test_one_image_may_name_its_label_map(segmenter):
    draw("x.jpg", RED, BLUE)
    do(segmenter, "x.jpg", out="out/mine.png", overlay=False)
    assert results() == ["mine.png", "mine_cat-dog.png"]


def test_no_result_replaces_another(segmenter):
    draw("in/x.jpg", RED)
    draw("in/x_Cat-dog.jpg", RED)
    with pytest.raises(
        ValueError, match=r"Masks of in/x\.jpg would have names of results of in/x_Cat-dog\.jpg: segment"
    ):
        do(segmenter, "in")
    assert len(do(segmenter, "in", masks=False).done) == 2
    two = model(["background", "b", "a_b"])
    draw("on/x.jpg", RED)
    draw("on/x_a.jpg", RED)
    with pytest.raises(ValueError, match=r"Masks of on/x\.jpg would have names of results of on/x_a\.jpg"):
        do(two, "on")
    draw("at/x.jpg", RED)
    draw("at/x_traffic-light.png", RED)
    with pytest.raises(ValueError, match=r"at/x_traffic-light\.png is one of the images, and would be overwritten"):
        do(segmenter, "at/x.jpg", "at/x_traffic-light.png", out="at", overlay=False)


def test_labels_in_names_of_files():
    names = ("background", "a b", "a-b", "A/B", "x\\y:z", "label " * 20, "Straße")
    endings = mask_endings(LabelSet(names))
    assert list(endings) == list(names[1:])
    short = [ending for name, ending in endings.items() if len(name) < 20]
    assert short == ["_a-b.png", "_a-b-2.png", "_A-B-3.png", "_x-y-z.png", "_Straße.png"]
    assert len(endings["label " * 20]) < 40
    assert mask_endings(LabelSet(["grass", "Background"])) == {"grass": "_grass.png", "Background": "_Background.png"}


def test_the_longest_names_fit(segmenter):
    draw(f"{'x' * 250}.png", RED, BLUE)
    long = model(["background", "label " * 20, "LABEL " * 20])
    assert len(do(long, f"{'x' * 250}.png").done) == 1
    assert max(len(os.fsencode(name)) for name in results()) <= 255


def test_masks_in_python(segmenter):
    draw("x.png", RED, GREEN, BLUE)
    result = segmenter("x.png")
    assert result.save_masks("out") == {
        "traffic light": Path("out/traffic-light.png"),
        "cat/dog": Path("out/cat-dog.png"),
    }
    assert result.save_masks("in/x.png").keys() == {"traffic light", "cat/dog"}
    assert [str(path) for path in sorted(Path("in").iterdir())] == TWO
    with Image.open("out/cat-dog.png") as mask:
        np.testing.assert_array_equal(np.asarray(mask) == 255, result["cat/dog"])


def test_masks_at_urls(segmenter, memory):
    draw("in/x.png", RED, RED, GREEN, BLUE)
    draw("in/y.png", RED)
    memory.put("in", "/in", recursive=True)

    def run(segmenter, **options):
        return segment_anywhere(segmenter, ["memory://in"], "memory://out", options=Options(masks=True, **options))

    first = run(segmenter).done
    assert first[0].to_dict()["masks"] == {
        "traffic light": "memory://out/x_traffic-light.png",
        "cat/dog": "memory://out/x_cat-dog.png",
    }
    assert "/out/x_cat-dog.png" in memory.find("/out")
    again = run(segmenter)
    assert (len(again.done), [image.to_dict() for image in again.earlier]) == (0, [image.to_dict() for image in first])
    assert len(run(model(min_area=10)).done) == 2
    assert not [path for path in memory.find("/out") if "-" in path]
    memory.pipe("/out/x_cat-dog.png", b"mine")
    assert "memory://out/x_cat-dog.png is there" in run(segmenter).failed[0][1]
    assert len(run(segmenter, overwrite=True).done) == 2
