"""A line of work over many images: the next ones are read and the last ones written while the network computes.

Memory stays bounded by pixels, not by files: nothing new is read while HELD pixels are under way. A file that cannot be
done is reported and the rest goes on; what an earlier run has done, with the same model and settings, is left alone.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.files import Bytes, image_size, read_image
from deepmrf.predict.files import Failure, Files, Picture, check_targets
from deepmrf.predict.notes import Note, foreign, image_key, read_note
from deepmrf.predict.result import Found, Segmentation, summarise
from deepmrf.predict.segmenter import Segmenter

HELD = 48_000_000
"""Pixels that may be in memory at a time (or one image of more): each takes about ten bytes."""
AHEAD = 4
"""Batches that are read ahead, and results that wait to be written."""
THREADS = 2
"""That read, and that write."""
FATAL = (errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC))
"""With these, no other file can be written either."""

Progress = Callable[[int, int, Path], None]
"""Told (files done, files in all, the last one)."""


@dataclass(frozen=True)
class Options:
    """What is written, and how."""

    overlay: bool = True
    """Write the overlay, too."""
    probabilities: bool = False
    """Write the probabilities, too."""
    overwrite: bool = False
    """Do again what is done."""
    batch: int = 1
    """Images of one size that are computed together."""


@dataclass(frozen=True)
class Outcome:
    """One image that is done."""

    path: Path
    files: Files
    size: tuple[int, int]
    """(height, width)."""
    found: list[Found]


@dataclass
class Report:
    """What became of each image, and of all together."""

    names: tuple[str, ...]
    done: list[Outcome] = field(default_factory=list)
    before: list[Outcome] = field(default_factory=list)
    """Done by an earlier run."""
    failed: list[Failure] = field(default_factory=list)
    animated: list[Path] = field(default_factory=list)
    """Files of several frames, of which the first was taken."""
    interrupted: bool = False
    pixels: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of each label, over all images that are done, now or before."""
    confidences: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Summed over those pixels."""

    def __post_init__(self) -> None:
        self.pixels, self.confidences = np.zeros(len(self.names), np.int64), np.zeros(len(self.names))

    @property
    def skipped(self) -> list[Path]:
        """The images whose results were there already."""
        return [outcome.path for outcome in self.before]

    def summary(self) -> list[tuple[Found, int]]:
        """Each class found, over all images, with the number of images it is in; the largest first."""
        images = dict.fromkeys(self.names, 0)
        for outcome in (*self.before, *self.done):
            for one in outcome.found:
                images[one.name] += 1
        return [(one, images[one.name]) for one in summarise(self.names, self.pixels, self.confidences)]


def run(
    segmenter: Segmenter,
    pictures: Sequence[Picture],
    out: Path,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Report:
    """Segment every picture and write its results below `out`. Ctrl-C stops with whole files only."""
    options = options or Options()
    if options.batch < 1:
        raise ValueError(f"batch={options.batch} must be at least 1 image.")
    check_targets(pictures, out)
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(THREADS) as readers, ThreadPoolExecutor(THREADS) as writers:
        line = _Line(segmenter, out, options, readers, writers, progress, len(pictures))
        try:
            for picture in pictures:
                line.take(picture)
            while line.busy:
                line.step()
        except KeyboardInterrupt:
            line.stop()
        except BaseException:
            readers.shutdown(wait=False, cancel_futures=True)
            writers.shutdown(wait=False, cancel_futures=True)
            raise
    return line.report


@dataclass
class _Job:
    picture: Picture
    files: Files
    pixels: int
    key: str
    """Of the image as it was before it was read."""


_Written = tuple[Outcome, NDArray[np.int64], NDArray[np.float64]]


class _Line:
    """The images under way: being read, waiting for others of their size, being written."""

    def __init__(
        self,
        segmenter: Segmenter,
        out: Path,
        options: Options,
        readers: ThreadPoolExecutor,
        writers: ThreadPoolExecutor,
        progress: Progress | None,
        whole: int,
    ) -> None:
        self.segmenter, self.out, self.options, self.whole = segmenter, out, options, whole
        self.readers, self.writers, self.progress = readers, writers, progress
        self.report = Report(segmenter.labels.names)
        self.reading: deque[tuple[_Job, Future[Bytes]]] = deque()
        self.waiting: dict[tuple[int, ...], list[tuple[_Job, Bytes]]] = {}
        self.writing: deque[tuple[_Job, Future[_Written]]] = deque()
        self.held = 0

    @property
    def busy(self) -> bool:
        return bool(self.reading or self.waiting or self.writing)

    def take(self, picture: Picture) -> None:
        """Begin to read a picture, once there is room for it."""
        options = self.options
        files = picture.files(self.out, options.overlay, options.probabilities)
        if not options.overwrite and self._done_before(picture, files):
            return self._tell(picture.path)
        try:
            if not options.overwrite and (other := foreign(files.labels, files.all()[1:])) is not None:
                raise ValueError(f"{other} is there, and not written by deepmrf predict: --overwrite replaces it.")
            height, width, animated = image_size(picture.path, self.segmenter.max_pixels)
            key = image_key(picture.path)
        except (OSError, ValueError) as why:
            return self._fail(picture.path, why)
        if animated:
            self.report.animated.append(picture.path)
        pixels = height * width
        while len(self.reading) >= AHEAD * options.batch or (self.busy and self.held + pixels > HELD):
            self.step()
        self.held += pixels
        read = self.readers.submit(read_image, picture.path, self.segmenter.max_pixels)
        self.reading.append((_Job(picture, files, pixels, key), read))

    def _done_before(self, picture: Picture, files: Files) -> bool:
        """Are all results there, of this very image, by this model with these settings? Then they count as found."""
        known = read_note(files.labels)
        if known is None:
            return False
        note, size = known
        try:
            same = (note.by, note.of) == (self.segmenter.identity, image_key(picture.path))
        except OSError:
            return False
        if not same or not set(files.beside()) <= set(note.beside) or not all(path.is_file() for path in files.all()):
            return False
        pixels, sums = np.array(note.pixels, np.int64), np.array(note.confidences)
        if pixels.shape != self.report.pixels.shape or sums.shape != pixels.shape:
            return False
        found = summarise(self.report.names, pixels, sums)
        self.report.before.append(Outcome(picture.path, files, size, found))
        self.report.pixels += pixels
        self.report.confidences += sums
        return True

    def step(self) -> None:
        """The oldest thing that can be done: compute what is read, then what waits, then await what is written."""
        while len(self.writing) >= AHEAD * self.options.batch or (self.writing and self.writing[0][1].done()):
            self._settle()
        if self.reading:
            job, read = self.reading.popleft()
            try:
                image = read.result()
            except (OSError, ValueError, MemoryError) as why:
                self.held -= job.pixels
                return self._fail(job.picture.path, why)
            group = self.waiting.setdefault(image.shape, [])
            group.append((job, image))
            if len(group) == self.options.batch:
                self._compute(self.waiting.pop(image.shape))
            elif sum(map(len, self.waiting.values())) >= AHEAD * self.options.batch:
                self._compute(self._fullest())
        elif self.waiting:
            self._compute(self._fullest())
        elif self.writing:
            self._settle()

    def stop(self) -> None:
        """After Ctrl-C: what is being written is finished, the rest forgotten."""
        self.report.interrupted = True
        for _, read in self.reading:
            read.cancel()
        while self.writing:
            self._settle()

    def _fullest(self) -> list[tuple[_Job, Bytes]]:
        return self.waiting.pop(max(self.waiting, key=lambda shape: len(self.waiting[shape])))

    def _compute(self, group: list[tuple[_Job, Bytes]]) -> None:
        images = [image for _, image in group]
        try:
            found = self.segmenter.batch(images, probabilities=self.options.probabilities)
        except (OSError, ValueError, TypeError, RuntimeError, MemoryError) as why:
            if len(group) > 1:  # one of them, or all of them together: alone, each has its own chance
                for one in group:
                    self._compute([one])
                return
            self.held -= group[0][0].pixels
            return self._fail(group[0][0].picture.path, why)
        for (job, _), made in zip(group, found, strict=True):
            self.writing.append((job, self.writers.submit(_write, job, made, self.segmenter.identity)))

    def _settle(self) -> None:
        job, written = self.writing.popleft()
        self.held -= job.pixels
        try:
            outcome, pixels, sums = written.result()
        except OSError as why:
            if why.errno in FATAL:
                raise OSError(why.errno, f"{why.strerror}: {job.files.labels} could not be written.") from why
            return self._fail(job.picture.path, why)
        except (ValueError, MemoryError) as why:
            return self._fail(job.picture.path, why)
        self.report.done.append(outcome)
        self.report.pixels += pixels
        self.report.confidences += sums
        self._tell(job.picture.path)

    def _fail(self, path: Path, why: BaseException) -> None:
        reason = str(why).strip() or ("there is not enough memory" if isinstance(why, MemoryError) else "it failed")
        reason = reason.replace(str(path), " ".join(str(path).splitlines()))  # names may hold line ends
        self.report.failed.append((path, reason.splitlines()[0]))
        self._tell(path)

    def _tell(self, path: Path) -> None:
        if self.progress is not None:
            report = self.report
            self.progress(len(report.done) + len(report.before) + len(report.failed), self.whole, path)


def _write(job: _Job, found: Segmentation, identity: str) -> _Written:
    if job.files.overlay is not None:
        found.save_overlay(job.files.overlay)
    if job.files.probabilities is not None:
        found.save(job.files.probabilities)
    pixels, sums = found.totals()
    note = Note(identity, job.key, job.files.beside(), tuple(pixels.tolist()), tuple(np.round(sums, 6).tolist()))
    found.save_labels(job.files.labels, note.text())
    height, width = found.labels.shape
    outcome = Outcome(job.picture.path, job.files, (height, width), summarise(found.names, pixels, sums))
    return outcome, pixels, sums
