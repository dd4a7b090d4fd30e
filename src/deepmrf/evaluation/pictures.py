"""Gallery: evaluated images on one HTML page, the largest gains and the worst failures first.

Of each image, a file holds five panels: image, truth, network, model, and the difference that the MRF makes.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.colours import Colour
from deepmrf.data.dataset import Item
from deepmrf.data.files import Bytes
from deepmrf.data.images import shrunk
from deepmrf.data.labels import LabelSet
from deepmrf.data.writing import replacing, write_text
from deepmrf.evaluation.models import MODEL, NETWORK
from deepmrf.figures import overlay, pale, panels
from deepmrf.figures.drawing import LABEL_OPACITY
from deepmrf.figures.pages import linked_figure, page

IMAGES_FIRST = 10
"""Images in each of the first two sections: the largest gains, the worst failures."""
PANEL_SIDE = 480
"""Pixels of a panel's longer side."""
JPEG_QUALITY = 90
GAINED: Colour = (0, 114, 178)
LOST: Colour = (213, 94, 0)
BOTH_WRONG: Colour = (90, 90, 90)
"""The model alone is right; the network alone is right; neither is. Blue, vermilion and grey, which colour-blind
readers tell apart."""


@dataclass(frozen=True)
class Compared:
    """One image: shares of its labelled pixels that are right."""

    name: str
    file: str
    network: float
    model: float

    @property
    def gain(self) -> float:
        """What the MRF adds."""
        return self.model - self.network

    @property
    def caption(self) -> str:
        scores = f"{100 * self.model:.2f} % of pixels right, network {100 * self.network:.2f} %"
        return f"{self.name}: {scores}, gain {100 * self.gain:+.2f}"


class Gallery:
    """The images so far. `add` is a Show of evaluate.py; `write` writes the page."""

    def __init__(self, folder: Path, labels: LabelSet) -> None:
        self.folder, self.labels = folder, labels
        self.images: list[Compared] = []

    def add(self, item: Item, image: Tensor, mask: Tensor, labels: dict[str, Tensor]) -> None:
        """Write the panels of an image."""
        pixels: Bytes = image.permute(1, 2, 0).numpy()
        truth, network, model = (ids.numpy() for ids in (mask, labels[NETWORK], labels[MODEL]))
        valid = truth != self.labels.ignore
        if not valid.any():
            return
        palette = self.labels.palette()
        maps = {"truth": truth, "network": network, "model": model}
        pictures = [
            ("image", pixels),
            *[(name, overlay(pixels, ids, palette, LABEL_OPACITY, 0)) for name, ids in maps.items()],
            ("difference", difference(pixels, truth, network, model, self.labels.ignore)),
        ]
        file = f"{len(self.images):05d}.jpg"
        with replacing(self.folder / file) as content:
            sheet = panels([(name, shrunk(picture, PANEL_SIDE)) for name, picture in pictures], columns=len(pictures))
            sheet.save(content, "JPEG", quality=JPEG_QUALITY)
        right = [float((ids == truth)[valid].mean()) for ids in (network, model)]
        self.images.append(Compared(item.name, file, right[0], right[1]))

    def write(self, title: str) -> Path:
        """Write index.html, and return its path."""
        gains, failures, others = ordered(self.images)
        sections = {
            "Largest gains": gains,
            "Worst failures: fewest pixels right": failures,
            "All others, by gain": others,
        }
        content = [
            (heading, "".join(linked_figure(image.file, image.caption) for image in images))
            for heading, images in sections.items()
            if images
        ]
        path = self.folder / "index.html"
        write_text(path, page(title, f"{len(self.images)} images. {_legend(self.labels)}", content))
        return path


def ordered(images: list[Compared]) -> tuple[list[Compared], list[Compared], list[Compared]]:
    """Return the images that gain most, those with the fewest pixels right, and those that are neither, by gain."""
    by_gain = sorted(images, key=lambda image: -image.gain)
    gains = [image for image in by_gain[:IMAGES_FIRST] if image.gain > 0]
    failures = sorted(images, key=lambda image: image.model)[:IMAGES_FIRST]
    return gains, failures, [image for image in by_gain if image not in gains and image not in failures]


def difference(
    image: Bytes, truth: NDArray[np.integer], network: NDArray[np.integer], model: NDArray[np.integer], ignore: int
) -> Bytes:
    """Return the image in pale grey, with the pixels that are wrong in one of the maps, or in both, in colours."""
    picture = pale(image)
    wrong_before, wrong_after = ((ids != truth) & (truth != ignore) for ids in (network, model))
    picture[wrong_before & ~wrong_after] = GAINED
    picture[~wrong_before & wrong_after] = LOST
    picture[wrong_before & wrong_after] = BOTH_WRONG
    return picture.astype(np.uint8)


def _legend(labels: LabelSet) -> str:
    """HTML of what the colours mean."""
    meanings = (("right by the MRF", GAINED), ("wrong by the MRF", LOST), ("wrong in both", BOTH_WRONG))
    entries = [*zip(labels.names, labels.colours, strict=True)]
    return f"Labels: {_swatches(entries)}. Difference: {_swatches(list(meanings))}."


def _swatches(entries: list[tuple[str, Colour]]) -> str:
    square = "<span style='background:rgb{};padding:0 .5rem;border:1px solid #555'></span>&nbsp;{}"
    return ", ".join(square.format(colour, html.escape(name)) for name, colour in entries)
