"""Record a segmented video: the video with its labels painted over it, label maps as PNG files, and a report.

    report = record(segmenter, "drive.mp4", "out.mp4", labels="maps")
    report.frames, report.consistency, report.summary()

Painting and writing run in a thread behind the network. After Ctrl-C or an error, the file ends there and is playable.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from deepmrf.data.progress import Progress, no_progress
from deepmrf.figures import LegendEntry
from deepmrf.figures import legend as legend_sheet
from deepmrf.flow.estimation import Method
from deepmrf.predict.ahead import Behind
from deepmrf.predict.result import legend_colours
from deepmrf.predict.segmenter import Segmenter
from deepmrf.video import earlier
from deepmrf.video.clock import Clock
from deepmrf.video.reading import DEFAULT_FPS, FrameSource
from deepmrf.video.report import VideoReport
from deepmrf.video.streaming import FrameResult, Stream, segment_video
from deepmrf.video.writing import Writer, encoder_for

FRAMES_WAITING_TO_BE_WRITTEN = 4
COUNT_TOLERANCE = 1
"""Frames that may be missing from a file that states its number of frames: AVI counts an empty one."""
MIN_FRAMES_MISSING, MIN_SHARE_MISSING = 5, 0.1
"""Where the number of frames is estimated from the duration, fewer missing frames are not reported."""


def record(
    segmenter: Segmenter,
    source: str | os.PathLike[str] | FrameSource,
    out: str | os.PathLike[str] | None,
    *,
    labels: str | os.PathLike[str] | None = None,
    flow: Method | None = "dis-fast",
    consistency: bool = False,
    max_frames: int | None = None,
    fps: float = DEFAULT_FPS,
    frame_by_frame: bool = False,
    full_precision: bool = False,
    legend: bool = True,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> VideoReport:
    """Segment a video; write it with its labels to `out`, and one label map (PNG) per frame to the folder `labels`.

    legend: add a strip below or beside the frames, with the colours of all classes of the model in every frame.
    Until it is finished, the video is NAME.part.mp4. `out` is replaced if it exists. resume: leave alone what earlier
    calls have finished, do again what was interrupted, and raise ExistingFileError if `out` is any other file.
    Other files in `labels` are replaced only with `overwrite`. For the other options see `segment_video`.
    Ctrl-C, and errors after the first frame, are not raised: the report tells them.
    """
    path = None if out is None else Path(out)
    folder = None if labels is None else Path(labels)
    if path is None and folder is None and not consistency:
        raise ValueError("There is nothing to write: give a video file, a folder for label maps, or both.")
    if path is not None:
        encoder_for(path)
    stream = segment_video(
        segmenter,
        source,
        flow=flow,
        consistency=consistency,
        max_frames=max_frames,
        fps=fps,
        frame_by_frame=frame_by_frame,
        full_precision=full_precision,
    )
    method = flow if stream.links or not stream.spans_time else None
    note, video_note = (earlier.note_of(stream.segmenter, stream.source, method, drawn) for drawn in (False, legend))
    report = VideoReport(segmenter.labels.names, path, folder)
    if path is not None:
        earlier.check_out(path, stream.source)
        if resume and not overwrite:
            report.done_before = earlier.done_before(path, folder, video_note, note, max_frames, consistency)
        if report.done_before == "all":
            return report
    if folder is not None:
        earlier.check_label_maps(folder, stream.source, max_frames, None if overwrite else note)
    entries = list(legend_colours(segmenter.labels).items()) if legend else []
    _write_all(_Sink(report, stream, note, video_note, entries, overwrite), progress or no_progress)
    return report


def _write_all(sink: _Sink, progress: Progress) -> None:
    """Write the frames of the stream in a thread, and complete the report."""
    report, stream = sink.report, sink.stream
    behind = Behind(sink.write, FRAMES_WAITING_TO_BE_WRITTEN)
    try:
        for frame_result in stream:
            behind.put(frame_result)
            progress(report.frames, stream.length)
    except KeyboardInterrupt:
        report.interrupted = True
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        report.failed = _sentence(error)
        if not report.frames and isinstance(error, OSError | ValueError):
            raise
    finally:
        with _ignoring_ctrl_c():
            _finish(behind, sink)


def _finish(behind: Behind[FrameResult], sink: _Sink) -> None:
    """Close everything, and complete the report."""
    report, stream = sink.report, sink.stream
    stream.close()
    for finish in (behind.finish, sink.close):
        try:
            finish()
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            report.failed = report.failed or _sentence(error)
    report.linked = stream.links and report.frames > 1
    report.skipped, report.consistency = stream.source.skipped, stream.consistency
    if not (report.interrupted or report.failed):
        report.missing = sink.missing()
    report.seconds = stream.seconds | sink.clock.seconds


@dataclass
class _Sink:
    """Paints, encodes, saves and counts the frames of a stream."""

    report: VideoReport
    stream: Stream
    note: str
    video_note: str
    legend_entries: Sequence[LegendEntry]
    overwrite: bool

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.writer: Writer | None = None
        self.sheet: Image.Image | None = None
        self.first = self.last = Fraction(0)
        self.longest_gap = 0

    def write(self, frame_result: FrameResult) -> None:
        _, frame, result = frame_result
        report = self.report
        with self.clock("writing"):
            if report.labels is not None and not self.overwrite:
                earlier.check_label_map(report.labels / f"{frame.name}.png", self.note)
            if report.path is not None and report.done_before == "nothing":
                picture = np.asarray(self._with_legend(result.overlay()))
                if self.writer is None:
                    self.writer = self._open_writer(report.path, picture.shape)
                self.writer.write(picture, frame.time)
            if report.labels is not None:
                result.save_labels(report.labels / f"{frame.name}.png", self.note)
            pixels, confidences = result.totals()
        report.add(pixels, confidences)
        if not report.frames:
            self.first = self.last = frame.time
        self.longest_gap = max(self.longest_gap, self._frames_until(frame.time))
        self.last = frame.time
        report.frames += 1

    def _with_legend(self, picture: Image.Image) -> Image.Image:
        """The frame on a sheet with the legend, which is drawn once and the same in every frame."""
        if not self.legend_entries:
            return picture
        if self.sheet is None:
            self.sheet = legend_sheet(picture.size, self.legend_entries)
        self.sheet.paste(picture)
        return self.sheet

    def _frames_until(self, time: Fraction) -> int:
        """The number of frames that fit between the last frame and a time."""
        return int((time - self.last) * self.stream.source.rate) - 1

    def missing(self) -> int:
        """The number of frames that the source should have given."""
        source, length = self.stream.source, self.stream.length
        if source.length is None or length is None:
            return 0
        missing = length - self.report.frames - self.report.skipped
        if source.counted:
            return missing if missing > COUNT_TOLERANCE else 0
        least = max(MIN_FRAMES_MISSING, int(MIN_SHARE_MISSING * length))
        at_end = self._frames_until(self.first + length / source.rate)
        # Where frames are far apart, as in a slide show, the rate was estimated too high: other gaps are as long.
        return missing if missing > least and at_end > max(least, 2 * self.longest_gap) else 0

    def _open_writer(self, path: Path, size: tuple[int, ...]) -> Writer:
        source = self.stream.source
        writer = Writer(
            earlier.part_of(path),
            (size[0], size[1]),
            rate=source.rate,
            time_base=source.time_base,
            sound=source.sound,
            aspect=source.aspect,
            note=earlier.comment_of(self.video_note, self.stream.max_frames),
        )
        self.report.silent = writer.silent
        return writer

    def close(self) -> None:
        """Close the video; give it its final name if it is finished."""
        if self.writer is None or self.report.path is None:
            return
        report, out = self.report, self.report.path
        report.path = self.writer.path
        stopped = report.interrupted or bool(report.failed)
        with self.clock("writing"):
            self.writer.close(all_sound=not stopped and report.frames != self.stream.max_frames)
        if not report.failed and (self.stream.source.live or not stopped):
            os.replace(self.writer.path, out.resolve() if out.is_symlink() else out)
            report.path = out


@contextlib.contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """A second Ctrl-C does not stop what must be finished after the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _sentence(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "There is not enough memory."
    return (str(error).strip() or type(error).__name__).splitlines()[0]
