"""Read pictures, clips and predictions that somebody has uploaded: within limits, and one sentence for a bad file."""

from __future__ import annotations

import math
import secrets
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from deepmrf.cli.video import names_video
from deepmrf.data.files import Bytes, image_size, one_line, read_image
from deepmrf.data.images import shrunk
from deepmrf.data.labels import LabelSet
from deepmrf.refine.label_ids import LabelIds
from deepmrf.refine.matching import describe_size
from deepmrf.refine.opening import ids_shown
from deepmrf.refine.predictions import PredictionFiles, count_labels, open_prediction
from deepmrf.video.reading import open_source

MEGABYTE, MEGAPIXEL = 1_000_000, 1_000_000
ARRAY_SUFFIXES = (".npy", ".npz")
MAX_NAME_LETTERS = 60
"""Of a longer file name, the last letters count: they end with the suffix."""
MAX_FILES_WAITING = 40
"""Files that were sent and not read; older ones are removed."""


@dataclass(frozen=True)
class Limits:
    """The largest uploads."""

    file_bytes: int = 50 * MEGABYTE
    pixels: int = 24 * MEGAPIXEL
    """Of a picture, or of a clip's frame."""
    predicted_pixels: int = 4 * MEGAPIXEL
    """Of a prediction, which is refined at its own size."""
    predicted_values: int = 64 * MEGAPIXEL
    """Labels times pixels of a prediction."""
    frames: int = 48
    """Of a longer clip, so many frames are taken, at equal distances."""
    clip_side: int = 640
    """Pixels: larger frames are shrunk to this longer side."""
    session_bytes: int = 1 << 30
    """Memory that all sessions may take together; the last one stays in any case."""


class Inbox:
    """Files that were sent and not read yet, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths: OrderedDict[str, Path] = OrderedDict()

    def add(self, name: str) -> tuple[str, Path]:
        """(key, path) for a file to be written; only the last part of its name counts."""
        letters = [letter for letter in name.replace("\\", "/").rsplit("/", 1)[-1] if letter.isprintable()]
        key = secrets.token_urlsafe(16)
        self._paths[key] = path = self.folder / key / ("".join(letters)[-MAX_NAME_LETTERS:].lstrip(".") or "file")
        path.parent.mkdir()
        while len(self._paths) > MAX_FILES_WAITING:
            self.discard(next(iter(self._paths)))
        return key, path

    def discard(self, key: str) -> None:
        """Remove a file."""
        path = self._paths.pop(key, None)
        if path is not None:
            shutil.rmtree(path.parent, ignore_errors=True)

    @contextmanager
    def take(self, keys: Sequence[str]) -> Iterator[list[Path]]:
        """The paths of these files, which are removed at the end."""
        try:
            missing = [key for key in keys if key not in self._paths]
            if missing or not keys:
                raise UploadError("The file is no longer here: drop it again.")
            yield [self._paths[key] for key in keys]
        finally:
            for key in keys:
                self.discard(key)


class UploadError(ValueError):
    """A file that cannot be used; the message is one sentence with the file's own name."""


@dataclass(frozen=True)
class Clip:
    """The frames of a picture (one) or a clip."""

    name: str
    """The file's name without its ending."""
    frames: list[Bytes] = field(repr=False)
    times: list[Fraction]
    """Seconds."""


@dataclass(frozen=True)
class Prediction:
    """An image, and what a network has predicted for it."""

    name: str
    image: Bytes = field(repr=False)
    log_p: Tensor = field(repr=False)
    """(L, H, W)."""
    labels: LabelSet
    label_ids: LabelIds | None
    """The ids of binary and soft masks."""
    kind: str
    """What the file was taken for."""


@contextmanager
def received(*paths: Path) -> Iterator[None]:
    """Turn errors inside into an UploadError that shows no path of this machine, and delete the files at the end."""
    try:
        yield
    except Exception as error:  # a broken file makes decoders raise nearly anything
        message = str(error) if isinstance(error, (ValueError, OSError, ImportError)) else ""
        message = message or f"The file cannot be used ({one_line(error)}): try another one."
        for path in paths:
            message = message.replace(str(path), path.name).replace(str(path.parent), "the upload")
        raise UploadError(" ".join(message.split())) from error
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def read_clip(path: Path, limits: Limits) -> Clip:
    """The frames of a picture or of a clip."""
    _check_bytes(path, limits)
    if not names_video(path):
        return Clip(path.stem, [read_image(path, limits.pixels)], [Fraction(0)])
    source = open_source(path, max_pixels=limits.pixels)
    step = math.ceil((source.length or 1) / limits.frames)
    frames, times = [], []
    with closing(source.frames()) as stream:
        for number, frame in enumerate(stream):
            if number % step == 0:
                frames.append(shrunk(frame.image, limits.clip_side))
                times.append(frame.time)
            if len(frames) == limits.frames:
                break
    return Clip(path.stem, frames, times)


def read_prediction(image: Path, prediction: Path, limits: Limits) -> Prediction:
    """An image and its prediction: probabilities, log-probabilities or logits, label ids, a binary or a soft mask."""
    for path in (image, prediction):
        _check_bytes(path, limits)
    pixels = read_image(image, limits.predicted_pixels)
    is_array = prediction.suffix.lower() in ARRAY_SUFFIXES
    if not is_array:
        image_size(prediction, limits.predicted_pixels)
    elif zipfile.is_zipfile(prediction):
        _check_archive(prediction, limits)
    files = PredictionFiles(image.stem, **{"array" if is_array else "ids": prediction})  # type: ignore[arg-type]
    label_ids = ids_shown([files])
    count = 2 if label_ids is not None else count_labels([files])
    log_p, kind = open_prediction(files, count, label_ids=label_ids)
    if math.prod(log_p.shape) > limits.predicted_values:
        values = f"{count} labels of {describe_size(log_p.shape[1:])} pixels"
        raise ValueError(f"{prediction.name} holds {values}, too many for the page: use deepmrf refine.")
    if log_p.shape[1:] != pixels.shape[:2]:
        sizes = f"{describe_size(log_p.shape[1:])} pixels, but {image.name} {describe_size(pixels.shape[:2])}"
        raise ValueError(f"{prediction.name} has {sizes}: save predictions at the image's size.")
    labels = LabelSet(("background", "foreground")) if label_ids else LabelSet.numbered(count)
    with torch.inference_mode():
        return Prediction(image.stem, pixels, log_p.tensor(), labels, label_ids, kind)


def _check_bytes(path: Path, limits: Limits) -> None:
    size = path.stat().st_size
    if size > limits.file_bytes:
        allowed = limits.file_bytes / MEGABYTE
        raise ValueError(f"{path.name} has {size / MEGABYTE:.3g} MB, more than {allowed:.3g} MB: make it smaller.")


def _check_archive(path: Path, limits: Limits) -> None:
    """Refuse a small file that would become a large array."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > 8 * limits.predicted_values:
        raise ValueError(f"{path.name} would unpack to {unpacked / MEGABYTE:.0f} MB: save fewer pixels or labels.")
