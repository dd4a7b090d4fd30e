"""What was found in an image: to look at, to index, to save."""

from __future__ import annotations

import base64
import html
import io
import re

import numpy as np
import pytest
from PIL import Image

from deepmrf.data.labels import ANIMALS, CAMVID, LabelSet
from deepmrf.predict import result
from deepmrf.predict.result import Segmentation

CAT = ANIMALS.names.index("cat")


def segmentation(height=6, width=8, label_set=ANIMALS, probabilities=True):
    """The left half is background at 0.5, the right one a cat at 0.75."""
    shares = np.zeros((len(label_set), height, width), np.float32)
    shares[0] = 0.5
    shares[CAT, :, width // 2 :] = 0.75
    labels = shares.argmax(0).astype(np.uint8)
    image = np.full((height, width, 3), 100, np.uint8)
    return Segmentation(labels, shares.max(0).astype(np.float16), image, label_set, shares if probabilities else None)


def test_summary_by_hand():
    summary = segmentation(width=12).summary()
    assert [(row.name, row.share, row.confidence) for row in summary] == [("background", 0.5, 0.5), ("cat", 0.5, 0.75)]
    assert segmentation(width=3).summary()[0].name == "cat"  # two of three columns


def test_totals_are_counted_in_bands(monkeypatch):
    segmented = segmentation(37, 11)
    monkeypatch.setattr(result, "ROWS_AT_A_TIME", 5)
    pixels, sums = segmentation(37, 11).totals()
    assert pixels.tolist() == [37 * 5, 37 * 6, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(sums, [37 * 5 * 0.5, 37 * 6 * 0.75, 0, 0, 0, 0, 0])
    assert segmented.summary() == segmentation(37, 11).summary()


def test_a_label_by_name_and_number():
    result = segmentation()
    assert result["cat"].dtype == bool
    assert result["cat"].sum() == 24
    np.testing.assert_array_equal(result[CAT], result["cat"])
    assert not result["horse"].any()
    with pytest.raises(KeyError, match=r"no label 'cats' \(did you mean cat\?\): the labels are background, cat, "):
        result["cats"]
    with pytest.raises(KeyError, match="no label 7"):
        result[7]


def test_mask_has_ids_and_colours():
    mask = segmentation().mask()
    assert mask.mode == "P"
    np.testing.assert_array_equal(np.array(mask), segmentation().labels)
    assert mask.convert("RGB").getpixel((7, 0)) == ANIMALS.colours[CAT]


def test_overlay_leaves_the_background_alone():
    painted = np.array(segmentation().overlay())
    assert (painted[:, :4] == 100).all()
    np.testing.assert_allclose(painted[0, 7], 0.45 * 100 + 0.55 * np.array(ANIMALS.colours[CAT]), atol=1)
    assert (painted[:, 4] == 255).all()  # the line between them
    street = np.array(segmentation(label_set=CAMVID).overlay())
    np.testing.assert_allclose(street[0, 0], 0.45 * 100 + 0.55 * np.array(CAMVID.colours[0]), atol=1)


def test_overlay_in_bands_is_the_whole(monkeypatch):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 7, (23, 9)).astype(np.uint8)
    image = rng.integers(0, 256, (23, 9, 3)).astype(np.uint8)
    segmented = Segmentation(labels, np.ones((23, 9), np.float16), image, ANIMALS)
    expected = np.array(segmented.overlay())
    monkeypatch.setattr(result, "ROWS_AT_A_TIME", 4)
    np.testing.assert_array_equal(np.array(segmented.overlay()), expected)


def test_overlay_with_a_legend():
    segmented = segmentation(200, 300)
    shown = segmented.overlay(legend=True)
    assert shown.width == 300
    assert shown.height > 200
    np.testing.assert_array_equal(np.array(shown)[:200], np.array(segmented.overlay()))
    assert segmented.legend_entries() == [("background  50%", None), ("cat  50%", ANIMALS.colours[CAT])]


def test_lines_of_large_overlays_are_wider(monkeypatch):
    monkeypatch.setattr(result, "SIDE_BY_LINE", 4)
    monkeypatch.setattr(result, "ROWS_AT_A_TIME", 2)
    assert (np.array(segmentation(8, 9).overlay()) == 255).all(-1).sum(1).tolist() == [3] * 8


def test_overlay_can_be_small():
    assert segmentation(60, 200).overlay(longest=50).size == (50, 15)
    assert segmentation(60, 200).overlay(longest=500).size == (200, 60)


def test_save_to_a_file(tmp_path):
    result = segmentation()
    assert result.save(tmp_path / "deep" / "x.png") == tmp_path / "deep" / "x.png"
    with Image.open(tmp_path / "deep" / "x.png") as file:
        assert file.mode == "P"
        assert file.info["labels"].startswith("background, cat")
        np.testing.assert_array_equal(np.array(file), result.labels)
    result.save(str(tmp_path / "x.npz"))
    with np.load(tmp_path / "x.npz") as file:
        assert file["probabilities"].dtype == np.float16
        np.testing.assert_allclose(file["probabilities"], result.probabilities, atol=1e-3)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.npz"]  # nothing half-made is left


def test_save_to_a_folder(tmp_path):
    segmentation().save(tmp_path / "one")
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["labels.png", "overlay.jpg", "probabilities.npz"]
    segmentation(probabilities=False).save(tmp_path / "two")
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["labels.png", "overlay.jpg"]


def test_what_cannot_be_saved_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"x\.jpg would not keep label ids"):
        segmentation().save(tmp_path / "x.jpg")
    with pytest.raises(ValueError, match="were not kept: call the segmenter with probabilities=True"):
        segmentation(probabilities=False).save(tmp_path / "x.npz")
    assert not list(tmp_path.iterdir())


def test_a_file_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "x.png").write_bytes(b"old")

    def write_half():
        with result.replacing(tmp_path / "x.png") as file:
            file.write(b"new")
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        write_half()
    assert (tmp_path / "x.png").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_it_reads_well():
    assert repr(segmentation()) == ("Segmentation of 8 x 6 pixels: background 50% (sure 50%), cat 50% (sure 75%)")


@pytest.mark.parametrize("size", [(6, 8), (300, 900), (900, 20)])
def test_notebooks_get_a_picture_and_a_table(size):
    page = segmentation(*size)._repr_html_()
    picture = re.search(r'src="data:image/jpeg;base64,([^"]+)"', page)[1]
    with Image.open(io.BytesIO(base64.b64decode(picture))) as shown:
        factor = min(1, result.NOTEBOOK_SIDE / max(size))
        assert shown.size == (round(size[1] * factor), round(size[0] * factor))
    cells = [html.unescape(re.sub("<[^>]+>", " ", row)).split() for row in re.findall("<tr>(.*?)</tr>", page)]
    assert cells == [["class", "pixels", "confidence"], ["background", "50%", "50%"], ["cat", "50%", "75%"]]
    assert f"background: rgb{ANIMALS.colours[CAT]}" in page


def test_names_in_notebooks_are_text():
    labels = LabelSet(("<b>", "a & b"))
    page = Segmentation(np.zeros((2, 2), np.uint8), np.ones((2, 2), np.float16), np.zeros((2, 2, 3), np.uint8), labels)
    assert "&lt;b&gt;" in page._repr_html_()
    assert "<b>" not in page._repr_html_()


def speckled():
    """A cat of 12 x 12 pixels with a dog of 2 x 3 in it, and a horse of 5 x 5 in a corner of the background."""
    labels = np.zeros((30, 40), np.uint8)
    labels[10:22, 10:22] = CAT
    labels[15:17, 15:18] = ANIMALS.names.index("dog")
    labels[25:, 35:] = ANIMALS.names.index("horse")
    confidence = np.full(labels.shape, 0.9, np.float16)
    confidence[25:, 35:] = 0.25
    return Segmentation(labels, confidence, np.zeros((30, 40, 3), np.uint8), ANIMALS)


def test_small_and_unsure_regions_are_cleaned_away():
    segmented = speckled()
    assert list(segmented.cleaned()) == ["background", "cat", "horse", "dog"]
    assert segmented.cleaned() is segmented
    assert list(segmented.cleaned(min_area=6)) == ["background", "cat", "horse", "dog"]
    assert list(segmented.cleaned(min_area=7)) == ["background", "cat", "horse"]
    assert segmented.cleaned(min_area=7)["cat"].sum() == 144
    assert list(segmented.cleaned(min_area=0.01)) == ["background", "cat", "horse"]  # 1% is 12 pixels
    assert list(segmented.cleaned(min_confidence=0.5)) == ["background", "cat", "dog"]
    assert list(segmented.cleaned(0.01, 0.5)) == ["background", "cat"]
    assert list(segmented) == ["background", "cat", "horse", "dog"], "the result itself stays"


def test_confidence_of_cleaned_pixels():
    cleaned = speckled().cleaned(7, 0.5)
    assert cleaned.confidence[16, 16] == np.float16(1) - np.float16(0.9)  # the most that the dog leaves to the cat
    assert cleaned.confidence[29, 39] == np.float16(0.25)
    assert cleaned.confidence[0, 0] == np.float16(0.9)
    probabilities = np.full((7, 30, 40), 0.05, np.float32)
    probabilities[CAT] = 0.07
    with_probabilities = Segmentation(cleaned.labels, cleaned.confidence, cleaned.image, ANIMALS, probabilities)
    labels = with_probabilities.labels.copy()
    labels[0, 0] = 3
    changed = Segmentation(
        labels, with_probabilities.confidence, with_probabilities.image, ANIMALS, probabilities
    ).cleaned(2)
    assert changed.confidence[0, 0] == np.float16(0.05)


@pytest.mark.parametrize("settings", [{"min_area": -1}, {"min_area": float("nan")}, {"min_confidence": 50}])
def test_cleaning_takes_areas_and_probabilities(settings):
    with pytest.raises(ValueError, match="must be a"):
        segmentation().cleaned(**settings)


def test_polygons():
    segmented = speckled()
    assert [(p.name, p.area) for p in segmented.polygons()] == [
        *(("background", 1031), ("cat", 138), ("horse", 25), ("dog", 6)),
    ]
    [cat] = segmented.polygons("cat")
    assert len(cat.holes) == 1
    assert [p.name for p in segmented.polygons(CAT)] == ["cat"]
    assert segmented.polygons("sheep") == []
    with pytest.raises(KeyError, match="no label 'cats'"):
        segmented.polygons("cats")


def test_what_is_in_it():
    result = segmentation(width=3)
    assert list(result) == ["cat", "background"]
    assert "cat" in result
    assert CAT in result
    assert "horse" not in result
    with pytest.raises(KeyError, match=r"no label 'cats' \(did you mean cat"):
        "cats" in result  # noqa: B015


@pytest.mark.parametrize("opacity", [-0.1, 2, float("nan")])
def test_opacity_is_a_share(opacity):
    with pytest.raises(ValueError, match="must be from 0, the image alone, to 1, the labels alone"):
        segmentation().overlay(opacity)


def test_no_file_lacks_the_last_bytes_where_a_disk_is_full(tmp_path, full_disk):
    """A short write is no error to Pillow, which writes JPEG files without Python."""
    segmented = segmentation(60, 80)
    for name, save in (("a.jpg", segmented.save_overlay), ("a.png", segmented.save_labels), ("a.npz", segmented.save)):
        save(tmp_path / name)
        size = (tmp_path / name).stat().st_size
        (tmp_path / name).unlink()
        with full_disk(size - 10), pytest.raises(OSError, match="File too large"):
            save(tmp_path / name)
        assert not list(tmp_path.iterdir())
