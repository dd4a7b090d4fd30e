"""Predictions, images and results of `refine` at URLs: the files of local folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data.labels import LabelSet
from deepmrf.layers import MeanField
from deepmrf.refine import remote
from deepmrf.refine.apply import refine
from deepmrf.refine.remote import mirrored_folders

pytestmark = pytest.mark.usefixtures("plain_torch")

MRF, LABELS = MeanField(3, window=5, context_size=3), LabelSet(("a", "b", "c"))


@pytest.fixture
def folders(tmp_path, monkeypatch, memory):
    """Pictures in "in" and predictions of three kinds in "p", both also at memory://."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for folder in ("in", "p", "p/parts"):
        Path(folder).mkdir()
    for name in ("array", "parts", "ids", "small"):
        Image.fromarray(random.integers(0, 256, (8, 9, 3), dtype=np.uint8)).save(f"in/{name}.png")
    np.save("p/array.npy", torch.rand(3, 8, 9).softmax(0).numpy())
    np.save("p/small.npy", np.zeros((3, 2, 2), np.float32))
    for label in range(3):
        Image.fromarray(random.integers(0, 256, (8, 9), dtype=np.uint8)).save(f"p/parts/{label}.png")
    Image.fromarray(random.integers(0, 3, (8, 9), dtype=np.uint8)).save("p/ids.png")
    Image.fromarray(random.integers(0, 256, (8, 9), dtype=np.uint8)).save("p/ids_confidence.png")
    for folder in ("in", "p"):
        memory.put(folder, f"/{folder}", recursive=True)
    return memory


def run(predictions="memory://p", images="memory://in", out="memory://out", **options):
    with mirrored_folders(predictions, images, out) as paths:
        return refine(MRF, LABELS, *paths, run=paths.run, **options)


def test_the_files_and_the_report_of_local_folders(folders):
    expected = refine(MRF, LABELS, "p", "in", "out", probabilities="npy", overlays=True)
    report = run(probabilities="npy", overlays=True)
    files = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    assert {path.rpartition("/")[2]: folders.cat_file(path) for path in folders.find("/out")} == files
    assert len(files) == 9
    assert (sorted(report.done), report.kinds) == (sorted(expected.done), expected.kinds)
    assert report.pixels == expected.pixels
    [(stem, reason)] = report.failed
    assert stem == "small"
    assert "The prediction memory://p/small.npy is 2 x 2 pixels but its image memory://in/small.png" in reason


def test_a_second_run_fetches_only_what_is_not_done(folders, monkeypatch):
    run()
    folders.rm_file("/out/ids.png")
    fetched = []
    monkeypatch.setattr(remote, "fetch", lambda url, path, fetch=remote.fetch: fetched.append(url) or fetch(url, path))
    report = run()
    assert report.done == ("ids",)
    assert report.skipped == ("array", "parts")
    assert sorted({url.rpartition("/")[2] for url in fetched}) == [
        "ids.png",
        "ids_confidence.png",
        "small.npy",
        "small.png",
    ]
    assert len(run(overwrite=True).done) == 3


def test_an_image_is_done_when_all_of_it_is_uploaded(folders, monkeypatch):
    def upload(path, url, upload=remote.upload):
        if url.endswith("array.npy"):
            raise OSError(f"{url} could not be written.")
        upload(path, url)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", upload)
        assert dict(run(probabilities="npy").failed)["array"] == "memory://out/array.npy could not be written"
    assert "/out/array.png" not in folders.find("/out")
    assert run(probabilities="npy").done == ("array",)


def test_some_folders_are_local(folders):
    assert len(run("p", "in", "memory://out").done) == 3
    assert len(run("memory://p", "in", "here").done) == 3
    assert Path("here/array.png").read_bytes() == folders.cat_file("/out/array.png")


def type_in(*words):
    words = ["refine", "--images", "memory://in", "-o", "memory://out", *words]
    return CliRunner().invoke(app, words, env={"COLUMNS": "300", "TERM": "dumb"})


def test_the_command(folders):
    Path("labels.json").write_text(json.dumps({"names": ["a", "b", "c"]}))
    result = type_in("--preset", "voc", "--predictions", "memory://p", "--labels", "labels.json")
    assert result.exit_code == 1
    assert "3 refined, 0 there already, 1 failed: memory://out." in result.output
    result = type_in("--preset", "voc", "--predictions", "memory://p")
    assert "A preset does not read predictions at URLs to count labels: give --labels labels.json." in result.output
    result = type_in("--preset", "voc", "--predictions", "memory://gone", "--soft-mask")
    assert "memory://gone does not exist; give the folder with the predictions" in result.output


def test_volumes_are_left_to_local_folders(folders):
    folders.pipe("/in/x.nii.gz", b"")
    with pytest.raises(ValueError, match="URLs are for pictures"):
        run()
