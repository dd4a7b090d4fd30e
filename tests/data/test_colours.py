"""Colours of labels: VOC's rule, and colours that people can tell apart."""

from __future__ import annotations

import numpy as np
import pytest

from deepmrf.data import VOC
from deepmrf.data.colours import BLACK, OKABE_ITO, VOID_COLOUR, choose_colours, distinct_colours, voc_colours

AVOIDED = (BLACK, (255, 255, 255), (128, 128, 128), VOID_COLOUR)
"""What overlays and label maps use otherwise, and grey, which looks unpainted."""
GRID_STEP = 15
"""Distance of the candidates in each channel."""
LEAST_LIGHTNESS, MOST_LIGHTNESS, LEAST_CHROMA = 0.35, 0.93, 0.05
"""The candidates in OKLab: darker, paler and greyer ones are hard to see in an overlay."""
VISIONS = (
    (1.0, np.eye(3)),
    (1.6, np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])),
    (1.6, np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])),
    (3.0, np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.147], [0.005, 0.691, 0.304]])),
)
"""(weight of a distance, linear RGB as it is seen) of usual vision, protanopia, deuteranopia, and tritanopia, which is
rare; the matrices are those of Machado, Oliveira and Fernandes (2009). Weights above 1 let usual vision count more."""
CONES = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
"""OKLab: cone responses of linear RGB."""
OPPONENTS = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
"""OKLab: lightness and two opponent colours of the cube roots of the responses."""


def oklab(colours):
    """Colours (N, 3) of 0 .. 255 in OKLab (N, 3), where distances are as large as they look."""
    return oklab_of_linear(linear(colours))


def linear(colours):
    """Undo the gamma of sRGB."""
    values = np.asarray(colours, np.float64) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab_of_linear(linear_rgb):
    return np.cbrt(linear_rgb @ CONES.T) @ OPPONENTS.T


def as_seen(colours):
    """Colours (N, 3) in OKLab by each kind of vision, times its weight: (4, N, 3)."""
    return np.stack([weight * oklab_of_linear((linear(colours) @ matrix.T).clip(0, 1)) for weight, matrix in VISIONS])


def test_each_colour_lies_farthest_from_those_before():
    axis = np.arange(0, 256, GRID_STEP)
    candidates = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    lightness, *opponents = oklab(candidates).T
    visible = (lightness > LEAST_LIGHTNESS) & (lightness < MOST_LIGHTNESS) & (np.hypot(*opponents) > LEAST_CHROMA)
    candidates = candidates[visible]
    seen, nearest = as_seen(candidates), np.inf
    for number, colour in enumerate((*AVOIDED, *distinct_colours(255)), start=-len(AVOIDED)):
        if number >= len(OKABE_ITO):
            assert colour == tuple(candidates[nearest.argmax()])
        nearest = np.minimum(nearest, np.linalg.norm(seen - as_seen(np.array([colour])), axis=-1).min(0))


def least_distances(colours):
    """The least distance of two colours in OKLab, for each kind of vision."""
    for _, matrix in VISIONS:
        seen = oklab_of_linear((linear(np.array(colours)) @ matrix.T).clip(0, 1))
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
