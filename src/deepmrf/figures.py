"""Pictures: label maps in colour, laid over their image, and panels side by side.

Images are numpy arrays (H, W, 3) of uint8, label maps (H, W) of ints. Pillow is imported when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = NDArray[np.uint8]


def palette(labels: int) -> Bytes:
    """`labels` well separated colours (labels, 3): hues a golden angle apart, at three brightnesses."""
    colours = []
    for index in range(labels):
        hue, value = (index * 0.61803398875 + 0.58) % 1.0, (0.95, 0.7, 0.5)[index % 3]
        ramp = [abs((hue * 6 + shift) % 6 - 3) - 1 for shift in (0, 4, 2)]
        colours.append([value * (0.25 + 0.75 * min(max(r, 0.0), 1.0)) for r in ramp])
    return np.round(255 * np.asarray(colours).reshape(-1, 3)).astype(np.uint8)


def overlay(image: Bytes, labels: NDArray[Any], colours: Bytes, opacity: float = 0.55) -> Bytes:
    """The image with its labels painted over it, and white lines where the label changes."""
    painted = (1 - opacity) * image + opacity * colours[labels]
    edge = np.zeros(labels.shape, dtype=bool)
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    edge[1:] |= labels[1:] != labels[:-1]
    painted[edge] = 255
    picture: Bytes = np.round(painted).astype(np.uint8)
    return picture


def panels(pictures: Sequence[tuple[str, Bytes]], columns: int = 2, title_height: int = 34, gap: int = 10) -> Image:
    """Pictures of one size in a grid, each under its title."""
    from PIL import Image as image
    from PIL import ImageDraw, ImageFont

    height, width = pictures[0][1].shape[:2]
    rows = math.ceil(len(pictures) / columns)
    size = (columns * (width + gap) + gap, rows * (height + title_height + gap) + gap)
    sheet = image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=min(18, title_height * 0.55))
    for index, (title, picture) in enumerate(pictures):
        row, column = divmod(index, columns)
        left, top = gap + column * (width + gap), gap + row * (height + title_height + gap)
        draw.text((left + 2, top + 5), title, fill="black", font=font)
        sheet.paste(image.fromarray(picture), (left, top + title_height))
    return sheet


def curves(history: Sequence[dict[str, Any]]) -> Image:
    """A run's loss (line, logarithmic) and validation mIoU (dots), one stage after the other, from train's history."""
    from PIL import Image as image
    from PIL import ImageDraw, ImageFont

    width, height, edge = 960, 420, 60
    sheet = image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=13)
    blue, red, grey = (40, 90, 200), (200, 40, 40), (200, 200, 200)
    losses = [(n, math.log10(max(entry["loss"], 1e-6))) for n, entry in enumerate(history) if "loss" in entry]
    found = [(n, entry["miou"], entry["stage"]) for n, entry in enumerate(history) if "miou" in entry]
    low = math.floor(min((value for _, value in losses), default=-1.0))
    high = max(math.ceil(max((value for _, value in losses), default=0.0)), low + 1)

    def spot(number: int, share: float) -> tuple[float, float]:
        across = edge + (width - 2 * edge) * number / max(len(history) - 1, 1)
        return across, height - edge - (height - 2 * edge) * min(max(share, 0.0), 1.0)

    draw.rectangle((edge, edge, width - edge, height - edge), outline="black")
    draw.text((edge, 16), "loss (blue, left) and validation mIoU (red, right)", fill="black", font=font)
    for power in range(low, high + 1):
        draw.text((edge - 8, spot(0, (power - low) / (high - low))[1]), f"{10.0**power:g}", blue, font, anchor="rm")
    for tenth in range(0, 11, 2):
        draw.text((width - edge + 8, spot(0, tenth / 10)[1]), f"{10 * tenth}", red, font, anchor="lm")
    for row, (n, _, stage) in enumerate(found):
        x = spot(n, 0)[0]
        draw.line((x, edge, x, height - edge), fill=grey)
        draw.text((x, height - edge + 8 + 17 * (row % 2)), stage, fill="black", font=font, anchor="ra")
    if len(losses) > 1:
        draw.line([spot(n, (value - low) / (high - low)) for n, value in losses], fill=blue, width=2)
    for n, value, _ in found:
        x, y = spot(n, value)
        draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=red)
        draw.text((x - 6, y - 20), f"{100 * value:.1f}", fill=red, font=font, anchor="ra")
    return sheet
