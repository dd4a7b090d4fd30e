"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, "int | None"], None]
"""Called with (steps done, steps in all); None where nobody knows how many there are."""

Phases = Callable[[str], Progress]
"""Begins a phase of the work by its name, and returns the Progress of that phase."""


def no_progress(done: int, total: int | None) -> None:
    """A Progress that tells nobody."""


def no_phases(name: str) -> Progress:
    """Phases that tell nobody."""
    return no_progress
