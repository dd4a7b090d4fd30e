"""Work ahead and behind in threads."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time

import pytest
import torch

from deepmrf.predict.ahead import Behind, Cores, WorkQueue, ahead, map_ahead


def test_ahead_keeps_the_order_and_no_more_than_asked():
    produced, most = [], 0

    def items():
        for number in range(50):
            produced.append(number)
            yield number

    for number in ahead(items(), 3):
        most = max(most, len(produced) - number)
        assert len(produced) - number <= 3 + 2  # waiting, in either hand
        time.sleep(0.001)
    assert produced == list(range(50))
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


FORGOTTEN = """
import gc
from deepmrf.predict.ahead import ahead

def numbers():
    try:
        yield from range(100)
    finally:
        print("closed")

class Holder:
    pass

holder = Holder()
holder.itself, holder.numbers = holder, ahead(numbers(), 2)
print(next(holder.numbers))
del holder
gc.collect()
print("done")
"""


def test_ahead_is_closed_where_it_is_garbage_in_a_cycle():
    """Its threads must outlive it: closing would wait for them for ever, so this runs in a process of its own."""
    done = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "closed", "done"]
    assert not done.stderr


def test_ahead_raises_where_the_item_would_have_come():
    closed = []

    def items():
        try:
            yield 1
            raise ValueError("broken")
        finally:
            closed.append(1)

    stream = ahead(items(), 2)
    assert next(stream) == 1
    with pytest.raises(ValueError, match="broken"):
        next(stream)
    assert closed == [1]
    assert list(ahead(iter([1, 2, 3]), 2)) == [1, 2, 3]  # what has no close() will do


def test_behind_does_all_in_order():
    done, before = [], threading.active_count()
    behind = Behind(done.append, 2)
    for number in range(20):
        behind.put(number)
    behind.finish()
    behind.finish()  # twice is once
    assert done == list(range(20))
    assert threading.active_count() == before


def test_behind_holds_no_more_than_asked():
    gate, done = threading.Semaphore(0), []

    def work(number):
        gate.acquire()
        done.append(number)

    behind = Behind(work, 2)
    for number in range(3):
        behind.put(number)  # one in work, two waiting
    threading.Timer(0.05, gate.release).start()
    behind.put(3)
    assert done == [0]
    for _ in range(3):
        gate.release()
    behind.finish()
    assert done == [0, 1, 2, 3]


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


def test_map_ahead_keeps_the_order_and_each_error_to_its_item():
    begun = []

    def work(number):
        begun.append(number)
        time.sleep(0.002 * (number % 3))
        if number == 4:
            raise ValueError("no four")
        return -number

    results = []
    for number, future in map_ahead(work, range(12), 3, threads=2):
        assert len(begun) <= number + 4
        try:
            results.append((number, future.result()))
        except ValueError as error:
            results.append((number, str(error)))
    assert results == [(n, "no four" if n == 4 else -n) for n in range(12)]


def test_map_ahead_may_be_left_early():
    before = threading.active_count()
    stream = map_ahead(abs, range(1000), 5)
    assert next(stream)[0] == 0
    stream.close()
    assert threading.active_count() == before


def test_a_queue_drops_what_was_not_begun():
    begun, gate, done = threading.Event(), threading.Event(), []

    def work(number):
        begun.set()
        gate.wait()
        done.append(number)

    with WorkQueue() as queue:
        for number in range(5):
            queue.put(number, work, number)
        assert not queue.ready
        begun.wait()
        queue.cancel()
        assert len(queue) == 1
        gate.set()
        item, future = queue.take()
        assert (item, future.result()) == (0, None)
    assert done == [0]


@pytest.fixture
def three_threads():
    """PyTorch with three threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


def test_cores_compute_side_by_side_in_order_with_a_thread_each(three_threads):
    together, seen = threading.Barrier(three_threads, timeout=20), []

    def work(number):
        seen.append(torch.get_num_threads())
        together.wait()  # passes only where three calls run at the same time
        return number * number

    with Cores() as cores:
        assert list(cores.map(work, range(9))) == [number * number for number in range(9)]
    assert set(seen) == {1}
    assert torch.get_num_threads() == three_threads


def test_maps_of_the_same_cores_feed_each_other_and_look_only_a_little_ahead(three_threads):
    taken = []

    def numbers():
        for number in range(100):
            taken.append(number)
            yield number

    with Cores() as cores:
        doubled = cores.map(lambda number: 2 * number, numbers())
        for index, value in enumerate(cores.map(lambda number: number + 1, doubled)):
            assert value == 2 * index + 1
            assert len(taken) - index <= 2 * three_threads + 2
            if index == 40:
                break
    assert not {thread for thread in threading.enumerate() if thread in cores._pool._threads}


def test_cores_give_the_results_before_an_error_of_the_items_first():
    def items():
        yield from range(3)
        raise KeyboardInterrupt

    with Cores(2) as cores:
        results = cores.map(str, items())
        assert list(itertools.islice(results, 3)) == ["0", "1", "2"]
        with pytest.raises(KeyboardInterrupt):
            next(results)


def test_cores_raise_what_a_call_fails_with_in_its_place():
    def work(number):
        return 1 // (number - 2)

    with Cores(2) as cores:
        results = cores.map(work, range(5))
        assert [next(results), next(results)] == [-1, -1]
        with pytest.raises(ZeroDivisionError):
            next(results)
