"""Segment a video: reading, flow and network run at the same time, with few frames in memory.

Models whose mean field spans time (dims = 3), and models for images that have a part for video, see each frame between
its neighbours, linked along the optical flow (windows.py). Other models see each frame alone. Flow is estimated on
frames of at most FLOW_SIDE pixels on the longer side and enlarged: it is smooth, and this is several times as fast.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepmrf.data.files import Bytes
from deepmrf.data.images import shrunk
from deepmrf.flow.estimation import Method, both_directions, flow_of_pairs
from deepmrf.predict.ahead import ahead
from deepmrf.predict.result import Segmentation
from deepmrf.predict.segmenter import Segmenter
from deepmrf.video.clock import Clock
from deepmrf.video.reading import DEFAULT_FPS, Frame, FrameSource, open_source
from deepmrf.video.windows import ClipSegmenter, LinkedFrame, Segmented, cores_of

if TYPE_CHECKING:
    from deepmrf.evaluation.temporal import TemporalConsistency

FRAMES_READ_AHEAD = 4
"""Frames that are read, and frames whose flow is estimated, before the network needs them."""
FLOW_SIDE = 512
"""Longer side, in pixels, of the frames that flow is estimated on."""


class FrameResult(NamedTuple):
    """A frame and its segmentation."""

    time: float
    """Seconds from the start of the video."""
    frame: Frame
    result: Segmentation


def segment_video(
    segmenter: Segmenter,
    source: str | os.PathLike[str] | FrameSource,
    *,
    flow: Method | None = "dis-fast",
    consistency: bool = False,
    max_frames: int | None = None,
    fps: float = DEFAULT_FPS,
    frame_by_frame: bool = False,
    full_precision: bool = False,
) -> Stream:
    """Yield (time, frame, Segmentation) of every frame of a video file, a folder of images or "camera:0".

    flow: how models that span time link frames: "dis-fast", "dis", a function of two frames (H, W, 3), or None for a
    rigid window.
    Models for images that have a part for video link frames, too, unless there is no flow or the segmenter cuts tiles.
    frame_by_frame: link no frames. Models that span time then have a rigid window, as without flow.
    full_precision: let the network compute in float32 also where bfloat16 is faster; the mean field always does.
    consistency: measure temporal consistency (Stream.consistency), as models of clips always do; models of single
    frames then need flow, too.
    max_frames: stop after this many frames. fps: frames per second of a folder of images.
    """
    source = open_source(source, fps, segmenter.max_pixels)
    # Models of clips have always told their consistency; for others it takes time that was not asked for.
    links = flow is not None and not frame_by_frame
    consistency = consistency or (links and any(model.spans_time for model in segmenter.models))
    if links and segmenter.tile is None:
        segmenter = segmenter.for_video(full_precision)
    return Stream(segmenter, source, flow, consistency, max_frames, links)


class Stream(Iterator[FrameResult]):
    """The segmented frames of a video. `close` ends it early; `seconds` tells how long each stage has worked.

    links: let models that span time see the flow.
    """

    def __init__(
        self,
        segmenter: Segmenter,
        source: FrameSource,
        flow: Method | None = "dis-fast",
        consistency: bool = False,
        max_frames: int | None = None,
        links: bool = True,
    ) -> None:
        if max_frames is not None and max_frames < 1:
            raise ValueError(f"max_frames={max_frames} must be at least 1 frame.")
        if consistency and flow is None:
            raise ValueError("Temporal consistency is measured along the optical flow: choose a flow.")
        if any(model.for_volumes for model in segmenter.models):
            raise ValueError("This model is for volumes, not for frames: choose one trained on images or clips.")
        self.segmenter, self.source, self.max_frames = segmenter, source, max_frames
        self.clock = Clock()
        self.spans_time = any(model.spans_time for model in segmenter.models)
        self.links = links and self.spans_time and flow is not None
        self.flow = flow if self.links or consistency else None
        self._clips = ClipSegmenter(segmenter, self.clock, self.links) if self.spans_time else None
        self._agreement: TemporalConsistency | None = None
        if consistency:
            from deepmrf.evaluation.temporal import TemporalConsistency  # torchmetrics takes seconds to import

            self._agreement = TemporalConsistency(ignore=segmenter.labels.ignore)
        # Of a copy: a generator that held the stream would be closed late where somebody leaves a loop over it early.
        self._results = copy.copy(self)._run()

    @property
    def length(self) -> int | None:
        """The number of frames, as far as it is known."""
        return min((n for n in (self.source.length, self.max_frames) if n is not None), default=None)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of work of reading, flow, network and mrf; they overlap. Models of single frames: mrf in network."""
        return dict(self.clock.seconds)

    @property
    def consistency(self) -> float | None:
        """Share of the pixels with a reliable link that have the label of the frame before; None if not measured."""
        return float(self._agreement.compute()) if self._agreement is not None and self._agreement.linked else None

    def __next__(self) -> FrameResult:
        return next(self._results)

    def close(self) -> None:
        """Stop reading, and close the source."""
        self._results.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Generator[FrameResult, None, None]:
        frames = ahead(self._with_flow(ahead(self._read(), FRAMES_READ_AHEAD)), FRAMES_READ_AHEAD)
        # Build Flow objects here: in another thread, PyTorch's own threads would compete with the network's.
        segmented = (self._clips or self._segment_frames)(
            LinkedFrame(frame, None if pair is None else flow_of_pairs([pair], pair.shape[2:]))
            for frame, pair in frames
        )
        last_labels: NDArray[np.uint8] | None = None
        try:
            for (frame, flow), result in segmented:
                if flow is not None and self._agreement is not None:
                    assert last_labels is not None  # flow comes with the second frame
                    pair = np.stack([_sampled(labels, *flow.shape[2:]) for labels in (last_labels, result.labels)])
                    self._agreement.update(torch.from_numpy(pair), flow)
                last_labels = result.labels
                yield FrameResult(float(frame.time), frame, result)
        finally:
            segmented.close()
            frames.close()

    def _read(self) -> Generator[Frame, None, None]:
        with closing(self.source.frames()) as frames:
            limited = itertools.islice(frames, self.max_frames)
            while True:
                with self.clock("reading"):
                    frame = next(limited, None)
                if frame is None:
                    return
                yield frame

    def _with_flow(
        self, frames: Generator[Frame, None, None]
    ) -> Generator[tuple[Frame, NDArray[np.float32] | None], None, None]:
        """Yield each frame with the flow from the frame before, and back: (2, 2, H, W)."""
        last: Bytes | None = None
        try:
            for frame in frames:
                pair = None
                if self.flow is not None:
                    with self.clock("flow"):
                        small = shrunk(frame.image, FLOW_SIDE)
                        if last is not None:
                            pair = both_directions(last, small, self.flow)
                    last = small
                yield frame, pair
        finally:
            frames.close()

    def _segment_frames(self, frames: Iterator[LinkedFrame]) -> Segmented:
        def segment(linked: LinkedFrame) -> tuple[LinkedFrame, Segmentation]:
            with self.clock("network"):
                [result] = self.segmenter.batch([linked.frame.image], probabilities=False)
            return linked, result

        with cores_of(self.segmenter) as cores:
            yield from cores.map(segment, frames)


def _sampled(labels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Return the labels at the centres of height x width cells."""
    rows = ((np.arange(height) + 0.5) * labels.shape[0] / height).astype(int)
    columns = ((np.arange(width) + 0.5) * labels.shape[1] / width).astype(int)
    sampled: NDArray[np.uint8] = labels[rows[:, None], columns]
    return sampled
