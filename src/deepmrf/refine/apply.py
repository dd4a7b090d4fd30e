"""Applying an MRF to a folder of predictions: refined label maps and, on request, probabilities.

    OUT/STEM.png    the label ids with their colours as a palette
    OUT/STEM.npy    probabilities (L, H, W) of float16, with probabilities="npy"; or OUT/STEM.npz, compressed

Of volumes (NIfTI), OUT/STEM.nii.gz holds the label ids on the volume's own grid, and probabilities are (L, D, H, W).
They are computed in tiles, each volume with its own spacing.

While one image is computed, the next ones are read. A file that cannot be used is reported and the rest goes on; what
lies in OUT already is left as it is, so that a run that was stopped continues. Label maps hold the labels 0 .. L-1, or
the ids that a labels.json gave to the masks (a Coding).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.files import VOID, Bytes, read_image
from deepmrf.data.folder import labels_file
from deepmrf.data.labels import LabelSet, distinct_colours
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.volumes import Volume, read_volume, unit_range, write_labels
from deepmrf.data.writing import replacing
from deepmrf.layers import MeanField, dense_crf
from deepmrf.predict.devices import chosen_device
from deepmrf.predict.tiles import in_tiles
from deepmrf.refine.fit import load_config, load_mrf
from deepmrf.refine.folder import writable_folder
from deepmrf.refine.predictions import Coding, Folder, Trio, check_size, count_labels, dims_of, match, read_with_kind

PRESETS: dict[str, Callable[[int], MeanField]] = {"dense-crf": dense_crf}
"""MRFs that need no training, by name."""
VOLUME_PRESETS: dict[str, Callable[[int], MeanField]] = {
    "dense-crf": lambda labels: dense_crf(
        labels, dims=3, window=7, features=1, colour_width=0.1, position_width=3.0, smooth_width=1.0
    )
}
"""The same for volumes: widths are in mm and in parts of the range between the volume's percentiles."""
AHEAD = 2
"""Images that are read while one is computed."""

Probabilities = Literal["", "npy", "npz"]


@dataclass(frozen=True)
class RefineReport:
    """What became of each image."""

    done: tuple[str, ...]
    skipped: tuple[str, ...]
    """Their results were there already."""
    failed: tuple[tuple[str, str], ...]
    """(stem, why), a sentence each."""
    notes: tuple[str, ...]
    """Images without predictions and predictions without images."""
    kinds: tuple[str, ...]
    """What the predictions were taken for."""


def open_mrf(folder: Folder) -> tuple[MeanField, LabelSet]:
    """The MRF that deepmrf fit wrote, and its labels."""
    return load_mrf(folder), LabelSet.from_dict(load_config(folder)["labels"])


def read_label_file(path: Folder) -> tuple[LabelSet, Coding | None]:
    """What a labels.json of any name says, as deepmrf fit reads it: the labels, and their ids if these are others."""
    labels, lookup, _ = labels_file(Path(path))
    return labels, Coding.of(lookup, len(labels))


def open_preset(name: str, predictions: Folder, images: Folder, labels: LabelSet | None) -> tuple[MeanField, LabelSet]:
    """A preset for as many labels as are named, or as the predictions show."""
    if name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}; choose one of {', '.join(PRESETS)}.")
    if labels is None:
        count = count_labels(trio.source for trio in match(predictions, images)[0])
        labels = LabelSet(tuple(f"label {label}" for label in range(count)), distinct_colours(count))
    presets = PRESETS if dims_of(images) == 2 else VOLUME_PRESETS
    return presets[name](len(labels)).eval(), labels


def refine(
    mrf: MeanField,
    labels: LabelSet,
    predictions: Folder,
    images: Folder,
    out: Folder,
    *,
    probabilities: Probabilities = "",
    overwrite: bool = False,
    device: str = "cpu",
    progress: Progress = no_progress,
    coding: Coding | None = None,
) -> RefineReport:
    """Refine every prediction that has an image, and write the results into `out`.

    `coding` gives the ids of label maps, those read and those written, where they are not the labels 0 .. L-1.
    """
    chosen_device(device)
    if probabilities not in ("", "npy", "npz"):
        raise ValueError(f"probabilities={probabilities!r} is unknown: choose 'npy', 'npz' or '' for none.")
    if mrf.labels != len(labels):
        raise ValueError(f"The MRF has {mrf.labels} labels, the label set {len(labels)}: give both the same.")
    if coding is not None and len(coding.ids) != len(labels):
        raise ValueError(f"There are {len(labels)} labels, but {len(coding.ids)} ids for them: give one each.")
    if mrf.dims != dims_of(images):
        named = {2: "pictures", 3: "volumes"}
        raise ValueError(
            f"The MRF is for {named.get(mrf.dims, 'other maps')}, but {images} holds {named[dims_of(images)]}; "
            "give what it was fitted to."
        )
    top = Path(out)
    for given in (predictions, images):
        if top.resolve() == Path(given).resolve():
            raise ValueError(f"The results would be written among the inputs in {given}; choose another folder.")
    trios, notes = match(predictions, images)
    writable_folder(top)
    todo = [trio for trio in trios if overwrite or not all(p.exists() for p in _targets(top, trio, probabilities))]
    skipped = sorted({trio.stem for trio in trios} - {trio.stem for trio in todo})
    mrf, done, failed, kinds = mrf.to(device), [], [], set()
    for trio, future in _ahead(todo, labels, coding):
        try:
            log_p, image, kind, volume = future.result()
            targets = _targets(top, trio, probabilities)
            if volume is None:
                with torch.inference_mode():
                    log_q = mrf(log_p[None].to(device), image[None].to(device))[0].cpu()
                _write(log_q, labels, targets, coding)
            else:
                made, shares = _refine_volume(mrf, log_p, image, volume, bool(probabilities))
                _write_volume(_coded(made, coding), shares, volume, targets)
            done.append(trio.stem)
            kinds.add(kind)
        except (OSError, ValueError, TypeError, MemoryError, RuntimeError) as why:
            failed.append((trio.stem, str(why) or type(why).__name__))
        progress(len(done) + len(failed), len(todo))
    return RefineReport(tuple(done), tuple(skipped), tuple(failed), tuple(notes), tuple(sorted(kinds)))


_Read = tuple[Tensor, Tensor, str, Volume | None]


def _ahead(trios: Sequence[Trio], labels: LabelSet, coding: Coding | None) -> Iterator[tuple[Trio, Future[_Read]]]:
    """Each image with its reading under way, a few ahead of its turn and no more, for the memory's sake."""
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting: deque[tuple[Trio, Future[_Read]]] = deque()
        for trio in trios:
            waiting.append((trio, pool.submit(_read, trio, labels, coding)))
            if len(waiting) > (AHEAD if trio.dims == 2 else 1):  # volumes are large
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()


def _read(trio: Trio, labels: LabelSet, coding: Coding | None) -> _Read:
    if trio.dims == 3:
        volume = read_volume(trio.image)
        log_p, kind = read_with_kind(trio.source, len(labels), labels.names, coding)
        check_size(log_p, volume.values.shape, trio.source, trio.image)
        return log_p, torch.from_numpy(unit_range(volume.values))[None], kind, volume
    image = read_image(trio.image)
    log_p, kind = read_with_kind(trio.source, len(labels), labels.names, coding)
    check_size(log_p, (image.shape[0], image.shape[1]), trio.source, trio.image)
    return log_p, torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), kind, None


def _refine_volume(
    mrf: MeanField, log_p: Tensor, image: Tensor, volume: Volume, shares_too: bool
) -> tuple[Tensor, Tensor | None]:
    """Label ids (D, H, W) of uint8 and, if asked, probabilities (L, D, H, W) of float16."""
    ids = torch.empty(log_p.shape[1:], dtype=torch.uint8)
    shares = torch.empty(log_p.shape, dtype=torch.float16) if shares_too else None
    for place, log_q in in_tiles(mrf, log_p, image, spacing=volume.spacing):
        ids[place] = log_q.argmax(0).to(torch.uint8)
        if shares is not None:
            shares[(slice(None), *place)] = log_q.exp().half()
    return ids, shares


def _targets(top: Path, trio: Trio, probabilities: Probabilities) -> list[Path]:
    ending = "png" if trio.dims == 2 else "nii.gz"
    return [top / f"{trio.stem}.{ending}", *([top / f"{trio.stem}.{probabilities}"] if probabilities else [])]


def _coded(labels: Tensor, coding: Coding | None) -> Bytes:
    """Labels of uint8 as the ids to write."""
    values: Bytes = labels.numpy()
    return values if coding is None else coding.table()[values]


def _palette(labels: LabelSet, coding: Coding | None) -> NDArray[np.uint8]:
    """Colours (256, 3) by id."""
    palette = labels.palette()
    if coding is None:
        return palette
    moved = np.repeat(palette[VOID:], 256, axis=0)
    moved[list(coding.ids)] = labels.colours
    return moved


def _write(log_q: Tensor, labels: LabelSet, targets: Sequence[Path], coding: Coding | None) -> None:
    """The label map and the probabilities of an image."""
    from PIL import Image

    picture = Image.fromarray(_coded(log_q.argmax(0).to(torch.uint8), coding))
    picture.putpalette(_palette(labels, coding).tobytes())
    for target in targets[1:]:
        _write_array(log_q.exp().half(), target)
    with replacing(targets[0]) as file:
        picture.save(file, format="PNG")  # last: it says that all is there


def _write_volume(ids: Bytes, shares: Tensor | None, volume: Volume, targets: Sequence[Path]) -> None:
    """The label map and the probabilities of a volume."""
    for target in targets[1:]:
        assert shares is not None  # asked for, as this target is
        _write_array(shares, target)
    write_labels(ids, targets[0], volume)


def _write_array(shares: Tensor, target: Path) -> None:
    with replacing(target) as file:
        if target.suffix == ".npy":
            np.save(file, shares.numpy(), allow_pickle=False)
        else:
            np.savez_compressed(file, probabilities=shares.numpy())
