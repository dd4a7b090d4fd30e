"""`deepmrf predict` on videos, as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepmrf.data.labels import ANIMALS
from deepmrf.models.parsing_network import read_model
from deepmrf.models.video_part import VideoPart
from deepmrf.video import record

av = pytest.importorskip("av")
pytestmark = pytest.mark.usefixtures("plain_torch")


def test_a_video_with_sound(type_in, film, pictures, seen, heard, segmenter):
    frames, times = pictures(8, (33, 47)), [0, 3, 4, 9, 10, 12, 13, 20]
    film("drive.mov", frames, times, sound=1.0)
    text = type_in("drive.mov", "-o", "out.mp4", "--overlay", "--no-legend")
    assert text.splitlines()[0].split() == ["class", "pixels", "confidence", "frames"]
    assert "Wrote out.mp4 (8 frames)." in text
    decoded, times_read = seen("out.mp4")
    assert times_read == [Fraction(n, 25) for n in times]
    assert decoded.shape == (8, 34, 48, 3)
    assert heard("out.mp4") == heard("drive.mov")
    expected = np.asarray(segmenter(frames[2]).overlay()).astype(int)
    assert abs(decoded[2, :33, :47] - expected).mean() < 12  # encoded, and colour at half the size


def test_the_legend_is_the_same_in_every_frame(type_in, film, pictures, seen, segmenter):
    frames = pictures(8, (48, 160))
    film("drive.mov", frames)
    type_in("drive.mov", "-o", "out.mp4")
    decoded, _ = seen("out.mp4")
    assert decoded.shape[1] > 48 or decoded.shape[2] > 160
    legend = np.array(decoded).astype(int)
    legend[:, :48, :160] = 0
    assert (abs(legend - legend[0]) > 60).mean() < 1e-3  # but for what the encoder does
    for colour in segmenter.labels.colours[1:]:
        assert (abs(legend[0] - colour).max(-1) < 40).sum() > 40, colour  # of every class, in the frame or not


def test_where_results_go(type_in, film):
    film("drive.mov")
    type_in("drive.mov")
    assert Path("segmented/drive_overlay.mp4").exists()
    type_in("drive.mov", "-o", "deep/down")
    assert Path("deep/down/drive_overlay.mp4").exists()


def test_patterns(type_in, film):
    film("x1.mov")
    film("x2.mov")
    assert type_in("x*.mov", "-o", "out").count("Wrote") == 2
    assert sorted(os.listdir("out")) == ["x1_overlay.mp4", "x2_overlay.mp4"]
    assert "gone*.mp4 matches nothing" in type_in("gone*.mp4", code=1)


def test_patterns_of_more_than_videos(type_in, film, pictures):
    Path("k").mkdir()
    film("k/low.mov")
    film("k/lower.mkv", codec="libx264")
    Image.fromarray(pictures(1, (32, 48))[0]).save("k/look.png")
    text = type_in("k/lo*.m*", "-o", "out")
    assert text.count("Wrote") == 2
    assert sorted(os.listdir("out")) == ["low_overlay.mp4", "lower_overlay.mp4"]
    type_in("k/*", "-o", "k/made")
    assert sorted(os.listdir("k/made")) == ["look.png", "look_overlay.jpg", "low_overlay.mp4", "lower_overlay.mp4"]
    type_in("k/low*", "-o", "k")
    assert type_in("k/low*", "-o", "k").count("is there already") == 2  # and no overlay of an overlay
    assert sorted(os.listdir("k")) == [
        "look.png",
        "low.mov",
        "low_overlay.mp4",
        "lower.mkv",
        "lower_overlay.mp4",
        "made",
    ]


def test_label_maps(type_in, film, pictures, segmenter):
    frames = pictures(3, (33, 47))
    film("drive.mov", frames)
    text = type_in("drive.mov", "--labels", "maps", "--no-overlay", "--json", "found.json")
    assert "Wrote 3 label maps in maps." in text
    assert sorted(os.listdir("maps")) == ["000000.png", "000001.png", "000002.png"]
    assert not Path("segmented").exists()
    with Image.open("maps/000001.png") as picture:
        assert picture.mode == "P"
        np.testing.assert_array_equal(np.array(picture), segmenter(frames[1]).labels)
    [entry] = json.loads(Path("found.json").read_text())["videos"]
    assert (entry["video"], entry["frames"], entry["complete"]) == ("drive.mov", 3, True)
    labels = np.stack([segmenter(frame).labels for frame in frames])
    for item in entry["found"]:
        share = (labels == ANIMALS.names.index(item["class"])).mean()
        assert item["share"] == pytest.approx(share, abs=1e-5)
        assert item["frames"] == (labels == ANIMALS.names.index(item["class"])).any((1, 2)).sum()


def test_a_second_run(type_in, film, pictures, seen):
    film("drive.mov", pictures(5, (32, 48)))
    type_in("drive.mov", "-o", "out.mp4", "--max-frames", "2")
    assert len(seen("out.mp4")[0]) == 2
    assert "is there already" in type_in("drive.mov", "-o", "out.mp4", "--max-frames", "2")
    assert "Wrote out.mp4 (5 frames)" in type_in("drive.mov", "-o", "out.mp4")  # what was cut short is done again
    assert "is there already" in type_in("drive.mov", "-o", "out.mp4")
    assert "not of this video by this model" in type_in("drive.mov", "-o", "out.mp4", "--flip", code=1)
    assert "Wrote" in type_in("drive.mov", "-o", "out.mp4", "--flip", "--overwrite")
    Path("mine.mp4").write_bytes(Path("drive.mov").read_bytes())
    assert "not of this video" in type_in("drive.mov", "-o", "mine.mp4", code=1)
    assert Path("mine.mp4").read_bytes() == Path("drive.mov").read_bytes()
    before = Path("drive.mov").read_bytes()
    assert "is the video itself" in type_in("drive.mov", "-o", "drive.mov", "--overwrite", code=1)
    assert Path("drive.mov").read_bytes() == before
    Path("drive.mov").rename("drive.part.mov")
    assert "drive.part.mov is the video itself" in type_in("drive.part.mov", "-o", "drive.mov", "--overwrite", code=1)
    assert Path("drive.part.mov").read_bytes() == before


def test_a_folder_of_frames(type_in, pictures, seen):
    Path("frames").mkdir()
    for number, image in enumerate(pictures(3, (32, 48))):
        Image.fromarray(image).save(f"frames/{number}.png")
    assert "Wrote out.mp4 (3 frames)" in type_in("frames", "-o", "out.mp4", "--fps", "10", "--labels", "maps")
    assert seen("out.mp4")[1] == [0, Fraction(1, 10), Fraction(2, 10)]
    assert sorted(os.listdir("maps")) == ["0.png", "1.png", "2.png"]
    type_in("frames", "--frames-as-video")
    assert Path("segmented/frames_overlay.mp4").exists()
    type_in("frames", "-o", "pictures")  # as before: images
    assert Path("pictures/0.png").exists()


def test_frames_that_are_a_day_apart(type_in, pictures, seen):
    Path("frames").mkdir()
    for number, image in enumerate(pictures(2, (32, 48))):
        Image.fromarray(image).save(f"frames/{number}.png")
    type_in("frames", "-o", "out.mp4", "--fps", str(1 / 86400))
    assert seen("out.mp4")[1] == [0, 86400]


def test_no_label_map_replaces_that_of_another_frame(type_in, pictures):
    Path("frames").mkdir()
    for name, image in zip(("1.png", "1.JPG", "2.png"), pictures(3, (32, 48)), strict=True):
        Image.fromarray(image).save(f"frames/{name}")
    text = type_in("frames", "-o", "out.mp4", "--labels", "maps", "--overwrite", code=1)
    assert "frames/1.JPG and frames/1.png would have the same label map, 1.png: rename one of them." in text
    assert not Path("maps").exists()
    assert not Path("out.mp4").exists()
    assert "Wrote out.mp4 (3 frames)." in type_in("frames", "-o", "out.mp4")


def test_short_and_damaged_videos(type_in, film, pictures, seen):
    film("one.mov", pictures(1, (32, 48)))
    assert "Wrote one.mp4 (1 frame)." in type_in("one.mov", "-o", "one.mp4", "--consistency")
    assert len(seen("one.mp4")[0]) == 1
    noise = np.random.default_rng(0).integers(0, 256, (40, 64, 96, 3), dtype=np.uint8)
    path = film("cut.mov", noise, codec="libx264", options={"movflags": "faststart"}, sound=1.0)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    text = type_in("cut.mov", "-o", "cut.mp4")
    count = len(seen("cut.mp4")[0])
    assert 5 < count < 40
    assert f"Wrote cut.mp4 ({count} frames)." in text
    assert re.search(r"cut.mov says it has 40 frames, but \d+ were found: it may be cut off\.", text)
    broken = film("broken.mov", pictures(6, (32, 48)))
    with av.open(str(broken)) as file:
        offsets = [packet.pos for packet in file.demux(video=0) if packet.size]
    content = bytearray(broken.read_bytes())
    content[offsets[2] : offsets[2] + 40] = bytes(40)
    broken.write_bytes(content)
    text = type_in("broken.mov", "-o", "broken.mp4")
    assert "1 frame could not be read and was left out." in text
    assert "Wrote broken.mp4 (5 frames)." in text


def test_matroska_files_that_break_off(type_in, film):
    noise = np.random.default_rng(0).integers(0, 256, (40, 64, 96, 3), dtype=np.uint8)
    content = film("good.mkv", noise, codec="libx264", sound=3.0).read_bytes()
    assert "should have" not in type_in("good.mkv", "-o", "good.mp4")  # though its sound goes on
    assert "should have" not in type_in("good.mkv", "-o", "short.mp4", "--max-frames", "5")
    half = len(content) // 2
    Path("cut.mkv").write_bytes(content[:half])
    Path("broken.mkv").write_bytes(content[:half] + bytes(2048) + content[half + 2048 :])
    for name in ("cut", "broken"):
        text = type_in(f"{name}.mkv", "-o", f"{name}.mp4", "--json", "found.json")
        assert re.search(rf"{name}.mkv should have about 40 frames, but \d+ were found: it may be cut off\.", text)
        assert json.loads(Path("found.json").read_text())["videos"][0]["complete"] is False


@pytest.mark.parametrize(
    "times",
    [range(50, 70), range(0, 40, 2), range(0, 500, 25), [*range(12), *range(36, 236, 25)]],
    ids=["late", "slow", "slides", "mixed"],
)
def test_matroska_files_that_are_whole(type_in, film, pictures, times):
    film("drive.mkv", pictures(20, (32, 48)), times, codec="libx264")
    assert len(times) == 20
    assert "cut off" not in type_in("drive.mkv", "-o", "out.mp4")


def test_what_is_no_video(type_in, film):
    Path("empty.mp4").write_bytes(b"")
    Path("text.mkv").write_text("hello")
    film("good.mov")
    text = type_in("empty.mp4", "text.mkv", "good.mov", "gone.jpg", "-o", "out", "--json", "found.json", code=1)
    assert "empty.mp4 is empty: replace the file." in text
    assert "text.mkv cannot be read as a video" in text
    found = json.loads(Path("found.json").read_text())
    assert [entry["video"] for entry in found["videos"]] == ["good.mov"]
    assert [entry["image"] for entry in found["failed"]] == ["empty.mp4", "text.mkv", "gone.jpg"]
    assert found["failed"][0]["why"] == "empty.mp4 is empty: replace the file."
    assert sorted(os.listdir("out")) == ["good_overlay.mp4"]


@pytest.mark.parametrize(
    "words, code, says",
    [
        (("a.mov", "--no-overlay"), 2, "Nothing would be written of the video: give --labels DIR"),
        (("a.mov", "b/a.mov"), 2, "a.mov and b/a.mov would both be segmented/a_overlay.mp4: give them in turn."),
        (("a.mov", "b/a.mov", "-o", "x.mp4"), 2, "x.mp4 is one video, but 2 were given"),
        (("a.mov", "b/c.mov", "--labels", "m"), 2, "m would get the label maps of 2 videos"),
        (("a.mov", "-o", "x.avi"), 1, "x.avi would be a .avi file, which cannot keep times"),
        (("a.mov", "--probabilities"), 2, "--probabilities is for images"),
        (("a.mov", "--masks"), 2, "--masks is for images: --labels DIR writes the label map of each frame of a video."),
        (("a.mov", "--flow", "best"), 2, "--flow best is unknown: choose dis-fast, dis or none."),
        (("a.mov", "--max-frames", "0"), 1, "max_frames=0 must be at least 1 frame."),
        (("a.mov", "--consistency", "--flow", "none"), 1, "choose a flow"),
        (("a.mov", "-o", "a.txt"), 1, "a.txt is a file: give a folder for the results, or a video"),
        (("camera:x",), 1, "camera:x is no camera: write its number, such as camera:0."),
        (("camera:99",), 1, "camera:99 does not answer: connect a camera"),
    ],
)
def test_a_wrong_option_gets_one_sentence(type_in, film, words, code, says):
    Path("b").mkdir()
    for name in ("a.mov", "b/a.mov", "b/c.mov"):
        film(name)
    Path("a.txt").write_text("hello")
    text = type_in(*words, code=code)
    assert says in text
    assert len(text.strip().splitlines()) == 1


def test_a_model_of_clips(type_in, film, pictures, model_folder):
    read_model(model_folder).inflate().save_pretrained("clips")
    film("drive.mov", pictures(6, (32, 48)))
    text = type_in("drive.mov", "-m", "clips", "-o", "out.mp4")
    assert "Wrote out.mp4 (6 frames, linked along the flow)." in text
    assert re.search(r"Temporal consistency: \d+\.\d\d% of pixels keep their label along the flow\.", text)
    rigid = type_in("drive.mov", "-m", "clips", "-o", "rigid.mp4", "--flow", "none")
    assert "Wrote rigid.mp4 (6 frames)." in rigid
    assert "Temporal consistency" not in rigid
    assert "rigid.mp4 is there already" in type_in("drive.mov", "-m", "clips", "-o", "rigid.mp4", "--frame-by-frame")
    words = ("drive.mov", "-m", "clips", "-o", "apart.mp4", "--frame-by-frame", "--json", "found.json")
    assert "Wrote apart.mp4 (6 frames)." in type_in(*words)
    [entry] = json.loads(Path("found.json").read_text())["videos"]
    assert (entry["linked"], entry["consistency"]) == (False, None)
    assert Path("apart.mp4").read_bytes() == Path("rigid.mp4").read_bytes() != Path("out.mp4").read_bytes()
    assert "Temporal consistency" in type_in(*words, "--consistency", "--overwrite")
    assert json.loads(Path("found.json").read_text())["videos"][0]["linked"] is False
    one = type_in("drive.mov", "-m", "clips", "-o", "one.mp4", "--max-frames", "1", "--json", "found.json")
    assert "Wrote one.mp4 (1 frame)." in one
    assert json.loads(Path("found.json").read_text())["videos"][0]["linked"] is False
    assert "Temporal consistency" not in type_in("drive.mov", "-o", "single.mp4")
    assert "Temporal consistency" in type_in("drive.mov", "-o", "measured.mp4", "--consistency")


def test_a_model_of_images_with_a_part_for_video(type_in, film, pictures, model_folder):
    model = read_model(model_folder)
    model.video = VideoPart(3)
    model.video.trajectory_weights.fill_(0.5)
    model.save_pretrained("both")
    film("drive.mov", pictures(6, (32, 48)))
    assert "Wrote out.mp4 (6 frames, linked along the flow)." in type_in("drive.mov", "-m", "both", "-o", "out.mp4")
    assert "is there already" in type_in("drive.mov", "-m", "both", "-o", "out.mp4")
    again = type_in("drive.mov", "-m", "both", "-o", "out.mp4", "--frame-by-frame", code=1)
    assert "--overwrite replaces it" in again
    assert "(6 frames)" in type_in("drive.mov", "-m", "both", "-o", "single.mp4", "--frame-by-frame")


def test_a_full_disk_ends_the_file_where_it_is(type_in, segmenter, film, pictures, seen, tmp_path, monkeypatch):
    from deepmrf.video import Writer

    path = film("drive.mov", pictures(9, (32, 48)))
    write = Writer.write

    def fails(self, image, when):
        if self.frames == 4:
            raise OSError(28, "No space left on device")
        write(self, image, when)

    monkeypatch.setattr(Writer, "write", fails)
    report = record(segmenter, path, tmp_path / "out.mp4")
    assert (report.frames, report.failed) == (4, "[Errno 28] No space left on device")
    assert report.path == tmp_path / "out.part.mp4"
    assert len(seen(report.path)[0]) == 4
    type_in("drive.mov", "--json", "found.json", code=1)
    found = json.loads(Path("found.json").read_text())
    assert found["failed"] == [{"image": "drive.mov", "why": "[Errno 28] No space left on device"}]
    assert found["videos"][0]["complete"] is False


def test_ctrl_c_as_a_user_presses_it(tmp_path, film, pictures, seen, heard, model_folder):
    film("drive.mov", pictures(120, (64, 96)), sound=4.8)
    words = [sys.executable, "-m", "deepmrf", "predict", "drive.mov", "-m", str(model_folder), "--labels", "maps"]
    words += ["--device", "cpu"]
    process = subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + 90
    while len(list((tmp_path / "maps").glob("*.png"))) < 3 and time.monotonic() < end and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert "Traceback" not in output
    name = "segmented/drive_overlay.part.mp4" if process.returncode else "segmented/drive_overlay.mp4"
    frames, times = seen(tmp_path / name)
    assert times == [Fraction(n, 25) for n in range(len(frames))]
    assert len(frames) == len(list((tmp_path / "maps").glob("*.png")))
    if process.returncode != 0:  # it may have been quicker than the finger
        assert process.returncode == 130
        assert f"Interrupted: {name} holds {len(frames)} frames; the same command begins it anew." in output
        packets = heard(tmp_path / name)
        assert packets == heard(tmp_path / "drive.mov")[: len(packets)]
        assert packets[-1][0] <= times[-1] + Fraction(1, 25)


def test_a_missing_video_is_called_missing(type_in):
    assert "gone.mp4 is missing" in type_in("gone.mp4", "--labels", "maps", code=1)


def test_overlays_are_no_videos_to_segment(type_in, film):
    film("drive.mov")
    type_in("drive.mov", "-o", ".")
    text = type_in("drive.mov", "drive_overlay.mp4", "-o", ".")  # as the shell expands a pattern
    assert "drive_overlay.mp4 is there already" in text
    assert sorted(path.name for path in Path().glob("*.m*")) == ["drive.mov", "drive_overlay.mp4"]
