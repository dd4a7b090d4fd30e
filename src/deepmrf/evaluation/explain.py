"""explain: an HTML report of what a model has learned, and of what its layers do to pictures.

    report = explain(model, "street", [Picture("a.jpg", image, truth)], Path("explained"))

writes explained/index.html, which needs no other file, and each figure as PNG and SVG beside it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deepmrf.data.dataset import Dataset
from deepmrf.data.files import Bytes
from deepmrf.data.labels import LabelSet
from deepmrf.data.progress import Progress, no_progress
from deepmrf.data.writing import write_text
from deepmrf.evaluation.steps import LayerSteps, context_weight, layer_steps, stage_scores, window_kernel
from deepmrf.figures import contexts as context_figures
from deepmrf.figures import overlay, pages
from deepmrf.figures.contexts import Floats, Pair
from deepmrf.figures.drawing import LABEL_OPACITY, Figure, save
from deepmrf.figures.steps import stage_bars, steps
from deepmrf.figures.window import penalty_window
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.pipeline import kernels_for
from deepmrf.predict.segmenter import Segmenter, trained_size

PAIRS_SHOWN = 4
"""Pairs of labels whose patterns are drawn where none are chosen."""
PICTURES_OF_DATA = 3
"""Pictures of a data set, spread evenly over it."""
MAX_SIDE = 640
"""Pixels of a picture's longer side, where the model does not say what it was trained on."""
Pixel = tuple[int, int]
"""(x, y)."""


@dataclass(frozen=True)
class Picture:
    """An image to explain."""

    name: str
    image: Bytes
    truth: NDArray[np.uint8] | None = None
    """True labels (H, W), if they are known."""


@dataclass(frozen=True)
class Explained:
    """A picture at the size that the model sees, with what its layers make of it."""

    picture: Picture
    steps: LayerSteps
    pixel: Pixel
    """Where b12's window is shown."""

    @property
    def labels(self) -> NDArray[np.uint8]:
        """The model's labels (H, W)."""
        return self.steps.label_maps[-1][1]


def pictures_of(data: Dataset, count: int = PICTURES_OF_DATA) -> list[Picture]:
    """Return pictures spread evenly over a data set."""
    indices = np.unique(np.linspace(0, len(data) - 1, min(count, len(data))).round().astype(int))
    return [Picture(data[index].name, *data.read(data[index])) for index in indices.tolist()]


def parse_pairs(text: str, labels: LabelSet) -> list[Pair]:
    """Return the labels (A, B) of each pair of "car:road, tree:sky"."""
    pairs = []
    for word in text.split(","):
        names = [name.strip() for name in word.split(":")]
        if len(names) != 2:
            example = ":".join((*labels.names, *labels.names)[:2])
            raise ValueError(f"The pair {word!r} must be two labels and a colon, such as {example}.")
        for name in names:
            if name not in labels.names:
                raise ValueError(f"The pair {word!r} has no label {name!r}: give two of {', '.join(labels.names)}.")
        pairs.append((labels.names.index(names[0]), labels.names.index(names[1])))
    return pairs


def explain(
    model: DeepParsingNetwork,
    name: str,
    pictures: Sequence[Picture],
    folder: Path,
    pixel: Pixel | None = None,
    pairs: Sequence[Pair] | None = None,
    progress: Progress = no_progress,
) -> Report:
    """Write the report of a model into a folder.

    pixel: (x, y) where b12's window is shown; None takes a pixel that the MRF changed. pairs: labels (A, B) whose
    patterns are drawn; None takes those that gain most, of those that meet in the pictures.
    progress: two steps per picture, and one for the model.
    """
    segmenter = Segmenter(model, device="cpu", size=trained_size([model]) or MAX_SIDE)
    report, total = Report(model, folder), 2 * len(pictures) + 1
    for picture in pictures:  # before anything is computed
        height, width = picture.image.shape[:2]
        if pixel is not None and not (0 <= pixel[0] < width and 0 <= pixel[1] < height):
            raise ValueError(
                f"The pixel {pixel[0]},{pixel[1]} is outside {picture.name}: give a column below {width} and a row "
                f"below {height}."
            )
    with kernels_for(segmenter, 1):
        for done, picture in enumerate(pictures, start=1):
            report.explained.append(_explained(segmenter, picture, pixel))
            progress(done, total)
        report.add_model(pairs)
        for number, explained in enumerate(report.explained, start=1):
            progress(len(pictures) + number, total)
            report.add_picture(explained, number)
    introduction = f"{model.summary()}; {len(model.labels)} labels: {', '.join(model.labels.names)}."
    if not pictures:
        introduction += " Give a picture to see what the layers do to it."
    script = pages.WINDOW_SCRIPT if pictures else ""
    write_text(report.page, pages.page(f"deepmrf explains {name}", html.escape(introduction), report.sections, script))
    progress(total, total)
    return report


def _explained(segmenter: Segmenter, picture: Picture, pixel: Pixel | None) -> Explained:
    image, truth = segmenter.shrunk(picture.image), picture.truth
    height, width = image.shape[:2]
    if truth is not None and truth.shape != (height, width):
        truth = np.array(Image.fromarray(truth).resize((width, height), Image.Resampling.NEAREST))
    result = layer_steps(segmenter.model, image)
    if pixel is None:
        pixel = _changed_pixel(result)
    else:
        full_height, full_width = picture.image.shape[:2]
        pixel = pixel[0] * width // full_width, pixel[1] * height // full_height
    return Explained(Picture(picture.name, image, truth), result, pixel)


def _changed_pixel(result: LayerSteps) -> Pixel:
    """A pixel that the MRF changed, the nearest to the centre; the centre where it changed none."""
    before, after = result.label_maps[0][1], result.label_maps[-1][1]
    centre = np.array(before.shape) // 2
    changed = np.argwhere(before != after)
    y, x = changed[((changed - centre) ** 2).sum(1).argmin()] if len(changed) else centre
    return int(x), int(y)


class Report:
    """A page, its sections and its figures so far."""

    def __init__(self, model: DeepParsingNetwork, folder: Path) -> None:
        self.model, self.page = model, folder / "index.html"
        self.figures: list[Path] = []
        """The PNG of each figure; an SVG of the same name lies beside it."""
        self.sections: list[tuple[str, str]] = []
        self.explained: list[Explained] = []

    def _figure(self, file: str, figure: Figure, caption: str) -> str:
        png, svg = save(figure, self.page.with_name(file))
        self.figures.append(png)
        return pages.embedded_figure(png, svg, caption)

    def _section(self, heading: str, parts: Sequence[str]) -> None:
        self.sections.append((heading, f"<div class='row'>{''.join(parts)}</div>"))

    def add_model(self, pairs: Sequence[Pair] | None) -> None:
        """Add what the model has learned; where there are pictures, compared with the labels in them."""
        mrf = self.model.mean_field
        if mrf is not None and mrf.label_contexts is not None:
            weight, scale = context_weight(mrf.label_contexts).numpy(), float(mrf.triple_penalty.scale.detach())
            clips = mrf.dims == 3 and mrf.label_contexts.size[0] > 1
            for frame in (0, -1) if clips else (0,):
                gains = context_figures.label_gains(weight, scale, mrf.label_contexts.contexts, frame)
                self._add_contexts(gains, frame, pairs)
        if scores := stage_scores(self.model):
            caption = "TA, LA and BA on the validation images after each stage of training, from the model's card."
            self._section("Stage by stage", [self._figure("stages", stage_bars(scores), caption)])

    def _pairs(self, gains: Floats) -> list[Pair]:
        """The pairs that gain most, of those that meet in the pictures if any do."""
        pairs = context_figures.strongest_pairs(gains)
        meeting = [pair for pair in pairs if self._shares(gains, pair) is not None]
        return (meeting or pairs)[:PAIRS_SHOWN]

    def _shares(self, gains: Floats, pair: Pair) -> Floats | None:
        maps = [(e.labels, e.steps.active) for e in self.explained if e.steps.active is not None]
        return context_figures.meeting_shares(maps, pair, gains.shape[2], (gains.shape[3], gains.shape[4]))

    def _add_contexts(self, gains: Floats, frame: int, pairs: Sequence[Pair] | None) -> None:
        names = self.model.labels.names
        pairs = pairs or self._pairs(gains)  # none where there is one label
        suffix, when = ("-before", ": from one frame to the next") if frame else ("", "")
        matrix = context_figures.compatibility(context_figures.total_gains(gains), names, frame)
        caption = (
            "What the column's label gains (blue, +) or pays (red) around the row's label, summed over the pattern, "
            "beside the mean label. Not symmetric: A may call for B where B does not call for A."
        )
        parts = [self._figure(f"compatibility{suffix}", matrix, caption)]
        if pairs:
            parts.append(self._patterns(gains, frame, pairs))
        self._section(f"Label compatibility and contexts{when}", parts)

    def _patterns(self, gains: Floats, frame: int, pairs: Sequence[Pair]) -> str:
        names, size = self.model.labels.names, (gains.shape[3], gains.shape[4])
        caption = "A:B, where B is likely (blue) when A is at the centre (square): B's contexts and their mean"
        shares: list[Floats | None] | None = None
        seen: list[Floats] | None = None
        if self.explained and not frame:
            caption += ", weighted by how often each won where B meets A (per cent). Last: where B is around A in the "
            caption += "labels of the pictures"
            shares = [self._shares(gains, pair) for pair in pairs]
            truths = [e.labels if e.picture.truth is None else e.picture.truth for e in self.explained]
            seen = [context_figures.arrangement(truths, pair, size) for pair in pairs]
        figure = context_figures.patterns(gains, pairs, names, shares, seen, frame)
        return self._figure("patterns-before" if frame else "patterns", figure, f"{caption}.")

    def add_picture(self, explained: Explained, number: int) -> None:
        """Add what the layers do to a picture."""
        picture, result, labels, mrf = explained.picture, explained.steps, self.model.labels, self.model.mean_field
        figure = steps(picture.image, result.label_maps, labels, picture.truth)
        caption = "Layer by layer. After b12: stage 2's model, with label contexts as the identity."
        parts = [self._figure(f"steps-{number}", figure, caption)]
        if result.active is not None and mrf is not None and mrf.label_contexts is not None:
            painted = overlay(picture.image, explained.labels, labels.palette(), LABEL_OPACITY, 0)
            figure = context_figures.winners(painted, result.active, mrf.label_contexts.contexts)
            caption = "Which of its label's contexts costs least at each pixel (b14)."
            parts.append(self._figure(f"contexts-{number}", figure, caption))
        kernel = None if mrf is None else window_kernel(mrf.triple_penalty)
        if kernel is not None:
            figure = penalty_window(picture.image, explained.pixel, kernel)
            caption = "b12 compares the pixel j with the pixels z in its window, by these weights."
            parts.append(self._figure(f"window-{number}", figure, caption))
            parts.append(pages.clickable_window(picture.image, explained.pixel, kernel))
        self._section(picture.name, parts)
