"""A second run over a video: what counts as done, what is done again, and what is never replaced."""

from __future__ import annotations

import json
import os
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepmrf.video import FrameSource, Stream, Writer, open_source, record

av = pytest.importorskip("av")
pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture
def frames(tmp_path, pictures):
    """A folder of three frames, f1.png to f3.png."""
    folder = tmp_path / "frames"
    folder.mkdir()
    for number, image in enumerate(pictures(3, (32, 48)), 1):
        Image.fromarray(image).save(folder / f"f{number}.png")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_label_maps_never_replace_the_frames(type_in, frames, segmenter, tmp_path):
    before = contents(frames)
    for words in ((), ("--overwrite",)):
        text = type_in("frames", "-o", "out.mp4", "--labels", "./frames", *words, code=2)
        assert "frames is the folder of the frames, which label maps would replace: choose another one." in text
    with pytest.raises(ValueError, match="frames is the folder of the frames"):
        record(segmenter, frames, "out.mp4", labels=frames, overwrite=True)
    (tmp_path / "links").mkdir()
    for path in frames.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    with pytest.raises(ValueError, match=r"f1\.png is a frame, which its label map would replace"):
        record(segmenter, tmp_path / "links", "out.mp4", labels=frames, overwrite=True)
    assert contents(frames) == before
    assert not Path("out.mp4").exists()


@pytest.mark.parametrize("name", ["frames", "drive.mov"])
def test_label_maps_replace_nothing_foreign(type_in, film, frames, segmenter, name):
    film("drive.mov")
    truth = Path("truth") / ("f2.png" if name == "frames" else "000002.png")
    truth.parent.mkdir()
    Image.fromarray(np.zeros((32, 48), np.uint8)).save(truth)
    before = contents(truth.parent)
    text = type_in(name, "-o", "out.mp4", "--labels", "truth", code=1)
    assert f"{truth} exists, and is not of this video by this model with these settings: choose another name." in text
    assert "--overwrite replaces it." in text
    with pytest.raises(ValueError, match="is not of this video by this model with these settings"):
        record(segmenter, name, None, labels="truth")
    assert contents(truth.parent) == before
    assert not Path("out.mp4").exists()
    type_in(name, "-o", "out.mp4", "--labels", "truth", "--overwrite")
    assert len(contents(truth.parent)) > 2
    words = (name, "--frames-as-video", "--no-overlay", "--labels", "truth")
    assert "label maps in truth" in type_in(*words)  # its own
    assert "not of this video" in type_in(*words, "--flip", code=1)


def test_names_that_are_no_frames_are_no_hindrance(segmenter, film, tmp_path):
    path, folder = film("drive.mov"), tmp_path / "maps"
    folder.mkdir()
    for name in ("cover.png", "12.png", "000002.png", "000000.png"):
        (folder / name).write_bytes(b"" if name == "000000.png" else b"precious")
    assert record(segmenter, path, None, labels=folder, max_frames=2).frames == 2
    assert {name for name, content in contents(folder).items() if content == b"precious"} == {
        "cover.png",
        "12.png",
        "000002.png",
    }


@pytest.mark.parametrize("out", ["out.mp4", "out.mkv", "out.webm"])
def test_what_was_interrupted_is_done_again(type_in, film, pictures, seen, monkeypatch, out):
    film("drive.mkv", pictures(9, (32, 48)), codec="libx264")
    assert not open_source("drive.mkv").counted
    following, given = Stream.__next__, []

    def interrupted(self):
        given.append(self)
        if len(given) > 4:
            raise KeyboardInterrupt
        return following(self)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "__next__", interrupted)
        type_in("drive.mkv", "-o", out, code=130)
    part = Path(out).with_suffix(f".part{Path(out).suffix}")
    assert len(seen(part)[0]) == 4
    assert not Path(out).exists()
    assert "(9 frames)" in type_in("drive.mkv", "-o", out)
    assert "is there already" in type_in("drive.mkv", "-o", out)
    assert len(seen(out)[0]) == 9
    assert not part.exists()


def test_a_limit_on_frames_that_is_lifted(type_in, film, pictures, seen):
    film("drive.mkv", pictures(9, (32, 48)), codec="libx264")
    type_in("drive.mkv", "-o", "out.mp4", "--max-frames", "8")
    assert "is there already" in type_in("drive.mkv", "-o", "out.mp4", "--max-frames", "8")
    assert "(9 frames)" in type_in("drive.mkv", "-o", "out.mp4")
    assert "is there already" in type_in("drive.mkv", "-o", "out.mp4", "--max-frames", "8")
    assert "Wrote 8 label maps in maps." in type_in(
        "drive.mkv", "-o", "out.mp4", "--max-frames", "8", "--labels", "maps"
    )
    assert len(seen("out.mp4")[0]) == 9


def test_what_was_not_asked_for_before_is_done(type_in, film):
    film("drive.mov")
    type_in("drive.mov", "-o", "out.mp4")
    words = ("drive.mov", "-o", "out.mp4", "--labels", "maps", "--json", "found.json")
    before = Path("out.mp4").read_bytes()
    assert "Wrote 6 label maps in maps." in type_in(*words)
    assert Path("out.mp4").read_bytes() == before, "a whole one is not put at risk"
    [entry] = json.loads(Path("found.json").read_text())["videos"]
    assert (entry["frames"], entry["overlay"], entry["labels"]) == (6, "out.mp4", "maps")
    text = type_in("drive.mov", "-o", "out.mp4", "--consistency")
    assert "Temporal consistency: " in text
    assert "The overlay is there already." in text
    assert Path("out.mp4").read_bytes() == before
    assert "is there already" in type_in(*words)
    assert json.loads(Path("found.json").read_text())["videos"] == [
        {"video": "drive.mov", "overlay": "out.mp4", "labels": "maps", "there_already": True}
    ]
    Path("maps/000003.png").unlink()
    assert "6 label maps" in type_in(*words)
    assert "Temporal consistency" in type_in(*words, "--consistency")


def test_another_video_of_the_same_name(type_in, film, pictures):
    film("drive.mov", pictures(3, (32, 48)))
    type_in("drive.mov", "-o", "out.mp4")
    before = Path("out.mp4").read_bytes()
    Path("b").mkdir()
    for count in (3, 6):
        film("b/drive.mov", pictures(count, (32, 48), seed=1))
        assert "not of this video" in type_in("b/drive.mov", "-o", "out.mp4", code=1)
    assert Path("out.mp4").read_bytes() == before
    os.utime("drive.mov", ns=(0, 0))
    assert "not of this video" in type_in("drive.mov", "-o", "out.mp4", code=1)


def test_other_frames_and_another_speed(type_in, frames, seen):
    type_in("frames", "-o", "out.mp4", "--fps", "10")
    assert "is there already" in type_in("frames", "-o", "out.mp4", "--fps", "10")
    assert "with these settings" in type_in("frames", "-o", "out.mp4", "--fps", "20", code=1)
    type_in("frames", "-o", "out.mp4", "--fps", "20", "--overwrite")
    assert seen("out.mp4")[1] == [0, Fraction(1, 20), Fraction(2, 20)]
    (frames / "f4.png").symlink_to("nowhere")
    assert "is there already" in type_in("frames", "-o", "out.mp4", "--fps", "20")
    os.utime(frames / "f2.png", ns=(0, 0))
    assert "not of this video" in type_in("frames", "-o", "out.mp4", "--fps", "20", code=1)


def test_a_file_that_cannot_be_opened(type_in, film):
    film("drive.mov")
    type_in("drive.mov", "-o", "out.mp4")
    killed = Path("out.mp4").read_bytes()[:88]
    Path("out.mp4").write_bytes(killed)
    assert "out.mp4 is unfinished or damaged: choose another file. --overwrite replaces it." in type_in(
        "drive.mov", "-o", "out.mp4", code=1
    )
    assert Path("out.mp4").read_bytes() == killed
    Path("out.mp4").write_bytes(b"")
    assert "Wrote out.mp4" in type_in("drive.mov", "-o", "out.mp4")
    Path("folder.mp4").mkdir()
    assert "folder.mp4 is a folder: give a video" in type_in("drive.mov", "-o", "folder.mp4", code=1)


def test_another_legend_is_another_video(type_in, film, tmp_path):
    film("drive.mov")
    type_in("drive.mov", "-o", "out.mp4", "--labels", "maps")
    maps = contents(tmp_path / "maps")
    assert "is there already" in type_in("drive.mov", "-o", "out.mp4")
    text = type_in("drive.mov", "-o", "out.mp4", "--no-legend", code=1)
    assert "out.mp4 exists, and is not of this video by this model with these settings" in text
    type_in("drive.mov", "-o", "plain.mp4", "--labels", "maps", "--no-legend")  # label maps have no legend
    assert contents(tmp_path / "maps") == maps


@pytest.mark.parametrize(
    ("name", "legend", "after"), [("out.mp4", False, 1), ("out.mp4", True, 58), ("out.mkv", False, 58)]
)
def test_what_was_killed_is_done_again(type_in, film, pictures, segmenter, monkeypatch, seen, name, legend, after):
    """Also if it was killed before its first fragment, or had other settings."""
    count = 60 if after > 1 else 3
    film("drive.mov", pictures(count, (32, 48)))
    part = Path(name).with_suffix(f".part{Path(name).suffix}")
    write = Writer.write

    def copied(self, image, time):
        write(self, image, time)
        if self.frames == after:
            shutil.copy(part, "killed")  # what a kill would leave

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", copied)
        record(segmenter, "drive.mov", name, legend=legend)
    assert not part.exists()
    Path(name).unlink()
    shutil.copy("killed", part)
    if after > 1:
        assert 30 < len(seen(part)[0]) < count
    assert f"({count} frames)" in type_in("drive.mov", "-o", name, "--no-legend")
    assert len(seen(name)[0]) == count
    assert not part.exists()


@pytest.mark.parametrize("name", ["out.mp4", "out.mov", "out.m4v", "out.mkv", "out.webm"])
def test_only_a_finished_video_has_its_name(type_in, film, segmenter, monkeypatch, seen, name):
    film("drive.mov")
    part = Path(name).with_suffix(f".part{Path(name).suffix}")

    def fails(source, target):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        assert record(segmenter, "drive.mov", name).path == part
    assert not Path(name).exists()
    assert len(seen(part)[0]) == 6
    assert "(6 frames)" in type_in("drive.mov", "-o", name)
    assert len(seen(name)[0]) == 6
    assert not part.exists()
    assert "is there already" in type_in("drive.mov", "-o", name)


@pytest.mark.parametrize("name", ["out.mkv", "out.webm"])
def test_a_damaged_video_is_done_again(type_in, film, name):
    noise = np.random.default_rng(0).integers(0, 256, (20, 64, 96, 3), dtype=np.uint8)
    film("drive.mov", noise, times=[0, 1, 5, *range(6, 23)])
    type_in("drive.mov", "-o", name)
    content = Path(name).read_bytes()
    for share in (0.5, 0.9):
        assert "is there already" in type_in("drive.mov", "-o", name)
        Path(name).write_bytes(content[: int(share * len(content))])
        assert "(20 frames)" in type_in("drive.mov", "-o", name)


def test_an_unfinished_video_replaces_nothing(type_in, film, segmenter, monkeypatch, seen):
    film("drive.mov")
    type_in("drive.mov", "-o", "out.mp4")
    before = Path("out.mp4").read_bytes()

    def full(self, image, time):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", full)
        type_in("drive.mov", "-o", "out.mp4", "--overwrite", code=1)
    assert Path("out.mp4").read_bytes() == before
    Path("out.part.mp4").unlink()
    Path("new.part.mp4").write_bytes(Path("drive.mov").read_bytes())
    assert "new.part.mp4 exists, and is not of this video" in type_in("drive.mov", "-o", "new.mp4", code=1)
    assert Path("new.part.mp4").read_bytes() == Path("drive.mov").read_bytes()
    assert not Path("new.mp4").exists()
    Path("link.mp4").symlink_to("far.mp4")
    assert "Wrote link.mp4" in type_in("drive.mov", "-o", "link.mp4")
    assert Path("link.mp4").is_symlink()
    assert len(seen("far.mp4")[0]) == 6


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_pipes_hold_no_videos(type_in, film):
    film("drive.mov")
    os.mkfifo("out.mp4")
    os.mkfifo("new.part.mp4")
    for name, pipe in (("out.mp4", "out.mp4"), ("new.mp4", "new.part.mp4")):
        assert f"{pipe} is a device or a pipe" in type_in("drive.mov", "-o", name, code=1)
        assert Path(pipe).is_fifo()


def test_a_camera_is_finished_when_it_is_stopped(segmenter, pictures, monkeypatch, tmp_path, seen):
    class Live(FrameSource):
        name = stem = "camera:0"
        live = True

        def _raw(self):
            for number, image in enumerate(pictures(3, (32, 48))):
                yield image, Fraction(number, 25), f"{number:06}"
            raise KeyboardInterrupt

    report = record(segmenter, Live(), tmp_path / "me.mp4")
    assert (report.interrupted, report.path, report.frames) == (True, tmp_path / "me.mp4", 3)
    assert len(seen(tmp_path / "me.mp4")[0]) == 3
    assert [path.name for path in tmp_path.glob("me*")] == ["me.mp4"]
