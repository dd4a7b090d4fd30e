"""Frames with exact times, from a video file, a folder of images or a camera.

    source = open_source("drive.mp4")        # or "frames/", or "camera:0"
    for frame in source.frames(): ...        # frame.image (H, W, 3) of uint8, upright; frame.time in seconds, exact

What cannot be decoded is left out and counted (`skipped`). All frames have the size of the first: those of another are
resized to it. Times rise from frame to frame: one that is missing or steps back is moved just behind the one before.
"""

from __future__ import annotations

import importlib
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

from deepmrf.data.files import Bytes, images_in, read_image
from deepmrf.predict.notes import image_key

CAMERA = "camera:"
"""What the name of a camera begins with; its number follows."""
FPS = 25.0
"""Frames a second of folders and of files that do not tell."""


class Frame(NamedTuple):
    """One picture of a video."""

    image: Bytes
    """(H, W, 3), upright."""
    time: Fraction
    """Seconds, exactly."""
    name: str
    """Its number, six digits, or the name of its file in a folder of frames."""


Raw = Generator[tuple[Bytes, Fraction | None, str], None, None]


class Source(ABC):
    """Where frames come from."""

    name: str
    """As given."""
    stem: str
    """For the names of results."""
    rate: Fraction = Fraction(25)
    """Frames a second, roughly: frames carry their own times."""
    time_base: Fraction = Fraction(1, 90000)
    """All times are multiples of this many seconds."""
    length: int | None = None
    """How many frames there are, as far as one knows before reading them."""
    counted: bool = False
    """Is that what the file says, and no estimate from its duration?"""
    aspect: Fraction | None = None
    """How wide a pixel is for its height, where it is not square; known from the first frame on."""
    sound: Path | None = None
    """A file with sound that belongs to the frames."""
    skipped: int = 0
    """Frames that could not be read."""

    def key(self) -> str:
        """A few letters that differ for other files and once they have changed; "-" where there are none."""
        return "-"

    @abstractmethod
    def _raw(self) -> Raw:
        """(image, time if known, name) of each frame; closing it lets go of the source."""

    def frames(self) -> Generator[Frame, None, None]:
        """The frames, once."""
        size: tuple[int, ...] | None = None
        last: Fraction | None = None
        with closing(self._raw()) as raw:
            for image, given, name in raw:
                when = given
                if when is None:
                    when = Fraction(0) if last is None else last + 1 / self.rate
                if last is not None and when <= last:
                    when = last + self.time_base
                size, last = size or image.shape, when
                yield Frame(image if image.shape == size else _resized(image, size), when, name)
        if size is None:
            many = f" ({self.skipped} could not be read)" if self.skipped else ""
            raise ValueError(f"{self.name} gave no frame{many}: replace it, or choose another.")


def open_source(source: str | os.PathLike[str] | Source, fps: float = FPS, max_pixels: int | None = None) -> Source:
    """A video file, a folder of frames (`fps` a second) or "camera:0" as a Source; or one sentence why not."""
    if isinstance(source, Source):
        return source
    text = os.fspath(source)
    if text.startswith(CAMERA) and not Path(text).exists():
        return Camera(text)
    path = Path(text)
    if path.is_dir():
        return FrameFolder(path, fps, max_pixels)
    return VideoFile(path, max_pixels)


def import_av() -> Any:
    """PyAV, or a sentence that says how to get it."""
    try:
        return importlib.import_module("av")
    except ImportError:
        raise ImportError("Video files are read and written with PyAV: pip install av.") from None


class VideoFile(Source):
    """The first video stream of a file, by PyAV; turned upright as its display matrix says."""

    def __init__(self, path: Path, max_pixels: int | None = None) -> None:
        self.name, self.stem, self.path = str(path), path.stem, path
        self._av = import_av()
        self._container = self._opened()
        streams = [s for s in self._container.streams.video if not _is_cover(s)]
        if not streams:
            self._container.close()
            raise ValueError(f"{path} holds no video: give a file with pictures in it.")
        self._stream = stream = streams[0]
        stream.thread_type = "SLICE"  # with frames in several threads, a broken one takes whole ones with it
        width, height = stream.codec_context.width, stream.codec_context.height
        if max_pixels is not None and width * height > max_pixels:
            self._container.close()
            raise ValueError(f"{path} has {width} x {height} pixels, more than {max_pixels:,}: make it smaller.")
        rate = stream.average_rate or stream.guessed_rate
        if rate and 0 < rate <= 1000:
            self.rate = Fraction(rate)
        if stream.time_base:
            self.time_base = Fraction(stream.time_base)
        self.length, self.counted = stream.frames or self._estimate() or None, bool(stream.frames)
        if self._container.streams.audio:
            self.sound = path

    def _opened(self) -> Any:
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} is missing: give a video file.")
        if not self.path.stat().st_size:
            raise ValueError(f"{self.path} is empty: replace the file.")
        try:
            return self._av.open(str(self.path), metadata_errors="replace")
        except (self._av.FFmpegError, ValueError) as why:
            raise ValueError(
                f"{self.path} cannot be read as a video ({gist(why)}): it is damaged, cut off or none; replace it."
            ) from None

    def key(self) -> str:
        """Of the file: its place, size and time."""
        return image_key(self.path)

    def _estimate(self) -> int:
        stream, container = self._stream, self._container
        if stream.duration and stream.time_base:
            return int(stream.duration * stream.time_base * self.rate)
        seconds = _seconds(stream.metadata.get("DURATION", ""))  # Matroska: its sound may be longer
        if not seconds and container.duration:
            seconds = Fraction(container.duration, self._av.time_base)
        if stream.start_time and stream.time_base:
            seconds -= stream.start_time * stream.time_base  # both are counted from 0, whenever the frames begin
        return max(0, int(seconds * self.rate))

    def _raw(self) -> Raw:
        number = 0
        with self._container:
            for frame in self._decoded():
                try:
                    image, turned = upright(frame.to_ndarray(format="rgb24"), _matrix(frame))
                except (self._av.FFmpegError, ValueError):
                    self.skipped += 1
                    continue
                if not number:
                    self._see_aspect(turned)
                base = frame.time_base or self.time_base
                yield image, None if frame.pts is None else frame.pts * Fraction(base), f"{number:06}"
                number += 1

    def _decoded(self) -> Iterator[Any]:
        """Frames that are whole. An error between packets ends the file; one in a packet costs its frames."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except self._av.FFmpegError:
                packet = None  # the file breaks off: what the decoder still holds comes next
            try:
                found = self._stream.decode(packet)
            except self._av.FFmpegError:
                self.skipped += 1
                found = []
            whole = [frame for frame in found if not frame.is_corrupt]
            self.skipped += len(found) - len(whole)
            yield from whole
            if packet is None:
                return

    def _see_aspect(self, turned: bool) -> None:
        given = self._stream.codec_context.sample_aspect_ratio or self._stream.sample_aspect_ratio
        if given and given > 0 and given != 1:
            self.aspect = 1 / Fraction(given) if turned else Fraction(given)


def _seconds(text: str) -> Fraction:
    """Of "00:01:02.5"; 0 for anything else."""
    found = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d*)?)", text)
    return Fraction(0) if found is None else 3600 * int(found[1]) + 60 * int(found[2]) + Fraction(found[3])


def _is_cover(stream: Any) -> bool:
    """Is it the picture on a record's sleeve?"""
    return "attached_pic" in str(getattr(stream, "disposition", "")).lower()


def _matrix(frame: Any) -> tuple[int, ...] | None:
    """The four numbers a, b, c, d of a display matrix: a pixel (x, y) belongs at (a x + c y, b x + d y)."""
    with suppress(ValueError):  # of kinds of side data that PyAV does not know
        for data in frame.side_data:
            if data.type.name == "DISPLAYMATRIX":
                numbers = np.frombuffer(bytes(data), np.int32)
                return tuple(int(numbers[n]) for n in (0, 1, 3, 4))
    return None


def upright(image: Bytes, matrix: tuple[int, ...] | None) -> tuple[Bytes, bool]:
    """(the image as a player shows it, are its sides swapped): turned by quarters and mirrored as the matrix says."""
    if matrix is None or not any(matrix):
        return image, False
    a, b, c, d = matrix
    swapped = abs(b) + abs(c) > abs(a) + abs(d)
    if swapped:
        image, a, d = image.transpose(1, 0, 2), c, b
    image = image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
    return np.ascontiguousarray(image), swapped


def _resized(image: Bytes, size: tuple[int, ...]) -> Bytes:
    from PIL import Image

    return np.array(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR))


class FrameFolder(Source):
    """The images of a folder in the order of their names, 2 before 10, at `fps` frames a second."""

    def __init__(self, folder: Path, fps: float = FPS, max_pixels: int | None = None) -> None:
        if not 0 < fps <= 1000:
            raise ValueError(f"fps={fps} must be frames a second, between 0 and 1000.")
        self.name, self.stem, self.max_pixels = str(folder), folder.resolve().name or "frames", max_pixels
        self.rate = Fraction(fps).limit_denominator(1001)
        self.time_base = 1 / self.rate
        self.paths = sorted(images_in(folder), key=lambda path: _by_number(path.name))
        if not self.paths:
            raise ValueError(f"{folder} is a folder without images: give one that holds a video's frames.")
        self.length, self.counted = len(self.paths), True

    def key(self) -> str:
        """Of all the images, in their order, and their speed."""
        facts = [str(self.rate)]
        for path in self.paths:
            with suppress(OSError):  # a link that leads nowhere: the frame is left out, too
                facts.append(image_key(path))
        return blake2b(" ".join(facts).encode(), digest_size=8).hexdigest()

    def _raw(self) -> Raw:
        for number, path in enumerate(self.paths):
            try:
                image = read_image(path, self.max_pixels)
            except (OSError, ValueError):
                self.skipped += 1
                continue
            yield image, number * self.time_base, path.stem


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


class Camera(Source):
    """A camera by its number, through OpenCV; times are those of the clock, counted from the first frame."""

    time_base = Fraction(1, 1000)

    def __init__(self, name: str) -> None:
        number = name.removeprefix(CAMERA)
        if not number.isdecimal():
            raise ValueError(f"{name} is no camera: write its number, such as {CAMERA}0.")
        try:
            cv2: Any = importlib.import_module("cv2")
        except ImportError:
            raise ImportError("Cameras are read with OpenCV: pip install opencv-python-headless.") from None
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # one sentence is enough, below
        self.name, self.stem, self._since = name, f"camera{number}", time.time_ns()
        self._capture = cv2.VideoCapture(int(number))
        if not self._capture.isOpened():
            raise ValueError(f"{name} does not answer: connect a camera, close other programs that use it, or try 1.")
        rate = self._capture.get(cv2.CAP_PROP_FPS)
        self.rate = Fraction(rate).limit_denominator(1001) if rate and 0 < rate <= 1000 else Fraction(30)

    def key(self) -> str:
        """Of this moment: what a camera has shown does not come again."""
        return f"{self._since:x}"

    def _raw(self) -> Raw:
        start: float | None = None
        number = 0
        try:
            while True:
                alive, image = self._capture.read()
                if not alive:
                    return
                now = time.monotonic()
                start = now if start is None else start
                when = Fraction(round(1000 * (now - start)), 1000)
                yield np.ascontiguousarray(image[..., ::-1]), when, f"{number:06}"
                number += 1
        finally:
            self._capture.release()


def gist(why: BaseException) -> str:
    """What FFmpeg has to say, without numbers and names of functions."""
    text = getattr(why, "strerror", None) or str(why) or type(why).__name__
    return str(text).splitlines()[0].rstrip(".")
