"""Images and results at URLs: the files and reports of local folders, and nothing believed done that is not."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.predict import remote
from deepmrf.predict.notes import FIELD
from deepmrf.predict.pipeline import Options, segment_files
from deepmrf.predict.remote import segment_anywhere
from deepmrf.predict.segmenter import load

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture
def pictures(tmp_path, monkeypatch, memory):
    """Three pictures and a file that is none, both in the folder "in" and at memory://in."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    Path("in/deep").mkdir(parents=True)
    for name in ("a.png", "b.jpg", "deep/c.png"):
        Image.fromarray(random.integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(f"in/{name}")
    Path("in/bad.png").write_text("no picture")
    memory.put("in", "/in", recursive=True)
    return memory


@pytest.fixture
def segmenter(model_folder):
    return load(model_folder, device="cpu")


def run(segmenter, inputs=("memory://in",), out="memory://out", **options):
    return segment_anywhere(segmenter, list(inputs), out, recursive=True, options=Options(**options))


def without_key(content):
    """A result, without what its note says of the image's name and date."""
    if not content.startswith(b"\x89PNG"):
        return content
    with Image.open(io.BytesIO(content)) as picture:
        return np.asarray(picture).tolist(), picture.getpalette(), json.loads(picture.info[FIELD]) | {"of": ""}


def results(memory, folder="/out"):
    return {path.removeprefix(f"{folder}/"): memory.cat_file(path) for path in memory.find(folder)}


def test_the_files_and_the_report_of_local_folders(pictures, segmenter):
    expected = segment_files(segmenter, ["in"], Path("out"), Options(probabilities=True), recursive=True)
    report = run(segmenter, probabilities=True)
    files = {str(path.relative_to("out")): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    uploaded = results(pictures)
    assert uploaded.keys() == files.keys()
    for name, content in files.items():
        assert without_key(uploaded[name]) == without_key(content)
    known = str(expected.to_dict()).replace("'in/", "'memory://in/").replace("'out/", "'memory://out/")
    assert str(report.to_dict()) == known
    assert [str(path) for path, _ in report.failed] == ["memory://in/bad.png"]


def test_a_second_run_fetches_only_what_has_changed(pictures, segmenter, monkeypatch):
    run(segmenter)
    before = results(pictures)
    fetched = []
    monkeypatch.setattr(remote, "fetch", lambda url, path, fetch=remote.fetch: fetched.append(url) or fetch(url, path))
    report = run(segmenter)
    assert (len(report.earlier), len(report.done), fetched) == (3, 0, ["memory://in/bad.png"])
    assert results(pictures) == before
    pictures.pipe("/in/b.jpg", Path("in/a.png").read_bytes())
    report = run(segmenter)
    assert [image.path for image in report.done] == ["memory://in/b.jpg"]
    assert len(run(segmenter, probabilities=True).done) == 3, "other results are wanted"
    assert len(run(segmenter, probabilities=True, legend=False).done) == 3


@pytest.mark.parametrize("broken", ["a.png", "a_overlay.jpg", "a.npz"])
def test_an_image_is_done_when_all_of_it_is_uploaded(pictures, segmenter, monkeypatch, broken):
    order = []

    def upload(path, url, upload=remote.upload):
        order.append(url)
        if url == f"memory://out/{broken}":
            raise OSError(f"{url} could not be written.")
        upload(path, url)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", upload)
        report = run(segmenter, probabilities=True)
    assert [str(path) for path, _ in report.failed] == ["memory://in/bad.png", "memory://in/a.png"]
    assert "/out/a.png" not in pictures.find("/out")
    labels = [url for url in order if url.endswith(".png")]
    assert all(order.index(f"{url[:-4]}{end}") < order.index(url) for url in labels[1:] for end in (".npz",))
    again = run(segmenter, probabilities=True)
    assert [image.path for image in again.done] == ["memory://in/a.png"]
    assert len(again.earlier) == 2


def test_files_of_others_stay(pictures, segmenter):
    pictures.pipe({"/out/a.png": b"mine", "/out/b.npz": b"mine, too, and longer than a comment"})
    report = run(segmenter, probabilities=True)
    reasons = dict(report.failed)
    assert "memory://out/a.png is there, and deepmrf predict did not write it" in reasons["memory://in/a.png"]
    assert "memory://out/b.npz is there" in reasons["memory://in/b.jpg"]
    assert pictures.cat_file("/out/a.png") == b"mine"
    assert len(run(segmenter, probabilities=True, overwrite=True).done) == 3


def test_local_images_and_results_beside_urls(pictures, segmenter):
    assert len(run(segmenter, ["in"]).done) == 3
    assert len(run(segmenter, ["in"]).earlier) == 3
    report = run(segmenter, out="here")
    assert report.done[0].files.labels == Path("here/a.png")
    assert Path("here/deep/c.png").is_file()
    assert len(run(segmenter, out="file://" + str(Path("here").resolve())).earlier) == 3


def test_results_are_no_images(pictures, segmenter):
    run(segmenter)
    pictures.put("in/a.png", "/in/a.png")
    report = run(segmenter, ["memory://in", "memory://out"], "memory://new")
    assert len(report.done) == 3
    assert sum("is a result of deepmrf" in reason for _, reason in report.failed) == 6
    with pytest.raises(ValueError, match="The results would be written among the images in memory://in: choose"):
        run(segmenter, out="memory://in")
    nested = run(segmenter, out="memory://in/out")
    assert len(nested.done) == 3
    assert len(run(segmenter, out="memory://in/out").earlier) == 3


def type_in(*words):
    return CliRunner().invoke(app, ["predict", *map(str, words)], env={"COLUMNS": "300", "TERM": "dumb"})


def test_the_command(pictures, model_folder):
    options = ("-r", "--model", model_folder, "--json", "found.json", "--coco", "coco.json")
    local = type_in("in", "-o", "out", *options)
    expected = Path("coco.json").read_text()
    result = type_in("memory://in", "-o", "memory://out", *options)
    assert result.exit_code == local.exit_code == 1
    assert result.output.replace("memory://", "") == local.output
    assert Path("coco.json").read_text() == expected
    images = json.loads(Path("found.json").read_text())["images"]
    assert images[0]["labels"] == "memory://out/a.png"
    single = type_in("memory://in/*.jpg", "-o", "memory://out/single.png", "--model", model_folder)
    assert "Wrote memory://out/single.png and memory://out/single_overlay.jpg (to look at)." in single.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["memory://gone"], "memory://gone is missing: give a file, a folder or a pattern"),
        (["memory://in", "in"], "Some of the inputs are URLs, others files of this machine"),
        (["memory://in/x.mp4"], "memory://in/x.mp4 is a video, which is not read from or written to URLs"),
        (["in", "-o", "memory://out.mp4"], "memory://out.mp4 is a video"),
        (["in", "-o", "memory://out", "--open"], "--open shows files of this machine"),
        (["in", "--json", "memory://x/found.json"], "--json is written on this machine"),
        (["in", "-o", "memory://in/a.png/out"], "memory://in/a.png/out could not be written"),
        (["memory://in", "-o", "memory://x.jpg"], "memory://x.jpg is no PNG file"),
        (["memory://in", "-o", "memory://x.png"], "memory://x.png is one label map, but there are 3 images"),
        (["nonsense://in"], "nonsense://in cannot be opened (Protocol not known: nonsense)"),
    ],
)
def test_what_cannot_be_is_one_sentence(pictures, model_folder, words, sentence):
    result = type_in(*words, "--model", model_folder)
    assert result.exit_code in (1, 2)
    assert sentence in result.output
    assert "deepmrf-" not in result.output, "no name of a temporary folder"
    assert "Traceback" not in result.output
