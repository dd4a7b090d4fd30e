"""Segment frames by models that look at several frames: each frame between those that the mean field can see.

The network sees each frame once. The mean field runs over FRAMES_PER_WINDOW frames at a time, with as many frames
around them as it reaches (predict/frames.py): every frame gets the result that the complete video would give it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepmrf.flow import Flow, join
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.frames import Window, frame_reach, windows
from deepmrf.predict.result import Segmentation
from deepmrf.predict.scales import enlarged_labels, resized
from deepmrf.predict.segmenter import Segmenter
from deepmrf.video.clock import Clock
from deepmrf.video.reading import Frame

FRAMES_PER_WINDOW = 4
"""Frames that the mean field labels at a time. More need less time per frame, and more memory."""


class LinkedFrame(NamedTuple):
    """A frame and the flow of the clip (frame before, this frame); None for the first frame, or without flow."""

    frame: Frame
    flow: Flow | None


Segmented = Generator[tuple[LinkedFrame, Segmentation], None, None]
"""Frames with their results."""


@dataclass(frozen=True)
class _Member:
    """One of the predictions that are averaged: a model on frames of one scale, mirrored or not."""

    model: DeepParsingNetwork
    scale: float
    mirror: bool

    def prepare(self, image: Tensor) -> Tensor:
        """Scale and mirror an image (1, 3, h, w) of uint8."""
        if self.scale != 1:
            image = resized(image, [max(1, round(n * self.scale)) for n in image.shape[2:]])
        return image.flip(-1) if self.mirror else image

    def log_probabilities(self, image: Tensor) -> Tensor:
        """Log-probabilities (1, L, h, w) of one frame; of the network alone if the mean field spans time."""
        log_p: Tensor = self.model.log_unary(image) if self.model.spans_time else self.model(image)
        return log_p

    def probabilities(self, images: list[Tensor], log_ps: list[Tensor], flow: Flow | None, inner: slice) -> Tensor:
        """Probabilities (T, L, h, w) of the `inner` frames of a window, not mirrored."""
        if self.model.spans_time:
            height, width = images[0].shape[2:]
            if flow is not None:
                flow = flow.resize(height, width).to(images[0].device)
                flow = flow.flip() if self.mirror else flow
            log_q = self.model.refined(torch.stack(log_ps, 2), torch.stack(images, 2), flow, inner)
            log_q = log_q[0].transpose(0, 1)
        else:
            log_q = torch.cat(log_ps[inner])
        q = log_q.float().exp()
        return q.flip(-1) if self.mirror else q


@dataclass
class _SeenFrame:
    """A frame that has passed the network."""

    linked: LinkedFrame
    size: tuple[int, int]
    """(height, width) of the frame as the segmenter shrinks it."""
    images: list[Tensor]
    """The image that each member sees."""
    log_ps: list[Tensor]
    """The log-probabilities of each member."""


class ClipSegmenter:
    """Segments frames by models of which at least one looks at other frames."""

    def __init__(self, segmenter: Segmenter, clock: Clock) -> None:
        if segmenter.tile is not None:
            raise ValueError(f"tile={segmenter.tile} is for images and models of single frames: give size instead.")
        self.segmenter, self.clock = segmenter, clock
        mirrors = (False, True) if segmenter.flip else (False,)
        self.members = [
            _Member(model, scale, mirror)
            for model in segmenter.models
            for scale in segmenter.scales
            for mirror in mirrors
        ]
        self.reach = max(frame_reach(model.mean_field) for model in segmenter.models)

    def __call__(self, frames: Iterator[LinkedFrame]) -> Segmented:
        """Yield each frame with its result, up to `reach` + FRAMES_PER_WINDOW - 1 frames late."""
        for results in map(self._label, windows(map(self._see, frames), self.reach, FRAMES_PER_WINDOW)):
            yield from results

    @torch.inference_mode()
    def _see(self, linked: LinkedFrame) -> _SeenFrame:
        """Run the networks on one frame."""
        with self.clock("network"):
            shrunk = np.ascontiguousarray(self.segmenter.shrunk(linked.frame.image).transpose(2, 0, 1))
            image = torch.from_numpy(shrunk)[None].to(self.segmenter.device)
            images = [member.prepare(image) for member in self.members]
            log_ps = [member.log_probabilities(view) for member, view in zip(self.members, images, strict=True)]
        return _SeenFrame(linked, (image.shape[2], image.shape[3]), images, log_ps)

    def _label(self, window: Window[_SeenFrame]) -> list[tuple[LinkedFrame, Segmentation]]:
        """Run the mean field, and give the wanted frames their labels."""
        results = []
        with self.clock("mrf"):
            for seen, q in zip(window.wanted, self._average(window), strict=True):
                image = seen.linked.frame.image
                labels, confidence = enlarged_labels(q, *image.shape[:2])
                results.append((seen.linked, self.segmenter.result(labels, confidence, image)))
        return results

    @torch.inference_mode()
    def _average(self, window: Window[_SeenFrame]) -> Tensor:
        """Probabilities (T, L, h, w) of the wanted frames, averaged over the members."""
        flow, size = _flow_of(window.frames), window.frames[0].size
        total: Tensor | None = None
        for index, member in enumerate(self.members):
            images = [seen.images[index] for seen in window.frames]
            log_ps = [seen.log_ps[index] for seen in window.frames]
            q = member.probabilities(images, log_ps, flow, window.inner)
            if q.shape[2:] != size:
                q = functional.interpolate(q, size, mode="bilinear")
            total = q if total is None else total + q
        assert total is not None  # there is at least one model
        return total / len(self.members)


def _flow_of(frames: Sequence[_SeenFrame]) -> Flow | None:
    """Return the flow of a window; None for a single frame, or where flow is not wanted."""
    flows = [seen.linked.flow for seen in frames[1:] if seen.linked.flow is not None]
    return join(flows) if flows else None
