"""segment_video: the labels of a video, frame by frame, with reading, flow and network at work at the same time.

Models of single frames are applied to each; models whose mean field spans time (dims = 3) see each frame between its
neighbours, linked along the optical flow (windows.py). Flow is estimated on frames of at most FLOW pixels on the longer
side, and enlarged: it is smooth, and this is several times as fast. No more than a few frames are in memory at a time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepmrf.data.files import Bytes
from deepmrf.evaluation.temporal import TemporalConsistency
from deepmrf.flow import Flow, between
from deepmrf.flow.estimation import Method
from deepmrf.predict.result import Segmentation
from deepmrf.predict.segmenter import Segmenter
from deepmrf.video.reading import FPS, Frame, Source, open_source
from deepmrf.video.threads import Clock, ahead
from deepmrf.video.windows import Labelled, Linked, Windows, spans_time

AHEAD = 4
"""Frames that are read, and flows that are estimated, before the network wants them."""
FLOW = 512
"""The longer side of the frames that flow is estimated on."""


Both = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Flows (H, W, 2) to a frame and back."""


class Seen(NamedTuple):
    """A frame and what was found in it."""

    time: float
    """Seconds."""
    frame: Frame
    found: Segmentation


def segment_video(
    segmenter: Segmenter,
    source: str | os.PathLike[str] | Source,
    *,
    flow: Method | None = "dis",
    consistency: bool = False,
    max_frames: int | None = None,
    fps: float = FPS,
) -> Stream:
    """(time, frame, Segmentation) of every frame of a video file, a folder of frames or "camera:0".

    flow: how models that span time are linked: "dis", a function of two frames (H, W, 3), or None for a rigid cube.
    consistency: estimate flow for models of single frames, too, to measure temporal consistency (Stream.consistency).
    max_frames: stop after so many. fps: of a folder of frames.
    """
    return Stream(segmenter, open_source(source, fps, segmenter.max_pixels), flow, consistency, max_frames)


class Stream(Iterator[Seen]):
    """The labels of a video as they come. `close` ends it early; `seconds` says how long each stage has worked."""

    def __init__(
        self,
        segmenter: Segmenter,
        source: Source,
        flow: Method | None = "dis",
        consistency: bool = False,
        max_frames: int | None = None,
    ) -> None:
        if max_frames is not None and max_frames < 1:
            raise ValueError(f"max_frames={max_frames} must be at least 1 frame.")
        if consistency and flow is None:
            raise ValueError("Temporal consistency is measured along the optical flow: choose a flow.")
        if any(model.for_volumes for model in segmenter.models):
            raise ValueError("This model is for volumes, not for frames: choose one trained on images or clips.")
        self.segmenter, self.source, self.max_frames = segmenter, source, max_frames
        self.clock = Clock()
        self.spans_time = any(spans_time(model) for model in segmenter.models)
        self.flow = flow if self.spans_time or consistency else None
        windows = Windows(segmenter, self.clock) if self.spans_time else None
        self._label = windows if windows is not None else self._one_by_one
        self._agreement = TemporalConsistency(ignore=segmenter.labels.ignore)
        self._made = self._run()

    @property
    def length(self) -> int | None:
        """How many frames there will be, as far as one knows."""
        known = [n for n in (self.source.length, self.max_frames) if n is not None]
        return min(known) if self.source.length is not None else self.max_frames

    @property
    def seconds(self) -> dict[str, float]:
        """How long reading, flow, network and MRF have worked; they overlap. Single frames: network and MRF as one."""
        return dict(self.clock.seconds)

    @property
    def consistency(self) -> float | None:
        """Of all pixels with a reliable link, the share whose label is that of the frame before; None if unknown."""
        return float(self._agreement.compute()) if self._agreement.linked else None

    def __next__(self) -> Seen:
        return next(self._made)

    def close(self) -> None:
        """Stop reading, and let go of the source."""
        self._made.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Generator[Seen, None, None]:
        frames = ahead(self._followed(ahead(self._read(), AHEAD)), AHEAD)
        labelled = self._label(Linked(frame, self._flow(both)) for frame, both in frames)
        before: NDArray[np.uint8] | None = None
        try:
            for item, found in labelled:
                if item.flow is not None:
                    before = self._agree(before, found.labels, item.flow)
                elif self.flow is not None:
                    before = found.labels
                yield Seen(float(item.frame.time), item.frame, found)
        finally:
            labelled.close()
            frames.close()

    def _read(self) -> Generator[Frame, None, None]:
        with closing(self.source.frames()) as frames:
            for number in itertools.count():
                if number == self.max_frames:
                    return
                with self.clock("reading"):
                    frame = next(frames, None)
                if frame is None:
                    return
                yield frame

    def _followed(self, frames: Generator[Frame, None, None]) -> Generator[tuple[Frame, Both | None], None, None]:
        """Each frame with the flow from the one before, and back."""
        before: Bytes | None = None
        try:
            for frame in frames:
                both: Both | None = None
                if self.flow is not None:
                    with self.clock("flow"):
                        small = _at_most(frame.image, FLOW)
                        if before is not None:
                            both = between(before, small, self.flow), between(small, before, self.flow)
                    before = small
                yield frame, both
        finally:
            frames.close()

    def _flow(self, both: Both | None) -> Flow | None:
        """Made here, not in the thread before: PyTorch's own threads would stand in each other's way."""
        if both is None:
            return None
        ahead, back = (torch.from_numpy(np.ascontiguousarray(way.transpose(2, 0, 1)))[None, :, None] for way in both)
        return Flow(ahead, back)

    def _one_by_one(self, frames: Iterator[Linked]) -> Labelled:
        for item in frames:
            with self.clock("network"):
                [found] = self.segmenter.batch([item.frame.image], probabilities=False)
            yield item, found

    def _agree(self, before: NDArray[np.uint8] | None, labels: NDArray[np.uint8], flow: Flow) -> NDArray[np.uint8]:
        """Count where the labels agree with the frame before, at the flow's size; returns the labels for the next."""
        assert before is not None  # a flow comes with the second frame
        height, width = flow.shape[2:]
        pair = np.stack([_thinned(one, height, width) for one in (before, labels)])
        self._agreement.update(torch.from_numpy(pair), flow)
        return labels


def _at_most(image: Bytes, longest: int) -> Bytes:
    from PIL import Image

    factor = longest / max(image.shape[:2])
    if factor >= 1:
        return image
    size = (max(1, round(image.shape[1] * factor)), max(1, round(image.shape[0] * factor)))
    return np.array(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))


def _thinned(labels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """The labels at the centres of height x width cells."""
    rows, columns = (
        ((np.arange(n) + 0.5) * whole / n).astype(int) for n, whole in zip((height, width), labels.shape, strict=True)
    )
    made: NDArray[np.uint8] = labels[rows[:, None], columns]
    return made
