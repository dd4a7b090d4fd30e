"""Connected regions of label maps, and what becomes of small and unsure ones, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from deepmrf.predict.regions import absorb, find_regions


def neighbours(cell, shape):
    for axis, step in itertools.product(range(len(shape)), (-1, 1)):
        other = list(cell)
        other[axis] += step
        if 0 <= other[axis] < shape[axis]:
            yield tuple(other)


def regions_by_hand(labels):
    """The cells of each region, in the order of their first cells."""
    seen, regions = set(), []
    for cell in np.ndindex(labels.shape):
        if cell in seen:
            continue
        region, front = {cell}, [cell]
        while front:
            for other in neighbours(front.pop(), labels.shape):
                if other not in region and labels[other] == labels[cell]:
                    region.add(other)
                    front.append(other)
        seen |= region
        regions.append(sorted(region))
    return regions


def absorbed_by_hand(labels, confidence, min_area, min_confidence):
    """As the docstring of predict/regions.py says it."""
    labels, own = labels.copy(), np.ones(labels.shape, bool)
    while True:
        weak = []
        for region in regions_by_hand(labels):
            sure = [float(confidence[cell]) for cell in region if own[cell]]
            alone = len(region) == labels.size
            if not alone and (len(region) < min_area or sum(sure) < min_confidence * len(sure)):
                weak.append(region)
        if not weak:
            return labels
        region = min(weak, key=lambda region: (len(region), region[0]))
        sides = {}
        for cell in region:
            for other in neighbours(cell, labels.shape):
                if labels[other] != labels[cell]:
                    sides[labels[other]] = sides.get(labels[other], 0) + 1
        label = min(sides, key=lambda label: (-sides[label], label))
        for cell in region:
            labels[cell], own[cell] = label, False


SHAPES = [(1, 1), (1, 9), (9, 1), (7, 11), (13, 8), (5,), (3, 4, 5), (2, 1, 7), (1, 6, 1), (2, 3, 2, 4)]


def random_map(shape, count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, count, shape).astype(np.uint8)
    confidence = (rng.integers(1, 9, shape) / 8).astype(np.float16)
    return labels, confidence


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_regions(shape, count):
    labels, _ = random_map(shape, count, seed=len(shape) + count)
    expected = regions_by_hand(labels)
    regions = find_regions(labels)
    assert regions.areas.tolist() == [len(region) for region in expected]
    assert regions.labels.tolist() == [labels[region[0]] for region in expected]
    numbers = np.zeros(shape, int)
    for number, region in enumerate(expected):
        for cell in region:
            numbers[cell] = number
    np.testing.assert_array_equal(regions.at(np.arange(labels.size)).reshape(shape), numbers)
    sides = {}
    for cell in np.ndindex(shape):
        for other in neighbours(cell, shape):
            if numbers[cell] < numbers[other]:
                pair = numbers[cell], numbers[other]
                sides[pair] = sides.get(pair, 0) + 1
    actual = {}
    for first, second, length in zip(*(part.tolist() for part in regions.borders), strict=True):
        pair = min(first, second), max(first, second)
        actual[pair] = actual.get(pair, 0) + length
    assert actual == sides


def test_a_long_winding_region_is_one():
    labels = np.zeros((41, 40), np.uint8)
    labels[1::4, 1:] = 1
    labels[3::4, :-1] = 1  # walls with a gap at alternating ends
    assert len(find_regions(labels).areas) == 1 + 20


def test_an_empty_map_has_no_regions():
    assert len(find_regions(np.zeros((0, 5), np.uint8)).areas) == 0
    assert absorb(np.zeros((0, 5), np.uint8), np.zeros((0, 5)), 5, 0.5).shape == (0, 5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("min_area, min_confidence", [(2, 0.0), (4, 0.0), (1000, 0.0), (0, 0.5), (3, 0.6), (0, 1.1)])
def test_small_and_unsure_regions_are_absorbed(shape, min_area, min_confidence):
    for seed in range(4):
        labels, confidence = random_map(shape, 2 + seed % 3, seed)
        before = labels.copy()
        actual = absorb(labels, confidence, min_area, min_confidence)
        np.testing.assert_array_equal(actual, absorbed_by_hand(labels, confidence, min_area, min_confidence))
        np.testing.assert_array_equal(labels, before)


def test_a_speck_by_hand():
    labels = np.array([[0, 0, 0, 0, 0], [0, 0, 2, 1, 1], [0, 0, 0, 1, 1]], np.uint8)
    expected = labels.copy()
    expected[1, 2] = 0  # three sides to label 0, one to label 1
    np.testing.assert_array_equal(absorb(labels, None, 2), expected)
    assert absorb(labels, None, 1) is labels  # nothing changes, nothing is copied


def test_a_large_map_of_noise_and_specks():
    rng = np.random.default_rng(0)
    labels = np.zeros((600, 800), np.uint8)
    labels[:, 400:] = 1
    noise = rng.random(labels.shape) < 0.02
    noisy = np.where(noise, 2, labels).astype(np.uint8)
    cleaned = absorb(noisy, None, 30)
    assert set(np.unique(cleaned)) == {0, 1}
    assert (cleaned != labels).mean() < 1e-3  # specks on the border between both may go to either
