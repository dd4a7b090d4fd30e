"""A few scenes on disk: synthetic:64 has 250, and every training of a test would segment all of them several times."""

from __future__ import annotations

import pytest

from deepmrf.data import synthetic


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """The name of a data set of 24 images to learn from and 8 to measure on, of 48 x 64 pixels."""
    folder = tmp_path_factory.mktemp("scenes")
    for split, count in (("train", 24), ("val", 8)):
        synthetic((48, 64), split, count, to=folder)
    return f"folder:{folder}"
