"""How long stages take."""

from __future__ import annotations

import time

from deepmrf.video.clock import Clock


def test_clock_adds_up():
    clock = Clock()
    for _ in range(2):
        with clock("a"):
            time.sleep(0.01)
    assert clock.seconds["a"] >= 0.02
