"""Figures of label contexts: planted patterns are found, and drawn at their place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepmrf.data.colours import distinct_colours
from deepmrf.data.labels import CAMVID, VOC
from deepmrf.figures import contexts
from deepmrf.layers import LabelContexts

pytest.importorskip("matplotlib")


def planted(labels=4, count=2, size=(5, 7), scale=-2.0):
    """Contexts of zeros but for -3 in the second one: label 2, for a label 1 two rows above and one column right.

    With a negative scale t is negative, and the cost of -3 is a penalty of 6.
    """
    weight = np.zeros((labels * count, labels, *size))
    weight[2 * count + 1, 1, size[0] // 2 - 2, size[1] // 2 + 1] = -3
    return contexts.label_gains(weight, scale, count)


def test_a_planted_penalty_is_found_at_its_place():
    gains = planted()
    # From label 1, label 2 pays two rows below and one column to the left; the mean over labels and contexts is 6 / 8.
    assert gains[1, 2, 1, 2 + 2, 3 - 1] == pytest.approx(-6 + 6 / 8)
    assert np.argwhere(gains < -1).tolist() == [[1, 2, 1, 4, 2]]
    assert np.count_nonzero(gains) == 8  # the others gain their share of the mean at that place
    assert contexts.label_gains(np.zeros((8, 4, 5, 7)), -2.0, 2).any() == np.False_


@pytest.mark.parametrize("size", [(3, 5), (4, 6), (9, 9)])
@pytest.mark.parametrize("scale", [-1.5, 0.7])
def test_gains_are_what_the_layer_does_with_one_pixel(size, scale, plain_torch):
    """t is b12's scale at one pixel of A: then -o14, less its mean over the labels, is the gain around it."""
    layer = LabelContexts(3, 1, size)
    torch.nn.init.normal_(layer.weight)
    gains = contexts.label_gains(layer.weight.detach().numpy(), scale, 1)
    for a in range(3):
        t = torch.zeros(1, 3, 21, 21)
        t[0, a, 10, 10] = scale
        o14 = layer(t)[0].detach().numpy()
        score = -(o14 - o14.mean(0))
        top, left = 10 - (size[0] - 1 - size[0] // 2), 10 - (size[1] - 1 - size[1] // 2)
        np.testing.assert_allclose(gains[a, :, 0], score[:, top : top + size[0], left : left + size[1]], atol=1e-5)


@pytest.mark.parametrize("frame", [0, -1])
def test_gains_between_frames_are_what_the_layer_does(frame, plain_torch):
    layer = LabelContexts(3, 1, (3, 5, 5), dims=3)
    torch.nn.init.normal_(layer.weight)
    gains = contexts.label_gains(layer.weight.detach().numpy(), 1.0, 1, frame)
    t = torch.zeros(1, 3, 4, 11, 11)
    t[0, 1, 2 + frame, 5, 5] = 1  # label 1 is in the frame before frame 2, or in frame 2
    o14 = layer(t)[0, :, 2].detach().numpy()
    np.testing.assert_allclose(gains[1, :, 0], -(o14 - o14.mean(0))[:, 3:8, 3:8], atol=1e-5)


def test_totals_and_the_strongest_pairs():
    gains = np.zeros((3, 3, 2, 3, 3))
    gains[0, 1, 0, 0, 0], gains[0, 1, 1, 2, 2] = 5, 1
    gains[1, 0], gains[2, 1], gains[1, 1] = 0.1, 0.2, 9
    totals = contexts.total_gains(gains)
    assert totals[0, 1] == pytest.approx(3)
    assert totals[1, 0] == pytest.approx(0.9)
    assert contexts.strongest_pairs(gains)[:2] == [(0, 1), (2, 1)]  # 1:0 is the first pair in its other order


def test_an_arrangement_is_where_b_lies_around_a():
    labels = np.zeros((40, 40), dtype=np.uint8)
    labels[10:30:10, 5:35:10] = 1
    labels[12:32:10, 4:34:10] = 2  # two rows below, one column to the left
    found = contexts.arrangement([labels], (1, 2), (5, 7))
    assert np.unravel_index(found.argmax(), found.shape) == (4, 2)
    assert np.unravel_index(contexts.arrangement([labels], (2, 1), (5, 7)).argmax(), (5, 7)) == (0, 4)
    assert np.isnan(contexts.arrangement([labels], (1, 3), (5, 7))).all()


@pytest.mark.parametrize("size", [(3, 3), (4, 6)])
def test_shares_are_of_the_pixels_of_b_that_see_an_a(size):
    rng = np.random.default_rng(0)
    labels, active = rng.integers(0, 12, (20, 23)), rng.integers(0, 3, (20, 23))
    counts = np.zeros(3)
    for y, x in np.argwhere(labels == 2):
        top, left = y - size[0] // 2, x - size[1] // 2
        seen = labels[max(0, top) : top + size[0], max(0, left) : left + size[1]]
        counts[active[y, x]] += (seen == 1).any()
    found = contexts.meeting_shares([(labels, active)], (1, 2), 3, size)
    np.testing.assert_allclose(found, counts / counts.sum())
    assert contexts.meeting_shares([(labels, active)], (1, 20), 3, size) is None


def test_compatibility_is_drawn_by_rows_and_columns(texts, readable):
    totals = contexts.total_gains(planted(11))
    totals[3, 8] = 4
    figure = contexts.compatibility(totals, CAMVID.names)
    axes = figure.axes[0]
    assert np.array_equal(axes.images[0].get_array(), totals)
    assert [tick.get_text() for tick in axes.get_yticklabels()] == list(CAMVID.names)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list(CAMVID.names)
    crosses = {text.get_position() for text in texts(figure) if text.get_text() == "+"}
    assert crosses == {(column, row) for row, column in np.argwhere(totals > 0)}
    assert (8, 3) in crosses
    assert (3, 8) not in crosses
    colours = axes.images[0].to_rgba(np.array([-9.0, 9.0]), bytes=True).tolist()
    assert colours[0][0] > colours[0][2]  # penalised is red
    assert colours[1][2] > colours[1][0]  # favoured is blue
    readable(figure)


def test_many_and_long_names_stay_readable(readable):
    readable(contexts.compatibility(np.eye(21), VOC.names))
    readable(contexts.compatibility(np.eye(3), ["a very long name of a label", "$x$", "b"], frame=-1))


def test_patterns_are_drawn_side_by_side(texts, readable):
    gains = planted(11, 5, (9, 9))
    shares = [np.array([0.1, 0.2, 0.3, 0.4, 0.0]), None]
    seen = [np.zeros((9, 9)), np.full((9, 9), np.nan)]
    seen[0][7, 4] = 1
    figure = contexts.patterns(gains, [(1, 2), (8, 3)], CAMVID.names, shares, seen)
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 2 * 7
    for k in range(5):
        assert np.array_equal(panels[k].images[0].get_array(), gains[1, 2, k])
        assert np.array_equal(panels[7 + k].images[0].get_array(), gains[8, 3, k])
    np.testing.assert_allclose(panels[5].images[0].get_array(), np.tensordot(shares[0], gains[1, 2], 1))
    np.testing.assert_allclose(panels[12].images[0].get_array(), gains[8, 3].mean(0))
    assert np.array_equal(panels[6].images[0].get_array(), seen[0])
    assert panels[0].lines[0].get_xydata().tolist() == [[4, 4]]  # the pixel of A
    written = [text.get_text() for text in texts(figure)]
    assert "building:\npole" in written
    assert "car:\nroad" in written
    assert [t for t in written if t.endswith(" %")] == ["10 %", "20 %", "30 %", "40 %", "0 %"]
    readable(figure)


def test_patterns_without_pictures_and_from_the_frame_before(texts, readable):
    figure = contexts.patterns(planted(11, 5, (6, 4)), [(1, 2)], CAMVID.names, frame=-1)
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 6
    assert panels[0].lines[0].get_xydata().tolist() == [[1, 2]]
    assert "building (t-1):\npole" in [text.get_text() for text in texts(figure)]
    readable(figure)


def test_winners_have_their_colours_and_shares(texts, readable):
    active = np.zeros((20, 30), dtype=np.uint8)
    active[5:15, 10:] = 2
    figure = contexts.winners(np.zeros((20, 30, 3), np.uint8), active, 3)
    shown = np.asarray(figure.axes[1].images[0].get_array())
    assert tuple(shown[10, 20]) == distinct_colours(3)[2]
    assert tuple(shown[0, 0]) == distinct_colours(3)[0]
    assert {"1: 67 %", "2: 0 %", "3: 33 %"} <= {text.get_text() for text in texts(figure)}
    readable(figure)
