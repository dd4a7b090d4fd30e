"""Uploads: what is read, what is refused in one sentence, and that no file stays."""

from __future__ import annotations

import io
import zipfile
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepmrf.cli.page.uploads import Limits, UploadError, read_clip, read_prediction, received

SMALL = Limits(file_bytes=150_000, pixels=5000, predicted_pixels=5000, predicted_values=20_000, frames=4, clip_side=32)


def upload(folder, name, content):
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".npz":
        np.savez_compressed(path, content)
    elif path.suffix == ".npy":
        np.save(path, content)
    else:
        Image.fromarray(content).save(path)
    return path


def write_clip(path, count=6, size=(48, 64)):
    pytest.importorskip("av")
    from deepmrf.video import Writer

    writer = Writer(path, size)
    for number in range(count):
        writer.write(np.full((*size, 3), 30 * number, np.uint8), Fraction(number, 25))
    writer.close()
    return path


def test_a_picture(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    path = upload(tmp_path, "my cat.png", pixels)
    with received(path):
        clip = read_clip(path, SMALL)
    assert (clip.name, clip.times) == ("my cat", [0])
    np.testing.assert_array_equal(clip.frames, [pixels])
    assert not path.exists()


def test_a_clip_is_sampled_and_shrunk(tmp_path):
    clip = read_clip(write_clip(tmp_path / "a.mp4"), SMALL)
    assert [frame.shape for frame in clip.frames] == [(24, 32, 3)] * 3
    assert clip.times == [0, Fraction(2, 25), Fraction(4, 25)]
    assert [round(float(frame.mean()) / 30) for frame in clip.frames] == [0, 2, 4]


PREDICTIONS = {
    "p.npy": (np.full((4, 20, 30), 0.25, np.float32), 4, "probabilities"),
    "p.npz": (np.random.default_rng(0).normal(size=(20, 30, 3)).astype(np.float32), 3, "logits"),
    "ids.png": (np.tile(np.arange(3, dtype=np.uint8), (20, 10)), 3, "label ids"),
    "mask.png": (np.tile(np.array([0, 255], np.uint8), (20, 15)), 2, "binary masks of 0 and 255"),
    "soft.npy": (np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30), 2, "soft masks"),
    "soft.png": (np.linspace(0, 255, 600).astype(np.uint8).reshape(20, 30), 2, "soft masks"),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_predictions_of_every_kind(name, tmp_path):
    content, labels, kind = PREDICTIONS[name]
    image = upload(tmp_path, "a.png", np.zeros((20, 30, 3), np.uint8))
    prediction = read_prediction(image, upload(tmp_path, name, content), SMALL)
    assert tuple(prediction.log_p.shape) == (labels, 20, 30)
    assert prediction.kind.startswith(kind)
    assert len(prediction.labels) == labels
    assert float(prediction.log_p.exp().sum(0).sub(1).abs().max()) < 1e-4


def bomb():
    """A .npz file of 60 kB that would unpack to 64 MB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("arr_0.npy", bytes(64_000_000))
    return buffer.getvalue()


def png_header(width, height):
    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


BAD = {
    "empty.png": (b"", "empty.png cannot be read as an image (the file is empty); replace the file."),
    "text.jpg": (b"hello", "text.jpg cannot be read as an image (its content is no image format"),
    "huge.png": (png_header(100, 51), "huge.png has 100 x 51 pixels, more than 0.005 million, and was not read"),
    "heavy.png": (bytes(160_000), "heavy.png has 0.16 MB, more than 0.15 MB: make it smaller."),
    "clip.mp4": (b"no video", "clip.mp4 cannot be read as a video ("),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_one_sentence_and_stay_nowhere(name, tmp_path):
    content, sentence = BAD[name]
    if name.endswith("mp4"):
        pytest.importorskip("av")
    path = upload(tmp_path, name, content)
    with pytest.raises(UploadError) as caught, received(path):
        read_clip(path, SMALL)
    assert sentence in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert not list(tmp_path.iterdir())


BAD_PREDICTIONS = {
    "size.npy": (np.zeros((2, 20, 31), np.float32) + 0.5, "size.npy has 31 x 20 pixels, but a.png 30 x 20"),
    "many.npy": (np.zeros((40, 20, 30), np.float32), "many.npy holds 30 labels of 20 x 40 pixels, too many"),
    "bomb.npz": (bomb(), "bomb.npz would unpack to 64 MB: save fewer pixels or labels."),
    "code.npy": (np.array([{"a": 1}]), "code.npy cannot be read as an array"),
    "nan.npy": (np.full((2, 20, 30), np.nan, np.float32), "nan.npy holds NaN or infinity"),
    "none.npy": (b"\x93NUMPY", "none.npy cannot be read as an array"),
    "colours.png": (np.zeros((20, 30, 3), np.uint8), "colours.png is a picture of mode RGB"),
}


@pytest.mark.parametrize("name", BAD_PREDICTIONS)
def test_bad_predictions_are_one_sentence_and_stay_nowhere(name, tmp_path):
    content, sentence = BAD_PREDICTIONS[name]
    image = upload(tmp_path, "a.png", np.zeros((20, 30, 3), np.uint8))
    path = upload(tmp_path, name, content)
    with pytest.raises(UploadError) as caught, received(image, path):
        read_prediction(image, path, SMALL)
    assert sentence in str(caught.value)
    assert str(tmp_path) not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_nobody_expected_is_a_sentence_too(tmp_path):
    path = upload(tmp_path, "a.png", b"x")
    with (
        pytest.raises(UploadError, match=r"^The file cannot be used \(deep inside\): try another one\.$"),
        received(path),
    ):
        raise RuntimeError("deep inside\nof a decoder")


@pytest.mark.parametrize("kind", ["png", "jpg", "npy", "npz", "mp4"])
def test_damaged_files_are_sentences(kind, tmp_path):
    """Bytes changed at random: each file is read, or refused by an UploadError."""
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
    good = upload(tmp_path, f"good.{kind}", pixels / 765) if kind.startswith("np") else tmp_path / f"good.{kind}"
    if kind == "mp4":
        write_clip(good, 3)
    elif not kind.startswith("np"):
        upload(tmp_path, good.name, pixels)
    original = np.frombuffer(good.read_bytes(), np.uint8)
    good.unlink()
    for _ in range(20):
        damaged = original[: rng.integers(1, len(original) + 1)].copy()
        damaged[rng.integers(0, len(damaged), 5)] = rng.integers(0, 256, 5)
        path, image = upload(tmp_path, f"x.{kind}", damaged.tobytes()), Path(tmp_path / "i.png")
        with suppress(UploadError), received(path, image):
            if kind.startswith("np"):
                read_prediction(upload(tmp_path, image.name, pixels), path, SMALL)
            else:
                read_clip(path, SMALL)
    assert not list(tmp_path.iterdir())
