"""Spelling: which known word a wrong one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LIKENESS = 0.7
"""Of two words, from 0 to 1, from which on one may be meant by the other."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" where a known word is much like this one, else "": to follow it in a message."""
    near = get_close_matches(word, list(known), 1, LIKENESS)
    return f" (did you mean {near[0]}?)" if near else ""
