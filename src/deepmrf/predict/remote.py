"""Segment images at URLs: fetch a share of them, segment it as local files are, and upload the results.

    report = segment_anywhere(segmenter, ["s3://bucket/photos"], "s3://bucket/out")

Of a result, the label map with its note is uploaded last: where it is, all is. A second run reads the first bytes of
the results that are there, and fetches only images that are not done.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepmrf.data.progress import Progress
from deepmrf.data.remote import URL, Mirror, Names, fetch, path_or_url, read_part, remove, upload
from deepmrf.predict.ahead import map_ahead
from deepmrf.predict.files import Failure, ImageFile, ResultFiles, check_targets
from deepmrf.predict.notes import HEADER_BYTES, TAIL_BYTES, is_result
from deepmrf.predict.pipeline import Options, Run, noted_result, segment_files, segment_images
from deepmrf.predict.report import ImageReport, PredictReport
from deepmrf.predict.segmenter import Segmenter

MAX_IMAGES_PER_SHARE = 32
"""Images that are fetched at a time."""
TRANSFERS = 8
"""Threads that fetch files."""

Input = str | os.PathLike[str]


@dataclass
class LocalPaths:
    """Inputs and an output as paths of this machine, some of which stand for URLs."""

    inputs: list[Path]
    out: Path
    mirror: Mirror

    @property
    def names(self) -> Names:
        """The URLs that paths stand for."""
        return self.mirror.names

    def versioned(self, images: Sequence[ImageFile]) -> list[ImageFile]:
        """The images, those at URLs with their version."""
        return [replace(image, version=self.mirror.versions.get(str(image.path), "")) for image in images]

    def run(
        self, segmenter: Segmenter, images: Sequence[ImageFile], folder: Path, options: Options, progress: Progress
    ) -> PredictReport:
        """Segment images share after share in this process."""
        check_targets(images, folder)
        report = PredictReport(segmenter.labels.names)
        images = self.versioned(images)
        for start in range(0, len(images), MAX_IMAGES_PER_SHARE):
            share = images[start : start + MAX_IMAGES_PER_SHARE]
            report.merge(segment_share(segmenter, share, folder, options, len(images), self.names))
            progress(len(report.images) + len(report.failed), len(images))
            if report.interrupted:
                break
        return report

    def segment(self, segmenter: Segmenter, run: Run | None = None, **options: Any) -> PredictReport:
        """`segment_files` with these inputs and this output; the report has the names that the user knows."""
        run = run or (self.run if self.names.urls else None)
        report = segment_files(segmenter, self.inputs, self.out, run=run, **options)
        report.failed = [
            *self.mirror.failed,
            *[(self.names.shown(path), self.names.in_words(reason)) for path, reason in report.failed],
        ]
        return report


@contextmanager
def mirrored(inputs: Sequence[Input], out: Input, recursive: bool = False) -> Iterator[LocalPaths]:
    """Paths for inputs and output, with a mirror of the URLs among them."""
    paths, target = [path_or_url(text) for text in inputs], path_or_url(out)
    if len({isinstance(path, URL) for path in paths}) > 1:
        raise ValueError("Some of the inputs are URLs, others files of this machine: give them in turn.")
    with Mirror() as mirror:
        folder = mirror.add_output(target) if isinstance(target, URL) else target
        depth = None if recursive else 1
        yield LocalPaths([mirror.add(p, depth) if isinstance(p, URL) else p for p in paths], folder, mirror)


def segment_anywhere(
    segmenter: Segmenter, inputs: Sequence[Input], out: Input, *, recursive: bool = False, **options: Any
) -> PredictReport:
    """`segment_files`, also for inputs and outputs that are URLs; options: those of `segment_files`."""
    with mirrored(inputs, out, recursive) as paths:
        return paths.segment(segmenter, recursive=recursive, **options)


def segment_share(
    segmenter: Segmenter, images: Sequence[ImageFile], folder: Path, options: Options, total: int, names: Names
) -> PredictReport:
    """Segment some images, `total` in all shares; names: the URLs that the paths of images and folder stand for."""
    out = names.url(folder)
    if out is None and not any(map(names.url, (image.path for image in images))):
        return segment_images(segmenter, images, folder, options, total=total)
    with tempfile.TemporaryDirectory(prefix="deepmrf-") as name:
        local = Path(os.path.realpath(name))
        results = local / "out" if out is not None else folder
        here = Names({} if out is None else {str(results): out})
        stage = _Stage(segmenter, options, local, results, names, here)
        ready: list[ImageFile] = []
        failed: list[Failure] = []
        for image, future in map_ahead(stage.fetch, images, TRANSFERS, TRANSFERS):
            try:
                ready.append(future.result())
            except (OSError, ValueError) as error:
                failed.append((names.shown(image.path), str(error)))
        publish = None if out is None else stage.publish
        try:
            report = segment_images(segmenter, ready, results, options, total=total, publish=publish)
        except OSError as error:
            raise OSError(here.in_words(str(error))) from error
        return stage.finished(report, failed)


@dataclass
class _Stage:
    """A temporary folder for the images and results of a share."""

    segmenter: Segmenter
    options: Options
    local: Path
    results: Path
    """Where results are written: below `local`, or in a folder that the user named."""
    names: Names
    here: Names
    """The URLs that paths below `local` stand for."""

    def fetch(self, image: ImageFile) -> ImageFile:
        """Fetch an image, unless it is done; before, enough of its results to know."""
        files = self.options.files(image, self.results, self.segmenter.labels)
        if str(self.results) in self.here.urls:
            for path in files.all():
                self._fetch_part(path)
        url = self.names.url(image.path)
        if url is None:
            return image
        path = self.local / os.urandom(8).hex() / image.path.name
        self.here.urls[str(path)] = url
        staged = replace(image, path=path)
        if self.options.overwrite or noted_result(self.segmenter, staged, files, self.options.legend) is None:
            path.parent.mkdir()
            fetch(url, path)
            if is_result(path):
                raise ValueError(f"{url} is a result of deepmrf: give the images themselves.")
        return staged

    def _fetch_part(self, path: Path) -> None:
        """Of a result that is there, fetch the bytes in which notes and comments lie."""
        url = self.here.url(path)
        assert url is not None  # it is below `results`
        start, end = (-TAIL_BYTES, None) if path.suffix == ".npz" else (0, HEADER_BYTES)
        part = read_part(url, start, end)
        if part is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(part)

    def publish(self, files: ResultFiles[Path], removed: Sequence[Path]) -> None:
        """Remove files of an earlier run at their URLs, and upload the results of an image, the label map last."""
        for path in removed:
            url = self.here.url(path)
            assert url is not None  # it is below `results`
            remove(url)
        for path in reversed(files.all()):
            url = self.here.url(path)
            assert url is not None  # it is below `results`
            upload(path, url)
            path.unlink()

    def finished(self, report: PredictReport, failed: Sequence[Failure]) -> PredictReport:
        """The report with URLs instead of the paths here."""
        shown = self.here.shown
        report.done = [self._shown(image) for image in report.done]
        report.earlier = [self._shown(image) for image in report.earlier]
        report.animated = [shown(path) for path in report.animated]
        report.failed = [(shown(path), self.here.in_words(reason)) for path, reason in report.failed]
        report.failed += failed
        return report

    def _shown(self, result: ImageReport) -> ImageReport:
        shown, files = self.here.shown, result.files
        overlay, probabilities = (path and shown(path) for path in (files.overlay, files.probabilities))
        masks = {name: shown(path) for name, path in files.masks.items()}
        files = ResultFiles(shown(files.labels), overlay, probabilities, masks)
        return replace(result, path=shown(result.path), files=files)
