"""Segment frames by models that look at several frames: each frame between those that the mean field can see.

The network sees each frame once. The mean field runs over one or a few frames at a time, with as many frames around
them as it reaches (predict/frames.py): every frame gets the result that the complete video would give it. On CPUs a few
frames are under way at a time.
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
from deepmrf.ops.window import reaches
from deepmrf.predict.ahead import Cores
from deepmrf.predict.frames import Window, frame_reach, windows
from deepmrf.predict.result import Segmentation
from deepmrf.predict.scales import enlarged_labels, probabilities_of, resized
from deepmrf.predict.segmenter import Segmenter
from deepmrf.unary.network import Network
from deepmrf.video.clock import Clock
from deepmrf.video.reading import Frame

FRAMES_PER_WINDOW = 4
"""Frames that a mean field with windows over time labels at once: more need less time per frame, and more memory."""


class LinkedFrame(NamedTuple):
    """A frame and the flow of the clip (frame before, this frame); None for the first frame, or without flow."""

    frame: Frame
    flow: Flow | None


Segmented = Generator[tuple[LinkedFrame, Segmentation], None, None]
"""Frames with their results."""


@dataclass(frozen=True)
class _View:
    """A frame as one member sees it."""

    image: Tensor
    """(1, 3, h, w) of uint8."""
    log_p: Tensor
    """Log-probabilities (1, L, h, w)."""
    flow: Flow | None
    """The flow of the clip (frame before, this frame), of the view's size."""
    belief: Tensor | None
    """The probabilities (1, L, h, w) of the mean field, where frames meet on trajectories alone."""
    belief_of_pixels: Tensor | None
    """The same in torch.channels_last, as `linked_frame` reads other frames."""


@dataclass(frozen=True)
class _Member:
    """One of the predictions that are averaged: a model on frames of one scale, mirrored or not."""

    model: DeepParsingNetwork
    scale: float
    mirror: bool

    def see(self, image: Tensor, flow: Flow | None) -> _View:
        """Scale and mirror an image (1, 3, h, w) of uint8 and its flow, and run the network."""
        if self.scale != 1:
            image = resized(image, [max(1, round(n * self.scale)) for n in image.shape[2:]])
        if flow is not None:
            flow = flow.resize(*image.shape[2:]).to(image.device)
        if self.mirror:
            image, flow = image.flip(-1), None if flow is None else flow.flip()
        mrf = self.model.mean_field
        if mrf is None or not self.model.spans_time:
            return _View(image, self.model(image), None, None, None)
        log_p = self.model.log_unary(image)
        belief = mrf.belief(log_p) if mrf.links_frames_alone() else None
        of_pixels = None if belief is None else belief.contiguous(memory_format=torch.channels_last)
        return _View(image, log_p, flow, belief, of_pixels)

    def probabilities(self, views: Sequence[_View], inner: slice) -> list[Tensor]:
        """Probabilities (L, h, w) of the `inner` frames of a window, not mirrored."""
        log_qs = [view.log_p[0] for view in views[inner]]
        if self.model.spans_time:
            flows = [view.flow for view in views[1:] if view.flow is not None]
            flow = join(flows) if flows else None
            if flow is not None and views[0].belief is not None:
                log_qs = [self._linked_frame(views, number, flow) for number in range(inner.start, inner.stop)]
            else:
                log_p, images = (
                    torch.stack(maps, 2) for maps in zip(*[(v.log_p, v.image) for v in views], strict=True)
                )
                log_qs = list(self.model.refined(log_p, images, flow, inner)[0].unbind(1))
        return [probabilities_of(log_q.flip(-1) if self.mirror else log_q) for log_q in log_qs]

    def _linked_frame(self, views: Sequence[_View], number: int, flow: Flow) -> Tensor:
        """Log-probabilities (L, h, w) of one frame of a window, whose frames meet on trajectories alone."""
        mrf = self.model.mean_field
        assert mrf is not None  # the views have beliefs
        reach = reaches(mrf.triple_penalty.window)[0]
        before, after = min(number, reach[0]), min(len(views) - 1 - number, reach[1])
        links = {
            dt: (way[:, :, 0], reliable[:, :, 0])
            for dt, (way, reliable) in flow.trajectories(before, after, slice(number, number + 1)).items()
        }
        beliefs = {
            dt: belief
            for dt, view in enumerate(views, -number)
            if (belief := view.belief_of_pixels if dt else view.belief) is not None
        }
        return mrf.linked_frame(views[number].log_p, views[number].image, beliefs, links)[0]


@dataclass
class _SeenFrame:
    """A frame that has passed the network."""

    linked: LinkedFrame
    size: tuple[int, int]
    """(height, width) of the frame as the segmenter shrinks it."""
    views: list[_View]
    """What each member sees of it."""


def cores_of(segmenter: Segmenter) -> Cores:
    """Cores for frames, one at a time on a GPU, or where a network of the user's own may keep things between calls."""
    ours = all(isinstance(model.unary, Network) for model in segmenter.models)
    return Cores(None if ours and segmenter.device.type == "cpu" else 1)


class ClipSegmenter:
    """Segments frames by models of which at least one looks at other frames; links: along the flow, if there is one."""

    def __init__(self, segmenter: Segmenter, clock: Clock, links: bool = True) -> None:
        if segmenter.tile is not None:
            raise ValueError(f"tile={segmenter.tile} is for images and models of single frames: give size instead.")
        self.segmenter, self.clock, self.links = segmenter, clock, links
        mirrors = (False, True) if segmenter.flip else (False,)
        self.members = [
            _Member(model, scale, mirror)
            for model in segmenter.models
            for scale in segmenter.scales
            for mirror in mirrors
        ]
        mean_fields = [model.mean_field for model in segmenter.models]
        with torch.inference_mode():  # where weights of zero count for nothing
            self.reach = max(map(frame_reach, mean_fields))
            linked_alone = all(mrf is None or mrf.dims != 3 or mrf.links_frames_alone() for mrf in mean_fields)
        self.step = 1 if linked_alone else FRAMES_PER_WINDOW

    def __call__(self, frames: Iterator[LinkedFrame]) -> Segmented:
        """Yield each frame with its result, a few frames late: the mean field and the threads look ahead."""
        with cores_of(self.segmenter) as cores:
            seen = windows(cores.map(self._see, frames), self.reach, self.step)
            for results in cores.map(self._label, seen):
                yield from results

    @torch.inference_mode()
    def _see(self, linked: LinkedFrame) -> _SeenFrame:
        """Run the networks on one frame."""
        with self.clock("network"):
            shrunk = np.ascontiguousarray(self.segmenter.shrunk(linked.frame.image).transpose(2, 0, 1))
            image = torch.from_numpy(shrunk)[None].to(self.segmenter.device)
            flow = linked.flow if self.links else None
            views = [member.see(image, flow) for member in self.members]
        return _SeenFrame(linked, (image.shape[2], image.shape[3]), views)

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
    def _average(self, window: Window[_SeenFrame]) -> Iterator[Tensor]:
        """Probabilities (L, h, w) of each wanted frame, averaged over the members."""
        size = window.frames[0].size
        of_members = [
            member.probabilities([seen.views[index] for seen in window.frames], window.inner)
            for index, member in enumerate(self.members)
        ]
        for of_frame in zip(*of_members, strict=True):
            same_size = [
                q if q.shape[1:] == size else functional.interpolate(q[None], size, mode="bilinear")[0]
                for q in of_frame
            ]
            yield same_size[0] if len(same_size) == 1 else torch.stack(same_size).mean(0)
