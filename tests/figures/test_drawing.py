"""Files of figures, and the package that draws them."""

from __future__ import annotations

import sys

import pytest
from PIL import Image

from deepmrf.figures.drawing import COLUMN_INCHES, DOTS_PER_INCH, label_name, save
from deepmrf.figures.steps import stage_bars

SCORES = {"unary": {"TA": 0.5}, "joint": {"TA": 0.75}}


def test_a_figure_is_a_png_of_a_columns_width_and_an_svg(tmp_path):
    pytest.importorskip("matplotlib")
    png, svg = save(stage_bars(SCORES), tmp_path / "new" / "bars.v1")
    assert (png.name, svg.name) == ("bars.v1.png", "bars.v1.svg")
    assert 0.9 * COLUMN_INCHES < Image.open(png).width / DOTS_PER_INCH < 1.05 * COLUMN_INCHES
    assert svg.read_bytes().startswith(b"<?xml")
    again = save(stage_bars(SCORES), tmp_path / "again")
    assert again[0].read_bytes() == png.read_bytes()
    assert again[1].read_bytes() == svg.read_bytes()


def test_without_matplotlib_there_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"^Figures need matplotlib: pip install 'deepmrf\[figures\]'$"):
        stage_bars(SCORES)


def test_names_are_plain_text():
    assert label_name("$a$") == r"\$a\$"
    assert label_name("a name that is too long") == "a name that i…"
