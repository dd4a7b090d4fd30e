"""record: a whole video with its labels painted over it, the label maps as PNG files, and what was found in it.

    made = record(segmenter, "drive.mp4", "out.mp4", labels="maps")
    made.frames, made.consistency, made.summary()

Painting and writing work behind the network. Ctrl-C and errors end the file where it is: it stays playable.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmrf.flow.estimation import Method
from deepmrf.predict.notes import holds, is_label_map
from deepmrf.predict.result import Found, summarise
from deepmrf.predict.segmenter import Segmenter
from deepmrf.video.reading import FPS, FrameFolder, Source, import_av
from deepmrf.video.streaming import Seen, Stream, segment_video
from deepmrf.video.threads import Behind, Clock
from deepmrf.video.writing import Writer, encoder_for, is_sealed

WAITING = 4
"""Frames that wait to be written."""

SLACK = 1
"""Frames that a whole file may have less than it says: AVI counts an empty one."""

HOLE, SHARE = 5, 0.1
"""Frames, and which share of all, that are missed at the end where a length is known from the duration alone."""

Progress = Callable[[int, int | None], None]
"""Told (frames written, frames in all as far as one knows)."""


@dataclass
class Recording:
    """What became of a video."""

    names: tuple[str, ...]
    """Of the labels."""
    path: Path | None = None
    """The video that was written."""
    labels: Path | None = None
    """The folder of label maps."""
    frames: int = 0
    """That were written."""
    skipped: int = 0
    """Frames of the source that could not be read."""
    missing: int = 0
    """Frames that the source says it has, or should have by its duration, and has not."""
    interrupted: bool = False
    """By Ctrl-C."""
    failed: str = ""
    """Why it ended early, in one sentence."""
    silent: str = ""
    """Why the sound was not copied."""
    consistency: float | None = None
    """The share of linked pixels whose label is that of the frame before."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each stage has worked; they overlap."""
    pixels: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of each label, in all frames."""
    confidences: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Summed over those pixels."""
    shown: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """In how many frames each label is."""

    def __post_init__(self) -> None:
        count = len(self.names)
        self.pixels, self.shown = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.confidences = np.zeros(count)

    def summary(self) -> list[tuple[Found, int]]:
        """Each class, over the whole video, with the number of frames it is in; the largest first."""
        frames = dict(zip(self.names, self.shown.tolist(), strict=True))
        return [(one, frames[one.name]) for one in summarise(self.names, self.pixels, self.confidences)]


def record(
    segmenter: Segmenter,
    source: str | os.PathLike[str] | Source,
    out: str | os.PathLike[str] | None,
    *,
    labels: str | os.PathLike[str] | None = None,
    flow: Method | None = "dis",
    consistency: bool = False,
    max_frames: int | None = None,
    fps: float = FPS,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Recording:
    """Segment a video; write its overlay to `out` and its label maps, one PNG a frame, to the folder `labels`.

    `out` is replaced if it is there; files in `labels` that are not of this video by this model, only with `overwrite`.
    Other options: see segment_video. Ctrl-C and errors after the first frame are told in the result, not raised.
    """
    path, folder = (None if one is None else Path(one) for one in (out, labels))
    if path is None and folder is None and not consistency:
        raise ValueError("There is nothing to write: give a video file, a folder for label maps, or both.")
    if path is not None:
        encoder_for(path)
    stream = segment_video(
        segmenter, source, flow=flow, consistency=consistency, max_frames=max_frames, fps=fps
    )  # raises what is wrong with the source before anything is written
    made = Recording(segmenter.labels.names, path, folder)
    note = note_of(segmenter, stream.source, flow)
    if folder is not None:
        _check_labels(folder, stream.source, max_frames, None if overwrite else note)
    sink = _Sink(made, stream.source, note, overwrite)
    behind = Behind(sink.take, WAITING)
    try:
        for seen in stream:
            behind.put(seen)
            if progress is not None:
                progress(made.frames, stream.length)
    except KeyboardInterrupt:
        made.interrupted = True
    except (OSError, ValueError, RuntimeError, MemoryError) as why:
        made.failed = _sentence(why)
        if not made.frames and isinstance(why, OSError | ValueError):
            raise
    finally:
        with _undisturbed():
            _finish(stream, behind, sink, made)
    return made


def note_of(segmenter: Segmenter, source: Source, flow: Method | None) -> str:
    """What a recording keeps as its comment: by which model and settings it was made, and of what."""
    name = os.fsencode(Path(source.name).name).decode(errors="replace")
    by = flow if isinstance(flow, str | None) else "custom"
    return f"deepmrf {segmenter.identity} {by} {source.key()} {name}"


@dataclass(frozen=True)
class Earlier:
    """What an earlier recording left."""

    frames: int
    """In the video."""
    whole: bool
    """Was its source read to the end?"""


def earlier(path: Path, note: str) -> Earlier | None:
    """What is in a video that was recorded with this note; None if it is another video, or raises if it is none."""
    av = import_av()
    try:
        with av.open(str(path), metadata_errors="replace") as file:
            if note not in _comments(file) or not file.streams.video:
                return None
            stream = file.streams.video[0]
            frames = int(stream.frames or sum(1 for packet in file.demux(stream) if packet.size))
            return Earlier(frames, is_sealed(path))
    except (av.FFmpegError, ValueError):
        raise ValueError(f"{path} is unfinished or damaged: --overwrite replaces it.") from None


def is_recording(path: Path) -> bool:
    """Was this video written by a run of ours?"""
    av = import_av()
    with contextlib.suppress(av.FFmpegError, ValueError), av.open(str(path), metadata_errors="replace") as file:
        return any(comment.startswith("deepmrf ") for comment in _comments(file))
    return False


def _comments(file: Any) -> list[str]:
    return [value for key, value in file.metadata.items() if key.lower() == "comment"]


def maps_there(folder: Path, note: str) -> int:
    """How many label maps with this note a folder holds."""
    return sum(is_label_map(path, note) for path in folder.glob("*.png"))


def check_folder(labels: Path, frames: Path) -> None:
    """Label maps have the names of their frames: they may not go to the same folder."""
    if labels.is_dir() and frames.is_dir() and labels.samefile(frames):
        raise ValueError(f"{labels} is the folder of the frames, which label maps would replace: choose another one.")


def _check_labels(folder: Path, source: Source, max_frames: int | None, note: str | None) -> None:
    """Would label maps replace frames, or, with a note, files that are not of this video by this model?"""
    frames: list[Path] = []
    if isinstance(source, FrameFolder):
        check_folder(folder, Path(source.name))
        frames = source.paths
    names, real = {path.stem for path in frames}, {os.path.realpath(path) for path in frames}
    for path in sorted(folder.glob("*.png")):
        if path.stem not in names and (frames or not _is_number(path.stem, max_frames)):
            continue
        if os.path.realpath(path) in real:
            raise ValueError(f"{path} is a frame, which its label map would replace: choose another folder for them.")
        if note is not None:
            _check_map(path, note)


def _is_number(stem: str, below: int | None) -> bool:
    """Is it what a frame of a video is called?"""
    return len(stem) >= 6 and stem.isascii() and stem.isdigit() and (below is None or int(stem) < below)


def _check_map(path: Path, note: str) -> None:
    """May this label map be written?"""
    if holds(path) and not is_label_map(path, note):
        raise ValueError(
            f"{path} is there, and not of this video by this model with these settings: --overwrite replaces it."
        )


def _finish(stream: Stream, behind: Behind[Seen], sink: _Sink, made: Recording) -> None:
    stream.close()
    try:
        behind.finish()
    except (OSError, ValueError, RuntimeError, MemoryError) as why:
        made.failed = made.failed or _sentence(why)
    try:
        sink.close(whole=not (made.interrupted or made.failed or made.frames == stream.max_frames))
    except (OSError, ValueError) as why:
        made.failed = made.failed or _sentence(why)
    made.skipped, made.consistency = stream.source.skipped, stream.consistency
    if not (made.interrupted or made.failed):
        made.missing = _missing(stream, sink, made)
    made.seconds = stream.seconds | sink.clock.seconds


def _missing(stream: Stream, sink: _Sink, made: Recording) -> int:
    if stream.source.length is None or stream.length is None:
        return 0
    missing = stream.length - made.frames - made.skipped
    if stream.source.counted:
        return missing if missing > SLACK else 0
    least = max(HOLE, int(SHARE * stream.length))
    return missing if missing > least and sink.lost(stream.length) > least else 0


class _Sink:
    """Where frames go: painted, encoded, saved and counted."""

    def __init__(self, made: Recording, source: Source, note: str, overwrite: bool = False) -> None:
        self.made, self.source, self.note, self.overwrite, self.clock = made, source, note, overwrite, Clock()
        self.writer: Writer | None = None
        self.first = self.last = Fraction(0)
        self.longest = 0

    def take(self, seen: Seen) -> None:
        found, made = seen.found, self.made
        with self.clock("writing"):
            if made.labels is not None and not self.overwrite:
                _check_map(made.labels / f"{seen.frame.name}.png", self.note)
            if made.path is not None:
                if self.writer is None:
                    self.writer = self._begin(made.path, found.labels.shape)
                self.writer.write(np.asarray(found.overlay()), seen.frame.time)
            if made.labels is not None:
                found.save_labels(made.labels / f"{seen.frame.name}.png", self.note)
            pixels, sums = found.totals()
        made.pixels += pixels
        made.confidences += sums
        made.shown += pixels > 0
        if not made.frames:
            self.first = self.last = seen.frame.time
        self.longest = max(self.longest, self._gap(seen.frame.time))
        self.last = seen.frame.time
        made.frames += 1

    def _gap(self, until: Fraction) -> int:
        """Frames that would fit between the last one and a time."""
        return int((until - self.last) * self.source.rate) - 1

    def lost(self, length: int) -> int:
        """Frames that would fit before the end of a source of that length; none if as much lies between others.

        Where frames are far apart, as in a slide show, the rate was estimated too high.
        """
        gap = self._gap(self.first + length / self.source.rate)
        return gap if gap > 2 * self.longest else 0

    def _begin(self, path: Path, size: tuple[int, ...]) -> Writer:
        source = self.source
        writer = Writer(
            path,
            (size[0], size[1]),
            rate=source.rate,
            time_base=source.time_base,
            sound=source.sound,
            aspect=source.aspect,
            note=self.note,
        )
        self.made.silent = writer.silent
        return writer

    def close(self, whole: bool) -> None:
        if self.writer is not None:
            with self.clock("writing"):
                self.writer.close(whole)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not break what the first one has to finish."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _sentence(why: BaseException) -> str:
    if isinstance(why, MemoryError):
        return "There is not enough memory."
    return (str(why).strip() or type(why).__name__).splitlines()[0]
