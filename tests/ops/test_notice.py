"""A line says that kernels compile, once it takes long enough to wonder."""

import time

import pytest

from deepmrf.ops import notice

numba = pytest.importorskip("numba")


def compile_for(seconds: float, module: str) -> None:
    """Let numba compile a function of a module, and take its time."""
    from numba.core import event

    def function() -> int:
        return 1

    function.__module__ = module
    data = {"dispatcher": numba.njit(function)}
    with event.trigger_event("numba:compile", data=data):
        time.sleep(seconds)


@pytest.fixture(autouse=True)
def prompt(monkeypatch):
    monkeypatch.setattr(notice, "SECONDS_OF_SILENCE", 0.1)
    monkeypatch.setattr(notice._clock, "announced", False)
    notice.announce_compilations()


def wait_for_the_end() -> None:
    while notice._clock.thread is not None:
        time.sleep(0.05)


def test_long_compilations_of_two_kernels_print_one_line(capsys):
    compile_for(0.6, "deepmrf.ops.some")
    compile_for(0.3, "deepmrf.ops.other")
    wait_for_the_end()
    assert capsys.readouterr().err.count(notice.MESSAGE) == 1


def test_a_pause_between_kernels_prints_nothing_more(capsys):
    for module in ("deepmrf.ops.some", "deepmrf.ops.other"):
        compile_for(0.6, module)
        wait_for_the_end()
    assert capsys.readouterr().err.count(notice.MESSAGE) == 1


def test_other_people_s_kernels_print_nothing(capsys):
    compile_for(0.5, "somebody.else")
    assert notice._clock.thread is None
    assert capsys.readouterr().err == ""


def test_short_compilations_print_nothing(capsys, monkeypatch):
    monkeypatch.setattr(notice, "SECONDS_OF_SILENCE", 5.0)
    compile_for(0.01, "deepmrf.ops.some")
    wait_for_the_end()
    assert capsys.readouterr().err == ""
