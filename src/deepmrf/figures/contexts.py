"""What label contexts (b13, b14) have learned: which labels they bring together, and where.

    gains[A, B, k, d] = -scale * mu_k(B, A, -d), less its mean over all labels B and contexts k

is what B gains in log-probability at the pixel d away from A, by the context k of B, for each unit of what b12 says of
A. mu is a penalty, so that a gain is a negative cost; t, which mu multiplies, has the sign of b12's `scale`; and mu is
read from the pixel of B, so that its offsets are turned round. The softmax of b15 removes what all labels have in
common, so only the difference from the mean label counts.

Shapes: L labels, K contexts, (h, w) pixels of a pattern, T frames.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.colours import distinct_colours
from deepmrf.data.files import Bytes
from deepmrf.figures import drawing
from deepmrf.figures.drawing import Figure, label_name, styled

Floats = NDArray[np.floating]
Ids = NDArray[np.integer]
Pair = tuple[int, int]
"""The labels (A, B) of "A:B"."""
ROWS_PER_MARK = 24
"""Up to so many labels, favoured pairs are also marked by a cross, for readers without colours."""


def label_gains(weight: Floats, scale: float, contexts: int, frame: int = 0) -> Floats:
    """Return gains (L, L, K, h, w) as defined above, of patterns (L K, L, h, w) or, of clips, (L K, L, T, h, w).

    scale: that of b12. frame: -1 gives the gain of B by A in the frame before; 0, in the same frame.
    """
    if weight.ndim == 5:
        weight = weight[:, :, weight.shape[2] // 2 + frame]
    labels = weight.shape[1]
    gains = -scale * weight.reshape(labels, contexts, labels, *weight.shape[2:])[..., ::-1, ::-1]  # (B, K, A, h, w)
    centred: Floats = np.moveaxis(gains - gains.mean((0, 1)), 2, 0)  # (A, B, K, h, w)
    return centred


def total_gains(gains: Floats) -> Floats:
    """Return the gain of B by A at all pixels of a pattern together, the mean over the contexts: (L, L), rows are A."""
    totals: Floats = gains.sum((-2, -1)).mean(-1)
    return totals


def strongest_pairs(gains: Floats) -> list[Pair]:
    """Return all pairs of two labels, the largest total gains first, each pair in one of its two orders."""
    totals = total_gains(gains)
    pairs: list[Pair] = []
    for index in np.argsort(-totals, axis=None):
        a, b = divmod(int(index), len(totals))
        if a != b and (b, a) not in pairs:
            pairs.append((a, b))
    return pairs


def arrangement(label_maps: Sequence[Ids], pair: Pair, size: tuple[int, int]) -> Floats:
    """Return ln of B's share at each offset from A over the mean share, (h, w); NaN where no B is near an A."""
    height, width = size
    together, total = np.zeros(size), np.zeros(size)
    for labels in label_maps:
        is_a, is_b = labels == pair[0], labels == pair[1]
        rows, columns = labels.shape
        for y in range(height):
            for x in range(width):
                dy, dx = y - (height - 1 - height // 2), x - (width - 1 - width // 2)
                here = np.s_[max(0, -dy) : rows - max(0, dy), max(0, -dx) : columns - max(0, dx)]
                there = np.s_[max(0, dy) : rows + min(0, dy), max(0, dx) : columns + min(0, dx)]
                together[y, x] += np.count_nonzero(is_a[here] & is_b[there])
                total[y, x] += np.count_nonzero(is_a[here])
    share = (together + 1) / (total + 1)
    return np.log(share / share.mean()) if together.any() else np.full(size, np.nan)


def meeting_shares(maps: Sequence[tuple[Ids, Ids]], pair: Pair, contexts: int, size: tuple[int, int]) -> Floats | None:
    """Return how often each context of B won where B meets A: (K,), shares of the pixels of B with an A in reach.

    maps: of each image, the labels (H, W), and of each pixel's label the context that won. None where the two labels
    never meet. Contexts that win deep inside of B see no A, so what they would say of it is never asked.
    """
    counts = np.zeros(contexts)
    for labels, active in maps:
        near = labels == pair[0]
        for axis, side in enumerate(size):
            padded = np.pad(near, [(side, side) if n == axis else (0, 0) for n in (0, 1)])
            offsets = range(side - side // 2, 2 * side - side // 2)  # where A lies, seen from B
            near = np.any([padded.take(range(o, o + near.shape[axis]), axis) for o in offsets], axis=0)
        counts += np.bincount(active[near & (labels == pair[1])], minlength=contexts)
    return counts / counts.sum() if counts.any() else None


@styled
def compatibility(totals: Floats, names: Sequence[str], frame: int = 0) -> Figure:
    """Draw the label compatibility (L, L): what the column's label gains near the row's label, by `total_gains`.

    Blue pairs, which have a cross, are favoured; red pairs are penalised. Rows and columns are different things: the
    figure is not symmetric. frame: -1 where the row's label is in the frame before.
    """
    count = len(names)
    figure = drawing.new_figure(drawing.COLUMN_INCHES * 0.93)
    axes = figure.add_subplot()
    limit = drawing.extent(totals)
    picture = axes.imshow(totals, interpolation="nearest", cmap=drawing.FAVOURED_MAP, vmin=-limit, vmax=limit)
    axes.set_xticks(range(count), [label_name(name) for name in names], rotation=90)
    axes.set_yticks(range(count), [label_name(name) for name in names])
    size = drawing.SMALL_POINTS if count <= ROWS_PER_MARK else drawing.SMALL_POINTS * ROWS_PER_MARK / count
    axes.tick_params(labelsize=size)
    axes.set(ylabel="when this label is there" if not frame else "when this label was there one frame before")
    axes.set(xlabel="this label gains around it")
    if count <= ROWS_PER_MARK:
        for row, column in np.argwhere(totals > 0):
            dark = totals[row, column] > 0.6 * limit
            axes.text(column, row, "+", ha="center", va="center", color="white" if dark else "black", fontsize=size)
    bar = figure.colorbar(picture, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("penalised   |   favoured", fontsize=drawing.SMALL_POINTS)
    return figure


@styled
def patterns(
    gains: Floats,
    pairs: Sequence[Pair],
    names: Sequence[str],
    shares: Sequence[Floats | None] | None = None,
    arrangements: Sequence[Floats] | None = None,
    frame: int = 0,
) -> Figure:
    """Draw for each pair "A:B" where B is likely when A is at the centre: B's K contexts side by side, and their mean.

    Blue is likely, red unlikely; the small square is A's pixel. shares: of each pair, how often each context of B won
    where B meets A (`meeting_shares`), by which the mean is weighted; where they are None, contexts weigh the same.
    arrangements (one per pair): a last column, where B is in labelled images. frame: -1
    where A is in the frame before.
    """
    contexts, (height, width) = gains.shape[2], gains.shape[3:]
    columns = contexts + 1 + (arrangements is not None)
    cell = (drawing.COLUMN_INCHES - 0.62) / columns
    figure = drawing.new_figure(len(pairs) * (cell + 0.05) + 0.35)
    grid = figure.subplots(len(pairs), columns, squeeze=False)
    figure.get_layout_engine().set(w_pad=0.01, h_pad=0.01, wspace=0.0, hspace=0.0)
    shown = np.stack([gains[pair] for pair in pairs])  # (P, K, h, w)
    limit = drawing.extent(shown)
    titles = ["context 1", *[str(k + 1) for k in range(1, contexts)], "mean", "in images"]
    centre = (width - 1 - width // 2, height - 1 - height // 2)
    for row, (a, b) in enumerate(pairs):
        share = None if shares is None else shares[row]
        maps = [*shown[row], np.average(shown[row], axis=0, weights=share)]
        maps += [] if arrangements is None else [arrangements[row]]
        for column, values in enumerate(maps):
            axes = grid[row][column]
            scale = limit if column <= contexts else drawing.extent(np.nan_to_num(values))
            title = titles[column] if not row else ""
            picture = drawing.show_picture(
                axes, values, title, interpolation="nearest", cmap=drawing.FAVOURED_MAP, vmin=-scale, vmax=scale
            )
            axes.title.set_fontsize(drawing.SMALL_POINTS)
            axes.plot(*centre, marker="s", markersize=3, markerfacecolor="none", color="black", markeredgewidth=0.6)
            if share is not None and column < contexts:
                axes.set_xlabel(f"{100 * share[column]:.0f} %", fontsize=drawing.SMALL_POINTS - 0.5, labelpad=1)
            if np.isnan(values).all():
                axes.text(0.5, 0.2, "none", transform=axes.transAxes, ha="center", fontsize=drawing.SMALL_POINTS)
            elif column <= contexts:
                reference = picture
        label = f"{label_name(names[a])}{' (t-1)' if frame else ''}:\n{label_name(names[b])}"
        grid[row][0].set_ylabel(label, rotation=0, ha="right", va="center")
    bar = figure.colorbar(reference, ax=grid, location="bottom", shrink=0.6, aspect=40, pad=0.01)
    bar.ax.locator_params(axis="x", nbins=4)  # more numbers would touch each other
    bar.set_label("unlikely   |   likely", fontsize=drawing.SMALL_POINTS)
    return figure


@styled
def winners(picture: Bytes, active: Ids, contexts: int) -> Figure:
    """Draw which of the K contexts won where: active (H, W) holds, of the label of each pixel, its active context.

    That is the k of b14's minimum, whose pattern costs the label least there; each has its share of the pixels. A
    context of one label has nothing in common with that number of another. picture: the labels, to compare.
    """
    height, width = active.shape
    figure = drawing.new_figure(drawing.COLUMN_INCHES / 2 * height / width + 0.45)
    left, right = figure.subplots(1, 2)
    colours = np.array(distinct_colours(contexts), np.uint8)
    drawing.show_picture(left, picture, "labels")
    drawing.show_picture(right, colours[active], "context that won", interpolation="nearest")
    shares = np.bincount(active.ravel(), minlength=contexts) / active.size
    drawing.add_legend(figure, [f"{k + 1}: {100 * share:.0f} %" for k, share in enumerate(shares)], colours)
    return figure
