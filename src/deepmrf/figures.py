"""Figures: label maps in colour over their image, and pictures side by side.

Images are numpy arrays (H, W, 3) of uint8, label maps (H, W) of ints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from deepmrf.data.files import Bytes


def overlay(image: Bytes, labels: NDArray[Any], colours: Bytes, opacity: float = 0.55) -> Bytes:
    """Paint the labels over the image, with white lines where the label changes."""
    painted = (1 - opacity) * image + opacity * colours[labels]
    edge = np.zeros(labels.shape, dtype=bool)
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    edge[1:] |= labels[1:] != labels[:-1]
    painted[edge] = 255
    picture: Bytes = np.round(painted).astype(np.uint8)
    return picture


def panels(
    pictures: Sequence[tuple[str, Bytes]], columns: int = 2, title_height: int = 34, gap: int = 10
) -> Image.Image:
    """Arrange (title, picture) pairs of one size in a grid; sizes are in pixels."""
    height, width = pictures[0][1].shape[:2]
    rows = math.ceil(len(pictures) / columns)
    size = (columns * (width + gap) + gap, rows * (height + title_height + gap) + gap)
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=min(18, title_height * 0.55))
    for index, (title, picture) in enumerate(pictures):
        row, column = divmod(index, columns)
        left, top = gap + column * (width + gap), gap + row * (height + title_height + gap)
        draw.text((left + 2, top + 5), title, fill="black", font=font)
        sheet.paste(Image.fromarray(picture), (left, top + title_height))
    return sheet
