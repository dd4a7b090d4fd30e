"""What results say of themselves: a second run, other models, other images, other people's files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.models import names as models
from deepmrf.predict.coco import write_coco
from deepmrf.predict.files import find_images
from deepmrf.predict.notes import Note, image_key, is_label_map, is_result, not_ours, read_note
from deepmrf.predict.pipeline import Options, segment_files
from deepmrf.predict.segmenter import load

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def segmenter(model_folder):
    return load(model_folder, device="cpu")


@pytest.fixture(scope="module")
def mirrored(model_folder):
    return load(model_folder, device="cpu", flip=True)


def draw(*names, size=(9, 12), seed=0):
    rng = np.random.default_rng(seed)
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(name)


def do(segmenter, *inputs, out="out", **options):
    return segment_files(segmenter, inputs, Path(out), Options(**options))


def test_a_note_is_read_as_it_was_written(segmenter):
    draw("x.jpg")
    do(segmenter, "x.jpg")
    note, size = read_note(Path("out/x.png"))
    assert (note.by, note.of, note.beside) == (segmenter.identity, image_key(Path("x.jpg")), ("overlay",))
    assert size == (9, 12)
    result = segmenter("x.jpg")
    pixels, sums = result.totals()
    assert note.pixels == tuple(pixels)
    np.testing.assert_allclose(note.confidences, sums, atol=1e-3)
    for text in ("", "{}", "[1]", "deepmrf of old", '{"by":1,"of":2,"beside":3,"pixels":[],"confidences":[]}'):
        result.save_labels(Path("odd.png"), text)
        assert read_note(Path("odd.png")) is None
    assert read_note(Path("x.jpg")) is None
    assert json.loads(Note("a", "b", (), (1,), (0.5,)).text())["pixels"] == [1]


def test_another_image_of_the_same_name_is_done(segmenter):
    draw("a/x.jpg")
    draw("b/x.jpg", size=(20, 14), seed=1)
    do(segmenter, "a/x.jpg")
    os.utime("b/x.jpg", (1e9, 1e9))  # older than the result
    assert [entry.path for entry in do(segmenter, "b/x.jpg").done] == [Path("b/x.jpg")]
    with Image.open("out/x.png") as label_map:
        assert label_map.size == (14, 20)
    assert do(segmenter, "b/x.jpg").skipped == [Path("b/x.jpg")]


def test_an_older_file_moved_into_its_place_is_done(segmenter):
    draw("x.jpg")
    draw("other.jpg", seed=1)
    os.utime("other.jpg", (1e9, 1e9))
    do(segmenter, "x.jpg")
    os.replace("other.jpg", "x.jpg")
    assert len(do(segmenter, "x.jpg").done) == 1


def test_what_lies_beside_must_be_of_the_same_model(segmenter, mirrored):
    draw("x.jpg")
    do(segmenter, "x.jpg", probabilities=True)
    old = Path("out/x.npz").read_bytes()
    do(mirrored, "x.jpg", overlay=False)
    assert Path("out/x.npz").read_bytes() == old, "it was not asked for"
    assert len(do(mirrored, "x.jpg", probabilities=True).done) == 1
    assert Path("out/x.npz").read_bytes() != old
    assert do(mirrored, "x.jpg", overlay=False).skipped == [Path("x.jpg")], "less than there is"


@pytest.mark.parametrize("name", ["x.png", "x_overlay.jpg", "x.npz"])
def test_files_of_others_are_not_replaced(segmenter, name):
    draw("in/x.jpg", "in/y.jpg", "out/x.jpg")
    os.replace("out/x.jpg", Path("out", name))
    before = Path("out", name).read_bytes()
    report = do(segmenter, "in", probabilities=True)
    assert [entry.path.name for entry in report.done] == ["y.jpg"]
    [(path, why)] = report.failed
    assert path == Path("in/x.jpg")
    assert why == f"out/{name} is there, and deepmrf predict did not write it: overwrite it, or choose another folder."
    assert Path("out", name).read_bytes() == before
    assert len(do(segmenter, "in", probabilities=True, overwrite=True).done) == 2


def test_files_of_others_beside_a_result_are_not_replaced(segmenter):
    draw("x.jpg")
    do(segmenter, "x.jpg", overlay=False)
    np.savez_compressed("out/x.npz", probabilities=np.zeros((2, 3, 4)))
    [(_, why)] = do(segmenter, "x.jpg", overlay=False, probabilities=True).failed
    assert why.startswith("out/x.npz is there, and deepmrf predict did not write it")
    do(segmenter, "x.jpg", overlay=False, probabilities=True, overwrite=True)
    with np.load("out/x.npz") as file:
        np.testing.assert_allclose(
            file["probabilities"], segmenter("x.jpg", probabilities=True).probabilities, atol=1e-3
        )
    draw("out/x_overlay.jpg")
    assert len(do(segmenter, "x.jpg", probabilities=True).failed) == 1


def test_what_a_crash_left_is_replaced(segmenter):
    draw("x.jpg")
    do(segmenter, "x.jpg", probabilities=True)
    Path("out/x.png").unlink()  # it is written last
    assert not_ours(Path("out/x.png"), [Path("out/x_overlay.jpg"), Path("out/x.npz")]) is None
    assert len(do(segmenter, "x.jpg", probabilities=True).done) == 1
    for name in ("x.png", "x_overlay.jpg", "x.npz"):
        Path("out", name).write_bytes(b"")
    assert len(do(segmenter, "x.jpg", probabilities=True).done) == 1


def test_results_are_no_images(segmenter):
    draw("x.jpg", "y.png", "deep/z.jpg", "sea_overlay.jpg")
    do(segmenter, "x.jpg", out=".")  # among the images
    assert sorted(str(entry.path) for entry in find_images(["."], recursive=True)[0]) == [
        "deep/z.jpg",
        "sea_overlay.jpg",
        "x.jpg",
        "y.png",
    ]
    assert [str(entry.path) for entry in find_images(["x.png"])[0]] == []
    assert is_result(Path("x.png"))
    assert is_result(Path("x_overlay.jpg"))
    assert not any(is_result(Path(name)) for name in ("x.jpg", "y.png", "sea_overlay.jpg", "missing.png"))
    assert not is_label_map(Path("x.jpg"))
    [(path, why)] = find_images(["x.png"])[1]
    assert (path, why) == (Path("x.png"), "x.png is a result of deepmrf: give the images themselves.")


@pytest.mark.parametrize(
    "inputs, out",
    [
        (["g/*"], "g/segmented"),
        (["g/x.jpg", "g/y.jpg", "g/segmented"], "g/segmented"),
        (["g/**/*.jpg"], "g/segmented"),
        (["g/*.jpg"], "g"),
    ],
)
def test_a_pattern_may_match_the_results(segmenter, inputs, out):
    draw("g/x.jpg", "g/y.jpg")
    Path("g/segmented").mkdir()
    first = do(segmenter, *inputs, out=out)
    assert (len(first.done), first.failed) == (2, [])
    second = do(segmenter, *inputs, out=out)
    assert sorted(map(str, second.skipped)) == ["g/x.jpg", "g/y.jpg"]
    assert (second.done, second.failed) == ([], [])


def test_a_folder_of_images_is_no_place_for_results(segmenter):
    draw("g/x.jpg", "h/y.jpg")
    with pytest.raises(ValueError, match="would be written among the images in g"):
        do(segmenter, "g", "h", out="g")


def test_a_second_run_tells_what_the_first_found(tmp_path, monkeypatch, model_folder):
    monkeypatch.setattr(models, "PRETRAINED", model_folder.parent)
    draw("in/x.jpg", "in/y.jpg", size=(40, 60))
    words = ["predict", "in", "-m", model_folder.name, "-o", "out", "--json", "new/found.json"]

    def run():
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "TERM": "dumb"})
        assert result.exit_code == 0, result.output
        return result.output.splitlines(), json.loads(Path("new/found.json").read_text())

    table, facts = run()
    again, later = run()
    assert again[:-1] == table[:-1]
    assert again[-1] == "2 there already: out; --overwrite does them again."
    assert later["skipped"] == ["in/x.jpg", "in/y.jpg"]
    for first, second in zip((facts, *facts["images"]), (later, *later["images"]), strict=True):
        assert [row["class"] for row in first["found"]] == [row["class"] for row in second["found"]]
        for row, same in zip(first["found"], second["found"], strict=True):
            assert row == pytest.approx(same, abs=1e-4)
    assert [image["labels"] for image in later["images"]] == ["out/x.png", "out/y.png"]


def test_a_large_result_is_done_and_its_outlines_are_drawn(segmenter, monkeypatch):
    """Above Pillow's limit on pixels, which is for files of strangers."""
    draw("a.png")
    assert len(do(segmenter, "a.png").done) == 1
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9 * 12 // 4)
    report = do(segmenter, "a.png")
    assert (len(report.done), len(report.earlier)) == (0, 1)
    write_coco(Path("regions.json"), report.images, segmenter.labels)
    assert json.loads(Path("regions.json").read_text())["annotations"]
