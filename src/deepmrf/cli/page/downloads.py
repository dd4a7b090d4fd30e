"""Results as files to download: what was shown last, at the picture's own size."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from deepmrf.cli.page.sessions import Session
from deepmrf.video.writing import Writer


def download(session: Session, name: str) -> bytes:
    """A file of DOWNLOADS."""
    if name not in DOWNLOADS:
        raise ValueError(f"There is no file {name!r} to download: choose one of {', '.join(DOWNLOADS)}.")
    with tempfile.TemporaryDirectory(dir=session.folder) as folder:
        path = Path(folder) / name
        DOWNLOADS[name](session, path)
        return path.read_bytes()


def _write_labels(session: Session, path: Path) -> None:
    result = session.segmentation()
    if session.label_ids is None:
        result.save_labels(path)
    else:
        Image.fromarray(session.label_ids.to_ids(result.labels)).save(path)


def _write_video(session: Session, path: Path) -> None:
    times, frames = session.clip.times, session.clip.frames
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else Fraction(25)
    writer = Writer(path, frames[0].shape[:2], rate=rate.limit_denominator(1001))
    try:
        for index, moment in enumerate(times):
            writer.write(np.array(session.segmentation(index).overlay()), moment)
    finally:
        writer.close()


DOWNLOADS: dict[str, Callable[[Session, Path], object]] = {
    "labels.png": _write_labels,
    "overlay.jpg": lambda session, path: session.segmentation().save_overlay(path),
    "probabilities.npz": lambda session, path: session.segmentation(probabilities=True).save(path),
    "overlay.mp4": _write_video,
}
"""What can be downloaded: name of the file, and what writes it. The video shows all frames of a clip."""
