"""Ids that stand for labels."""

from __future__ import annotations

import numpy as np
import pytest

from deepmrf.data.dataset import lookup_table
from deepmrf.refine.label_ids import LabelIds


def test_bad_ids_are_named():
    for ids, void, why in (((0, 300), (255,), "300"), ((0, 0), (255,), "repeat"), ((0, 255), (255,), "repeat")):
        with pytest.raises(ValueError, match=why):
            LabelIds(ids, void)


def test_a_table_gives_the_ids_unless_they_are_the_labels():
    assert LabelIds.from_lookup(lookup_table({0: 0, 1: 1}), 2) is None
    label_ids = LabelIds.from_lookup(lookup_table({7: 0, 3: 1, 9: 255}), 2)
    assert label_ids == LabelIds((7, 3), (9, 255))
    labels = np.array([[0, 1], [1, 0]], np.uint8)
    ids = label_ids.to_ids(labels)
    assert ids.tolist() == [[7, 3], [3, 7]]
    assert (label_ids.to_labels(ids.astype(np.int64), None) == labels).all()
