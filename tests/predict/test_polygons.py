"""Outlines of regions: filled again, they give the label map back."""

from __future__ import annotations

import numpy as np
import pytest

from deepmrf.predict.polygons import find_polygons
from deepmrf.predict.regions import find_regions

NAMES = tuple("abcdef")


def signed_area(ring):
    x, y = np.asarray(ring).T
    return (np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1))) / 2


def filled(rings, shape):
    """Pixels whose centre a ray to the left leaves by an odd number of crossings."""
    inside = np.zeros(shape, bool)
    for ring in rings:
        for (x, y), (next_x, next_y) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
            if x == next_x:
                inside[min(y, next_y) : max(y, next_y), x:] ^= True
            else:
                assert y == next_y  # only along the sides of pixels
    return inside


def random_map(shape, count, seed):
    return np.random.default_rng(seed).integers(0, count, shape).astype(np.uint8)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (2, 2), (5, 8), (9, 9), (16, 13)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_outlines_give_the_map_back(shape, count):
    for seed in range(5):
        labels = random_map(shape, count, seed)
        polygons = find_polygons(labels, NAMES)
        again = np.full(shape, 255)
        for polygon in polygons:
            mask = filled([polygon.outer, *polygon.holes], shape)
            assert mask.sum() == polygon.area
            assert (again[mask] == 255).all()
            again[mask] = polygon.label
        np.testing.assert_array_equal(again, labels)
        areas = [polygon.area for polygon in polygons]
        assert areas == sorted(find_regions(labels).areas.tolist(), reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_rings_turn_the_right_way_and_only_at_corners(seed):
    for polygon in find_polygons(random_map((14, 14), 2, seed), NAMES):
        assert signed_area(polygon.outer) > 0  # clockwise, y pointing down
        assert all(signed_area(hole) < 0 for hole in polygon.holes)
        assert signed_area(polygon.single_ring()) == polygon.area
        for ring in (polygon.outer, *polygon.holes):
            steps = np.sign(np.roll(ring, -1, axis=0) - ring)
            assert (steps != np.roll(steps, -1, axis=0)).any(1).all()


def test_a_ring_by_hand():
    labels = np.zeros((5, 6), np.uint8)
    labels[1:4, 1:5] = 1
    labels[2, 2:4] = 2
    background, ring, core = find_polygons(labels, NAMES)
    assert ring.name == "b"
    assert (ring.area, ring.box()) == (10, (1, 1, 4, 3))
    assert ring.outer.tolist() == [[1, 1], [5, 1], [5, 4], [1, 4]]
    assert [hole.tolist() for hole in ring.holes] == [[[2, 3], [4, 3], [4, 2], [2, 2]]]
    assert core.outer.tolist() == [[2, 2], [4, 2], [4, 3], [2, 3]]
    assert background.holes[0].tolist() == [[1, 4], [5, 4], [5, 1], [1, 1]]
    assert ring.single_ring().tolist() == [
        *([1, 1], [5, 1], [5, 4], [1, 4]),
        *([1, 1], [2, 3], [4, 3], [4, 2], [2, 2], [2, 3], [1, 1]),
    ]
    assert repr(ring) == "Polygon('b', 10 pixels, 4 corners, holes: 1)"


def test_pixels_that_meet_at_a_corner_are_apart():
    polygons = find_polygons(np.eye(3, dtype=np.uint8), NAMES)
    assert [polygon.area for polygon in polygons if polygon.label == 1] == [1, 1, 1]


def test_pycocotools_decodes_the_very_masks():
    masks = pytest.importorskip("pycocotools.mask")
    for seed in range(40):
        labels = random_map((12, 15), 2 + seed % 3, seed)
        for polygon in find_polygons(labels, NAMES):
            ring = polygon.single_ring().reshape(-1).tolist()
            decoded = masks.decode(masks.merge(masks.frPyObjects([ring], 12, 15)))
            np.testing.assert_array_equal(decoded, filled([polygon.outer, *polygon.holes], (12, 15)))
