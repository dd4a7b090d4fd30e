"""Step by step: planted changes are counted, named, and painted at their place."""

from __future__ import annotations

import numpy as np
import pytest

from deepmrf.data.labels import CAMVID
from deepmrf.figures.steps import changed_pixels, changes, stage_bars, steps

pytest.importorskip("matplotlib")
ROAD, CAR, SKY = (CAMVID.names.index(name) for name in ("road", "car", "sky"))


@pytest.fixture
def maps():
    """Labels of the network, after b12, and of the model, where a car of 6 pixels turns into road, and one into sky."""
    network = np.full((30, 40), ROAD, dtype=np.uint8)
    network[10:14, 5:9] = CAR
    after = network.copy()
    after[10:12, 5:8] = ROAD
    last = after.copy()
    last[13, 8] = SKY
    return [("network", network), ("after b12", after), ("model", last)]


def test_changes_are_counted_by_label(maps):
    assert changes(maps[0][1], maps[2][1], 11) == [(CAR, ROAD, 6), (CAR, SKY, 1)]
    assert changes(maps[0][1], maps[0][1], 11) == []


def test_changed_pixels_have_their_new_colour(maps):
    image = np.full((30, 40, 3), 100, dtype=np.uint8)
    picture = changed_pixels(image, maps[0][1], maps[2][1], CAMVID.palette())
    assert tuple(picture[10, 5]) == CAMVID.colours[ROAD]
    assert tuple(picture[13, 8]) == CAMVID.colours[SKY]
    assert tuple(picture[0, 0]) == (200, 200, 200)


@pytest.mark.parametrize("with_truth", [True, False])
def test_every_step_is_drawn(maps, with_truth, texts, readable):
    image = np.full((30, 40, 3), 100, dtype=np.uint8)
    truth = maps[2][1].copy()
    truth[0] = CAMVID.ignore
    truth[1, :29] = CAR  # 29 of 1,160 are wrong in the model, and 7 more in the network
    figure = steps(image, maps, CAMVID, truth if with_truth else None)
    panels = [axes for axes in figure.axes if axes.images]
    titles = ["image", *["truth"] * with_truth, "network", "after b12", "model"]
    right = {"network": ": 96.9 % right", "after b12": ": 97.4 % right", "model": ": 97.5 % right"}
    expected = [name + (right.get(name, "") if with_truth else "") for name in titles]
    assert [axes.get_title() for axes in panels] == [*expected, "changed: 0.6 % of pixels"]
    car = np.asarray(panels[titles.index("network")].images[0].get_array())[10, 5]
    assert np.abs(car - (0.35 * 100 + 0.65 * np.array(CAMVID.colours[CAR]))).max() <= 1
    assert tuple(np.asarray(panels[-1].images[0].get_array())[10, 5]) == CAMVID.colours[ROAD]
    listed = " ".join(text.get_text() for text in texts(figure))
    assert "car → road: 6" in listed
    assert "car → sky: 1" in listed
    assert "fence" not in listed  # it is in no map
    readable(figure)


def test_nothing_changed(maps, readable):
    readable(steps(np.zeros((30, 40, 3), np.uint8), maps[:1], CAMVID))


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
