"""Segmentation: the labels of one image, to look at, to index, to save.

result = deepmrf.load("animals")("cat.jpg")
result                      # in a notebook: the image with its labels, and what they cover
result["cat"]               # (H, W) of bool
result.save("cat.png")      # the label map; result.save("folder") writes all there is
result.save_masks("masks")  # masks/cat.png: black and white
"""

from __future__ import annotations

import base64
import html
import io
import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from deepmrf.data.colours import BACKGROUND, Colour
from deepmrf.data.images import shrunk
from deepmrf.data.labels import LabelSet
from deepmrf.data.spelling import did_you_mean
from deepmrf.data.writing import replacing, write_bytes
from deepmrf.figures import LegendEntry, overlay
from deepmrf.figures import legend as legend_sheet
from deepmrf.predict.files import mask_endings
from deepmrf.predict.notes import FIELD, MASK, overlay_comment
from deepmrf.predict.polygons import Polygon, find_polygons
from deepmrf.predict.regions import absorb

ROWS_AT_A_TIME = 512
"""Rows of an overlay to paint at a time: colours are mixed as floats, eight times the image's size."""
NOTEBOOK_SIDE = 800
"""Pixels of the longer side of the image in a notebook."""
SIDE_BY_LINE = 1000
"""Lines between labels are one pixel wide, and one more for every so many pixels of the longer side."""


class ClassShare(NamedTuple):
    """How much of an image, or of several, a class covers."""

    name: str
    share: float
    """The part of all pixels that have this label."""
    confidence: float
    """The mean probability of the label on those pixels."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"class": self.name, "share": round(self.share, 6), "confidence": round(self.confidence, 4)}


@dataclass(frozen=True, eq=False, repr=False)
class Segmentation:
    """The labels of one image, with their probabilities."""

    labels: NDArray[np.uint8]
    """(H, W): the most probable label of each pixel."""
    confidence: NDArray[np.float16]
    """(H, W): its probability."""
    image: NDArray[np.uint8]
    """(H, W, 3): the image, upright."""
    label_set: LabelSet
    """Names and colours."""
    probabilities: NDArray[np.float32] | None = None
    """(L, H, W): of every label; None where they were not asked for or the image is too large for them."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the labels."""
        return self.label_set.names

    @property
    def colours(self) -> tuple[Colour, ...]:
        """The colours of the labels."""
        return self.label_set.colours

    def __getitem__(self, name: str | int) -> NDArray[np.bool_]:
        """Where a label is, (H, W) of bool, by its name or number."""
        mask: NDArray[np.bool_] = self.labels == self._number(name)
        return mask

    def _number(self, name: str | int) -> int:
        """The number of a label, by its name or number."""
        number = self.names.index(name) if isinstance(name, str) and name in self.names else name
        if isinstance(number, int | np.integer) and 0 <= number < len(self.names):
            return int(number)
        guess = did_you_mean(str(name), self.names)
        raise KeyError(f"There is no label {name!r}{guess}: the labels are {', '.join(self.names)}.")

    def __contains__(self, name: str | int) -> bool:
        """Has any pixel this label? A name that the model does not know is an error, as in [...]."""
        return bool(self[name].any())

    def __iter__(self) -> Iterator[str]:
        """The names of the classes in the image, the largest first."""
        return iter([share.name for share in self.summary()])

    def summary(self) -> list[ClassShare]:
        """The classes in the image, the largest first."""
        return class_shares(self.names, *self.totals())

    def totals(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(number of pixels, sum of their confidences), per label."""
        count = len(self.names)
        pixels, sums = np.zeros(count, np.int64), np.zeros(count)
        for top in range(0, len(self.labels), ROWS_AT_A_TIME):
            labels = self.labels[top : top + ROWS_AT_A_TIME].ravel()
            pixels += np.bincount(labels, minlength=count)
            sums += np.bincount(labels, self.confidence[top : top + ROWS_AT_A_TIME].ravel(), minlength=count)
        return pixels, sums

    def cleaned(self, min_area: float = 0, min_confidence: float = 0.0) -> Segmentation:
        """The same image without small and unsure regions: each goes to the label it shares the longest border with.

        min_area: pixels, or the share of the image if below 1. min_confidence: the mean probability of a region's
        pixels. A pixel's confidence becomes that of its new label; where the probabilities were not kept, it becomes
        the most that its old label leaves for another one.
        """
        check_cleaning(min_area, min_confidence)
        pixels = math.ceil(min_area * self.labels.size if min_area < 1 else min_area)
        labels = absorb(self.labels, self.confidence, pixels, min_confidence)
        if labels is self.labels:
            return self
        confidence, changed = self.confidence.copy(), labels != self.labels
        if self.probabilities is not None:
            confidence[changed] = self.probabilities[(labels[changed], *np.nonzero(changed))]
        else:
            confidence[changed] = np.minimum(confidence[changed], 1 - confidence[changed])
        return replace(self, labels=labels, confidence=confidence)

    def overlay(self, opacity: float = 0.55, longest: int | None = None, legend: bool = False) -> Image.Image:
        """The image with its labels painted over it; `longest` shrinks a larger one to that many pixels a side.

        legend: add a strip below or beside the picture, with the colours and shares of its classes, largest first.
        """
        if not 0 <= opacity <= 1:
            raise ValueError(f"opacity={opacity!r} must be from 0, the image alone, to 1, the labels alone.")
        image, labels = self.image if longest is None else shrunk(self.image, longest), self.labels
        if image is not self.image:
            size = image.shape[1], image.shape[0]
            labels = np.array(Image.fromarray(labels).resize(size, Image.Resampling.NEAREST))
        colours, void = self.label_set.palette(), self.names.index(BACKGROUND) if BACKGROUND in self.names else -1
        painted, line = np.empty_like(image), 1 + max(labels.shape) // SIDE_BY_LINE
        for top in range(0, len(image), ROWS_AT_A_TIME):
            end, above = top + ROWS_AT_A_TIME, max(0, top - line)  # the rows above, for the line between the two
            rows = slice(top, end)
            band = overlay(image[above:end], labels[above:end], colours, opacity, line)[top - above :]
            plain = (labels[rows] == void) & ~(band == 255).all(-1)
            painted[rows] = np.where(plain[..., None], image[rows], band)
        picture = Image.fromarray(painted)
        if not legend:
            return picture
        sheet = legend_sheet(picture.size, self.legend_entries())
        sheet.paste(picture)
        return sheet

    def legend_entries(self) -> list[LegendEntry]:
        """(name and share, colour) of the classes in the image, the largest first."""
        colours = legend_colours(self.label_set)
        return [(f"{c.name}  {_percent(c.share)}", colours[c.name]) for c in self.summary()]

    def polygons(self, name: str | int | None = None) -> list[Polygon]:
        """The outlines of the connected regions, exact to the pixel and the largest first; of one label, if named.

        Coordinates are (x, y) at the corners of pixels. Holes are rings of their own (`Polygon.holes`).
        """
        wanted = range(len(self.names)) if name is None else [self._number(name)]
        return [polygon for polygon in find_polygons(self.labels, self.names) if polygon.label in wanted]

    def mask(self) -> Image.Image:
        """The label map as an image of 8-bit ids with a palette."""
        picture = Image.fromarray(self.labels)
        picture.putpalette(self.label_set.palette().tobytes())
        return picture

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write NAME.png, the label map (ids with a palette), or NAME.npz, the probabilities; returns the path.

        Any other path is a folder: it gets labels.png, overlay.jpg and, where they are kept, probabilities.npz.
        """
        target = Path(path)
        suffix = "" if target.is_dir() else target.suffix.lower()
        if suffix in (".jpg", ".jpeg", ".webp", ".gif", ".tif", ".tiff", ".bmp"):
            raise ValueError(f"{target} would not keep label ids exactly or readably: save to a .png file or a folder.")
        if suffix not in (".png", ".npz"):
            self.save_overlay(target / "overlay.jpg")
            if self.probabilities is not None:
                self.save(target / "probabilities.npz")
            self.save(target / "labels.png")
        elif suffix == ".png":
            self.save_labels(target)
        elif self.probabilities is None:
            raise ValueError("The probabilities were not kept: call the segmenter with probabilities=True.")
        else:
            with replacing(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.comment = FIELD.encode()
                with archive.open("probabilities.npy", "w", force_zip64=True) as part:
                    np.lib.format.write_array(part, self.probabilities.astype(np.float16))
        return target

    def save_labels(self, path: Path, note: str = "") -> None:
        """The label map as PNG, with the labels' names and a note in its text fields."""
        text = PngInfo()
        text.add_itxt("labels", ", ".join(self.names))
        if note:
            text.add_itxt(FIELD, note)
        with replacing(path) as file:
            self.mask().save(file, format="PNG", pnginfo=text)

    def save_masks(self, path: str | os.PathLike[str]) -> dict[str, Path]:
        """Write each label in the image but the background in black and white; returns their paths by label.

        For NAME.png, the name of the label map, they are NAME_LABEL.png; any other path is a folder for LABEL.png.
        """
        target, found = Path(path), set(self)
        beside = target.suffix.lower() == ".png" and not target.is_dir()
        paths = {
            name: target.with_name(f"{target.stem}{ending}") if beside else target / ending[1:]
            for name, ending in mask_endings(self.label_set).items()
            if name in found
        }
        for name, mask in paths.items():
            self.save_mask(mask, name)
        return paths

    def save_mask(self, path: Path, name: str) -> None:
        """One label in black and white, as PNG: 255 inside, 0 outside."""
        text = PngInfo()
        text.add_itxt(MASK, name)
        with replacing(path) as file:
            Image.fromarray(self[name].view(np.uint8) * 255).save(file, format="PNG", pnginfo=text)

    def save_overlay(self, path: Path, longest: int | None = 4096, legend: bool = True) -> None:
        """The overlay as JPEG, the image at most `longest` pixels a side: larger ones few programs open."""
        content = io.BytesIO()  # where a disk is full, Pillow does not notice that its last bytes were not written
        picture = self.overlay(longest=longest, legend=legend)
        picture.save(content, format="JPEG", quality=92, comment=overlay_comment(legend))
        write_bytes(path, content.getvalue())

    def __repr__(self) -> str:
        height, width = self.labels.shape
        classes = ", ".join(f"{c.name} {_percent(c.share)} (sure {_percent(c.confidence)})" for c in self.summary())
        return f"Segmentation of {width} x {height} pixels: {classes}"

    def _repr_html_(self) -> str:
        """The overlay and a table of the classes with their colours, for notebooks."""
        buffer = io.BytesIO()
        self.overlay(longest=NOTEBOOK_SIDE).save(buffer, format="JPEG", quality=90)
        picture = base64.b64encode(buffer.getvalue()).decode()
        colours, cell = legend_colours(self.label_set), '<td style="text-align: right">'
        rows = [
            f'<tr><td style="text-align: left">{_swatch(colours[c.name])} {html.escape(c.name)}</td>'
            f"{cell}{_percent(c.share)}</td>{cell}{_percent(c.confidence)}</td></tr>"
            for c in self.summary()
        ]
        return (
            f'<img src="data:image/jpeg;base64,{picture}" alt="{html.escape(repr(self))}">'
            f"<table><tr><th>class</th><th>pixels</th><th>confidence</th></tr>{''.join(rows)}</table>"
        )


def check_cleaning(min_area: float, min_confidence: float) -> None:
    """Raise a ValueError where the arguments of `Segmentation.cleaned` are out of range."""
    if not 0 <= min_area < math.inf:
        raise ValueError(f"min_area={min_area!r} must be a number of pixels, or a share of the image below 1.")
    if not 0 <= min_confidence <= 1:
        raise ValueError(f"min_confidence={min_confidence!r} must be a probability, from 0 to 1.")


def class_shares(names: tuple[str, ...], pixels: NDArray[np.int64], sums: NDArray[np.float64]) -> list[ClassShare]:
    """The classes that have pixels, the largest first, from each label's pixels and the sum of their confidences."""
    total = max(int(pixels.sum()), 1)
    order = [int(n) for n in np.argsort(-pixels, kind="stable") if pixels[n]]
    return [ClassShare(names[n], float(pixels[n] / total), float(sums[n] / pixels[n])) for n in order]


@dataclass
class ClassTotals:
    """What each label covers over several images or frames: the base of reports."""

    names: tuple[str, ...]
    """The names of the labels."""
    pixels: NDArray[np.int64] = field(init=False)
    """Number of pixels per label."""
    confidences: NDArray[np.float64] = field(init=False)
    """Sum of the confidences of those pixels, per label."""
    images_with_label: NDArray[np.int64] = field(init=False)
    """Number of images, or frames, that show each label."""

    def __post_init__(self) -> None:
        count = len(self.names)
        self.pixels, self.images_with_label = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.confidences = np.zeros(count)

    def add(self, pixels: NDArray[np.int64], sums: NDArray[np.float64]) -> None:
        """Add an image by its `Segmentation.totals`."""
        self.pixels += pixels
        self.confidences += sums
        self.images_with_label += pixels > 0

    def summary(self) -> list[tuple[ClassShare, int]]:
        """The classes over all images, the largest first, each with the number of images that show it."""
        images = dict(zip(self.names, self.images_with_label.tolist(), strict=True))
        return [(share, images[share.name]) for share in class_shares(self.names, self.pixels, self.confidences)]


def legend_colours(labels: LabelSet) -> dict[str, Colour | None]:
    """The colour of each name in a legend; None for the background, which overlays leave unpainted."""
    pairs = zip(labels.names, labels.colours, strict=True)
    return {name: None if name == BACKGROUND else colour for name, colour in pairs}


def _swatch(colour: Colour | None) -> str:
    """A small square of HTML in this colour; an empty one for what is not painted."""
    fill = "transparent" if colour is None else f"rgb{colour}"
    return (
        f'<span style="display: inline-block; width: 1em; height: 1em; border: 1px solid; background: {fill}"></span>'
    )


def _percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"
