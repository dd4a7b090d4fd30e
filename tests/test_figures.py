"""Pictures: sizes, colours, and that what should show does."""

from __future__ import annotations

import numpy as np

from deepmrf import figures


def test_overlay_mixes_and_draws_white_borders():
    image = np.full((4, 6, 3), 100, dtype=np.uint8)
    labels = np.zeros((4, 6), dtype=int)
    labels[:, 3:] = 1
    colours = np.array([[0, 0, 0], [200, 200, 200]], dtype=np.uint8)
    seen = figures.overlay(image, labels, colours, opacity=0.5)
    assert (seen[:, 3] == 255).all()
    assert (seen[:, :3] == 50).all()
    assert (seen[:, 4:] == 150).all()


def test_panels_stand_in_a_grid():
    picture = np.zeros((20, 30, 3), dtype=np.uint8)
    sheet = figures.panels([("a", picture), ("b", picture), ("c", picture)], columns=2, title_height=20, gap=5)
    assert sheet.size == (2 * 35 + 5, 2 * 45 + 5)
    assert sheet.getpixel((10, 30)) == (0, 0, 0)
    assert sheet.getpixel((50, 80)) == (255, 255, 255)  # nothing in the fourth place
