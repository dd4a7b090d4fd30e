"""Segment many image files: read ahead, compute, and write behind, each in threads of its own.

    report = segment_files(deepmrf.load("animals"), ["photos", "more/*.jpg"], Path("segmented"))

Memory is bounded by pixels, not by files. A file that fails is reported and the rest goes on. What an earlier run has
done, with the same model and settings, is left alone. files.py says which files are read and written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepmrf import ops
from deepmrf.data.files import Bytes, image_size, read_image
from deepmrf.data.labels import LabelSet
from deepmrf.data.progress import Progress, no_progress
from deepmrf.ops.jobs import compiled_before
from deepmrf.predict.ahead import WorkQueue
from deepmrf.predict.files import (
    ImageFile,
    ResultFiles,
    check_masks,
    check_targets,
    find_images,
    mask_endings,
    output_folder,
)
from deepmrf.predict.notes import Note, is_mask, is_overlay, not_ours, read_note
from deepmrf.predict.report import ImageReport, PredictReport
from deepmrf.predict.result import Segmentation, class_shares
from deepmrf.predict.segmenter import Segmenter

MAX_PIXELS_IN_MEMORY = 48_000_000
"""Nothing is read while more pixels are under way, except one image alone; a pixel takes about ten bytes."""
BATCHES_AHEAD = 4
"""Batches that are read ahead, and batches of results that wait to be written."""
READERS = WRITERS = 2
"""Threads that read, and threads that write."""
DISK_ERRORS = (errno.ENOSPC, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC))
"""After one of these, no other file can be written either."""
MAX_PLAIN_WINDOW, MAX_PLAIN_SIDE = 31, 1024
"""Pixels of a side, of windows and of images, up to which plain PyTorch segments an image in a few seconds."""


@dataclass(frozen=True)
class Options:
    """What to write, and how."""

    overlay: bool = True
    """Write the overlay, too."""
    probabilities: bool = False
    """Write the probabilities, too."""
    overwrite: bool = False
    """Segment again what is done, and replace other files."""
    batch: int = 1
    """Images of one size to compute together."""
    legend: bool = True
    """Draw a legend below or beside the overlay."""
    masks: bool = False
    """Write a mask in black and white of each label in the image but the background, too."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch={self.batch} must be at least 1 image.")

    def files(self, image: ImageFile, folder: Path, labels: LabelSet) -> ResultFiles[Path]:
        """Where the results of an image go."""
        return image.results(folder, self.overlay, self.probabilities, mask_endings(labels) if self.masks else None)


Run = Callable[[Segmenter, Sequence[ImageFile], Path, Options, Progress], PredictReport]
"""Segments the images and writes the results below a folder."""
Publish = Callable[[ResultFiles[Path], Sequence[Path]], None]
"""Does something with the files of an image once they are written, and with those of an earlier run that were removed;
an OSError is one of writing them."""


def segment_files(
    segmenter: Segmenter,
    inputs: Iterable[str | os.PathLike[str]],
    out: Path,
    options: Options | None = None,
    progress: Progress = no_progress,
    recursive: bool = False,
    tile_progress: Progress = no_progress,
    run: Run | None = None,
) -> PredictReport:
    """Segment the images that files, folders and patterns name. `out` is a folder, or NAME.png for one image.

    progress: called with the number of images that are done. tile_progress: with that of an image's tiles.
    run: segments the images that were found; None for `segment_images`.
    """
    images, missing = find_images(inputs, recursive, out)
    if not images:
        return PredictReport(segmenter.labels.names, failed=missing)
    images, folder = output_folder(images, out)
    options = options or Options()
    if options.masks:
        check_masks(images, folder, mask_endings(segmenter.labels))
    if run is None:
        report = segment_images(segmenter, images, folder, options, progress, tile_progress)
    else:
        report = run(segmenter, images, folder, options, progress)
    report.failed[:0] = missing
    return report


def segment_images(
    segmenter: Segmenter,
    images: Sequence[ImageFile],
    folder: Path,
    options: Options | None = None,
    progress: Progress = no_progress,
    tile_progress: Progress = no_progress,
    total: int = 0,
    publish: Publish | None = None,
) -> PredictReport:
    """Segment every image and write its results below the folder. Ctrl-C stops with complete files only.

    total: images of the run, where these are a part of it: they decide which kernels are used.
    publish: called with the files of each image.
    """
    options = options or Options()
    check_targets(images, folder)
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = _Pipeline(segmenter, folder, options, progress, tile_progress, len(images), publish)
    with pipeline.reading, pipeline.writing, kernels_for(segmenter, total or len(images)):
        try:
            progress(0, len(images))
            for image in images:
                pipeline.add(image)
            while pipeline.busy:
                pipeline.step()
        except KeyboardInterrupt:
            pipeline.stop()
    return pipeline.report


def kernels_for(segmenter: Segmenter, images: int) -> AbstractContextManager[None]:
    """Choose plain PyTorch for a single image where kernels were never compiled, which would take ten seconds."""
    fields = [model.mean_field for model in segmenter.models if model.mean_field is not None]
    small_windows = all(max(mrf.triple_penalty.window) <= MAX_PLAIN_WINDOW for mrf in fields)
    small_image = segmenter.size is not None and segmenter.size <= MAX_PLAIN_SIDE and segmenter.scales == (1.0,)
    single = images == 1 and segmenter.device.type == "cpu"
    return ops.use("torch") if single and small_windows and small_image and not compiled_before() else nullcontext()


Written = tuple[tuple[int, int], NDArray[np.int64], NDArray[np.float64]]
"""(height, width) of an image that is done, and its `Segmentation.totals`."""


def noted_result(segmenter: Segmenter, image: ImageFile, files: ResultFiles[Path], legend: bool) -> Written | None:
    """What results of this very image, by this model with these settings, say of it; None unless all exist."""
    noted = read_note(files.labels)
    if noted is None:
        return None
    note, size = noted
    try:
        same = (note.by, note.of) == (segmenter.identity, image.key())
    except OSError:
        return None
    if not same or not len(note.pixels) == len(note.confidences) == len(segmenter.labels):
        return None
    wanted = files.showing(_shown(segmenter.labels.names, note.pixels))
    present = set(files.beside()) <= set(note.beside) and all(file.is_file() for file in wanted.all())
    same_overlay = files.overlay is None or is_overlay(files.overlay, legend)
    if not (present and same_overlay and all(map(is_mask, wanted.masks.values()))):
        return None
    return size, np.array(note.pixels, np.int64), np.array(note.confidences)


def _shown(names: Sequence[str], pixels: Iterable[int]) -> set[str]:
    """The labels that have pixels."""
    return {name for name, count in zip(names, pixels, strict=True) if count}


@dataclass(frozen=True)
class _Job:
    """An image under way."""

    path: Path
    files: ResultFiles[Path]
    pixels: int
    key: str
    """Of the image file as it was before it was read."""


_Group = list[tuple[_Job, Bytes]]


@dataclass
class _Pipeline:
    """The images under way: being read, waiting for others of their size, being written."""

    segmenter: Segmenter
    folder: Path
    options: Options
    progress: Progress
    tile_progress: Progress
    total: int
    publish: Publish | None

    def __post_init__(self) -> None:
        self.reading, self.writing = WorkQueue[_Job, Bytes](READERS), WorkQueue[_Job, Written](WRITERS)
        self.waiting: dict[tuple[int, ...], _Group] = {}
        self.pixels_in_memory = 0
        self.limit = BATCHES_AHEAD * self.options.batch
        self.report = PredictReport(self.segmenter.labels.names)

    @property
    def busy(self) -> bool:
        return bool(self.reading or self.waiting or self.writing)

    def add(self, image: ImageFile) -> None:
        """Begin to read an image, once there is room for it."""
        files = self.options.files(image, self.folder, self.segmenter.labels)
        if not self.options.overwrite and (earlier := noted_result(self.segmenter, image, files, self.options.legend)):
            return self._add(self.report.earlier, image.path, files, earlier)
        try:
            if not self.options.overwrite and (other := not_ours(files.labels, files.all()[1:])) is not None:
                raise ValueError(
                    f"{other} is there, and deepmrf predict did not write it: overwrite it, or choose another folder."
                )
            height, width, animated = image_size(image.path, self.segmenter.max_pixels)
            key = image.key()
        except (OSError, ValueError) as error:
            return self._fail(image.path, error)
        if animated:
            self.report.animated.append(image.path)
        pixels = height * width
        while len(self.reading) >= self.limit or (self.busy and self.pixels_in_memory + pixels > MAX_PIXELS_IN_MEMORY):
            self.step()
        self.pixels_in_memory += pixels
        job = _Job(image.path, files, pixels, key)
        self.reading.put(job, read_image, image.path, self.segmenter.max_pixels)

    def _add(self, reports: list[ImageReport], path: Path, files: ResultFiles[Path], written: Written) -> None:
        """Report the results of an image, and count them."""
        size, pixels, sums = written
        files = files.showing(_shown(self.report.names, pixels))
        reports.append(ImageReport(path, files, size, class_shares(self.report.names, pixels, sums)))
        self.report.add(pixels, sums)
        self._tell()

    def step(self) -> None:
        """Do the oldest thing that can be done: compute what was read, then what waits, then wait for the writers."""
        while len(self.writing) >= self.limit or self.writing.ready:
            self._finish_oldest()
        if self.reading:
            self._take_image()
        elif self.waiting:
            self._compute(self._largest_group())
        elif self.writing:
            self._finish_oldest()

    def _take_image(self) -> None:
        job, future = self.reading.take()
        try:
            image = future.result()
        except (OSError, ValueError, MemoryError) as error:
            self.pixels_in_memory -= job.pixels
            return self._fail(job.path, error)
        group = self.waiting.setdefault(image.shape, [])
        group.append((job, image))
        if len(group) == self.options.batch:
            self._compute(self.waiting.pop(image.shape))
        elif sum(map(len, self.waiting.values())) >= self.limit:
            self._compute(self._largest_group())

    def _largest_group(self) -> _Group:
        return self.waiting.pop(max(self.waiting, key=lambda shape: len(self.waiting[shape])))

    def _compute(self, group: _Group) -> None:
        try:
            images = [image for _, image in group]
            results = self.segmenter.batch(
                images, probabilities=self.options.probabilities, progress=self.tile_progress
            )
        except (OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            if len(group) > 1:  # perhaps only one of them fails, or all of them together
                for single in group:
                    self._compute([single])
                return
            job, _ = group[0]
            self.pixels_in_memory -= job.pixels
            return self._fail(job.path, error)
        for (job, _), result in zip(group, results, strict=True):
            self.writing.put(job, _write, job, result, self.segmenter.identity, self.options.legend, self.publish)

    def _finish_oldest(self) -> None:
        """Wait until the oldest result is written, and report it."""
        job, future = self.writing.take()
        self.pixels_in_memory -= job.pixels
        try:
            written = future.result()
        except OSError as error:
            if error.errno in DISK_ERRORS:
                raise OSError(error.errno, f"{error.strerror}: {job.files.labels} could not be written.") from error
            return self._fail(job.path, error)
        except (ValueError, MemoryError) as error:
            return self._fail(job.path, error)
        self._add(self.report.done, job.path, job.files, written)

    def stop(self) -> None:
        """After Ctrl-C: finish what is being written and drop the rest."""
        self.report.interrupted = True
        self.reading.cancel()
        while self.writing:
            self._finish_oldest()

    def _fail(self, path: Path, error: BaseException) -> None:
        short = "there is not enough memory" if isinstance(error, MemoryError) else "it failed"
        reason = (str(error).strip() or short).replace(str(path), " ".join(str(path).splitlines()))
        self.report.failed.append((path, reason.splitlines()[0]))
        self._tell()

    def _tell(self) -> None:
        report = self.report
        self.progress(len(report.done) + len(report.earlier) + len(report.failed), self.total)


def _write(job: _Job, result: Segmentation, identity: str, legend: bool, publish: Publish | None = None) -> Written:
    """Write the files of one image, the label map last: where it is, all is. Remove masks of labels that are gone."""
    if job.files.overlay is not None:
        result.save_overlay(job.files.overlay, legend=legend)
    if job.files.probabilities is not None:
        result.save(job.files.probabilities)
    pixels, sums = result.totals()
    files = job.files.showing(_shown(result.names, pixels))
    for name, path in files.masks.items():
        result.save_mask(path, name)
    removed = [path for name, path in job.files.masks.items() if name not in files.masks and is_mask(path)]
    for path in removed:
        path.unlink()
    note = Note(identity, job.key, job.files.beside(), tuple(pixels.tolist()), tuple(np.round(sums, 6).tolist()))
    result.save_labels(job.files.labels, note.text())
    if publish is not None:
        publish(files, removed)
    height, width = result.labels.shape
    return (height, width), pixels, sums
