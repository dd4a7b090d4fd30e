"""Small videos, written with PyAV as other programs would, and a small segmenter."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

av = pytest.importorskip("av")

from deepmrf.cli import app  # noqa: E402
from deepmrf.models.parsing_network import read_model  # noqa: E402
from deepmrf.predict.segmenter import Segmenter  # noqa: E402


def _pictures(count, size, seed=0):
    """Coarse coloured blocks that drift by two pixels a frame: (count, H, W, 3)."""
    rng = np.random.default_rng(seed)
    height, width = size
    blocks = rng.integers(0, 256, (height // 8 + 1, (width + 2 * count) // 8 + 1, 3), dtype=np.uint8)
    canvas = blocks.repeat(8, 0).repeat(8, 1)
    return np.stack([canvas[:height, 2 * n : 2 * n + width] for n in range(count)])


@pytest.fixture(autouse=True)
def alone():
    """One thread: for such small frames, PyTorch's threads cost more than they bring where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pictures():
    """pictures(count, (H, W)): frames that drift."""
    return _pictures


@pytest.fixture
def film(tmp_path):
    """film(name, frames, times, ...): a video of frames (T, H, W, 3) whose times are `times` * base seconds."""

    def make(name, frames=None, times=None, base=Fraction(1, 25), sound=0.0, codec="png", options=None, late=0):
        path = tmp_path / name
        frames = _pictures(6, (32, 48)) if frames is None else frames
        times = range(len(frames)) if times is None else times
        with av.open(str(path), "w", options=options or {}) as file:
            video = file.add_stream(codec, rate=Fraction(25))
            video.width, video.height = frames.shape[2], frames.shape[1]
            video.pix_fmt = "rgb24" if codec == "png" else "yuv420p"
            video.time_base = video.codec_context.time_base = base
            audio = file.add_stream("aac", rate=48000, layout="mono") if sound else None
            for picture, time in zip(frames, times, strict=True):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                frame.pts, frame.time_base = time, base
                file.mux(video.encode(frame))
            file.mux(video.encode(None))
            for start in range(0, int(48000 * sound), 1024) if audio is not None else ():
                wave = np.sin(2 * np.pi * 440 * np.arange(start, start + 1024) / 48000).astype(np.float32)[None] / 2
                frame = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
                frame.sample_rate, frame.pts, frame.time_base = 48000, start + late, Fraction(1, 48000)
                file.mux(audio.encode(frame))
            if audio is not None:
                file.mux(audio.encode(None))
        return path

    return make


@pytest.fixture
def seen():
    """seen(path): (frames (T, H, W, 3), their times in seconds) of a video, read with PyAV alone."""

    def read(path):
        with av.open(str(path)) as file:
            decoded = [(f.to_ndarray(format="rgb24"), f.pts * f.time_base) for f in file.decode(video=0)]
        return np.stack([image for image, _ in decoded]), [time for _, time in decoded]

    return read


@pytest.fixture
def heard():
    """heard(path): (time in seconds, bytes) of each packet of sound."""

    def read(path):
        with av.open(str(path)) as file:
            if not file.streams.audio:
                return []
            return [(p.pts * p.time_base, bytes(p)) for p in file.demux(file.streams.audio[0]) if p.size]

    return read


@pytest.fixture
def segmenter(model_folder):
    return Segmenter([read_model(model_folder)], device="cpu")


@pytest.fixture
def type_in(untaught):
    """type_in("predict", ...): in the folder of the films, where "animals" is a model that has learned nothing."""

    def run(*words, code=0):
        result = CliRunner().invoke(app, ["predict", *words], env={"COLUMNS": "200", "TERM": "dumb"})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == code, result.output
        return re.sub(r"\x1b\[[0-9;]*m", "", result.output)

    return run
