"""Finding image files, and the line that reads, computes and writes them."""

from __future__ import annotations

import errno
import os
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepmrf.predict import files, pipeline
from deepmrf.predict.files import find_images, output_folder
from deepmrf.predict.pipeline import Options, segment_files, segment_images
from deepmrf.predict.segmenter import load

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture(scope="module")
def segmenter(model_folder):
    return load(model_folder, device="cpu")


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """draw(name, ...): small images of noise, in the current folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)

    def make(*names, size=(9, 12)):
        for name in names:
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
            image.save(path, format="PNG" if path.suffix.lower() not in (".jpg", ".jpeg", ".gif") else None)
        return [Path(name) for name in names]

    return make


def targets(inputs, **options):
    images, failed = find_images(inputs, **options)
    assert not failed
    return {str(image.path): image.target for image in images}


def test_files_folders_and_patterns(draw):
    draw("a/x.jpg", "a/y.PNG", "a/.hidden.png", "a/deep/z.webp", "b/x.jpg")
    Path("a/notes.txt").write_text("no image")
    assert targets(["a"]) == {"a/x.jpg": "x", "a/y.PNG": "y"}
    assert targets(["a"], recursive=True) == {"a/x.jpg": "x", "a/y.PNG": "y", "a/deep/z.webp": "deep/z"}
    assert targets(["a/x.jpg"]) == {"a/x.jpg": "x"}
    assert targets(["*/x.jpg"]) == {"a/x.jpg": "a/x", "b/x.jpg": "b/x"}
    assert targets(["**/*.webp"]) == {"a/deep/z.webp": "z"}
    assert targets(["a", "b"]) == {"a/x.jpg": "a/x", "a/y.PNG": "a/y", "b/x.jpg": "b/x"}
    assert targets(["a/notes.txt"]) == {"a/notes.txt": "notes.txt"}  # named: tried


def test_each_once(draw):
    draw("a/x.jpg", "a/y.jpg")
    inputs = ["a/y.jpg", "a", "./a/x.jpg", "a/*.jpg", os.path.abspath("a/y.jpg")]
    assert list(targets(inputs)) == ["a/y.jpg", "a/x.jpg"]


def test_results_do_not_collide(draw):
    draw("x.jpg", "x.png", "X.gif", "y.jpg", "x.jpg.png")
    names = targets(["."])
    assert names["y.jpg"] == "y"
    assert len({name.casefold() for name in names.values()}) == 5
    assert names["x.png"] == "x.png"


def test_a_name_that_exists_is_no_pattern(draw):
    strange = [
        "a[1].jpg",
        "b*.jpg",
        "what?.png",
        "two\nlines.png",
        "ü 貓 🐈.jpg",
        "-o.png",
        "'q' \"q\".png",
        "#%s{0}.png",
    ]
    draw(*strange, "a1.jpg", "b2.jpg")
    for name in strange:
        assert list(targets([name])) == [name]
    assert sorted(targets(["b*.jp?"])) == ["b*.jpg", "b2.jpg"]


def test_names_too_long_are_cut(draw, segmenter):
    long = "ü" * 120 + "a.png"  # 246 bytes
    draw(long, "ü" * 120 + "b.png")
    images, _ = find_images(["."])
    assert len({image.target for image in images}) == 2
    report = segment_images(segmenter, images, Path("out"))
    assert len(report.done) == 2, report.failed


def test_what_is_not_there_is_told(draw, tmp_path):
    draw("a/deep/x.jpg")
    _, failed = find_images(["gone.jpg", "*.bmp", "a"])
    sentences = [why for _, why in failed]
    assert "gone.jpg is missing" in sentences[0]
    assert "*.bmp matches nothing" in sentences[1]
    assert sentences[2] == "a is a folder without images; the option recursive also searches the folders in it."


def test_the_results_are_not_looked_for_among_the_images(draw):
    draw("x.jpg", "out/x.png", "out/x_overlay.jpg")
    assert targets(["."], recursive=True, out=Path("out")) == {"x.jpg": "x"}
    with pytest.raises(ValueError, match="would be written among the images"):
        find_images(["out"], out=Path("./out"))


def test_circles_of_links_end(draw):
    draw("a/x.jpg")
    Path("a/again").symlink_to("..", target_is_directory=True)
    Path("a/self.jpg").symlink_to("self.jpg")
    images, failed = find_images(["a"], recursive=True)
    assert sorted(str(image.path) for image in images) == ["a/self.jpg", "a/x.jpg"]
    assert not failed


def test_one_label_map_may_be_named(draw):
    draw("x.jpg", "y.jpg")
    images, _ = find_images(["x.jpg"])
    [named], folder = output_folder(images, Path("deep/labels.png"))
    assert (named.target, folder) == ("labels", Path("deep"))
    assert output_folder(images, Path("out")) == (images, Path("out"))
    with pytest.raises(ValueError, match=r"labels\.png is one label map, but there are 2 images"):
        output_folder(find_images(["."])[0], Path("labels.png"))
    for wrong in ("labels.jpg", "labels.TIF", "labels.npz"):
        with pytest.raises(ValueError, match=r"is no PNG file, which label maps are: say labels\.png, or a folder"):
            output_folder(images, Path(wrong))
    Path("2026.jpg").mkdir()
    assert output_folder(images, Path("2026.jpg")) == (images, Path("2026.jpg"))
    assert output_folder(images, Path("run.1")) == (images, Path("run.1"))


# ---- the line


def result_names(folder="out"):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def test_a_folder_is_segmented(draw, segmenter):
    draw("in/a/x.jpg", "in/b/x.jpg", "in/b/x.png")
    images, _ = find_images(["in"], recursive=True)
    calls = []
    report = segment_images(
        segmenter, images, Path("out"), Options(probabilities=True), lambda *numbers: calls.append(numbers)
    )
    stems = ["a/x", "b/x.jpg", "b/x.png"]
    assert result_names() == sorted(stem + ending for stem in stems for ending in (".npz", ".png", "_overlay.jpg"))
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]
    for outcome in report.done:
        expected = segmenter(outcome.path)
        np.testing.assert_array_equal(np.array(Image.open(outcome.files.labels)), expected.labels)
        assert outcome.classes == expected.summary()
        assert outcome.size == (9, 12)
    assert report.pixels.sum() == 3 * 9 * 12
    shares = {row.name: count for row, count in report.summary()}
    assert max(shares.values()) == 3


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_batches_change_nothing(draw, segmenter, batch):
    draw(*[f"in/{n}.png" for n in range(5)])
    draw(*[f"in/{n}.png" for n in range(5, 8)], size=(7, 12))
    images, _ = find_images(["in"])
    single = segment_images(segmenter, images, Path("one"), Options(overlay=False))
    report = segment_images(segmenter, images, Path("out"), Options(overlay=False, batch=batch))
    assert len(report.done) == 8
    for name in result_names():
        np.testing.assert_array_equal(np.array(Image.open(Path("out", name))), np.array(Image.open(Path("one", name))))
    np.testing.assert_array_equal(report.pixels, single.pixels)


def test_a_second_run_does_what_is_left(draw, segmenter, model_folder):
    draw("in/x.jpg", "in/y.jpg", "in/z.jpg", "in/changed.jpg")
    images, _ = find_images(["in"])
    segment_images(segmenter, images, Path("out"))
    Path("out/y.png").unlink()
    Path("out/z_overlay.jpg").unlink()
    os.utime("in/changed.jpg", (2e9, 2e9))
    report = segment_images(segmenter, images, Path("out"))
    assert sorted(entry.path.name for entry in report.done) == ["changed.jpg", "y.jpg", "z.jpg"]
    assert [path.name for path in report.skipped] == ["x.jpg"]
    os.utime("in/changed.jpg", (1e9, 1e9))
    assert len(segment_images(segmenter, images, Path("out"), Options(overwrite=True)).done) == 4
    assert len(segment_images(segmenter, images, Path("out")).skipped) == 4
    flipped = load(model_folder, flip=True)
    assert len(segment_images(flipped, images, Path("out")).done) == 4, "other settings, other results"
    Path("out/x.png").write_bytes(b"")  # a crash left it
    assert len(segment_images(flipped, images, Path("out")).done) == 1


def test_progress_of_images_and_tiles(draw, model_folder):
    draw("in/x.png", "in/y.png", size=(70, 140))
    images, tiles = [], []
    segment_files(
        load(model_folder, device="cpu", tile=64),
        ["in"],
        Path("out"),
        progress=lambda done, total: images.append((done, total)),
        tile_progress=lambda done, total: tiles.append((done, total)),
    )
    assert images == [(0, 2), (1, 2), (2, 2)]
    assert tiles == [(n, 6) for n in range(1, 7)] * 2


def test_another_legend_is_another_overlay(draw, segmenter):
    draw("in/x.jpg")
    images, _ = find_images(["in"])
    segment_images(segmenter, images, Path("out"))
    labels = Path("out/x.png").read_bytes()
    assert len(segment_images(segmenter, images, Path("out"), Options(legend=False)).done) == 1
    assert len(segment_images(segmenter, images, Path("out"), Options(legend=False)).skipped) == 1
    assert len(segment_images(segmenter, images, Path("out"), Options(overlay=False)).skipped) == 1
    assert Path("out/x.png").read_bytes() == labels, "label maps do not know of legends"
    with Image.open("out/x_overlay.jpg") as picture:
        assert picture.size == (12, 9)


def test_images_are_never_overwritten(draw, segmenter):
    draw("x.png", "y.jpg")
    with pytest.raises(ValueError, match=r"x\.png is one of the images"):
        segment_images(segmenter, find_images(["x.png"])[0], Path())
    segment_images(segmenter, find_images(["y.jpg"])[0], Path())
    assert Path("y.png").exists()


def bad_files():
    """Files that are no images, each with a word of its sentence."""
    Image.new("RGB", (64, 64), "red").save("truncated.jpg")
    content = Path("truncated.jpg").read_bytes()
    Path("truncated.jpg").write_bytes(content[: len(content) // 2])
    Path("empty.jpg").write_bytes(b"")
    Path("text.jpg").write_text("I am no image.")
    Path("eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    Path("loop.jpg").symlink_to("loop.jpg")
    Path("broken.jpg").symlink_to("nowhere.jpg")
    os.mkfifo("pipe.jpg")
    Path("bomb.png").write_bytes(png_header(60_000, 60_000))
    return {
        "truncated.jpg": "truncated",
        "empty.jpg": "the file is empty",
        "text.jpg": "no image format",
        "eps.png": "no image format",
        "loop.jpg": "symbolic links",
        "broken.jpg": "does not exist",
        "pipe.jpg": "no regular file",
        "bomb.png": "60000 x 60000 pixels, more than 250 million, and was not read",
    }


def png_header(width, height):
    """A PNG of a few bytes that claims to be large."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 500)) + chunk(b"IEND", b"")
    )


def test_bad_files_do_not_stop_the_rest(draw, segmenter):
    draw("good.jpg", "zebra.png")
    bad = bad_files()
    images, failed = find_images(["."])
    assert not failed
    report = segment_images(segmenter, images, Path("out"), Options(batch=2))
    assert sorted(entry.path.name for entry in report.done) == ["good.jpg", "zebra.png"]
    reasons = {path.name: why for path, why in report.failed}
    assert set(reasons) == set(bad)
    for name, word in bad.items():
        assert word in reasons[name]
        assert reasons[name].startswith(name)
        assert "\n" not in reasons[name]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="everything may be read here")
def test_a_file_without_permission(draw, segmenter):
    [path] = draw("x.jpg")
    path.chmod(0)
    report = segment_images(segmenter, find_images(["x.jpg"])[0], Path("out"))
    assert report.failed[0][1] == "x.jpg cannot be read as an image (Permission denied); allow reading it."


def test_of_an_animation_the_first_frame(draw, segmenter, tmp_path):
    frames = [Image.new("RGB", (12, 9), colour) for colour in ("red", "blue")]
    draw()
    frames[0].save("x.gif", save_all=True, append_images=frames[1:])
    report = segment_images(segmenter, find_images(["x.gif"])[0], Path("out"))
    assert [path.name for path in report.animated] == ["x.gif"]
    np.testing.assert_array_equal(np.array(Image.open("out/x.png")), segmenter(frames[0]).labels)


def test_results_are_upright(draw, segmenter):
    draw()
    picture = Image.new("RGB", (12, 9))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save("x.jpg", exif=exif)
    segment_images(segmenter, find_images(["x.jpg"])[0], Path("out"))
    assert Image.open("out/x.png").size == (9, 12)


def test_memory_is_bounded_by_pixels(draw, segmenter, monkeypatch):
    draw(*[f"in/{n:02}.png" for n in range(12)], size=(10, 10))
    monkeypatch.setattr(pipeline, "MAX_PIXELS_IN_MEMORY", 250)
    read, lock, most, now = pipeline.read_image, threading.Lock(), [0], [0]

    def reading(path, limit):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        return read(path, limit)

    write = pipeline._write

    def writing(*arguments):
        result = write(*arguments)
        with lock:
            now[0] -= 1
        return result

    monkeypatch.setattr(pipeline, "read_image", reading)
    monkeypatch.setattr(pipeline, "_write", writing)
    for batch in (1, 5):
        report = segment_files(segmenter, ["in"], Path(f"out{batch}"), Options(batch=batch))
        assert len(report.done) == 12
    assert most[0] == 2


def test_one_that_is_too_large_for_all_is_done_alone(draw, segmenter, monkeypatch):
    draw("in/a.png", "in/b.png", "in/c.png")
    monkeypatch.setattr(pipeline, "MAX_PIXELS_IN_MEMORY", 1)
    assert len(segment_images(segmenter, find_images(["in"])[0], Path("out")).done) == 3


def test_ctrl_c_leaves_whole_files(draw, segmenter, monkeypatch):
    draw(*[f"in/{n}.png" for n in range(6)])
    batch, calls = type(segmenter).batch, []

    def interrupted(self, images, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return batch(self, images, **options)

    monkeypatch.setattr(type(segmenter), "batch", interrupted)
    report = segment_images(segmenter, find_images(["in"])[0], Path("out"))
    assert report.interrupted
    assert len(report.done) == 2
    assert result_names() == ["0.png", "0_overlay.jpg", "1.png", "1_overlay.jpg"]


def test_a_full_disk_ends_the_run(draw, segmenter, monkeypatch):
    draw(*[f"in/{n}.png" for n in range(6)])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pipeline, "_write", full)
    with pytest.raises(OSError, match=r"No space left on device: .*could not be written"):
        segment_images(segmenter, find_images(["in"])[0], Path("out"))


def test_one_image_of_a_batch_may_fail(draw, segmenter, monkeypatch):
    draw(*[f"in/{n}.png" for n in range(4)])
    bad = np.array(Image.open("in/2.png"))
    batch = type(segmenter).batch

    def picky(self, images, **options):
        if any((image == bad).all() for image in images):
            raise ValueError("I do not like it.")
        return batch(self, images, **options)

    monkeypatch.setattr(type(segmenter), "batch", picky)
    report = segment_images(segmenter, find_images(["in"])[0], Path("out"), Options(batch=4))
    assert len(report.done) == 3
    assert report.failed == [(Path("in/2.png"), "I do not like it.")]


def test_every_ending_has_a_reader():
    Image.init()
    assert {ending for ending in files.IMAGE_ENDINGS if ending not in Image.EXTENSION} <= {".avif"}
