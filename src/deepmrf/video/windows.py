"""Models that see several frames: each frame's labels from those around it, as far as the model reaches in time.

Frames come one by one. The network sees each once; its log-probabilities wait until the frames after it are there, too,
and are forgotten when no frame needs them any more. The mean field then runs over STEP frames at a time, between those
before and after: as far as it reaches, so that every frame gets what the whole clip would give it.
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
from deepmrf.predict.frames import frame_reach
from deepmrf.predict.result import Segmentation
from deepmrf.predict.scales import enlarged_labels
from deepmrf.predict.segmenter import Segmenter
from deepmrf.video.reading import Frame
from deepmrf.video.threads import Clock

STEP = 4
"""Frames that the mean field labels at a time: more share the frames around them, and hold more memory."""


class Linked(NamedTuple):
    """A frame and the flow of the clip (the frame before, this one); None for the first, or where none is wanted."""

    frame: Frame
    flow: Flow | None


Labelled = Generator[tuple[Linked, Segmentation], None, None]
"""Frames with their labels."""


def spans_time(model: DeepParsingNetwork) -> bool:
    """Does its mean field look at other frames?"""
    return model.mean_field is not None and model.mean_field.dims == 3


@dataclass(frozen=True)
class _Member:
    """One of the results that are averaged: a model, on frames of some size, mirrored or not."""

    model: DeepParsingNetwork
    scale: float
    mirror: bool

    def image(self, small: Tensor) -> Tensor:
        """What the model sees of a frame (1, 3, h, w) of uint8."""
        if self.scale != 1:
            size = [max(1, round(n * self.scale)) for n in small.shape[2:]]
            real = functional.interpolate(small.float(), size, mode="bilinear", antialias=self.scale < 1)
            small = real.round_().clamp_(0, 255).to(torch.uint8)
        return small.flip(-1) if self.mirror else small

    def see(self, image: Tensor) -> Tensor:
        """What is kept of a frame: log-probabilities (1, L, h, w), of the network alone if the MRF spans time."""
        found: Tensor = self.model.log_unary(image) if spans_time(self.model) else self.model(image)
        return found

    def probabilities(
        self, images: Sequence[Tensor], maps: Sequence[Tensor], flow: Flow | None, wanted: slice
    ) -> Tensor:
        """Of the `wanted` frames of a window, (n, L, h, w), not mirrored."""
        if spans_time(self.model):
            size = images[0].shape[2:]
            if flow is not None:
                flow = flow.resize(int(size[0]), int(size[1])).to(images[0].device)
                flow = flow.flip() if self.mirror else flow
            log_q = self.model.refined(torch.stack(list(maps), 2), torch.stack(list(images), 2), flow)
            found = log_q[0, :, wanted].transpose(0, 1)
        else:
            found = torch.cat(list(maps[wanted]))
        found = found.float().exp()
        return found.flip(-1) if self.mirror else found


@dataclass
class _Held:
    """A frame in the window."""

    frame: Frame
    flow: Flow | None
    size: tuple[int, int]
    images: list[Tensor]
    maps: list[Tensor]


class Windows:
    """Labels of frames by models of which at least one looks at other frames."""

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

    def __call__(self, frames: Iterator[Linked]) -> Labelled:
        """Each frame with its labels, `reach` + STEP - 1 frames late."""
        held: list[_Held] = []
        done = 0  # so many at the beginning have their labels, and are there for those after them
        for item in frames:
            with self.clock("network"):
                held.append(self._seen(item))
            if len(held) == done + STEP + self.reach:
                yield from self._labelled(held, slice(done, done + STEP))
                drop = max(0, done + STEP - self.reach)
                held, done = held[drop:], done + STEP - drop
        if len(held) > done:
            yield from self._labelled(held, slice(done, len(held)))

    @torch.inference_mode()
    def _seen(self, item: Linked) -> _Held:
        small = np.ascontiguousarray(self.segmenter.shrunk(item.frame.image).transpose(2, 0, 1))
        picture = torch.from_numpy(small)[None].to(self.segmenter.device)
        images = [member.image(picture) for member in self.members]
        maps = [member.see(image) for member, image in zip(self.members, images, strict=True)]
        return _Held(item.frame, item.flow, (picture.shape[2], picture.shape[3]), images, maps)

    def _labelled(self, held: Sequence[_Held], wanted: slice) -> Labelled:
        with self.clock("mrf"):
            found = self._average(held, wanted)
            made = [
                enlarged_labels(one, *held_one.frame.image.shape[:2])
                for one, held_one in zip(found, held[wanted], strict=True)
            ]
        for (labels, confidence), one in zip(made, held[wanted], strict=True):
            item = Linked(one.frame, one.flow)
            yield item, Segmentation(labels, confidence, one.frame.image, self.segmenter.labels)

    @torch.inference_mode()
    def _average(self, held: Sequence[_Held], wanted: slice) -> Tensor:
        links = [one.flow for one in held[1:]]
        flow = join([link for link in links if link is not None]) if links and None not in links else None
        total: Tensor | None = None
        for number, member in enumerate(self.members):
            images, maps = [one.images[number] for one in held], [one.maps[number] for one in held]
            found = member.probabilities(images, maps, flow, wanted)
            if found.shape[2:] != held[0].size:
                found = functional.interpolate(found, held[0].size, mode="bilinear")
            total = found if total is None else total + found
        assert total is not None  # there is a model
        return total / len(self.members)
