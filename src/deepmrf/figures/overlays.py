"""Overlays: label maps in colour over their image, with a legend, and pictures side by side.

Images are numpy arrays (H, W, 3) of uint8, label maps (H, W) of ints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from deepmrf.data.colours import Colour
from deepmrf.data.files import Bytes

LegendEntry = tuple[str, Colour | None]
"""A text and the colour before it; None for what is not painted."""
MIN_FONT_SIZE, FONT_SIZE_BY_SIDE = 12, 0.02
"""Pixels of a legend's letters: at least so many, and this part of the picture's longer side."""
MAX_LEGEND_BY_HEIGHT, MIN_ROWS_ALLOWED = 0.5, 12
"""A legend below a picture has at most this part of its height, but may always have so many rows."""
FALLBACK_FONTS = (
    *("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial Unicode.ttf", "arial.ttf", "NotoSansCJK-Regular.ttc"),
    *("PingFang.ttc", "msyh.ttc", "Nirmala.ttf"),
)
"""Fonts to look for on the system where a text has letters beyond ASCII, which is all that Pillow's own font has."""


def overlay(image: Bytes, labels: NDArray[Any], colours: Bytes, opacity: float = 0.55, line: int = 1) -> Bytes:
    """Paint the labels over the image, with white lines, `line` pixels wide, where the label changes."""
    painted = (1 - opacity) * image + opacity * colours[labels]
    edge = np.zeros(labels.shape, dtype=bool)
    for distance in range(1, line + 1):
        edge[:, distance:] |= labels[:, distance:] != labels[:, :-distance]
        edge[distance:] |= labels[distance:] != labels[:-distance]
    painted[edge] = 255
    picture: Bytes = np.round(painted).astype(np.uint8)
    return picture


def pale(image: Bytes) -> NDArray[np.float64]:
    """Return the image in pale grey, (H, W, 3) of 0 to 255, for colours to be painted on."""
    grey: NDArray[np.float64] = np.repeat(image.mean(2, keepdims=True) * 0.3 + 170, 3, axis=2)
    return grey


def legend(size: tuple[int, int], entries: Sequence[LegendEntry]) -> Image.Image:
    """Draw a sheet with room for a picture of (width, height) at its top left, and the entries below or beside it.

    The legend lies where it makes the sheet larger by less. Of too many entries, the last are counted: "+ 12 more".
    """
    width, height = size
    font_size = max(MIN_FONT_SIZE, round(FONT_SIZE_BY_SIDE * max(size)))
    line, gap = round(1.6 * font_size), round(0.6 * font_size)
    usual = ImageFont.load_default(font_size)
    fonts = {text: usual if text.isascii() else _font_for(text, font_size) or usual for text, _ in entries}
    widths = [math.ceil(fonts[text].getlength(text)) + font_size + 5 * gap // 2 for text, _ in entries]
    cell = max(widths, default=0)
    columns = len(entries) if sum(widths) + gap <= width else max(1, (width - gap) // max(cell, 1))
    rows = math.ceil(len(entries) / max(columns, 1))
    below = max(width, cell + gap if columns == 1 else 0), height + rows * line + gap
    beside = width + cell + gap, height
    if len(entries) * line + gap <= height and math.prod(beside) < math.prod(below):
        sheet_size, left, top, columns = beside, width, 0, 1
    else:
        max_rows = max(MIN_ROWS_ALLOWED, int(MAX_LEGEND_BY_HEIGHT * height / line))
        if rows > max_rows:
            rows, first = max_rows, max_rows * columns - 1
            entries = [*entries[:first], (f"+ {len(entries) - first} more", None)]
        sheet_size, left, top = (below[0], height + rows * line + gap), 0, height
    sheet = Image.new("RGB", sheet_size, "white")
    draw = ImageDraw.Draw(sheet)
    steps = np.cumsum([0, *widths]) if columns == len(entries) else np.arange(columns) * cell
    for index, (text, colour) in enumerate(entries):
        x = left + gap + int(steps[index % columns])
        y = top + gap // 2 + (index // columns) * line + line // 2
        half = font_size // 2
        if text in fonts:
            draw.rectangle((x, y - half, x + font_size, y + half), colour or "white", (110, 110, 110), font_size // 12)
            x += font_size + 2 * gap // 3
        draw.text((x, y), text, (20, 20, 20), fonts.get(text, usual), anchor="lm")
    return sheet


def _font_for(text: str, size: int) -> ImageFont.FreeTypeFont | None:
    """A font of the system that has all letters of a text."""
    for name in FALLBACK_FONTS:
        try:
            font = ImageFont.truetype(name, size)
        except OSError:
            continue
        missing = bytes(font.getmask("\uffff"))
        if all(letter.isascii() or bytes(font.getmask(letter)) != missing for letter in text):
            return font
    return None


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
