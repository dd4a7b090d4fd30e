"""Work ahead and behind."""

from __future__ import annotations

import threading
import time

import pytest

from deepmrf.video.threads import Behind, Clock, ahead


def test_ahead_keeps_the_order_and_no_more_than_asked():
    made, most = [], 0

    def items():
        for number in range(50):
            made.append(number)
            yield number

    for number in ahead(items(), 3):
        most = max(most, len(made) - number)
        assert len(made) - number <= 3 + 2  # in the queue, in either hand
        time.sleep(0.001)
    assert made == list(range(50))
    assert most > 1  # it was ahead


def test_ahead_closes_its_items_and_its_thread():
    closed = []

    def items():
        try:
            while True:
                yield 1
        finally:
            closed.append(threading.current_thread())

    before = threading.active_count()
    stream = ahead(items(), 2)
    assert next(stream) == 1
    stream.close()
    assert len(closed) == 1
    assert closed[0] is not threading.main_thread()
    assert threading.active_count() == before


def test_ahead_raises_where_the_item_would_have_come():
    def items():
        yield 1
        raise ValueError("broken")

    stream = ahead(items(), 2)
    assert next(stream) == 1
    with pytest.raises(ValueError, match="broken"):
        next(stream)


def test_behind_does_all_in_order():
    done = []
    behind = Behind(done.append, 2)
    for number in range(20):
        behind.put(number)
    behind.finish()
    assert done == list(range(20))


def test_behind_tells_what_failed_and_does_no_more():
    done = []

    def work(number):
        if number == 3:
            raise OSError("disk full")
        done.append(number)

    behind = Behind(work, 2)

    def feed():
        for number in range(1000):
            behind.put(number)

    with pytest.raises(OSError, match="disk full"):
        feed()
    with pytest.raises(OSError, match="disk full"):
        behind.finish()
    assert done == [0, 1, 2]


def test_clock_adds_up():
    clock = Clock()
    for _ in range(2):
        with clock("a"):
            time.sleep(0.01)
    assert clock.seconds["a"] >= 0.02
