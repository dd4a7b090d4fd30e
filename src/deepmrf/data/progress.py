"""Types of the callbacks by which long work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, "int | None"], None]
"""Called with (steps done, steps in all); None if the total is unknown."""

Phases = Callable[[str], Progress]
"""Called with the name of a phase when it begins; returns the Progress of that phase."""


def no_progress(done: int, total: int | None) -> None:
    """Report nothing."""


def no_phases(name: str) -> Progress:
    """Report nothing in any phase."""
    return no_progress
