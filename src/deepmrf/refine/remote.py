"""Refine predictions at URLs: fetch a share of them with their images, refine it as local files are, and upload.

    with mirrored_folders("s3://bucket/p", "s3://bucket/photos", "s3://bucket/refined") as folders:
        report = refine(mrf, labels, *folders, run=folders.run)

Of a result, the label map is uploaded last: where it is, all is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from deepmrf.data.progress import Progress
from deepmrf.data.remote import URL, Mirror, Names, exists, fetch, path_or_url, upload
from deepmrf.data.volumes import volumes_in
from deepmrf.predict.ahead import map_ahead
from deepmrf.predict.remote import MAX_IMAGES_PER_SHARE, TRANSFERS
from deepmrf.refine.apply import Refinement, RefineReport, ResultWriter, refine_files
from deepmrf.refine.changes import total
from deepmrf.refine.matching import MatchedFiles, PredictedImage
from deepmrf.refine.predictions import Folder

LEVELS_OF_PREDICTIONS = 2
"""A prediction may be a folder of pictures."""


@dataclass(frozen=True)
class Folders:
    """Folders of predictions, images and results on this machine, some of which stand for URLs."""

    predictions: Path
    images: Path
    out: Path
    names: Names

    def __iter__(self) -> Iterator[Path]:
        return iter((self.predictions, self.images, self.out))

    def run(
        self,
        refinement: Refinement,
        files: Sequence[MatchedFiles],
        progress: Progress,
        device: str = "cpu",
        workers: int | None = None,
    ) -> RefineReport:
        """Refine files share after share in this process."""
        if not self.names.urls:
            return refine_files(refinement, files, progress, device, workers)
        parts = []
        for start in range(0, len(files), MAX_IMAGES_PER_SHARE):
            share = files[start : start + MAX_IMAGES_PER_SHARE]
            parts.append(refine_share(refinement, share, self.names, device, workers))
            progress(min(start + len(share), len(files)), len(files))
        return merged(parts)


@contextmanager
def mirrored_folders(predictions: Folder, images: Folder, out: Folder) -> Iterator[Folders]:
    """Paths for the folders, with a mirror of the URLs among them."""
    with Mirror() as mirror:
        folders = []
        for given, depth in ((predictions, LEVELS_OF_PREDICTIONS), (images, 1)):
            path = path_or_url(given)
            folders.append(mirror.add(path, depth) if isinstance(path, URL) else path)
        target = path_or_url(out)
        folders.append(mirror.add_output(target) if isinstance(target, URL) else target)
        if mirror.names.urls and folders[1].is_dir() and volumes_in(folders[1]):
            raise ValueError("URLs are for pictures: copy volumes to a folder of this machine.")
        for _, reason in mirror.failed:
            raise ValueError(reason)
        yield Folders(folders[0], folders[1], folders[2], mirror.names)


def merged(parts: Sequence[RefineReport]) -> RefineReport:
    """The report of all shares, sorted."""
    names = ("done", "skipped", "failed", "notes", "kinds")
    report = RefineReport(*(tuple(sorted({x for part in parts for x in getattr(part, name)})) for name in names))
    return replace(report, pixels=total([part.pixels for part in parts if part.pixels]))


def refine_share(
    refinement: Refinement, files: Sequence[MatchedFiles], names: Names, device: str, workers: int | None
) -> RefineReport:
    """Refine some predictions; names: the URLs that paths of inputs and results stand for."""
    if not names.urls:
        return refine_files(refinement, files, device=device, workers=workers)
    with tempfile.TemporaryDirectory(prefix="deepmrf-") as folder:
        stage = _Stage(Path(folder), names)
        out = names.url(refinement.writer.folder)
        if out is not None:
            refinement = replace(refinement, writer=_Uploader(refinement.writer, Path(folder, "out"), out))
        ready: list[MatchedFiles] = []
        failed: list[tuple[str, str]] = []

        def prepare(matched: MatchedFiles) -> MatchedFiles:
            done = not refinement.overwrite and refinement.writer.has_written(matched)
            return matched if done else stage.fetched(matched)

        for matched, future in map_ahead(prepare, files, TRANSFERS, TRANSFERS):
            try:
                ready.append(future.result())
            except OSError as error:
                failed.append((matched.stem, str(error)))
        report = refine_files(refinement, ready, device=device, workers=workers)
        failed += [(stem, stage.here.in_words(reason)) for stem, reason in report.failed]
        return replace(report, failed=tuple(failed))


class _Stage:
    """A temporary folder for the inputs of a share."""

    def __init__(self, folder: Path, names: Names) -> None:
        self.folder, self.names, self.here = folder, names, Names()

    def fetched(self, matched: MatchedFiles) -> MatchedFiles:
        """The same files, fetched where they are at URLs."""
        prediction = matched.prediction
        array, ids, confidence = (
            None if path is None else self._fetch(path)
            for path in (prediction.array, prediction.ids, prediction.confidence)
        )
        per_label = {label: self._fetch(path) for label, path in prediction.per_label.items()}
        prediction = replace(prediction, array=array, ids=ids, confidence=confidence, per_label=per_label)
        return replace(matched, prediction=prediction, image=self._fetch(matched.image))

    def _fetch(self, path: Path) -> Path:
        url = self.names.url(path)
        if url is None:
            return path
        copy = self.folder / f"{os.urandom(8).hex()}{path.suffix}"
        self.here.urls[str(copy)] = url
        fetch(url, copy)
        return copy


class _Uploader(ResultWriter):
    """Writes results into a temporary folder and uploads them, the label map last."""

    def __init__(self, writer: ResultWriter, folder: Path, url: str) -> None:
        super().__init__(folder, writer.labels, writer.label_ids, writer.probabilities, writer.overlays)
        self.url = url
        self.present: dict[str, bool] = {}

    def has_written(self, files: MatchedFiles) -> bool:
        """Are all results of this image there? Asked once."""
        if files.stem not in self.present:
            self.present[files.stem] = all(exists(f"{self.url}/{path.name}") for path in self.paths(files))
        return self.present[files.stem]

    def write(self, files: MatchedFiles, predicted: PredictedImage, labels: Tensor, p: Tensor | None) -> None:
        """Write and upload."""
        super().write(files, predicted, labels, p)
        for path in reversed(self.paths(files)):
            upload(path, f"{self.url}/{path.name}")
            path.unlink()
