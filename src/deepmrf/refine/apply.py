"""Apply an MRF to a folder of predictions.

Several images are refined at a time, each in its own thread, which reads, computes and writes; large images are
computed in tiles. A file that cannot be used is reported, and the rest goes on. Results that exist stay as they are, so
that a run that was stopped continues. What is written:

    OUT/STEM.png    the label ids with their colours as a palette; of binary and soft masks, grey 0 and 255
    OUT/STEM.npy    probabilities (L, H, W) of float16, with probabilities="npy"; or OUT/STEM.npz, compressed
    OUT/STEM_overlay.jpg    the image with its labels painted over it, with overlays=True

Of volumes (NIfTI), OUT/STEM.nii.gz holds the label ids on the volume's own grid, and probabilities are (L, D, H, W).
Label maps hold the labels 0 .. L-1, or the ids of a LabelIds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from deepmrf.data.files import VOID, Bytes, image_size
from deepmrf.data.labels import LabelSet
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.volumes import Spacing, read_grid, write_labels
from deepmrf.data.writing import check_folder, replacing
from deepmrf.layers import MeanField
from deepmrf.models.folder import first_line
from deepmrf.predict.ahead import Cores
from deepmrf.predict.notes import OVERLAY
from deepmrf.predict.result import Segmentation
from deepmrf.predict.segmenter import chosen_device
from deepmrf.predict.tiles import MAX_TILE_BYTES, Maps, bytes_per_pixel, in_tiles
from deepmrf.refine.changes import PixelCounts, count_pixels, total
from deepmrf.refine.decode import MAX_PIXELS, check_gt_prob
from deepmrf.refine.label_ids import BINARY, SOFT, LabelIds
from deepmrf.refine.matching import MatchedFiles, PredictedImage, count_dims, match_files, read_predicted_image
from deepmrf.refine.predictions import Folder

MAX_IMAGE_BYTES = 4 << 30
"""Images whose maps take more bytes than this are computed in tiles."""
MAX_BYTES_AT_ONCE = 4 << 30
"""Bytes that the maps of all images that are refined at a time may take."""


Probabilities = Literal["", "npy", "npz"]


@dataclass(frozen=True)
class RefineReport:
    """What became of each image, by stem."""

    done: tuple[str, ...]
    skipped: tuple[str, ...]
    """Their results were there already."""
    failed: tuple[tuple[str, str], ...]
    """(stem, reason), a sentence each."""
    notes: tuple[str, ...]
    """Images without predictions, predictions without images, options without use."""
    kinds: tuple[str, ...]
    """What the predictions were taken for."""
    pixels: PixelCounts = ()
    """(before, after) of each label in what was done; `describe_changes` says which labels lost many."""


class ResultWriter:
    """Writes the results into a folder; the label map comes last, so that it says that all is there."""

    def __init__(
        self,
        folder: Path,
        labels: LabelSet,
        label_ids: LabelIds | None,
        probabilities: Probabilities,
        overlays: bool = False,
    ) -> None:
        self.folder, self.labels, self.label_ids = folder, labels, label_ids
        self.probabilities, self.overlays = probabilities, overlays

    def has_written(self, files: MatchedFiles) -> bool:
        """Are all results of this image there?"""
        return all(path.exists() for path in self.paths(files))

    def paths(self, files: MatchedFiles) -> list[Path]:
        """The results of an image: its label map, and perhaps its probabilities and its overlay."""
        probabilities = f".{self.probabilities}" if self.probabilities else ""
        endings = (".png" if files.dims == 2 else ".nii.gz", probabilities, OVERLAY if self.overlays else "")
        return [self.folder / f"{files.stem}{ending}" for ending in endings if ending]

    def write(self, files: MatchedFiles, predicted: PredictedImage, labels: Tensor, p: Tensor | None) -> None:
        """Write labels (*S) of uint8 and perhaps probabilities (L, *S) of an image, or of a volume."""
        paths = self.paths(files)
        if self.overlays:
            image, unused = predicted.image.permute(1, 2, 0).numpy(), np.zeros(labels.shape, np.float16)
            Segmentation(labels.numpy(), unused, image, self.labels).save_overlay(paths[-1])
        if p is not None:
            with replacing(paths[1]) as file:
                if self.probabilities == "npy":
                    np.save(file, p.numpy(), allow_pickle=False)
                else:
                    np.savez_compressed(file, probabilities=p.numpy())
        ids: Bytes = labels.numpy()
        ids = ids if self.label_ids is None else self.label_ids.to_ids(ids)
        if predicted.volume is not None:
            write_labels(ids, paths[0], predicted.volume)
            return
        picture = Image.fromarray(ids)
        if self.label_ids not in (BINARY, SOFT):
            picture.putpalette(self._palette().tobytes())
        with replacing(paths[0]) as file:
            picture.save(file, format="PNG")

    def _palette(self) -> Bytes:
        """Colours (256, 3) by id."""
        palette = self.labels.palette()
        if self.label_ids is None:
            return palette
        by_id = np.repeat(palette[VOID:], 256, axis=0)
        by_id[list(self.label_ids.ids)] = self.labels.colours
        return by_id


@dataclass(frozen=True)
class Refinement:
    """An MRF, and how to apply it."""

    mrf: MeanField
    writer: ResultWriter
    gt_prob: float | None
    overwrite: bool


Run = Callable[[Refinement, Sequence[MatchedFiles], Progress], RefineReport]
"""Refines the files and writes the results."""


def refine(
    mrf: MeanField,
    labels: LabelSet,
    predictions: Folder,
    images: Folder,
    out: Folder,
    *,
    probabilities: Probabilities = "",
    overlays: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    progress: Progress = no_progress,
    label_ids: LabelIds | None = None,
    gt_prob: float | None = None,
    workers: int | None = None,
    run: Run | None = None,
) -> RefineReport:
    """Refine every prediction that has an image, and write the results into `out`.

    overlays: also write each image with its labels painted over it; not for volumes.
    label_ids: the ids in label maps, those read and those written, where they are not the labels 0 .. L-1.
    gt_prob: the probability that a label map is right, where no file tells its confidence; None: 0.9.
    workers: images refined at a time; None: as many as PyTorch uses threads.
    run: refines the files that were matched; None for `refine_files` with this device and these workers.
    """
    if run is None:
        chosen_device(device)  # before files are read
        run = partial(refine_files, device=device, workers=workers)
    if probabilities not in ("", "npy", "npz"):
        raise ValueError(f"probabilities={probabilities!r} is unknown: choose 'npy', 'npz' or '' for none.")
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers!r} must be at least 1.")
    _check_mrf(mrf, labels, label_ids, images)
    if overlays and mrf.dims == 3:
        raise ValueError(f"Overlays are for pictures, and {images} holds volumes: leave overlays out.")
    if gt_prob is not None:
        check_gt_prob(gt_prob, len(labels))
    writer = ResultWriter(Path(out), labels, label_ids, probabilities, overlays)
    for folder in (predictions, images):
        if writer.folder.resolve() == Path(folder).resolve():
            raise ValueError(f"The results would be written among the inputs in {folder}; choose another folder.")
    matched, notes = match_files(predictions, images)
    check_folder(writer.folder, "the results")
    report = run(Refinement(mrf, writer, gt_prob, overwrite), matched, progress)
    if gt_prob is not None and report.kinds and not any("right with" in kind for kind in report.kinds):
        notes.append(f"gt_prob={gt_prob:g} was not used: it is for label maps without a confidence of their own.")
    return replace(report, notes=tuple(notes))


def refine_files(
    refinement: Refinement,
    matched: Sequence[MatchedFiles],
    progress: Progress = no_progress,
    device: str = "cpu",
    workers: int | None = None,
) -> RefineReport:
    """Refine predictions with their images, several at a time, and write the results."""
    target, writer = chosen_device(device), refinement.writer
    todo = [files for files in matched if refinement.overwrite or not writer.has_written(files)]
    skipped = sorted({files.stem for files in matched} - {files.stem for files in todo})
    mrf, done, failed, kinds, counts = refinement.mrf.to(target), [], [], set(), []
    workers = _count_workers(mrf, todo, workers or torch.get_num_threads())
    computing = nullcontext() if target.type == "cpu" else threading.Lock()  # a GPU computes one image at a time

    def work(files: MatchedFiles) -> tuple[str, PixelCounts]:
        """The kind of the prediction, and the pixels of each label before and after."""
        predicted = read_predicted_image(files, writer.labels, writer.label_ids, refinement.gt_prob)
        at_once = bytes_per_pixel(mrf) * math.prod(predicted.log_p.shape[1:]) <= MAX_IMAGE_BYTES
        log_p = predicted.log_p.tensor() if at_once else predicted.log_p  # tiles read parts of it
        with computing:
            spacing = None if predicted.volume is None else predicted.volume.spacing
            labels, p = refine_image(mrf, log_p, predicted.image, spacing, bool(writer.probabilities))
        writer.write(files, predicted, labels, p)
        return predicted.kind, count_pixels(log_p, labels)

    def attempt(files: MatchedFiles) -> tuple[str, PixelCounts] | str:
        """What `work` returns, or what went wrong."""
        try:
            return work(files)
        except (OSError, ValueError, TypeError, MemoryError, RuntimeError) as error:
            return first_line(error)

    with Cores(workers) as cores:
        for files, result in zip(todo, cores.map(attempt, todo), strict=True):
            if isinstance(result, str):
                failed.append((files.stem, result))
            else:
                kinds.add(result[0])
                counts.append(result[1])
                done.append(files.stem)
            progress(len(done) + len(failed), len(todo))
    return RefineReport(tuple(done), tuple(skipped), tuple(failed), (), tuple(sorted(kinds)), total(counts))


def _check_mrf(mrf: MeanField, labels: LabelSet, label_ids: LabelIds | None, images: Folder) -> None:
    """Raise an error where labels, ids or images are not those of the MRF."""
    if mrf.labels != len(labels):
        raise ValueError(f"The MRF has {mrf.labels} labels, the label set {len(labels)}: give both the same.")
    if label_ids is not None and len(label_ids.ids) != len(labels):
        raise ValueError(f"There are {len(labels)} labels, but {len(label_ids.ids)} ids for them: give one each.")
    dims, names = count_dims(images), {2: "pictures", 3: "volumes"}
    if mrf.dims != dims:
        raise ValueError(
            f"The MRF is for {names.get(mrf.dims, 'other maps')}, but {images} holds {names[dims]}; "
            "give what it was fitted to."
        )


def _count_workers(mrf: MeanField, todo: Sequence[MatchedFiles], workers: int) -> int:
    """How many images are refined at a time: fewer where they are large."""
    largest = 1
    for files in todo:
        with suppress(OSError, ValueError):  # reading a bad file later names it
            size = read_grid(files.image)[0] if files.dims == 3 else image_size(files.image, MAX_PIXELS)[:2]
            largest = max(largest, math.prod(size))
    return max(1, min(workers, len(todo), MAX_BYTES_AT_ONCE // (largest * bytes_per_pixel(mrf))))


def refine_image(
    mrf: MeanField, log_p: Maps, image: Tensor, spacing: Spacing | None, with_p: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Labels (*S) of uint8 and, if asked, probabilities (L, *S) of float16; spacing: of a volume, else None."""
    labels = torch.empty(log_p.shape[1:], dtype=torch.uint8)
    p = torch.empty(log_p.shape, dtype=torch.float16) if with_p else None
    max_bytes = MAX_IMAGE_BYTES if spacing is None else MAX_TILE_BYTES
    for region, log_q in in_tiles(mrf, log_p, image, spacing=spacing, max_bytes=max_bytes):
        labels[region] = log_q.argmax(0).to(torch.uint8)
        if p is not None:
            p[(slice(None), *region)] = log_q.exp().half()
    return labels, p
