"""Bars of scores by stage."""

from __future__ import annotations

import pytest

from deepmrf.figures.bars import stage_bars

pytest.importorskip("matplotlib")


def test_bars_are_as_high_as_the_scores(texts, readable):
    stages = ("unary", "triple penalty", "label contexts", "joint")
    scores = {stage: {"TA": 1.0, "LA": 0.5 + n / 100, "BA": 0.861} for n, stage in enumerate(stages)}
    figure = stage_bars(scores)
    axes = figure.axes[0]
    for number, bars in enumerate(axes.containers):
        assert [bar.get_height() for bar in bars] == pytest.approx([100, 50 + number, 86.1])
        assert [bar.get_y() for bar in bars] == [0, 0, 0]
    written = [text.get_text() for text in texts(figure)]
    assert {"50.0", "51.0", "52.0", "53.0", *stages} <= {*written}
    assert written.count("86.1") == 4
    readable(figure)
