"""Video files: times, sizes, colours, sound, and what is left when the writer dies."""

from __future__ import annotations

import shutil
from fractions import Fraction

import numpy as np
import pytest

from deepmrf.video import Writer, writing

av = pytest.importorskip("av")


def write(path, frames, times, **options):
    writer = Writer(path, frames.shape[1:3], **options)
    for image, time in zip(frames, times, strict=True):
        writer.write(np.ascontiguousarray(image), time)
    writer.close()
    return writer


@pytest.mark.parametrize(
    "base", [Fraction(1, 25), Fraction(1, 90000), Fraction(1001, 30000), Fraction(1, 12800)], ids=str
)
@pytest.mark.parametrize("first", [0, 50])
def test_times_are_kept_exactly(tmp_path, pictures, seen, base, first):
    times = [base * (first + n) for n in (0, 3, 4, 9, 10, 11, 40, 41)]
    write(tmp_path / "a.mp4", pictures(8, (32, 48)), times, time_base=base)
    assert seen(tmp_path / "a.mp4")[1] == times


def test_other_containers(tmp_path, pictures, seen):
    frames, times = pictures(4, (32, 48)), [Fraction(n, 25) for n in (0, 2, 3, 7)]
    for name in ("a.mov", "a.m4v", "a.mkv", "a.webm"):  # 1/25 s is a whole number of Matroska's milliseconds
        write(tmp_path / name, frames, times, time_base=Fraction(1, 25))
        assert seen(tmp_path / name)[1] == times, name
        write(tmp_path / f"b{name}", frames, times, time_base=Fraction(1, 25))
        assert (tmp_path / name).read_bytes() == (tmp_path / f"b{name}").read_bytes(), name
    with pytest.raises(ValueError, match=r"a\.avi would be a \.avi file, which cannot keep times: choose \.mp4"):
        Writer(tmp_path / "a.avi", (32, 48))
    assert not (tmp_path / "a.avi").exists()


def test_times_before_zero_are_moved(tmp_path, pictures, seen):
    write(tmp_path / "a.mp4", pictures(3, (32, 48)), [Fraction(n, 25) for n in (-2, -1, 1)])
    assert seen(tmp_path / "a.mp4")[1] == [0, Fraction(1, 25), Fraction(3, 25)]


@pytest.mark.parametrize("size", [(33, 47), (32, 47), (1, 1), (2, 3)], ids=str)
def test_odd_sizes_get_a_copy_of_their_edge(tmp_path, seen, size):
    frames = np.full((3, *size, 3), (200, 100, 50), np.uint8)
    frames[:, : size[0] // 2] = (30, 60, 90)
    write(tmp_path / "a.mp4", frames, [Fraction(n, 25) for n in range(3)])
    decoded = seen(tmp_path / "a.mp4")[0]
    height, width = (n + n % 2 for n in size)
    assert decoded.shape == (3, height, width, 3)
    assert abs(decoded[0, -1, -1].astype(int) - (200, 100, 50)).max() <= 12


def test_colours_are_those_given(tmp_path, seen):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 64, 128), (255, 255, 255), (0, 0, 0)]
    frames = np.stack([np.full((32, 32, 3), colour, np.uint8) for colour in colours])
    write(tmp_path / "a.mp4", frames, [Fraction(n, 25) for n in range(6)])
    decoded = seen(tmp_path / "a.mp4")[0][:, 16, 16].astype(int)
    assert abs(decoded - colours).max() <= 6
    with av.open(str(tmp_path / "a.mp4")) as file:
        assert file.streams.video[0].codec_context.colorspace == 1  # BT.709, so that players do not guess


def test_the_next_best_encoder(tmp_path, pictures, seen, monkeypatch):
    monkeypatch.setitem(writing.ENCODERS, ".mp4", ("no such encoder", "mpeg4"))
    times = [Fraction(n, 30) for n in (0, 1, 5)]
    writer = write(tmp_path / "a.mp4", pictures(3, (33, 47)), times, time_base=Fraction(1, 90000))
    assert writer.encoder == "mpeg4"
    assert seen(tmp_path / "a.mp4")[1] == times
    monkeypatch.setitem(writing.ENCODERS, ".mp4", ("no such encoder",))
    with pytest.raises(ValueError, match="This PyAV was built without no such encoder"):
        Writer(tmp_path / "b.mp4", (32, 48))


def test_pixels_that_are_not_square(tmp_path, pictures):
    write(tmp_path / "a.mp4", pictures(2, (32, 48)), [Fraction(0), Fraction(1, 25)], aspect=Fraction(4, 3))
    with av.open(str(tmp_path / "a.mp4")) as file:
        assert file.streams.video[0].sample_aspect_ratio == Fraction(4, 3)


@pytest.mark.parametrize("name", ["in.mp4", "in.mkv"])
def test_sound_is_copied_packet_by_packet(tmp_path, film, pictures, heard, name):
    frames = pictures(25, (32, 48))
    source = film(name, frames, codec="libx264", sound=1.0)
    writer = write(tmp_path / "out.mp4", frames, [Fraction(n, 25) for n in range(25)], sound=source)
    given, copied = heard(source), heard(tmp_path / "out.mp4")
    assert writer.silent == ""
    assert [content for _, content in copied] == [content for _, content in given]
    slack = Fraction(1, 1000) if name == "in.mkv" else 0  # Matroska counts milliseconds
    assert all(abs(a - b) <= slack for (a, _), (b, _) in zip(copied, given, strict=True))


def test_broadcast_sound_loses_its_headers_only(tmp_path, film, pictures, heard):
    frames = pictures(25, (32, 48))
    source = film("in.m2ts", frames, codec="libx264", sound=1.0)
    writer = write(tmp_path / "out.mp4", frames, [Fraction(n, 25) for n in range(25)], sound=source)
    given, copied = heard(source), heard(tmp_path / "out.mp4")
    assert writer.silent == ""
    assert [content for _, content in copied] == [content[7:] for _, content in given]  # ADTS has seven bytes
    assert all(abs(a - b) < Fraction(1, 48000) for (a, _), (b, _) in zip(copied, given, strict=True))
    with av.open(str(tmp_path / "out.mp4")) as file:
        assert sum(frame.samples for frame in file.decode(audio=0)) >= 46 * 1024


def test_sound_that_begins_late_stays_late(tmp_path, film, pictures, heard, seen):
    frames = pictures(25, (32, 48))
    source = film("in.mp4", frames, codec="libx264", sound=0.5, late=24011)
    times = [Fraction(n + 3, 25) for n in range(25)]
    write(tmp_path / "out.mp4", frames, times, time_base=Fraction(1, 25), sound=source)
    given, copied = heard(source), heard(tmp_path / "out.mp4")
    assert [time for time, _ in copied] == [time for time, _ in given]
    assert seen(tmp_path / "out.mp4")[1] == times


def test_sound_ends_with_the_frames_if_it_must(tmp_path, film, pictures, heard):
    source = film("in.mp4", pictures(25, (32, 48)), codec="libx264", sound=1.0)
    writer = Writer(tmp_path / "out.mp4", (32, 48), sound=source)
    for number in range(5):
        writer.write(np.zeros((32, 48, 3), np.uint8), Fraction(number, 25))
    writer.close(all_sound=False)
    times = [time for time, _ in heard(tmp_path / "out.mp4")]
    assert times == [time for time, _ in heard(source)][: len(times)]
    assert 0.1 < times[-1] <= 0.2


def test_sound_that_does_not_fit_is_left_out_and_told(tmp_path, film, pictures, seen, heard):
    frames = pictures(5, (32, 48))
    source = film("in.mp4", frames, codec="libx264", sound=0.2)
    writer = write(tmp_path / "out.webm", frames, [Fraction(n, 25) for n in range(5)], sound=source)
    assert "its sound (aac) does not fit into a webm file" in writer.silent
    assert len(seen(tmp_path / "out.webm")[0]) == 5
    assert not heard(tmp_path / "out.webm")


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".webm"])
def test_a_writer_that_is_killed_leaves_all_but_the_last_second(tmp_path, seen, suffix):
    if suffix == ".mp4" and av.library_versions["libavformat"][:2] < writing.HYBRID_SINCE:
        pytest.skip("this libavformat cannot write fragments that become a plain file")
    frames = np.random.default_rng(0).integers(0, 256, (95, 48, 64, 3), dtype=np.uint8)
    whole, killed = tmp_path / f"a{suffix}", tmp_path / f"killed{suffix}"
    writer = Writer(whole, (48, 64))
    for number, image in enumerate(frames):
        writer.write(image, Fraction(number, 25))
    shutil.copy(whole, killed)  # what a kill would leave
    writer.close()
    left, times = seen(killed)
    assert 70 <= len(left) < 95
    assert times == [Fraction(n, 25) for n in range(len(left))]
    assert len(seen(whole)[0]) == 95


def test_frames_of_another_size_are_refused(tmp_path):
    writer = Writer(tmp_path / "a.mp4", (32, 48))
    with pytest.raises(ValueError, match=r"A frame has shape \(8, 8, 3\), but the video \(32, 48, 3\)"):
        writer.write(np.zeros((8, 8, 3), np.uint8), Fraction(0))
    writer.close()
