"""What the layer does to a bad labelling, in one picture: `python benchmarks/coffee.py`.

A photograph of a cup of coffee gets a labelling that is coarse (blocks of 20 pixels) and noisy (a third of the blocks
and a tenth of the pixels say something else). Two mean-field layers clean it up:

- dense_crf(5): dense CRF with its customary parameters, nothing trained;
- the same layer after learning its five numbers (weights and bandwidths) on ANOTHER photograph, the astronaut, with two
  labels: they say nothing about labels, so they carry over.

The reference outlines were drawn by hand. Seed 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from skimage import data
from torch.nn import functional

import deepmrf
from deepmrf import figures
from deepmrf.data.colours import distinct_colours

PERSON = [
    *[(22, 512), (25, 470), (20, 400), (24, 350), (35, 310), (45, 270), (60, 245), (85, 228), (112, 210), (114, 190)],
    *[(122, 170), (140, 152), (170, 148), (182, 148), (180, 132), (170, 118), (157, 105), (153, 75), (160, 50)],
    *[(180, 40), (200, 22), (230, 15), (262, 22), (290, 45), (300, 80), (298, 105), (285, 125), (272, 137), (262, 160)],
    *[(256, 175), (280, 192), (300, 222), (304, 235), (325, 250), (345, 270), (355, 310), (362, 348), (385, 345)],
    *[(410, 345), (440, 355), (470, 385), (490, 420), (497, 450), (505, 470), (512, 490), (512, 512)],
]
SPOON_HANDLE = [(372, 238), (383, 205), (405, 145), (412, 110), (408, 95), (400, 75), (409, 67), (421, 72), (424, 80)]
SPOON_HANDLE += [(418, 95), (414, 112), (407, 145), (388, 200), (385, 240)]
NAMES = ("table", "saucer", "cup", "coffee", "spoon")


def astronaut() -> tuple[np.ndarray, np.ndarray]:
    """The photograph, halved, and 1 where the person is."""
    photo = Image.fromarray(data.astronaut())
    mask = Image.new("L", photo.size)
    ImageDraw.Draw(mask).polygon(PERSON, fill=1)
    return np.asarray(photo.reduce(2)), np.asarray(mask)[::2, ::2].astype(np.int64)


def coffee() -> tuple[np.ndarray, np.ndarray]:
    """The photograph and its five labels."""
    photo = Image.fromarray(data.coffee())
    mask = Image.new("L", photo.size)
    draw = ImageDraw.Draw(mask)
    draw.ellipse((77, 64, 479, 389), fill=1)
    draw.polygon([(173, 110), (409, 110), (398, 170), (330, 265), (290, 284), (250, 280), (190, 215)], fill=1)
    draw.ellipse((173, 18, 409, 207), fill=2)
    draw.ellipse((204, 95, 371, 193), fill=3)
    draw.polygon(SPOON_HANDLE, fill=4)
    draw.ellipse((326, 243, 406, 326), fill=4)
    return np.asarray(photo), np.asarray(mask).astype(np.int64)


def coarse_and_noisy(reference: np.ndarray, labels: int, block: int, random: np.random.Generator) -> torch.Tensor:
    """Log-probabilities (1, L, H, W) of a bad labelling: right on the whole, wrong in blocks and in pixels."""
    height, width = reference.shape
    small = reference[block // 2 :: block, block // 2 :: block]
    wrong = random.random(small.shape) < 1 / 3
    small = np.where(wrong, random.integers(0, labels, small.shape), small)
    coarse = np.kron(small, np.ones((block, block), dtype=np.int64))
    coarse = np.pad(coarse, ((0, max(0, height - coarse.shape[0])), (0, max(0, width - coarse.shape[1]))), mode="edge")
    coarse = coarse[:height, :width]
    coarse = np.where(random.random(coarse.shape) < 0.1, random.integers(0, labels, coarse.shape), coarse)
    logits = 1.2 * functional.one_hot(torch.from_numpy(coarse), labels).float()
    return logits.movedim(-1, 0)[None].log_softmax(1)


def to_tensor(photo: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(photo.copy()).movedim(-1, 0)[None]  # uint8: the layers read it as value / 255


def scores(labels: np.ndarray, reference: np.ndarray) -> tuple[float, float]:
    """Share of right pixels, and intersection over union averaged over the labels."""
    ious = [
        ((labels == v) & (reference == v)).sum() / ((labels == v) | (reference == v)).sum()
        for v in np.unique(reference)
    ]
    return float((labels == reference).mean()), float(np.mean(ious))


def learn_on_another_photo(steps: int, random: np.random.Generator) -> deepmrf.MeanField:
    """dense_crf's weights and bandwidths, learned on the astronaut by gradient descent through its iterations."""
    photo, reference = astronaut()
    image, target = to_tensor(photo), torch.from_numpy(reference)[None]
    crf = deepmrf.dense_crf(2, window=31, iterations=3, learn=True)
    optimizer = torch.optim.Adam(crf.triple_penalty.parameters(), lr=0.1)
    start = time.perf_counter()
    for step in range(steps):
        log_p = coarse_and_noisy(reference, 2, 20, random)
        loss = functional.nll_loss(crf(log_p, image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        left = (time.perf_counter() - start) / (step + 1) * (steps - step - 1)
        end = "\n" if step == steps - 1 or not sys.stdout.isatty() else "\r"
        if end == "\r" or (step + 1) % 5 == 0:
            print(f"  learning on the astronaut: step {step + 1}/{steps}, loss {loss:.3f}, {left:.0f} s left ", end=end)
    return crf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out/coffee.png"), help="the picture to write")
    parser.add_argument("--steps", type=int, default=20, help="gradient steps on the other photograph (default 20)")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    photo, reference = coffee()
    image, log_p = to_tensor(photo), coarse_and_noisy(reference, len(NAMES), 20, random)

    customary = deepmrf.dense_crf(len(NAMES), window=31, iterations=5)
    learned = deepmrf.dense_crf(len(NAMES), window=31, iterations=5)
    trained = learn_on_another_photo(arguments.steps, random)
    learned.triple_penalty.load_state_dict(trained.triple_penalty.state_dict())

    colours = np.array(distinct_colours(len(NAMES)), np.uint8)
    pictures = [("photograph", photo), ("reference", figures.overlay(photo, reference, colours))]
    print(f"{'':34}  pixels right    mean IoU   seconds")
    for name, layer in (
        ("before", None),
        ("dense CRF, customary parameters", customary),
        ("dense CRF, learned", learned),
    ):
        with torch.no_grad():
            if layer is not None:
                layer(log_p, image)  # the first call compiles
            start = time.perf_counter()
            log_q = log_p if layer is None else layer(log_p, image)
            seconds = time.perf_counter() - start
        labels = log_q[0].argmax(0).numpy()
        right, iou = scores(labels, reference)
        print(f"{name:34}  {right:11.1%}   {iou:9.1%}   {'' if layer is None else f'{seconds:7.2f}'}")
        pictures.append((f"{name}: {right:.1%} right, IoU {iou:.1%}", figures.overlay(photo, labels, colours)))
    pictures.insert(2, pictures.pop(2))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figures.panels([pictures[0], *pictures[2:]]).save(arguments.out)
    print(f"Look at {arguments.out}.")


if __name__ == "__main__":
    main()
