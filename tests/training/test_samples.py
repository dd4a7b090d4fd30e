"""Training samples: which images are held out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.labels import LabelSet
from deepmrf.training.samples import hold_out


@pytest.mark.parametrize(("count", "share", "held"), [(100, 0.1, 10), (2975, 0.12, 357), (11, 0.5, 5), (7, 0.3, 2)])
def test_held_out_images_lie_in_five_stretches(count, share, held):
    items = [Item(f"{index:04}", Path("x.png"), Path("x.png")) for index in range(count)]
    rest, out = hold_out(Dataset(items, LabelSet(["a", "b"])), share)
    assert abs(len(out) - held) <= 3
    assert {*rest, *out} == {*items}
    assert not {*rest} & {*out}
    numbers = [int(item.name) for item in out]
    assert sum(b - a > 1 for a, b in itertools.pairwise(numbers)) <= 4
    assert list(rest) == [item for item in items if item not in {*out}]


def test_too_few_images_to_hold_out():
    items = [Item("a", Path("x.png"), Path("x.png"))]
    with pytest.raises(ValueError, match="cannot be held out"):
        hold_out(Dataset(items, LabelSet(["a", "b"])), 0.1)
