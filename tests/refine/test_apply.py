"""Refining a folder of predictions: with a preset, with a fitted MRF, again, and around bad files."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from deepmrf import MeanField
from deepmrf.cli import app
from deepmrf.data.colours import OKABE_ITO, distinct_colours
from deepmrf.data.labels import LabelSet
from deepmrf.predict.result import Segmentation
from deepmrf.refine.apply import refine
from deepmrf.refine.label_ids import LabelIds
from deepmrf.refine.opening import open_mrf, open_preset, read_label_file
from deepmrf.refine.predictions import PredictionFolder, open_prediction
from deepmrf.refine.report import FitReport
from deepmrf.refine.settings import FitSettings

SIZE = (24, 30)
LABELS = LabelSet(("left", "right", "other"), distinct_colours(3))


@pytest.fixture
def folders(tmp_path):
    """Four images of two halves, with predictions that are right but for a tenth of the pixels."""
    random = np.random.default_rng(0)
    truth = np.zeros(SIZE, np.uint8)
    truth[:, 15:] = 1
    for name in ("predictions", "images"):
        (tmp_path / name).mkdir()
    for number in range(4):
        noisy = np.where(random.random(SIZE) < 0.1, random.integers(0, 3, SIZE), truth).astype(np.uint8)
        Image.fromarray(noisy).save(tmp_path / "predictions" / f"{number}.png")
        Image.fromarray(np.where(truth[..., None] == 1, 220, 30).astype(np.uint8).repeat(3, 2)).save(
            tmp_path / "images" / f"{number}.jpg"
        )
    return tmp_path / "predictions", tmp_path / "images", tmp_path / "out", truth


def test_a_preset_needs_no_training(folders):
    predictions, images, out, truth = folders
    mrf, labels, _ = open_preset("dense-crf", predictions, images)
    assert len(labels) == 3
    calls = []
    report = refine(mrf, labels, predictions, images, out, progress=lambda *n: calls.append(n))
    assert report.done == ("0", "1", "2", "3")
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert report.kinds == ("label ids",)
    for path in out.iterdir():
        picture = Image.open(path)
        assert picture.mode == "P"
        assert picture.getpalette()[:9] == [c for colour in labels.colours for c in colour]
        assert (np.asarray(picture) == truth).mean() > 0.99
    with pytest.raises(ValueError, match="voc, irn"):
        open_preset("magic", predictions, images)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_fitted_folder_and_its_probabilities(folders, tmp_path, kind):
    predictions, images, out, _ = folders
    mrf = MeanField(3, window=5, contexts=2, context_size=3)
    torch.nn.init.normal_(mrf.label_contexts.weight, std=0.1)
    FitReport(mrf, "nothing", LABELS, {}, (), FitSettings(), "").save(tmp_path / "mrf")
    loaded, labels, label_ids = open_mrf(tmp_path / "mrf")
    assert (labels, label_ids) == (LABELS, None)
    refine(loaded, labels, predictions, images, out, probabilities=kind)
    log_p, _ = open_prediction(PredictionFolder(predictions).find("1"), 3)
    image = torch.from_numpy(np.array(Image.open(images / "1.jpg"))).permute(2, 0, 1)
    expected = mrf(log_p.tensor()[None], image[None])[0].exp()
    written, _ = open_prediction(PredictionFolder(out).find("1"), 3)
    torch.testing.assert_close(written.tensor().exp(), expected, atol=1e-3, rtol=0)
    assert (np.asarray(Image.open(out / "1.png")) == expected.argmax(0).numpy()).all()
    assert np.load(out / f"1.{kind}") is not None
    assert not list(out.glob(".*"))


def test_overlays_are_drawn_as_predict_draws_them(folders):
    predictions, images, out, _ = folders
    mrf = MeanField(3, window=3, contexts=0)
    refine(mrf, LABELS, predictions, images, out)
    assert len(refine(mrf, LABELS, predictions, images, out, overlays=True).done) == 4  # they were missing
    assert sorted(path.name for path in out.iterdir()) == sorted(
        f"{number}{ending}" for number in range(4) for ending in (".png", "_overlay.jpg")
    )
    with Image.open(out / "1.png") as label_map, Image.open(images / "1.jpg") as image:
        labels = np.array(label_map)
        drawn = Segmentation(labels, np.ones(SIZE, np.float16), np.array(image), LABELS)
        drawn.save_overlay(out.parent / "expected.jpg")
    assert (out / "1_overlay.jpg").read_bytes() == (out.parent / "expected.jpg").read_bytes()
    assert refine(mrf, LABELS, predictions, images, out, overlays=True).skipped == ("0", "1", "2", "3")
    (out / "2_overlay.jpg").unlink()
    assert refine(mrf, LABELS, predictions, images, out, overlays=True).done == ("2",)
    assert refine(mrf, LABELS, predictions, images, out).skipped == ("0", "1", "2", "3")


def test_labels_without_colours_get_those_of_predict(folders):
    predictions, images = folders[:2]
    assert open_preset("voc", predictions, images)[1].colours == OKABE_ITO[:3]
    own = [(9, 9, 9), (200, 0, 0), (0, 0, 200)]
    for path, colours in (("0.png", own), ("1.png", own[::-1])):
        picture = Image.open(predictions / path)
        picture.putpalette([value for colour in colours for value in colour])
        picture.save(predictions / path)
    labels = open_preset("voc", predictions, images)[1]  # the first label map brings its colours
    assert labels.colours == tuple(own)
    assert labels.names == ("label 0", "label 1", "label 2")
    grey = Image.open(predictions / "0.png")
    grey.putpalette([value for value in range(256) for _ in range(3)])
    grey.save(predictions / "0.png")
    assert open_preset("voc", predictions, images)[1].colours == OKABE_ITO[:3]


def test_what_is_done_is_skipped(folders):
    predictions, images, out, _ = folders
    mrf = MeanField(3, window=3, contexts=0)
    refine(mrf, LABELS, predictions, images, out)
    (out / "2.png").unlink()
    before = (out / "1.png").stat().st_mtime_ns
    again = refine(mrf, LABELS, predictions, images, out)
    assert again.done == ("2",)
    assert again.skipped == ("0", "1", "3")
    assert (out / "1.png").stat().st_mtime_ns == before
    assert len(refine(mrf, LABELS, predictions, images, out, overwrite=True).done) == 4
    more = refine(mrf, LABELS, predictions, images, out, probabilities="npy")  # their probabilities are missing
    assert len(more.done) == 4


def test_a_bad_file_does_not_stop_the_rest(folders):
    predictions, images, out, _ = folders
    (predictions / "0.png").write_bytes(b"broken")
    Image.new("RGB", (5, 5)).save(images / "2.jpg")
    (images / "3.jpg").unlink()
    report = refine(MeanField(3, window=3, contexts=0), LABELS, predictions, images, out)
    assert report.done == ("1",)
    assert [stem for stem, _ in report.failed] == ["0", "2"]
    assert "cannot be read" in report.failed[0][1]
    assert "30 x 24 pixels but its image" in report.failed[1][1]
    assert report.notes == ("1 of the predictions have no image: 3.",)
    assert [path.name for path in out.iterdir()] == ["1.png"]


def test_bad_calls_are_named(folders):
    predictions, images, out, _ = folders
    mrf = MeanField(3, window=3, contexts=0)
    with pytest.raises(ValueError, match="among the inputs"):
        refine(mrf, LABELS, predictions, images, predictions)
    with pytest.raises(ValueError, match="probabilities"):
        refine(mrf, LABELS, predictions, images, out, probabilities="txt")
    with pytest.raises(ValueError, match="4 labels"):
        refine(MeanField(4, window=3), LABELS, predictions, images, out)
    with pytest.raises(ValueError, match="3 labels, but 2 ids"):
        refine(mrf, LABELS, predictions, images, out, label_ids=LabelIds((4, 5)))
    with pytest.raises(ValueError, match="banana"):
        refine(mrf, LABELS, predictions, images, out, device="banana")
    out.write_text("a file")
    with pytest.raises(ValueError, match="is a file: give a folder for the results"):
        refine(mrf, LABELS, predictions, images, out)


def test_a_corrupt_archive_does_not_stop_the_rest(folders):
    predictions, images, out, _ = folders
    array = np.random.default_rng(0).random((3, *SIZE)).astype(np.float32)
    np.savez_compressed(predictions / "0.npz", array)
    content = bytearray((predictions / "0.npz").read_bytes())
    content[80:120] = b"x" * 40
    (predictions / "0.npz").write_bytes(content)
    with pytest.raises(zlib.error), np.load(predictions / "0.npz") as archive:
        archive["arr_0"]
    mrf, labels, _ = open_preset("dense-crf", predictions, images)
    report = refine(mrf, labels, predictions, images, out)
    assert report.done == ("1", "2", "3")
    assert "0.npz cannot be read as an array" in report.failed[0][1]


# ---- the command


def type_in(folders, *words):
    predictions, images, out, _ = folders
    common = ("--predictions", predictions, "--images", images, "-o", out)
    words = [str(word) for word in ("refine", *words, *common)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_labels_are_read_as_fit_reads_them(folders, tmp_path):
    predictions, _, out, truth = folders
    path = tmp_path / "other.json"
    path.write_text(
        "\ufeff" + json.dumps({"names": ["left", "right"], "ids": [4, 6], "ignore": None}), encoding="utf-8"
    )
    labels, label_ids = read_label_file(path)
    assert (labels.names, label_ids) == (("left", "right"), LabelIds((4, 6)))
    for file in predictions.iterdir():
        Image.fromarray(np.array([4, 6, 255], np.uint8)[np.asarray(Image.open(file))]).save(file)
    code, text = type_in(folders, "--preset", "dense-crf", "--labels", path)
    assert code == 0, text
    assert "ids of the masks: 4, 6." in text
    for file in out.iterdir():
        assert (np.asarray(Image.open(file)) == np.where(truth == 1, 6, 4)).mean() > 0.99
    path.write_text("{names")
    code, text = type_in(folders, "--preset", "dense-crf", "--labels", path)
    assert code == 2
    assert f"{path} cannot be used" in text


def test_a_fitted_mrf_takes_no_labels(folders, tmp_path):
    mrf = MeanField(3, window=3, contexts=0)
    FitReport(mrf, "nothing", LABELS, {}, (), FitSettings(), "").save(tmp_path / "mrf")
    (tmp_path / "labels.json").write_text(json.dumps(LABELS.to_dict()))
    code, text = type_in(folders, tmp_path / "mrf", "--labels", tmp_path / "labels.json")
    assert code == 2
    assert "leave --labels out" in text
    assert not folders[2].exists()


def test_the_device_is_checked_before_the_work(folders, monkeypatch):
    def work(*_):
        raise AssertionError("the files were read")

    monkeypatch.setattr("deepmrf.refine.opening.count_labels", work)
    code, text = type_in(folders, "--preset", "dense-crf", "--device", "banana")
    assert code == 2
    assert "device='banana' is unknown" in text
    assert not folders[2].exists()
