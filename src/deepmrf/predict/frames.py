"""Sliding windows over frames that come one by one, for MRFs that look at the frames before and after.

    for window in windows(map(through_network, frames), reach=2, step=4):
        labels = mrf(window.frames)[window.inner]

Each frame is taken from the iterator once and is forgotten when no later frame needs it, so that a network sees every
frame once and memory does not grow with the length of the video. Every wanted frame has `reach` frames on both sides
(fewer at the ends of the video): it gets the result that the whole video would give it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from deepmrf.layers import MeanField

T = TypeVar("T")


@dataclass(frozen=True)
class Window(Generic[T]):
    """Consecutive frames, some of which are wanted."""

    frames: list[T]
    inner: slice
    """The frames whose results are wanted; the others lie around them."""

    @property
    def wanted(self) -> list[T]:
        """The frames whose results are wanted."""
        return self.frames[self.inner]


def windows(frames: Iterable[T], reach: int, step: int) -> Iterator[Window[T]]:
    """Yield windows that together want every frame once, `step` at a time, in order.

    At most 2 * reach + step frames are in memory. The last window wants all that remain: fewer than reach + step.
    """
    cached: list[T] = []
    done = 0  # the first `done` cached frames have their results; later frames still look at them
    for frame in frames:
        cached.append(frame)
        if len(cached) == done + step + reach:
            yield Window(cached, slice(done, done + step))
            done += step
            forgotten = max(0, done - reach)
            cached, done = cached[forgotten:], done - forgotten
    if len(cached) > done:
        yield Window(cached, slice(done, len(cached)))


def frame_reach(mean_field: MeanField | None) -> int:
    """How many frames before or after a frame can change its labels: 0 for an MRF on images."""
    return 0 if mean_field is None or mean_field.dims != 3 else max(mean_field.reach()[0])
