"""b12's window at a pixel j: the pixels z that the triple penalty compares it with, and their weights d(j, z).

    distance   d = colour |I_j - I_z|^2 + position |j - z|^2
    gaussian   d = exp(-colour |I_j - I_z|^2 - position |j - z|^2) + smooth_weight exp(-|j - z|^2 / 2 smooth_width^2)

I is the image in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmrf.data.files import Bytes
from deepmrf.figures.drawing import COLUMN_INCHES, SMALL_POINTS, Figure, new_figure, show_picture, styled

Box = tuple[int, int, int, int]
"""(left, right, top, bottom) in pixels; right and bottom are outside."""


@dataclass(frozen=True)
class WindowKernel:
    """The numbers of d(j, z), as they stand in the equations above."""

    gaussian: bool
    """Else distance."""
    colour: float
    position: float
    smooth_weight: float
    smooth_width: float
    window: tuple[int, int]
    """Rows and columns of the window; an even m reaches from -m/2 to m/2 - 1."""
    spacing: tuple[float, float] = (1.0, 1.0)
    """Distance of two rows and of two columns."""


def window_weights(image: Bytes, pixel: tuple[int, int], kernel: WindowKernel) -> tuple[NDArray[np.float64], Box]:
    """Return d(j, z) of the pixels z in the window around j = (x, y), 0 at j itself, and where that window lies."""
    (x, y), (rows, columns) = pixel, kernel.window
    top, bottom = max(0, y - rows // 2), min(image.shape[0], y - rows // 2 + rows)
    left, right = max(0, x - columns // 2), min(image.shape[1], x - columns // 2 + columns)
    colours = image[top:bottom, left:right] / 255 - image[y, x] / 255
    far_y, far_x = np.arange(top, bottom) - y, np.arange(left, right) - x
    far = (far_y[:, None] * kernel.spacing[0]) ** 2 + (far_x * kernel.spacing[1]) ** 2
    weights = kernel.colour * (colours**2).sum(2) + kernel.position * far
    if kernel.gaussian:
        weights = np.exp(-weights) + kernel.smooth_weight * np.exp(-far / (2 * kernel.smooth_width**2))
        weights[y - top, x - left] = 0
    return weights, (left, right, top, bottom)


@styled
def penalty_window(image: Bytes, pixel: tuple[int, int], kernel: WindowKernel) -> Figure:
    """Draw b12's window around a pixel j = (x, y) of an image (H, W, 3), and d(j, z) of each pixel z in it."""
    weights, (left, right, top, bottom) = window_weights(image, pixel, kernel)
    figure = new_figure(COLUMN_INCHES / 2)
    where, cropped, weighted = figure.subplots(1, 3, width_ratios=(1.6, 1, 1.25))
    show_picture(where, image, f"window at {pixel[0]}, {pixel[1]}")
    box = (left - 0.5, right - 0.5, bottom - 0.5, top - 0.5)
    for colour, width in (("black", 1.8), ("yellow", 0.8)):
        corners = [(0, 3), (1, 3), (1, 2), (0, 2), (0, 3)]
        where.plot([box[x] for x, _ in corners], [box[y] for _, y in corners], color=colour, linewidth=width)
    show_picture(cropped, image[top:bottom, left:right], "the pixels in it", extent=box, interpolation="nearest")
    options = {"extent": box, "interpolation": "nearest", "cmap": "cividis", "vmin": 0}
    picture = show_picture(weighted, weights, "d(j, z)", **options)
    for axes in (cropped, weighted):
        for colour, width in (("black", 1.4), ("white", 0.6)):
            axes.plot(*pixel, marker="s", markersize=4, markerfacecolor="none", color=colour, markeredgewidth=width)
    bar = figure.colorbar(picture, ax=weighted, shrink=0.7, pad=0.03)
    bar.ax.tick_params(labelsize=SMALL_POINTS)
    bar.set_label("alike and near" if kernel.gaussian else "unlike or far", fontsize=SMALL_POINTS)
    return figure
