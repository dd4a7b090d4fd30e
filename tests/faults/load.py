"""Load: threads, forked workers, and memory over many images and frames."""

from __future__ import annotations

import os
import signal
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from campaign import Part, call
from PIL import Image

from deepmrf import Segmenter, load
from deepmrf.cli import process
from deepmrf.data.synthetic import LABELS
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model
from deepmrf.predict.files import ImageFile
from deepmrf.predict.pipeline import segment_images
from deepmrf.video import Writer, record

GROWTH_MEGABYTES = 16
"""How much the memory may rise between the first fifth of the work and its end."""
FORK_SECONDS = 120


def make_inputs(folder: Path, frames: int) -> None:
    """Write a small model, photos, a film, and predictions with images and masks."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    settings = {"window": 3, "contexts": 2, "context_size": 3}
    write_model(DeepParsingNetwork.build("fast", LABELS, {"width": 8}, settings).eval(), folder / "model")
    for name in ("photos", "fit/predictions", "fit/images", "fit/masks"):
        (folder / name).mkdir(parents=True)
    for number in range(10):
        Image.fromarray(rng.integers(0, 256, (96, 128, 3), dtype=np.uint8)).save(folder / "photos" / f"{number}.png")
        mask = np.repeat(np.arange(3).repeat([7, 7, 6])[:, None], 26, axis=1).astype(np.uint8)
        noisy = np.where(rng.random(mask.shape) < 0.1, rng.integers(0, 3, mask.shape), mask).astype(np.uint8)
        for name, picture in (("predictions", noisy), ("images", 80 * mask), ("masks", mask)):
            Image.fromarray(picture).save(folder / "fit" / name / f"scene{number}x.png")
    slope = np.indices((96, 128)).sum(0)
    for name, count in (("film.mp4", 60), ("long.mp4", frames)):
        writer = Writer(folder / name, (96, 128))
        for number in range(count):
            image = np.stack([(slope + number * step) % 256 for step in (1, 2, 3)], -1).astype(np.uint8)
            writer.write(image, Fraction(number, 25))
        writer.close()


def _labels(segment: Segmenter, image: Path) -> bytes:
    return segment(image, probabilities=False).labels.tobytes()


def use_threads(work: Path, threads: int) -> list[str]:
    """Segment the photos in several threads at once; all give what one gives."""
    segment, photos = load(work / "model", device="cpu"), sorted((work / "photos").iterdir())
    expected, failures = [_labels(segment, photo) for photo in photos], []

    def work_through(number: int) -> None:
        try:
            if [_labels(segment, photo) for photo in photos] != expected:
                failures.append(f"thread {number}: other labels")
        except Exception as error:
            failures.append(f"thread {number}: {error!r}")

    pool = [threading.Thread(target=work_through, args=(number,)) for number in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return failures


def use_forks(work: Path, forks: int) -> list[str]:
    """Segment a photo, then in forked processes, which inherit threads and locks; none hangs."""
    segment, photo = load(work / "model", device="cpu"), work / "photos" / "0.png"
    expected, failures, children = _labels(segment, photo), [], []
    for _ in range(forks):
        child = os.fork()
        if not child:
            signal.alarm(FORK_SECONDS)
            os._exit(0 if _labels(segment, photo) == expected else 3)
        children.append(child)
    for number, child in enumerate(children):
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            failures.append(f"fork {number}: {'hangs' if code == -signal.SIGALRM else f'exit code {code}'}")
    return failures


def _megabytes() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def do_many(work: Path, kind: str, count: int) -> tuple[float, float]:
    """Memory after a fifth of the images or frames, and after all."""
    process.prepare()
    segmenter, marks = load(work / "model", device="cpu"), [0.0, 0.0]

    def progress(done: int, total: int | None) -> None:
        marks[0 if done <= count // 5 else 1] = _megabytes()

    if kind == "images":
        photos = sorted((work / "photos").iterdir())
        images = [ImageFile(photos[number % len(photos)], str(number)) for number in range(count)]
        done = len(segment_images(segmenter, images, work / "many", None, progress).done)
    else:
        done = record(segmenter, work / "long.mp4", work / "long-out.mp4", progress=progress).frames
    assert done == count, f"{done} of {count}"
    return marks[0], marks[1]


def threads_and_forks(part: Part, work: Path, count: int) -> None:
    """Several threads at once, then several forked processes."""
    for function in (use_threads, use_forks):
        part.add_all(*call(function, work, count), cases=count)


def memory(part: Part, work: Path, kind: str, count: int) -> None:
    """Memory does not rise with the work."""
    marks, outcome = call(do_many, work, kind, count)
    problem = outcome.problem(0)
    if marks and marks[1] - marks[0] > GROWTH_MEGABYTES:
        problem = f"memory rose from {marks[0]:.0f} to {marks[1]:.0f} MB"
    part.add(f"{count} {kind}", problem, outcome, cases=count)
