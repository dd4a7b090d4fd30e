"""Pages: nothing from a network, nothing unescaped."""

from __future__ import annotations

import json
import re
from html import unescape

import numpy as np

from deepmrf.figures.pages import clickable_window, linked_figure, page
from deepmrf.figures.window import WindowKernel


def test_text_is_escaped():
    text = page("<b>", "a <i>b</i>", [("x & y", linked_figure("a'b.jpg", "<c>"))])
    assert "<title>&lt;b&gt;</title>" in text
    assert "<h2>x &amp; y</h2>" in text
    assert "src='a&#x27;b.jpg'" in text
    assert "<figcaption>&lt;c&gt;" in text
    assert "://" not in text


def test_a_clickable_window_carries_the_kernel():
    text = clickable_window(np.zeros((4, 5, 3), np.uint8), (3, 2), WindowKernel(True, 1.5, 0.25, 0.0, 1.0, (3, 5)))
    numbers = json.loads(unescape(re.search(r'data-kernel="([^"]*)"', text)[1]))
    assert numbers["pixel"] == [3, 2]
    assert (numbers["gaussian"], numbers["colour"], numbers["window"]) == (True, 1.5, [3, 5])
    assert "src='data:image/png;base64," in text
