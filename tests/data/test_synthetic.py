import itertools

import numpy as np
import pytest

from deepmrf.data import synthetic
from deepmrf.data.synthetic import _PAINT, LABELS

HEAD, HAT, BODY, BALL, SHADOW = range(1, 6)


def test_seed_decides():
    dataset, same, other = synthetic(count=3), synthetic(count=3), synthetic(count=3, seed=1)
    for a, b in zip(dataset, same, strict=True):
        np.testing.assert_array_equal(dataset.read(a)[0], same.read(b)[0])
    assert any((dataset.read(a)[1] != other.read(b)[1]).any() for a, b in zip(dataset, other, strict=True))
    assert (dataset.read(dataset[0])[0] != synthetic(split="val").read(dataset[0])[0]).any()
    assert (dataset.read(dataset[0])[0] != dataset.read(dataset[1])[0]).any()


def test_hats_are_above_heads_and_bodies_below():
    dataset = synthetic(count=30)
    seen = set()
    for item in dataset:
        _, mask = dataset.read(item)
        seen |= set(np.unique(mask))
        above, below = mask[:-1], mask[1:]
        touching = {(a, b) for a, b in zip(above.ravel(), below.ravel(), strict=True) if a != b}
        assert not {(HEAD, HAT), (BODY, HEAD), (SHADOW, BALL), (BODY, HAT), (HAT, BODY)} & touching
        for column in mask.T:
            if HAT in column and HEAD in column:
                assert np.flatnonzero(column == HAT).min() < np.flatnonzero(column == HEAD).min()
    assert seen == set(range(len(LABELS)))


def accuracy(dataset, labels_alike, radius):
    """The share of pixels right when each takes the nearest colour, after adding up costs over a square."""
    right = total = 0
    for item in dataset:
        image, mask = dataset.read(item)
        cost = ((image[..., None, :].astype(float) - _PAINT) ** 2).sum(-1)  # (H, W, L)
        padded = np.pad(cost, ((radius, radius), (radius, radius), (0, 0)), mode="edge")
        windows = np.lib.stride_tricks.sliding_window_view(padded, (2 * radius + 1,) * 2, axis=(0, 1))
        best = windows.sum((-2, -1)).argmin(-1)
        right += (labels_alike[best] == labels_alike[mask]).sum()
        total += mask.size
    return right / total


def test_hard_for_a_pixel_easy_for_neighbours():
    dataset = synthetic(count=10)
    alike = np.array([0, HEAD, HAT, HAT, HEAD, SHADOW])  # what colour can tell apart
    alone, pooled = accuracy(dataset, alike, 0), accuracy(dataset, alike, 2)
    assert alone < 0.5
    assert pooled > alone + 0.3
    assert accuracy(dataset, np.arange(6), 2) < pooled - 0.1  # the rest is left to label contexts


def test_videos_move_a_little():
    dataset = synthetic(count=2, frames=4)
    assert [item.frame for item in dataset] == [0, 1, 2, 3] * 2
    assert len(dataset.clips(3)) == 8
    masks = [dataset.read(item)[1] for item in dataset[:4]]
    for before, after in itertools.pairwise(masks):
        assert 0 < (before != after).mean() < 0.15


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"size": (8, 64)}, "16 or more"),
        ({"split": "all"}, "give one of train, val, test"),
        ({"count": 0}, "0 scenes"),
        ({"noise": -1.0}, "noise -1.0"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        synthetic(**arguments)
