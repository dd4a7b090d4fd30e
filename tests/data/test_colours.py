"""Colours of labels: VOC's rule, and colours that people can tell apart."""

from __future__ import annotations

import numpy as np
import pytest

from deepmrf.data import VOC
from deepmrf.data.colours import AVOIDED, VISIONS, _linear, _oklab, choose_colours, distinct_colours, oklab, voc_colours


def least_distances(colours):
    """The least distance of two colours in OKLab, for each kind of vision."""
    for _, matrix in VISIONS:
        seen = _oklab((_linear(np.array(colours)) @ matrix.T).clip(0, 1))
        distances = np.linalg.norm(seen[:, None] - seen, axis=-1)
        yield distances[np.triu_indices(len(colours), 1)].min()


def test_voc():
    assert voc_colours(21) == VOC.colours
    assert voc_colours(256)[255] == (224, 224, 192)


@pytest.mark.parametrize("count, usual, without_a_cone", [(7, 0.15, 0.07), (20, 0.1, 0.045), (50, 0.06, 0.02)])
def test_colours_are_told_apart(count, usual, without_a_cone):
    # A step of 0.02 in OKLab is one that people see side by side.
    least, *dichromats = least_distances(distinct_colours(count))
    assert least > usual
    assert min(dichromats) > without_a_cone


def test_colours_are_told_from_what_overlays_use_otherwise():
    assert next(least_distances((*AVOIDED, *distinct_colours(50)))) > 0.06


def test_first_colours_do_not_depend_on_the_number_of_labels():
    assert distinct_colours(60)[:20] == distinct_colours(20)
    assert distinct_colours(0) == ()


def test_every_number_of_labels_has_different_colours():
    colours = distinct_colours(255)
    assert len(set(colours)) == 255
    assert all(isinstance(channel, int) and 0 <= channel <= 255 for colour in colours for channel in colour)


def test_background_is_black_wherever_it_stands():
    first, second = distinct_colours(2)
    assert choose_colours(["cat", "background", "dog"]) == (first, (0, 0, 0), second)
    assert choose_colours(["cat", "dog"]) == (first, second)


def test_oklab_of_known_colours():
    white, black, red = oklab(np.array([(255, 255, 255), (0, 0, 0), (255, 0, 0)]))
    np.testing.assert_allclose(white, (1, 0, 0), atol=2e-3)
    np.testing.assert_allclose(black, 0, atol=1e-12)
    np.testing.assert_allclose(red, (0.628, 0.225, 0.126), atol=2e-3)
