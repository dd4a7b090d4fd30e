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
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepmrf.flow.estimation import Method
from deepmrf.result import Found, summarise
from deepmrf.segment import Segmenter
from deepmrf.video.reading import FPS, Source, import_av
from deepmrf.video.streaming import Seen, Stream, segment_video
from deepmrf.video.threads import Behind, Clock
from deepmrf.video.writing import Writer, encoder_for

WAITING = 4
"""Frames that wait to be written."""

SLACK = 1
"""Frames that a whole file may have less than it says: AVI counts an empty one."""

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
    """Frames that the source says it has, and has not."""
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
    progress: Progress | None = None,
) -> Recording:
    """Segment a video; write its overlay to `out` and its label maps, one PNG a frame, to the folder `labels`.

    Other options: see segment_video. Ctrl-C and errors after the first frame are told in the result, not raised.
    """
    path, folder = (None if one is None else Path(one) for one in (out, labels))
    if path is None and folder is None:
        raise ValueError("There is nothing to write: give a video file, a folder for label maps, or both.")
    if path is not None:
        encoder_for(path)
    stream = segment_video(
        segmenter, source, flow=flow, consistency=consistency, max_frames=max_frames, fps=fps
    )  # raises what is wrong with the source before anything is written
    made = Recording(segmenter.labels.names, path, folder)
    sink = _Sink(made, stream.source, note_of(segmenter, stream.source, flow))
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
    return f"deepmrf {segmenter.identity} {flow if isinstance(flow, str | None) else 'custom'} {Path(source.name).name}"


def frames_there(path: Path, note: str) -> int | None:
    """How many frames an earlier recording with this note holds; None if the file is something else."""
    av = import_av()
    try:
        with av.open(str(path), metadata_errors="replace") as file:
            comments = [value for key, value in file.metadata.items() if key.lower() == "comment"]
            stream = file.streams.video[0]
            if note not in comments:
                return None
            return int(stream.frames or sum(1 for packet in file.demux(stream) if packet.size))
    except (av.FFmpegError, ValueError, IndexError):
        return None


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
    if stream.source.counted and stream.length is not None and not (made.interrupted or made.failed):
        missing = stream.length - made.frames - made.skipped
        made.missing = missing if missing > SLACK else 0
    made.seconds = stream.seconds | sink.clock.seconds


class _Sink:
    """Where frames go: painted, encoded, saved and counted."""

    def __init__(self, made: Recording, source: Source, note: str) -> None:
        self.made, self.source, self.note, self.clock = made, source, note, Clock()
        self.writer: Writer | None = None

    def take(self, seen: Seen) -> None:
        found, made = seen.found, self.made
        with self.clock("writing"):
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
        made.frames += 1

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
