"""The pixels of labels before and after refinement, and what is said of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepmrf.refine import changes
from deepmrf.refine.changes import count_pixels, describe_changes, total
from deepmrf.refine.decode import decode_ids


@pytest.mark.parametrize("values", [1 << 24, 20])
def test_pixels_are_counted_but_for_void(tmp_path, monkeypatch, values):
    monkeypatch.setattr(changes, "VALUES_AT_A_TIME", values)
    ids = np.array([[0, 1, 1, 255], [2, 2, 2, 255], [1, 1, 0, 0]], np.uint8)
    refined = torch.tensor([[0, 1, 1, 1], [2, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.uint8)
    log_p = decode_ids(ids, None, 3, tmp_path)
    expected = ((3, 4), (4, 5), (3, 1))
    assert count_pixels(log_p, refined) == count_pixels(log_p.tensor(), refined) == expected
    assert total([expected, expected]) == ((6, 8), (8, 10), (6, 2))
    assert total([]) == ()


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((), ""),
        (((1000, 1066), (100, 67), (100, 67)), ""),
        (((1000, 1033), (100, 67), (100, 66), (10, 44)), "c lost 34 % of its pixels, d has 4.4 times its pixels"),
        (((10_000, 10_010), (10, 0), (5, 0)), "b lost all its pixels"),
        (
            ((9, 59), (10, 0), (10, 1), (10, 2), (30, 7)),
            "b lost all its pixels, c lost 90 % of its pixels, "
            "d lost 80 % of its pixels, 2 more labels changed as much",
        ),
    ],
)
def test_great_losses_are_named_first(counts, said):
    assert describe_changes(counts, "abcde"[: len(counts) or 5]) == said
