"""Images in memory: shrinking large ones takes little more than they have."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from PIL import Image

from deepmrf.data import images
from deepmrf.data.images import shrunk


@pytest.mark.parametrize("size", [(301, 200), (97, 403), (130, 3), (2, 500)])
@pytest.mark.parametrize("pixels", [1, 5000])
def test_bands_are_shrunk_as_the_image_would_be(monkeypatch, size, pixels):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    expected = shrunk(image, 64)
    height, width = expected.shape[:2]
    np.testing.assert_array_equal(expected, Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))
    assert max(height, width) == 64
    monkeypatch.setattr(images, "MAX_PIXELS_RESIZED", pixels)
    difference = np.abs(shrunk(image, 64).astype(int) - expected)
    assert difference.max() <= 1  # Pillow keeps the edges of boxes as float32
    assert (difference > 0).mean() < 0.2


def test_a_large_image_is_not_copied(monkeypatch):
    image = np.zeros((3000, 2000, 3), np.uint8)
    monkeypatch.setattr(images, "MAX_PIXELS_RESIZED", 1 << 18)
    tracemalloc.start()
    shrunk(image, 500)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < image.nbytes / 4
