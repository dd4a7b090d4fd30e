"""Segment and refine on a Ray cluster: many processes, on one machine or on many, share the images of a run.

    deepmrf.cluster.predict(["photos"], "segmented", model="animals")         # all processors of this machine
    deepmrf.cluster.predict("s3://b/photos", "s3://b/out", address="auto")    # all machines of a cluster

Ray Data holds a pool of workers, each a process with the model, and hands them shares of the images. A worker runs
predict/pipeline.py or refine/apply.py over its shares, so that files, notes and messages are those of one machine. A
worker that dies is started again and its share with it: what is written stays, as in a second run.

The machines need deepmrf and the same files: a shared file system, or URLs such as s3://bucket/photos, of which a
worker fetches its shares (predict/remote.py, refine/remote.py). The model travels from the driver.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from deepmrf.data.extras import optional
from deepmrf.data.files import image_size, one_line
from deepmrf.data.labels import LabelSet
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.remote import Names
from deepmrf.data.writing import check_folder
from deepmrf.layers import MeanField
from deepmrf.predict.ahead import map_ahead
from deepmrf.predict.files import ImageFile, check_targets
from deepmrf.predict.pipeline import Options
from deepmrf.predict.remote import MAX_IMAGES_PER_SHARE, mirrored, segment_share
from deepmrf.predict.report import PredictReport
from deepmrf.predict.segmenter import Segmenter, load
from deepmrf.refine.address import check_address
from deepmrf.refine.apply import Refinement, RefineReport
from deepmrf.refine.apply import Run as RefineRun
from deepmrf.refine.apply import refine as refine_folder
from deepmrf.refine.matching import MatchedFiles
from deepmrf.refine.predictions import Folder
from deepmrf.refine.remote import merged, mirrored_folders, refine_share

__all__ = ["predict", "refine"]

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
    with mirrored(inputs, out, recursive) as places:

        def run(
            segmenter: Segmenter, images: Sequence[ImageFile], folder: Path, options: Options, progress: Progress
        ) -> PredictReport:
            check_targets(images, folder)
            if not folder.exists():
                check_folder(folder, "the results")  # before Ray starts
            work = _Predict(segmenter, folder, options, len(images), places.names)
            report = PredictReport(segmenter.labels.names)
            ordered = _by_size(images, segmenter.max_pixels) if options.batch > 1 else images
            try:
                for part in pool.run(work, places.versioned(ordered), options.batch):
                    report.merge(part)
                    progress(len(report.images) + len(report.failed), len(images))
            except KeyboardInterrupt:
                report.interrupted = True
            order = {places.names.shown(image.path): number for number, image in enumerate(images)}
            for results in (report.done, report.earlier):
                results.sort(key=lambda result: order[result.path])
            report.failed.sort(key=lambda failure: order[failure[0]])
            return report

        return places.segment(segmenter, run, options=options, progress=progress, recursive=recursive)


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
    with mirrored_folders(predictions, images, out) as folders:
        run = run_on(folders.names, address, workers, device or "cpu")
        return refine_folder(mrf, labels, *folders, progress=progress, run=run, **options)


def run_on(names: Names, address: str | None, workers: int | None, device: str) -> RefineRun:
    """What refines files on a cluster; names: the URLs that their paths stand for."""
    pool = _Pool(address, workers, device)

    def run(refinement: Refinement, files: Sequence[MatchedFiles], progress: Progress) -> RefineReport:
        parts: list[RefineReport] = []
        finished = 0
        for part in pool.run(_Refine(refinement, names), files):
            parts.append(part)
            finished += len(part.done) + len(part.skipped) + len(part.failed)
            progress(finished, len(files))
        return merged(parts)

    return run


@dataclass
class _Predict:
    """Segments a share of the images."""

    segmenter: Segmenter
    folder: Path
    options: Options
    total: int
    """Images of all shares."""
    names: Names

    def to(self, device: str) -> None:
        self.segmenter.to(device)

    def __call__(self, images: Sequence[ImageFile]) -> PredictReport:
        return segment_share(self.segmenter, images, self.folder, self.options, self.total, self.names)


@dataclass
class _Refine:
    """Refines a share of the predictions."""

    refinement: Refinement
    names: Names
    device: str = "cpu"

    def to(self, device: str) -> None:
        self.device = device

    def __call__(self, files: Sequence[MatchedFiles]) -> RefineReport:
        return refine_share(self.refinement, files, self.names, self.device, workers=1)


def _by_size(images: Sequence[ImageFile], max_pixels: int) -> list[ImageFile]:
    """Images of one size one after the other, so that a share has full batches."""

    def size(image: ImageFile) -> tuple[int, ...]:
        with suppress(OSError, ValueError):  # the worker names a bad file
            return image_size(image.path, max_pixels)[:2]
        return ()

    results = map_ahead(size, images, 4 * THREADS_READING_SIZES, THREADS_READING_SIZES)
    sized = [(future.result(), image) for image, future in results]
    return [image for _, image in sorted(sized, key=lambda pair: pair[0])]


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
        if not self.ray.is_initialized():
            self.address = check_address(self.address)

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
            workers_per_gpu = math.ceil(workers / gpus) if gpus else 0  # Ray gives a worker no parts of two GPUs
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
                num_gpus=1 / workers_per_gpu if gpus else 0,
            )
            try:
                for row in results.iter_rows():
                    result = ray.cloudpickle.loads(row["result"])
                    if isinstance(result, Exception):
                        raise result
                    yield result
            except ray.exceptions.RayError as error:
                raise OSError(f"The Ray cluster failed: {one_line(error)}.") from error

    @contextmanager
    def _connected(self) -> Iterator[None]:
        if self.ray.is_initialized():  # the caller's own connection
            yield
            return
        try:
            self.ray.init(self.address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError, ImportError, self.ray.exceptions.RayError) as error:
            cluster = "Ray does not start here" if self.address in (None, "local") else f"No cluster at {self.address}"
            token = "; if it has a token, set RAY_AUTH_MODE=token" if ":" in (self.address or "") else ""
            raise OSError(f"{cluster}: {one_line(error)}{token}.") from error
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
        self.failure: Exception | None = None
        try:
            self.work = self.pickle.loads(work)
            self.work.to(device)
        except Exception as error:  # Ray would start a worker that fails here again and again
            self.failure = OSError(f"A worker on {platform.node()} does not start: {one_line(error)}.")

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        try:
            result = self.failure or self.work(self.pickle.loads(row["share"]))
        except Exception as error:  # a full disk, for example: the driver raises it
            result = error
        return {"result": self.pickle.dumps(result)}
