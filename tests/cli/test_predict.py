"""`deepmrf predict` as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import deepmrf
from deepmrf.cli import app
from deepmrf.data.labels import ANIMALS
from deepmrf.ops import registry as backends
from deepmrf.predict.pipeline import kernels_for
from deepmrf.predict.regions import find_regions

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture
def type_in(untaught):
    """type_in("predict", ...): in an empty folder, where "animals" is a model that has learned nothing."""

    def run(*words):
        result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    return run


def draw(*names, size=(40, 60)):
    rng = np.random.default_rng(len(names))
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(name)


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def results(folder="segmented"):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def test_one_picture(type_in):
    draw("cat.jpg")
    result = type_in("predict", "cat.jpg")
    assert result.exit_code == 0, result.output
    assert results() == ["cat.png", "cat_overlay.jpg"]
    lines = plain(result.stdout).strip().splitlines()
    assert lines[0].split() == ["class", "pixels", "confidence"]
    assert lines[1].split()[0] in ANIMALS.names
    assert lines[-1] == "Wrote segmented/cat.png and segmented/cat_overlay.jpg (to look at)."
    with Image.open("segmented/cat.png") as picture:
        assert (picture.mode, picture.size) == ("P", (60, 40))
    with Image.open("segmented/cat_overlay.jpg") as picture:
        assert picture.width >= 60
        assert picture.height > 40  # the legend
    result = type_in("predict", "cat.jpg", "--no-legend")  # the overlay is another one
    assert "Wrote" in result.stdout
    with Image.open("segmented/cat_overlay.jpg") as picture:
        assert picture.size == (60, 40)
    assert "1 there already" in type_in("predict", "cat.jpg", "--no-legend").stdout


def test_open_shows_the_overlay_or_the_folder(type_in, monkeypatch):
    opened = []
    monkeypatch.setattr("typer.launch", lambda path: opened.append(path) or 0)
    draw("cat.jpg", "dog.jpg")
    type_in("predict", "cat.jpg", "--open")
    type_in("predict", "cat.jpg", "--open")  # it was there already
    type_in("predict", "cat.jpg", "--open", "--no-overlay", "-o", "labels.png")
    type_in("predict", "cat.jpg", "dog.jpg", "--open", "-o", "out")
    assert opened == ["segmented/cat_overlay.jpg", "segmented/cat_overlay.jpg", "labels.png", "out"]
    monkeypatch.setattr("typer.launch", lambda path: 4)
    result = type_in("predict", "cat.jpg", "--open")
    assert result.exit_code == 0
    assert plain(result.stdout).splitlines()[-1] == (
        "segmented/cat_overlay.jpg could not be opened: this system names no program for it."
    )


@pytest.mark.parametrize(
    ("compiled", "images", "options", "expected"),
    [
        (False, 1, {"size": 256}, "torch"),
        (True, 1, {"size": 256}, None),  # the kernels are there
        (False, 2, {"size": 256}, None),  # it pays to compile them
        (False, 1, {"tile": 64}, None),
        (False, 1, {"size": 0}, None),  # as large as it is
        (False, 1, {"size": 4000}, None),
        (False, 1, {"size": 256, "scales": (1.0, 2.0)}, None),
    ],
)
def test_the_first_picture_waits_for_no_compiler(
    compiled, images, options, expected, tmp_path, monkeypatch, model_folder
):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(backends, "_forced", None)
    if compiled:
        (tmp_path / "gaussian_1").mkdir()
        (tmp_path / "gaussian_1" / "cpu_kernels.finish-283.py311.nbi").touch()
    segmenter = deepmrf.load(str(model_folder), device="cpu", **options)
    with kernels_for(segmenter, images):
        assert backends._forced == expected
    assert backends._forced is None


def test_out_may_be_the_label_map(type_in):
    draw("cat.jpg")
    result = type_in("predict", "cat.jpg", "-o", "deep/mine.png", "--no-overlay", "--probabilities")
    assert result.exit_code == 0, result.output
    assert results("deep") == ["mine.npz", "mine.png"]
    assert "Wrote deep/mine.png and deep/mine.npz." in result.stdout
    with np.load("deep/mine.npz") as file:
        np.testing.assert_array_equal(file["probabilities"].argmax(0).shape, (40, 60))
        assert file["probabilities"].dtype == np.float16
    assert type_in("predict", "cat.jpg", "cat.jpg", "-o", "mine.png").exit_code == 0  # one image, given twice
    draw("dog.jpg")
    refused = type_in("predict", "cat.jpg", "dog.jpg", "-o", "mine.png")
    assert refused.exit_code == 2
    assert "mine.png is one label map, but there are 2 images" in refused.output


def test_masks_in_black_and_white(type_in):
    draw("cat.jpg")
    result = type_in("predict", "cat.jpg", "--masks", "--no-overlay", "--json", "found.json")
    assert result.exit_code == 0, result.output
    labels = np.asarray(Image.open("segmented/cat.png"))
    masks = json.loads(Path("found.json").read_text())["images"][0]["masks"]
    assert set(masks) == {ANIMALS.names[label] for label in np.unique(labels) if label}
    assert results() == sorted(["cat.png", *(f"cat_{name}.png" for name in masks)])
    for name, path in masks.items():
        assert path == f"segmented/cat_{name}.png"
        np.testing.assert_array_equal(np.asarray(Image.open(path)), 255 * (labels == ANIMALS.names.index(name)))
        assert path in result.stdout
    assert "1 there already" in type_in("predict", "cat.jpg", "--masks", "--no-overlay").stdout


@pytest.mark.parametrize("option", ["--mask", "--class"])
def test_who_looks_for_masks_is_told_of_them(type_in, option):
    result = type_in("predict", "cat.jpg", option)
    assert result.exit_code == 2
    assert "--masks" in plain(result.output)


def test_many_pictures_and_a_second_run(type_in):
    draw("in/a/x.jpg", "in/b/x.jpg", "in/b/x.png", "in/y.jpg")
    result = type_in("predict", "in", "-r", "-o", "out", "--json", "out/found.json", "--batch", "2")
    assert result.exit_code == 0, result.output
    text = plain(result.stdout)
    assert "4 segmented: out." in text
    assert text.splitlines()[0].split() == ["class", "pixels", "confidence", "images"]
    stems = ["a/x", "b/x.jpg", "b/x.png", "y"]
    assert results("out") == sorted(["found.json", *[f"{s}{end}" for s in stems for end in (".png", "_overlay.jpg")]])
    content = json.loads(Path("out/found.json").read_text())
    assert content["classes"] == list(ANIMALS.names)
    assert sum(entry["share"] for entry in content["found"]) == pytest.approx(1, abs=1e-5)
    assert sorted(image["image"] for image in content["images"]) == [
        "in/a/x.jpg",
        "in/b/x.jpg",
        "in/b/x.png",
        "in/y.jpg",
    ]
    image = content["images"][0]
    assert (image["height"], image["width"]) == (40, 60)
    assert Path(image["labels"]).exists()
    labels = np.array(Image.open(image["labels"]))
    shares = {entry["class"]: entry["share"] for entry in image["found"]}
    assert shares[ANIMALS.names[labels[0, 0]]] == pytest.approx((labels == labels[0, 0]).mean(), abs=1e-5)
    again = type_in("predict", "in", "-r", "-o", "out")
    assert again.exit_code == 0
    assert "4 there already: out; --overwrite does them again." in plain(again.stdout)
    assert "4 segmented" in plain(type_in("predict", "in", "-r", "-o", "out", "--overwrite").stdout)


def test_every_option_together(type_in, model_folder):
    draw("x.png", size=(90, 150))
    words = ["--scales", "0.5", "1", "--flip", "--tile", "64", "--device", "cpu", "--size", "100", "--batch", "3"]
    result = type_in("predict", *words, "x.png", "-m", "animals", "-m", str(model_folder), "--probabilities")
    assert result.exit_code == 0, result.output
    with np.load("segmented/x.npz") as file:
        assert file["probabilities"].shape == (7, 90, 150)
    assert type_in("predict", "x.png", "--scales", "0.5,1", "-o", "two").exit_code == 0


def test_bad_files_are_listed_and_the_rest_is_done(type_in):
    draw("good.jpg")
    Path("empty.jpg").write_bytes(b"")
    Path("text.png").write_text("hello")
    result = type_in("predict", "good.jpg", "empty.jpg", "text.png", "gone.jpg", "*.bmp", "--json", "found.json")
    assert result.exit_code == 1
    text = plain(result.output)
    for says in (
        "empty.jpg cannot be read as an image (the file is empty); replace the file.",
        "text.png cannot be read as an image (its content is no image format that is known here); replace the file.",
        "gone.jpg is missing: give a file, a folder or a pattern",
        "*.bmp matches nothing",
        "1 segmented, 4 failed: segmented.",
    ):
        assert says in text
    assert len(json.loads(Path("found.json").read_text())["failed"]) == 4
    assert results() == ["good.png", "good_overlay.jpg"]


def test_nothing_to_do(type_in):
    Path("in").mkdir()
    result = type_in("predict", "in")
    assert result.exit_code == 1
    assert "in is a folder without images; the option recursive also searches the folders in it." in plain(
        result.output
    )
    assert "Nothing was segmented: 1 failed." in plain(result.output)
    assert not Path("segmented").exists()


def test_hostile_names_are_shown_safely(type_in):
    draw("[red]x.jpg")
    Path("two\nlines\x1b[31m.jpg").write_bytes(b"")
    os.close(os.open(b"\xff\xfe.jpg", os.O_CREAT))
    result = type_in("predict", ".")
    assert result.exit_code == 1
    assert "two lines?[31m.jpg cannot be read" in result.output
    assert "??.jpg cannot be read" in result.output
    assert results() == ["[red]x.png", "[red]x_overlay.jpg"]


def test_small_and_unsure_regions(type_in):
    draw("cat.png")
    names = {}
    for words in ((), ("--min-area", "4"), ("--min-area", "10%", "--min-confidence", "0.1"), ("--min-confidence", "1")):
        result = type_in("predict", "cat.png", "-o", "out", *words)
        assert result.exit_code == 0, result.output
        assert "Wrote" in result.stdout, "other settings, other results"
        with Image.open("out/cat.png") as label_map:
            names[words] = len(find_regions(np.array(label_map)).areas)
    counts = list(names.values())
    assert counts[0] > counts[1] > counts[2] >= counts[3] == 1
    assert "1 there already" in type_in("predict", "cat.png", "-o", "out", "--min-confidence", "1").stdout


def test_outlines_of_all_images_now_and_earlier(type_in):
    draw("in/a.png", "in/b.png")
    assert type_in("predict", "in/b.png", "-o", "out").exit_code == 0
    result = type_in("predict", "in", "-o", "out", "--coco", "coco/all.json", "--min-area", "9")
    assert result.exit_code == 0, result.output
    assert "Wrote the outlines of the regions to coco/all.json." in plain(result.stdout)
    first = Path("coco/all.json").read_bytes()
    assert [image["file_name"] for image in json.loads(first)["images"]] == ["a.png", "b.png"]
    again = type_in("predict", "in", "-o", "out", "--coco", "coco/all.json", "--min-area", "9")
    assert "2 there already" in again.stdout
    assert Path("coco/all.json").read_bytes() == first


def test_too_many_pixels(type_in):
    draw("large.png", size=(300, 400))
    result = type_in("predict", "large.png", "--max-pixels", "100000")
    assert result.exit_code == 1
    says = "large.png has 400 x 300 pixels, more than 0.1 million, and was not read; make it smaller"
    assert says in plain(result.output)


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ("--model", "animal"),
            "There is no model 'animal' (did you mean animals?): give a bundled one (animals), a folder",
        ),
        (("--model", "weights.pt"), "weights.pt is refused: files of this kind can run code"),
        (("--scales", "big"), "--scales big is no number"),
        (("--scales", "99"), "must be factors between 0.1 and 8"),
        (("--tile", "1"), "tile=1 must be a whole number of pixels, at least 64"),
        (("--device", "tpu"), "device='tpu' is unknown"),
        (("--batch", "0"), "batch=0 must be at least 1"),
        (("-o", "cat.jpg"), "cat.jpg is no PNG file, which label maps are: say cat.png, or a folder"),
        (("-o", "."), "cat.png is one of the images"),
        (("-o", "cat.mp4"), "cat.mp4 would be a video, but cat.jpg is an image: give a folder"),
        (("--labels", "maps"), "--labels is for videos: the label maps of images are written into --out"),
        (("--flow", "raft"), "--flow raft is unknown: choose dis-fast, dis or none"),
        (("--json", "folder"), "--json folder cannot be written: name a file, such as folder/found.json"),
        (("--min-area", "small"), "--min-area small is no area: give pixels, such as 50, or per cent, such as 0.1%."),
        (("--min-area", "100%"), "--min-area 100% is no area"),
        (("--min-area", "0.5"), "--min-area 0.5 is no area"),
        (("--min-confidence", "50"), "min_confidence=50.0 must be a probability, from 0 to 1"),
        (("--coco", "folder"), "--coco folder cannot be written: name a file, such as folder/found.json"),
        (("--device", "meta"), "device='meta' cannot be used here"),
    ],
)
def test_a_wrong_option_gets_one_sentence(type_in, words, says):
    draw("cat.jpg", "cat.png")
    Path("folder").mkdir()
    Path("weights.pt").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    inputs = ("cat.png",) if words == ("-o", ".") else ("cat.jpg",)
    result = type_in("predict", *inputs, *words)
    assert result.exit_code == 2, result.output
    assert says in plain(result.output)
    assert len(result.output.strip().splitlines()) == 1
    assert not Path("ran").exists()


@pytest.mark.parametrize("words", [("cat.jpg",), ("*.jpg",), (".", "-o", "out")], ids=" ".join)
def test_images_need_nothing_of_videos(tmp_path, model_folder, words):
    """Imported, it would take seconds."""
    draw(str(tmp_path / "cat.jpg"))
    code = f"""
import sys
from deepmrf.cli import app
app({["predict", *words, "--model", str(model_folder), "--device", "cpu"]}, standalone_mode=False)
print(*{{"torchmetrics", "av", "cv2"}} & {{*sys.modules}}, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "1 segmented" in done.stdout or "Wrote" in done.stdout
    assert not done.stderr.split()


def test_videos_go_to_their_own_command(type_in, monkeypatch):
    seen = []

    def predict_video(path, segmenter, out, overwrite, **_):
        seen.append((path, out, overwrite))
        return 0

    monkeypatch.setattr("deepmrf.cli.video.predict_video", predict_video)
    Path("clip.MP4").write_bytes(b"x")
    assert type_in("predict", "clip.MP4", "-o", "out").exit_code == 0
    assert seen == [(Path("clip.MP4"), Path("out"), False)]
    draw("cat.jpg")
    assert type_in("predict", "clip.MP4", "cat.jpg", "-o", "out").exit_code == 0
    assert results("out") == ["cat.png", "cat_overlay.jpg"]


def test_help_teaches_with_examples(type_in):
    text = plain(type_in("predict", "--help").output)
    for says in ("deepmrf predict cat.jpg", "EXIF", "first frame", "--max-pixels", "exit code"):
        assert says in text
    assert "deepmrf predict" in plain(type_in("--help").output)


def test_ctrl_c_as_a_user_presses_it(tmp_path, model_folder):
    for number in range(60):
        draw(str(tmp_path / f"in/{number:02}.png"))
    words = [sys.executable, "-m", "deepmrf", "predict", "in", "-m", str(model_folder), "-o", "out", "--device", "cpu"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=alone
    )
    end = time.monotonic() + 90
    while not list((tmp_path / "out").glob("*.png")) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert "Traceback" not in output
    done = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert not [name for name in done if name.endswith(".part")]
    for path in (tmp_path / "out").glob("*.png"):
        with Image.open(path) as picture:
            picture.load()
    if process.returncode != 0:  # it may have been quicker than the finger
        assert process.returncode == 130
        assert "the same command goes on from here" in output


def test_ctrl_c_while_outlines_are_drawn(type_in, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    draw("cat.jpg")
    monkeypatch.setattr("deepmrf.predict.coco.find_polygons", interrupted)
    result = type_in("predict", "cat.jpg", "--coco", "coco.json")
    assert result.exit_code == 130
    assert "Interrupted: what is written is complete, and the same command goes on from here." in result.output
    assert results() == ["cat.png", "cat_overlay.jpg"]
    assert not Path("coco.json").exists()


def test_names_that_look_like_markup_or_cannot_be_written(tmp_path, monkeypatch, model_folder):
    monkeypatch.chdir(tmp_path)
    config = json.loads((model_folder / "config.json").read_text())
    config["labels"]["names"] = ["[bold]", "[/x]", *config["labels"]["names"][2:]]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())
    name = "\u043a\u043e\u0442.png"
    picture = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / name)
    words = ["predict", name, "-m", str(folder), "-o", "out", "--device", "cpu"]
    done = CliRunner(charset="ascii").invoke(app, words, env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "Wrote out/???.png and out/???_overlay.jpg (to look at)."
    with Image.open(tmp_path / "out" / name) as label_map:
        shown = [config["labels"]["names"][n] for n in sorted(set(np.array(label_map).ravel().tolist()))]
    assert {"[bold]", "[/x]"} & set(shown), "the test needs one of them"
    assert all(label in done.stdout for label in shown)


def test_pipes_and_devices_are_skipped_with_a_sentence(type_in, pipe):
    draw("photos/b.png")
    pipe("photos/a.png")
    pipe("photos/c_overlay.jpg")
    Path("photos/d.jpg").symlink_to("/dev/zero")
    result = type_in("predict", "photos", "--json", "/dev/null")
    assert result.exit_code == 1
    sentence = "photos/a.png cannot be read as an image (it is no regular file); replace the file."
    assert f"{sentence} (likewise photos/c_overlay.jpg, photos/d.jpg)" in plain(result.output)
    assert "1 segmented, 3 failed" in plain(result.output)
    assert results() == ["b.png", "b_overlay.jpg"]
    assert Path("/dev/null").is_char_device()
    assert type_in("predict", "photos/a.png").exit_code == 1


def test_a_pipe_in_the_place_of_a_result_is_not_read(type_in, pipe):
    draw("a.png")
    Path("segmented").mkdir()
    pipe("segmented/a.png")
    result = type_in("predict", "a.png")
    assert "segmented/a.png is there, and deepmrf predict did not write it" in plain(result.output)


def test_workers_are_for_ray(type_in):
    result = type_in("predict", "cat.jpg", "--workers", "2")
    assert result.exit_code == 2
    assert "--workers is for --ray: add --ray, or leave --workers out." in plain(result.output)
