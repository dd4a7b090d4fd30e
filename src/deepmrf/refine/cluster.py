"""Segment and refine on a Ray cluster: many processes, on one machine or on many, share the images of a run.

    deepmrf.cluster.predict(["photos"], "segmented", model="animals")         # all processors of this machine
    deepmrf.cluster.predict("/nfs/photos", "/nfs/out", address="auto")        # all machines of a cluster

Ray Data holds a pool of workers, each a process with the model, and hands them shares of the images. A worker runs
predict/pipeline.py or refine/apply.py over its shares, so that files, notes and messages are those of one machine. A
worker that dies is started again and its share with it: what is written stays, as in a second run.

The machines need deepmrf and the same paths: a shared file system. The model travels from the driver.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from deepmrf.data.extras import optional
from deepmrf.data.files import image_size
from deepmrf.data.labels import LabelSet
from deepmrf.data.progress import Progress, no_progress
from deepmrf.layers import MeanField
from deepmrf.predict.ahead import map_ahead
from deepmrf.predict.files import ImageFile, check_targets
from deepmrf.predict.pipeline import Options, segment_files, segment_images
from deepmrf.predict.report import PredictReport
from deepmrf.predict.segmenter import Segmenter, load
from deepmrf.refine.apply import Refinement, RefineReport, refine_files
from deepmrf.refine.apply import refine as refine_folder
from deepmrf.refine.matching import MatchedFiles
from deepmrf.refine.predictions import Folder

__all__ = ["predict", "refine"]

MAX_IMAGES_PER_SHARE = 32
"""Images that a worker gets at a time. Its report comes back when all of them are done."""
SHARES_PER_WORKER = 8
"""At least so many shares for each worker, so that all of them end at about the same time."""
THREADS_READING_SIZES = 8

T = TypeVar("T")


def predict(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    model: str | os.PathLike[str] | Segmenter = "animals",
    *,
    address: str | None = None,
    workers: int | None = None,
    device: str | None = None,
    options: Options | None = None,
    recursive: bool = False,
    progress: Progress = no_progress,
) -> PredictReport:
    """Segment the images that files, folders and patterns name, as `deepmrf predict` does, on a Ray cluster.

    model: a name, a folder, or what `deepmrf.load` returns, with its settings. address: of the cluster, such as "auto"
    or "host:6379"; None takes the one that runs here, or starts one on this machine. workers: processes that hold a
    model; None: one for each GPU of the cluster, or without GPUs one for each processor. device: "cpu" or "cuda".
    """
    pool = _Pool(address, workers, device)
    segmenter = copy.deepcopy(model).to("cpu") if isinstance(model, Segmenter) else load(model, device="cpu")
    inputs = [paths] if isinstance(paths, str | os.PathLike) else paths

    def run(
        segmenter: Segmenter, images: Sequence[ImageFile], folder: Path, options: Options, progress: Progress
    ) -> PredictReport:
        check_targets(images, folder)
        work = _Predict(segmenter, folder, options, len(images))
        report = PredictReport(segmenter.labels.names)
        ordered = _by_size(images, segmenter.max_pixels) if options.batch > 1 else images
        try:
            for part in pool.run(work, ordered, options.batch):
                report.merge(part)
                progress(len(report.images) + len(report.failed), len(images))
        except KeyboardInterrupt:
            report.interrupted = True
        order = {image.path: number for number, image in enumerate(images)}
        for results in (report.done, report.earlier):
            results.sort(key=lambda result: order[result.path])
        report.failed.sort(key=lambda failure: order[failure[0]])
        return report

    return segment_files(segmenter, inputs, Path(out), options, progress, recursive, run=run)


def refine(
    mrf: MeanField,
    labels: LabelSet,
    predictions: Folder,
    images: Folder,
    out: Folder,
    *,
    address: str | None = None,
    workers: int | None = None,
    device: str | None = None,
    progress: Progress = no_progress,
    **options: Any,
) -> RefineReport:
    """Refine every prediction that has an image, as `deepmrf refine` does, on a Ray cluster; see `predict`.

    options: those of deepmrf.refine.apply.refine.
    """
    pool = _Pool(address, workers, device or "cpu")

    def run(refinement: Refinement, files: Sequence[MatchedFiles], progress: Progress) -> RefineReport:
        parts: list[RefineReport] = []
        finished = 0
        for part in pool.run(_Refine(refinement), files):
            parts.append(part)
            finished += len(part.done) + len(part.skipped) + len(part.failed)
            progress(finished, len(files))
        names = ("done", "skipped", "failed", "notes", "kinds")
        return RefineReport(*(tuple(sorted({x for part in parts for x in getattr(part, name)})) for name in names))

    return refine_folder(mrf, labels, predictions, images, out, progress=progress, run=run, **options)


@dataclass
class _Predict:
    """Segments a share of the images."""

    segmenter: Segmenter
    folder: Path
    options: Options
    total: int
    """Images of all shares."""

    def to(self, device: str) -> None:
        self.segmenter.to(device)

    def __call__(self, images: Sequence[ImageFile]) -> PredictReport:
        return segment_images(self.segmenter, images, self.folder, self.options, total=self.total)


@dataclass
class _Refine:
    """Refines a share of the predictions."""

    refinement: Refinement
    device: str = "cpu"

    def to(self, device: str) -> None:
        self.device = device

    def __call__(self, files: Sequence[MatchedFiles]) -> RefineReport:
        return refine_files(self.refinement, files, device=self.device, workers=1)


def _by_size(images: Sequence[ImageFile], max_pixels: int) -> list[ImageFile]:
    """Images of one size one after the other, so that a share has full batches."""

    def size(image: ImageFile) -> tuple[int, ...]:
        with suppress(OSError, ValueError):  # the worker names a bad file
            return image_size(image.path, max_pixels)[:2]
        return ()

    sized = map_ahead(size, images, 4 * THREADS_READING_SIZES, THREADS_READING_SIZES)
    return [
        image for image, _ in sorted([(image, future.result()) for image, future in sized], key=lambda pair: pair[1])
    ]


@dataclass
class _Pool:
    """Which cluster, and what part of it."""

    address: str | None
    workers: int | None
    device: str | None
    ray: Any = field(init=False)

    def __post_init__(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user wants it
        self.ray = optional("ray", "A cluster needs", "ray")
        optional("ray.data", "A cluster needs", "ray")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers!r} must be at least 1.")
        if self.device not in (None, "cpu", "cuda"):
            raise ValueError(f"device={self.device!r} is unknown: choose 'cpu' or 'cuda'.")

    def run(self, work: Any, items: Sequence[T], batch: int = 1) -> Iterator[Any]:
        """Yield work(share) for shares of the items, in the order in which they are finished."""
        ray = self.ray
        with self._connected():
            resources = ray.cluster_resources()
            gpus = 0 if self.device == "cpu" else int(resources.get("GPU", 0))
            if self.device == "cuda" and not gpus:
                raise ValueError("device='cuda' was asked for, but the cluster has no GPU: choose 'cpu'.")
            workers = self.workers or gpus or max(1, int(resources.get("CPU", 1)))
            shares = _shares(items, workers, batch)
            workers = min(workers, len(shares))
            rows = [{"share": ray.cloudpickle.dumps(share)} for share in shares]
            dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
            dataset.context.enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)
            start = (ray.cloudpickle.dumps(work), "cuda" if gpus else "cpu", os.getcwd(), sys.path)
            results = dataset.map(
                _Worker,
                fn_constructor_args=start,
                compute=ray.data.ActorPoolStrategy(  # idle workers leave room for those that lost their machine
                    min_size=1, max_size=workers, initial_size=workers, max_tasks_in_flight_per_actor=2
                ),
                num_cpus=1,
                num_gpus=min(1.0, gpus / workers),  # several workers may share a GPU
            )
            try:
                for row in results.iter_rows():
                    result = ray.cloudpickle.loads(row["result"])
                    if isinstance(result, Exception):
                        raise result
                    yield result
            except ray.exceptions.RayError as error:
                raise OSError(f"The Ray cluster failed: {str(error).splitlines()[0]}") from error

    @contextmanager
    def _connected(self) -> Iterator[None]:
        if self.ray.is_initialized():  # the caller's own connection
            yield
            return
        try:
            self.ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise OSError(f"No Ray cluster answers at {self.address}: {str(error).splitlines()[0]}") from error
        try:
            yield
        finally:
            self.ray.shutdown()


def _shares(items: Sequence[T], workers: int, batch: int) -> list[Sequence[T]]:
    """Cut the items into shares, each of complete batches but the last."""
    size = min(MAX_IMAGES_PER_SHARE, math.ceil(len(items) / (workers * SHARES_PER_WORKER)))
    size = batch * math.ceil(size / batch)
    return [items[start : start + size] for start in range(0, len(items), size)]


class _Worker:
    """A process of the cluster, with the model."""

    def __init__(self, work: bytes, device: str, folder: str, path: list[str]) -> None:
        import ray

        with suppress(OSError):  # relative paths are those of the driver
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path]  # the code of an own network
        self.pickle = ray.cloudpickle
        self.work = self.pickle.loads(work)
        self.work.to(device)

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        try:
            result = self.work(self.pickle.loads(row["share"]))
        except Exception as error:  # a full disk, for example: the driver raises it
            result = error
        return {"result": self.pickle.dumps(result)}
