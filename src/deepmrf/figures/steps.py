"""Step by step: what each layer made of an image, which pixels changed from which label to which; scores by stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.colours import distinct_colours
from deepmrf.data.files import Bytes
from deepmrf.data.labels import LabelSet
from deepmrf.figures import drawing
from deepmrf.figures.drawing import Figure, label_name, styled
from deepmrf.figures.overlays import overlay, pale

Ids = NDArray[np.integer]
Change = tuple[int, int, int]
"""A label before, the label after, and the number of pixels that went from the one to the other."""
CHANGES_LISTED = 6


def changes(before: Ids, after: Ids, labels: int) -> list[Change]:
    """Return (label before, label after, pixels) of all pixels whose label differs, the most frequent first."""
    counts = np.bincount(before.ravel().astype(np.int64) * labels + after.ravel(), minlength=labels**2)
    order = [int(index) for index in np.argsort(-counts, kind="stable") if counts[index]]
    return [(*divmod(index, labels), int(counts[index])) for index in order if index // labels != index % labels]


def changed_pixels(image: Bytes, before: Ids, after: Ids, colours: Bytes) -> Bytes:
    """Return the image in pale grey, with each pixel whose label differs in the colour of its label after."""
    picture = pale(image)
    changed = before != after
    picture[changed] = colours[after[changed]]
    return picture.astype(np.uint8)


@styled
def steps(
    image: Bytes, label_maps: Sequence[tuple[str, Ids]], labels: LabelSet, truth: Ids | None = None, columns: int = 2
) -> Figure:
    """Draw an image (H, W, 3), its truth if there is one, label maps (H, W) by name, and what changed between them.

    The last panel has the pixels where the last map differs from the first, in the colours of their new labels; below
    it, from what to what. With a truth, a panel's title says how many of the pixels that have a label are right.
    """
    palette = labels.palette()
    pictures = [("image", image)]
    if truth is not None:
        pictures.append(("truth", overlay(image, truth, palette, drawing.LABEL_OPACITY, 0)))
    for name, ids in label_maps:
        right = "" if truth is None else f": {100 * _share_right(ids, truth, labels.ignore):.1f} % right"
        pictures.append((f"{name}{right}", overlay(image, ids, palette, drawing.LABEL_OPACITY, 0)))
    before, after = label_maps[0][1], label_maps[-1][1]
    moved = changes(before, after, 256)
    share = sum(count for *_, count in moved) / before.size
    pictures.append((f"changed: {100 * share:.1f} % of pixels", changed_pixels(image, before, after, palette)))

    height, width = image.shape[:2]
    rows, free = math.ceil(len(pictures) / columns), -len(pictures) % columns
    listed = _sentences(moved[:CHANGES_LISTED], labels.names, per_line=1 if free else 2)
    present = [label for label in range(len(labels)) if any((ids == label).any() for _, ids in label_maps)]
    heights = [drawing.COLUMN_INCHES / columns * height / width + 0.16] * rows
    heights += [] if free else [0.14 * (1 + listed.count("\n"))]
    figure = drawing.new_figure(sum(heights) + 0.14 * math.ceil(len(present) / 4) + 0.1)
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0.01, hspace=0.01)
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for number, (title, picture) in enumerate(pictures):
        drawing.show_picture(figure.add_subplot(grid[divmod(number, columns)]), picture, title)
    text = figure.add_subplot(grid[-1, columns - free :] if free else grid[-1, :])  # a free place, or a row of its own
    text.set_axis_off()
    text.text(0.5, 0.5, listed, ha="center", va="center", fontsize=drawing.SMALL_POINTS, linespacing=1.4)
    drawing.add_legend(figure, [label_name(labels.names[n]) for n in present], palette[present], columns=4)
    return figure


def _sentences(moved: Sequence[Change], names: Sequence[str], per_line: int) -> str:
    texts = [f"{label_name(names[a])} \N{RIGHTWARDS ARROW} {label_name(names[b])}: {count}" for a, b, count in moved]
    return "\n".join("        ".join(texts[n : n + per_line]) for n in range(0, len(texts), per_line))


def _share_right(ids: Ids, truth: Ids, ignore: int) -> float:
    valid = truth != ignore
    return float((ids == truth)[valid].mean()) if valid.any() else math.nan


@styled
def stage_bars(scores: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw scores of 0 to 1, {stage: {metric: score}}, as bars in per cent: a group for each metric."""
    stages = list(scores)
    metrics = list(scores[stages[0]])
    figure = drawing.new_figure(1.9)
    axes = figure.add_subplot()
    colours = np.array(distinct_colours(len(stages)), np.uint8)
    width = 0.8 / len(stages)
    for number, stage in enumerate(stages):
        positions = np.arange(len(metrics)) + (number - (len(stages) - 1) / 2) * width
        heights = [100 * scores[stage][metric] for metric in metrics]
        bars = axes.bar(positions, heights, 0.92 * width, color=colours[number] / 255, label=stage)
        axes.bar_label(bars, fmt="%.1f", rotation=90, padding=1, fontsize=drawing.SMALL_POINTS - 0.5)
    axes.set_xticks(range(len(metrics)), metrics)
    axes.set(ylim=(0, 122), yticks=range(0, 101, 20), ylabel="per cent")
    axes.spines[["top", "right"]].set_visible(False)
    drawing.add_legend(figure, stages, colours, columns=4)
    return figure
