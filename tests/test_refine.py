"""Refining a folder of predictions: with a preset, with a fitted MRF, again, and around bad files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from deepmrf import MeanField
from deepmrf.data.labels import LabelSet, distinct_colours
from deepmrf.fit import FitReport, FitSettings, save_mrf
from deepmrf.predictions import read_prediction
from deepmrf.refine import open_mrf, open_preset, refine

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
    mrf, labels = open_preset("dense-crf", predictions, images, None)
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
    with pytest.raises(ValueError, match="dense-crf"):
        open_preset("magic", predictions, images, None)


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_fitted_folder_and_its_probabilities(folders, tmp_path, kind):
    predictions, images, out, _ = folders
    made = MeanField(3, window=5, contexts=2, context_size=3)
    torch.nn.init.normal_(made.label_contexts.weight, std=0.1)
    save_mrf(FitReport(made, "nothing", LABELS, {}, (), FitSettings(), ""), tmp_path / "mrf")
    mrf, labels = open_mrf(tmp_path / "mrf")
    assert labels == LABELS
    refine(mrf, labels, predictions, images, out, probabilities=kind)
    log_p = read_prediction(predictions, "1", 3)
    image = torch.from_numpy(np.array(Image.open(images / "1.jpg"))).permute(2, 0, 1)
    expected = made(log_p[None], image[None])[0].exp()
    torch.testing.assert_close(read_prediction(out, "1", 3).exp(), expected, atol=1e-3, rtol=0)
    assert (np.asarray(Image.open(out / "1.png")) == expected.argmax(0).numpy()).all()
    assert np.load(out / f"1.{kind}") is not None
    assert not list(out.glob(".*"))


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
