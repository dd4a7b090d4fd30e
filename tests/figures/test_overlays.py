"""Pictures: sizes, colours, and that what should show does."""

from __future__ import annotations

import numpy as np
import pytest

from deepmrf import figures
from deepmrf.data.colours import distinct_colours


def test_overlay_mixes_and_draws_white_borders():
    image = np.full((4, 6, 3), 100, dtype=np.uint8)
    labels = np.zeros((4, 6), dtype=int)
    labels[:, 3:] = 1
    colours = np.array([[0, 0, 0], [200, 200, 200]], dtype=np.uint8)
    seen = figures.overlay(image, labels, colours, opacity=0.5)
    assert (seen[:, 3] == 255).all()
    assert (seen[:, :3] == 50).all()
    assert (seen[:, 4:] == 150).all()


COLOURS = distinct_colours(200)


def swatches(sheet, size):
    """The colours that the legend shows."""
    pixels = np.array(sheet).astype(np.int32) @ (1 << 16, 1 << 8, 1)
    pixels[: size[1], : size[0]] = 0xFFFFFF
    return {(value >> 16, value >> 8 & 255, value & 255) for value in np.unique(pixels).tolist()}


@pytest.mark.parametrize(
    "size", [(640, 480), (100, 66), (60, 40), (200, 700), (3000, 300), (1600, 1200), (1, 1), (17, 900)]
)
@pytest.mark.parametrize("count", [1, 2, 11])
def test_a_legend_shows_every_entry_outside_the_picture(size, count):
    sheet = figures.legend(size, [(f"name of label {n}", COLOURS[n]) for n in range(count)])
    assert sheet.width >= size[0]
    assert sheet.height >= size[1]
    assert (np.array(sheet)[: size[1], : size[0]] == 255).all()  # nothing is drawn where the picture goes
    assert set(COLOURS[:count]) <= swatches(sheet, size)


def test_letters_grow_with_the_picture():
    def height_of_letters(side):
        sheet = figures.legend((side, side), [("ooo", (255, 0, 0))])
        dark = (np.array(sheet) < 60).all(-1).any(1)
        return dark.sum()

    assert height_of_letters(100) == height_of_letters(500) >= 5
    assert height_of_letters(2000) > 3 * height_of_letters(500)


def test_a_legend_lies_where_there_is_room():
    entries = [(f"label {n}", COLOURS[n]) for n in range(6)]
    assert figures.legend((640, 480), entries).size[0] == 640  # below
    assert figures.legend((300, 4000), entries[:1]).size[0] >= 300
    assert figures.legend((480, 360), [(f"class {n}", COLOURS[n]) for n in range(15)]).size[1] == 360  # beside


def test_too_many_entries_are_counted():
    entries = [(f"label {n}", COLOURS[n]) for n in range(150)]
    sheet = figures.legend((480, 360), entries)
    shown = swatches(sheet, (480, 360))
    assert sheet.height < 1.7 * 360
    assert COLOURS[0] in shown
    assert COLOURS[149] not in shown


def test_unpainted_entries_are_white():
    assert swatches(figures.legend((200, 200), [("background", None)]), (200, 200)) >= {(255, 255, 255), (110,) * 3}


def test_letters_beyond_ascii_are_drawn_or_left_as_boxes():
    text = "Stra\u00dfe \u0434\u043e\u043c \u9053\u8def"
    assert np.array(figures.legend((300, 200), [(text, (255, 0, 0))])).min() < 60


def test_lines_may_be_wider():
    image, labels = np.full((6, 9, 3), 100, dtype=np.uint8), np.zeros((6, 9), dtype=int)
    labels[:, 4:] = 1
    seen = figures.overlay(image, labels, np.zeros((2, 3), np.uint8), line=3)
    assert (seen == 255).all(-1)[0].tolist() == [False] * 4 + [True] * 3 + [False] * 2


def test_panels_stand_in_a_grid():
    picture = np.zeros((20, 30, 3), dtype=np.uint8)
    sheet = figures.panels([("a", picture), ("b", picture), ("c", picture)], columns=2, title_height=20, gap=5)
    assert sheet.size == (2 * 35 + 5, 2 * 45 + 5)
    assert sheet.getpixel((10, 30)) == (0, 0, 0)
    assert sheet.getpixel((50, 80)) == (255, 255, 255)  # nothing in the fourth place
