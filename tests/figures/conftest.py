"""Texts of a figure, and whether they lie over one another."""

from __future__ import annotations

import itertools

import pytest


@pytest.fixture
def texts():
    """texts(figure): every text that a figure shows, as it is drawn."""

    def of(figure):
        from matplotlib.text import Text

        figure.draw_without_rendering()
        return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]

    return of


@pytest.fixture
def readable(texts):
    """readable(figure): fail where two texts overlap, leave the sheet, or are smaller than 5.5 points."""

    def check(figure):
        boxes = {text: text.get_window_extent() for text in texts(figure)}
        for text in boxes:
            assert text.get_fontsize() >= 5.5, text.get_text()
        for (a, box_a), (b, box_b) in itertools.combinations(boxes.items(), 2):
            width = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0)
            height = min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
            assert min(width, height) < 0.5, f"{a.get_text()!r} lies over {b.get_text()!r}"

    return check
