"""Read frames with exact times from a video file, a folder of images or a camera.

    source = open_source("drive.mp4")        # or "frames/", or "camera:0"
    for frame in source.frames(): ...        # frame.image (H, W, 3) of uint8, upright; frame.time in seconds, exact

Frames that cannot be decoded are left out and counted (`skipped`). Frames of another size than the first are resized to
its size. Times increase from frame to frame: a time that is missing or too early becomes one just after the last.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from deepmrf.data.extras import optional
from deepmrf.data.files import Bytes, images_in, one_line, read_image
from deepmrf.predict.notes import image_key

CAMERA_PREFIX = "camera:"
"""A camera's name is this and its number."""
DEFAULT_FPS = 25.0
"""Frames per second of folders of images."""
MAX_FPS = 1000
"""Higher rates in a file are errors of the file."""
MIN_FPS = 1 / 86400
"""One frame a day: MP4 files hold no much longer ones."""


class Frame(NamedTuple):
    """One frame of a video."""

    image: Bytes
    """(H, W, 3), upright."""
    time: Fraction
    """Exact seconds from the start of the video."""
    name: str
    """Its number in six digits, or the stem of its file in a folder of images."""


RawFrames = Generator[tuple[Bytes, Fraction | None, str], None, None]
"""(image, time if known, name) of each frame."""


class FrameSource(ABC):
    """A source of frames."""

    name: str
    """The path or camera as given."""
    stem: str
    """The name without folder and suffix, for the names of results."""
    rate: Fraction = Fraction(25)
    """Frames per second, approximately: frames have their own times."""
    time_base: Fraction = Fraction(1, 90000)
    """All times are multiples of this many seconds."""
    length: int | None = None
    """Number of frames, as far as it is known before reading."""
    counted: bool = False
    """True if `length` is stated by the file, False if it is estimated from the duration."""
    aspect: Fraction | None = None
    """Width / height of a pixel, if it is not square; known from the first frame on."""
    sound: Path | None = None
    """A file whose sound belongs to the frames."""
    skipped: int = 0
    """Number of frames that could not be read so far."""
    live: bool = False
    """True if frames come until somebody stops them."""

    def key(self) -> str:
        """Return a short text that identifies the content: it differs for other files and changes with them."""
        return "-"

    @abstractmethod
    def _raw(self) -> RawFrames:
        """Read the frames. Closing the generator closes the source."""

    def frames(self) -> Generator[Frame, None, None]:
        """Read the frames; possible once."""
        size: tuple[int, ...] | None = None
        last: Fraction | None = None
        with closing(self._raw()) as raw:
            for image, known_time, name in raw:
                seconds = known_time
                if seconds is None:
                    seconds = Fraction(0) if last is None else last + 1 / self.rate
                if last is not None and seconds <= last:
                    seconds = last + self.time_base
                size, last = size or image.shape, seconds
                if image.shape != size:
                    image = np.array(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR))
                yield Frame(image, seconds, name)
        if size is None:
            unreadable = f" ({self.skipped} could not be read)" if self.skipped else ""
            raise ValueError(f"{self.name} gave no frame{unreadable}: replace it, or choose another.")


def open_source(
    source: str | os.PathLike[str] | FrameSource, fps: float = DEFAULT_FPS, max_pixels: int | None = None
) -> FrameSource:
    """Open a video file, a folder of images (`fps` per second) or "camera:0"; refuse more pixels than `max_pixels`."""
    if isinstance(source, FrameSource):
        return source
    text = os.fspath(source)
    if text.startswith(CAMERA_PREFIX) and not Path(text).exists():
        return Camera(text)
    path = Path(text)
    if path.is_dir():
        return FrameFolder(path, fps, max_pixels)
    return VideoFile(path, max_pixels)


def import_av() -> Any:
    """Import PyAV, or raise an ImportError that says how to install it."""
    return optional("av", "Video files need", "video")


class VideoFile(FrameSource):
    """The first video stream of a file, read by PyAV and turned upright by its display matrix."""

    def __init__(self, path: Path, max_pixels: int | None = None) -> None:
        self.name, self.stem, self.path = str(path), path.stem, path
        self._av = import_av()
        self._container = self._open()
        streams = [s for s in self._container.streams.video if s.codec_context is not None and not _is_cover(s)]
        if not streams:
            self._container.close()
            raise ValueError(f"{path} holds no video that can be decoded: give a file with pictures in it.")
        self._stream = stream = streams[0]
        stream.thread_type = "SLICE"  # in "FRAME" threads, a damaged frame spoils good ones
        width, height = stream.codec_context.width, stream.codec_context.height
        if max_pixels is not None and width * height > max_pixels:
            self._container.close()
            raise ValueError(f"{path} has {width} x {height} pixels, more than {max_pixels:,}: make it smaller.")
        rate = stream.average_rate or stream.guessed_rate
        if rate and 0 < rate <= MAX_FPS:
            self.rate = Fraction(rate)
        if stream.time_base:
            self.time_base = Fraction(stream.time_base)
        self.length, self.counted = stream.frames or self._estimated_length() or None, bool(stream.frames)
        if self._container.streams.audio:
            self.sound = path

    def _open(self) -> Any:
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} is missing: give a video file.")
        if not self.path.stat().st_size:
            raise ValueError(f"{self.path} is empty: replace the file.")
        try:
            return self._av.open(str(self.path), metadata_errors="replace")
        except (self._av.FFmpegError, ValueError) as error:
            problem = f"cannot be read as a video ({one_line(error)})"
            raise ValueError(f"{self.path} {problem}: it is damaged, cut off or none; replace it.") from None

    def key(self) -> str:
        """Return a key of the file's path, size and time."""
        return image_key(self.path)

    def _estimated_length(self) -> int:
        """Return the number of frames by duration and rate; 0 if unknown."""
        stream, container = self._stream, self._container
        if stream.duration and stream.time_base:
            return int(stream.duration * stream.time_base * self.rate)
        seconds = seconds_of(stream.metadata.get("DURATION", ""))  # Matroska; its sound may be longer
        if not seconds and container.duration:
            seconds = Fraction(container.duration, self._av.time_base)
        if stream.start_time and stream.time_base:
            seconds -= stream.start_time * stream.time_base  # both durations count from 0
        return max(0, int(seconds * self.rate))

    def _raw(self) -> RawFrames:
        number, matrix, last_rotation = 0, None, None
        with self._container:
            for frame in self._decoded():
                try:
                    # A frame that was asked for its side data is in a cycle: it stays until the garbage collector runs.
                    rotation = getattr(frame, "rotation", 0)
                    matrix = _matrix(frame) if rotation != last_rotation else matrix
                    last_rotation = rotation
                    image, sides_swapped = upright(frame.to_ndarray(format="rgb24"), matrix)
                except (self._av.FFmpegError, ValueError):
                    self.skipped += 1
                    continue
                if not number:
                    self._read_aspect(sides_swapped)
                time_base = frame.time_base or self.time_base
                yield image, None if frame.pts is None else frame.pts * Fraction(time_base), f"{number:06}"
                number += 1

    def _decoded(self) -> Iterator[Any]:
        """Decode the undamaged frames. An error between packets ends the file, one in a packet skips its frames."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except self._av.FFmpegError:
                packet = None  # the file breaks off: decode(None) gives the frames still in the decoder
            try:
                decoded = self._stream.decode(packet)
            except self._av.FFmpegError:
                self.skipped += 1
                decoded = []
            good = [frame for frame in decoded if not frame.is_corrupt]
            self.skipped += len(decoded) - len(good)
            yield from good
            if packet is None:
                return

    def _read_aspect(self, sides_swapped: bool) -> None:
        aspect = self._stream.codec_context.sample_aspect_ratio or self._stream.sample_aspect_ratio
        if aspect and aspect > 0 and aspect != 1:
            self.aspect = 1 / Fraction(aspect) if sides_swapped else Fraction(aspect)


def seconds_of(text: str) -> Fraction:
    """Return the seconds of a text such as "00:01:02.5"; 0 for other texts."""
    match = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d*)?)", text)
    return Fraction(0) if match is None else 3600 * int(match[1]) + 60 * int(match[2]) + Fraction(match[3])


def _is_cover(stream: Any) -> bool:
    """Is the stream a cover picture?"""
    return "attached_pic" in str(getattr(stream, "disposition", "")).lower()


def _matrix(frame: Any) -> tuple[int, ...] | None:
    """Numbers a, b, c, d of the display matrix: it moves pixel (x, y) to (a x + c y, b x + d y)."""
    with suppress(ValueError):  # raised for kinds of side data that PyAV does not know
        for data in frame.side_data:
            if data.type.name == "DISPLAYMATRIX":
                numbers = np.frombuffer(bytes(data), np.int32)
                return tuple(int(numbers[n]) for n in (0, 1, 3, 4))
    return None


def upright(image: Bytes, matrix: tuple[int, ...] | None) -> tuple[Bytes, bool]:
    """Turn an image by quarters and mirror it, as players do: (the image, are height and width exchanged?)."""
    if matrix is None or not any(matrix):
        return image, False
    a, b, c, d = matrix
    swapped = abs(b) + abs(c) > abs(a) + abs(d)
    if swapped:
        image, a, d = image.transpose(1, 0, 2), c, b
    image = image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
    return np.ascontiguousarray(image), swapped


class FrameFolder(FrameSource):
    """The images of a folder in the order of the numbers in their names, at `fps` frames per second."""

    def __init__(self, folder: Path, fps: float = DEFAULT_FPS, max_pixels: int | None = None) -> None:
        if not MIN_FPS <= fps <= MAX_FPS:
            raise ValueError(f"fps={fps} must be frames a second, at least one a day and at most {MAX_FPS}.")
        self.name, self.stem, self.max_pixels = str(folder), folder.resolve().name or "frames", max_pixels
        self.rate = _rate(fps)
        self.time_base = 1 / self.rate
        self.paths = sorted(images_in(folder), key=lambda path: _natural_order(path.name))
        if not self.paths:
            raise ValueError(f"{folder} is a folder without images: give one that holds a video's frames.")
        self.length, self.counted = len(self.paths), True

    def key(self) -> str:
        """Return a key of all images in their order, and of the rate."""
        keys = [str(self.rate)]
        for path in self.paths:
            with suppress(OSError):  # a broken link: its frame is skipped as well
                keys.append(image_key(path))
        return blake2b(" ".join(keys).encode(), digest_size=8).hexdigest()

    def _raw(self) -> RawFrames:
        for number, path in enumerate(self.paths):
            try:
                image = read_image(path, self.max_pixels)
            except (OSError, ValueError):
                self.skipped += 1
                continue
            yield image, number * self.time_base, path.stem


def _rate(fps: float) -> Fraction:
    """Frames per second as a fraction of small numbers: 29.97 becomes 2997 / 100, and 0.0004 becomes 1 / 2500."""
    return Fraction(fps).limit_denominator(1001) if fps >= 1 else 1 / Fraction(1 / fps).limit_denominator(1001)


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which 2 comes before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


class Camera(FrameSource):
    """A camera by its number, read by OpenCV; times are those of the clock, counted from the first frame."""

    time_base = Fraction(1, 1000)
    live = True

    def __init__(self, name: str) -> None:
        number = name.removeprefix(CAMERA_PREFIX)
        if not number.isdecimal():
            raise ValueError(f"{name} is no camera: write its number, such as {CAMERA_PREFIX}0.")
        cv2 = optional("cv2", "Cameras need", "video")
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # the error below says enough
        self.name, self.stem, self._opened_at = name, f"camera{number}", time.time_ns()
        self._capture = cv2.VideoCapture(int(number))
        if not self._capture.isOpened():
            raise ValueError(f"{name} does not answer: connect a camera, close other programs that use it, or try 1.")
        rate = self._capture.get(cv2.CAP_PROP_FPS)
        self.rate = Fraction(rate).limit_denominator(1001) if rate and 0 < rate <= MAX_FPS else Fraction(30)

    def key(self) -> str:
        """Return a key of the moment the camera was opened: its frames never come again."""
        return f"{self._opened_at:x}"

    def _raw(self) -> RawFrames:
        start = 0.0
        try:
            for number in itertools.count():
                success, image = self._capture.read()
                if not success:
                    return
                now = time.monotonic()
                start = start if number else now
                milliseconds = round(1000 * (now - start))
                yield np.ascontiguousarray(image[..., ::-1]), Fraction(milliseconds, 1000), f"{number:06}"
        finally:
            self._capture.release()
