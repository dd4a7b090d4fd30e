"""Frames from files, folders and cameras."""

from __future__ import annotations

import gc
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepmrf.video import open_source
from deepmrf.video.reading import FrameSource, upright

av = pytest.importorskip("av")


def test_frames_and_times_are_exact(film, pictures):
    frames, times = pictures(6, (32, 48)), [0, 3, 4, 9, 10, 40]
    source = open_source(film("a.mov", frames, times, Fraction(1, 90)))
    decoded = list(source.frames())
    np.testing.assert_array_equal(np.stack([frame.image for frame in decoded]), frames)
    assert [frame.time for frame in decoded] == [Fraction(n, 90) for n in times]
    assert [frame.name for frame in decoded] == [f"{n:06}" for n in range(6)]
    assert (source.length, source.skipped, source.sound) == (6, 0, None)


def test_sound_is_noticed(film):
    path = film("a.mov", sound=0.2)
    assert open_source(path).sound == path


def test_frames_that_were_read_leave_memory_at_once(film, pictures):
    source = open_source(film("a.mov", pictures(20, (32, 48))))
    gc.collect()
    gc.disable()
    try:
        for _ in source.frames():
            alive = sum(type(thing) is av.VideoFrame for thing in gc.get_objects())
        assert alive <= 3
    finally:
        gc.enable()


def turned(path, matrix):
    """The same file with another display matrix: a, b, c, d of 16.16 numbers in its track header."""
    content = bytearray(path.read_bytes())
    offset = content.index(b"tkhd") + 4 + 4 + 20 + 8 + 8
    a, b, c, d = matrix
    content[offset : offset + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "matrix, expected",
    [
        ((1, 0, 0, 1), lambda image: image),
        ((0, 1, -1, 0), lambda image: np.rot90(image, -1)),  # a phone held upright: a quarter clockwise
        ((-1, 0, 0, -1), lambda image: np.rot90(image, 2)),
        ((0, -1, 1, 0), lambda image: np.rot90(image, 1)),
        ((-1, 0, 0, 1), lambda image: image[:, ::-1]),
        ((1, 0, 0, -1), lambda image: image[::-1]),
        ((0, 1, 1, 0), lambda image: image.transpose(1, 0, 2)),
    ],
    ids=["plain", "clockwise", "upside down", "counterclockwise", "mirror", "flip", "transposed"],
)
def test_phones_videos_stand_upright(film, pictures, matrix, expected):
    frames = pictures(2, (32, 48))
    decoded = list(open_source(turned(film("a.mov", frames), matrix)).frames())
    assert len(decoded) == 2
    np.testing.assert_array_equal(decoded[1].image, expected(frames[1]))


def test_upright_by_hand():
    image = np.arange(6, dtype=np.uint8).reshape(2, 3, 1).repeat(3, 2)
    result, swapped = upright(image, (0, 1 << 16, -(1 << 16), 0))
    assert swapped
    np.testing.assert_array_equal(result[..., 0], [[3, 0], [4, 1], [5, 2]])
    assert upright(image, None)[0] is image


def test_corrupt_frames_are_left_out_and_counted(film, pictures):
    frames = pictures(6, (32, 48))
    path = film("a.mov", frames)
    with av.open(str(path)) as file:
        offsets = [packet.pos for packet in file.demux(video=0) if packet.size]
    content = bytearray(path.read_bytes())
    for number in (2, 3):
        content[offsets[number] : offsets[number] + 40] = bytes(40)
    path.write_bytes(content)
    source = open_source(path)
    decoded = list(source.frames())
    assert source.skipped == 2
    assert [frame.time for frame in decoded] == [Fraction(n, 25) for n in (0, 1, 4, 5)]
    np.testing.assert_array_equal(np.stack([frame.image for frame in decoded]), frames[[0, 1, 4, 5]])


@pytest.mark.parametrize("name, options", [("a.mkv", None), ("a.mov", {"movflags": "faststart"})])
def test_a_file_that_breaks_off_gives_what_it_has(film, name, options):
    noise = np.random.default_rng(0).integers(0, 256, (40, 64, 96, 3), dtype=np.uint8)  # no frame is much smaller
    path = film(name, noise, codec="libx264", options=options)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    source = open_source(path)
    decoded = list(source.frames())
    assert 5 < len(decoded) < 40
    assert [frame.time for frame in decoded[:3]] == [0, Fraction(1, 25), Fraction(2, 25)]


def test_frames_of_another_size_get_the_first_ones(tmp_path):
    for number, size in ((2, (30, 20)), (10, (60, 40)), (1, (30, 20))):
        Image.new("RGB", size, (number * 20, 0, 0)).save(tmp_path / f"frame{number}.png")
    (tmp_path / "frame3.png").write_bytes(b"no image")
    (tmp_path / "notes.txt").write_text("hello")
    source = open_source(tmp_path, fps=10)
    decoded = list(source.frames())
    assert source.length == 4
    assert source.skipped == 1
    assert [frame.name for frame in decoded] == ["frame1", "frame2", "frame10"]  # by number
    assert [frame.time for frame in decoded] == [0, Fraction(1, 10), Fraction(3, 10)]  # the broken one leaves its gap
    assert {frame.image.shape for frame in decoded} == {(20, 30, 3)}
    assert decoded[2].image[0, 0, 0] == 200


class Listed(FrameSource):
    """Frames with given times."""

    name = stem = "listed"

    def __init__(self, *times):
        self.times = times

    def _raw(self):
        for time in self.times:
            yield np.zeros((4, 4, 3), np.uint8), time, "x"


def test_times_always_rise():
    times = [
        frame.time for frame in Listed(None, None, Fraction(1), Fraction(1), Fraction(1, 2), None, Fraction(3)).frames()
    ]
    tick = Fraction(1, 90000)
    after = 1 + 2 * tick + Fraction(1, 25)
    assert times == [0, Fraction(1, 25), 1, 1 + tick, 1 + 2 * tick, after, 3]


def test_what_is_no_video_is_told_in_one_sentence(tmp_path, film):
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("hello")
    (tmp_path / "folder").mkdir()
    film("cut.mp4", codec="libx264")
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "cut.mp4").read_bytes()[:300])
    with av.open(str(tmp_path / "sound.m4v"), "w", format="mp4") as file:
        audio = file.add_stream("aac", rate=48000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 48000, 0
        file.mux(audio.encode(frame))
        file.mux(audio.encode(None))
    for name, says in {
        "empty.mp4": "is empty: replace the file",
        "text.mp4": "cannot be read as a video (Invalid data found when processing input)",
        "cut.mp4": "damaged, cut off or none",
        "sound.m4v": "holds no video",
        "gone.mp4": "is missing",
        "folder": "is a folder without images",
    }.items():
        with pytest.raises((ValueError, OSError), match=name) as why:
            open_source(tmp_path / name)
        assert says in str(why.value)
        assert len(str(why.value).splitlines()) == 1


def test_a_file_whose_frames_are_all_broken(film):
    path = film("a.mov")
    with av.open(str(path)) as file:
        offsets = [packet.pos for packet in file.demux(video=0) if packet.size]
    content = bytearray(path.read_bytes())
    for offset in offsets:
        content[offset : offset + 40] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"gave no frame \(6 could not be read\)"):
        list(open_source(path).frames())


def test_too_many_pixels(film):
    with pytest.raises(ValueError, match="48 x 32 pixels, more than 100"):
        open_source(film("a.mov"), max_pixels=100)


def test_a_camera(monkeypatch):
    cv2 = pytest.importorskip("cv2")
    released = []

    class Capture:
        def __init__(self, number):
            self.left = 3 if number == 7 else 0

        def isOpened(self):
            return self.left > 0

        def get(self, _):
            return 15.0

        def read(self):
            self.left -= 1
            return self.left >= 0, np.full((4, 6, 3), (255, 0, 0), np.uint8)  # blue, as OpenCV has it

        def release(self):
            released.append(True)

    monkeypatch.setattr(cv2, "VideoCapture", Capture)
    source = open_source("camera:7")
    decoded = list(source.frames())
    assert (len(decoded), source.rate, source.length, source.stem) == (3, 15, None, "camera7")
    assert source.key() == source.key() != open_source("camera:7").key()  # what it showed does not come again
    assert decoded[0].image[0, 0].tolist() == [0, 0, 255]
    assert decoded[0].time == 0
    assert released
    with pytest.raises(ValueError, match="camera:0 does not answer: connect a camera"):
        open_source("camera:0")
    with pytest.raises(ValueError, match=r"camera:front is no camera: write its number, such as camera:0\."):
        open_source("camera:front")


@pytest.mark.parametrize(
    "fps, rate",
    [
        (1 / 86400, Fraction(1, 86400)),
        (0.0004, Fraction(1, 2500)),
        (0.3, Fraction(3, 10)),
        (1, 1),
        (29.97, Fraction(2997, 100)),
        (1000, 1000),
    ],
)
def test_frames_may_be_far_apart(tmp_path, fps, rate):
    Path(tmp_path / "x.png").write_bytes(b"")
    source = open_source(tmp_path, fps=fps)
    assert (source.rate, source.rate * source.time_base) == (rate, 1)


def test_fps_must_make_sense(tmp_path):
    Path(tmp_path / "x.png").write_bytes(b"")
    for fps in (0, -1, 1e-9, 5e-324, 1e9, float("nan")):
        with pytest.raises(ValueError, match="frames a second"):
            open_source(tmp_path, fps=fps)
