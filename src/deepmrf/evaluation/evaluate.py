"""Evaluation: predictors against a data set, with the paper's metrics; models against videos, with consistency, too.

Videos are streamed: a few frames are in memory at a time, with as many around them as a mean field over frames sees, so
that every frame gets what it would get in the whole sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepmrf.data.dataset import Dataset, Item
from deepmrf.evaluation.metrics import Scores, SegmentationMetrics, TemporalConsistency
from deepmrf.flow import Flow, estimate, join
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.scales import Predictor, temporal_reach

NOTHING = "No pixel of these images has a label: give a split with labelled images."
TOGETHER = 12
"""Frames of a video that go through the mean field at a time, besides those around them."""

Step = Callable[[int, int], None]
"""Told (images done, images in all)."""


def evaluate(
    predict: Predictor,
    data: Dataset,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
    share: tuple[int, int] = (0, 1),
) -> Scores:
    """Scores over all images of `data`; with several processes, `share` = (this one, how many) splits the images."""
    labels = data.labels
    metrics = SegmentationMetrics(len(labels), labels.ignore, labels.names).to(device)
    mine = range(share[0], len(data), share[1])
    for done, (image, mask) in enumerate(pairs(data, mine), start=1):
        found = predict(image.to(device)).argmax(1)
        metrics.update(found, mask.to(device))
        if progress is not None:
            progress(done, len(mine))
    return _computed(metrics)


def _computed(metrics: SegmentationMetrics) -> Scores:
    try:
        found: Scores = metrics.compute()
    except ValueError:  # it speaks to who calls it
        raise ValueError(NOTHING) from None
    return found


def check_labelled(data: Dataset, frames: bool = False, progress: Step | None = None) -> None:
    """Read all of `data`, so that what evaluation cannot use is an error before anything is trained.

    frames: of videos, which need not all be labelled.
    """
    labelled = False
    for done, item in enumerate(data, start=1):
        mask = data.read(item)[1]
        if mask is None and not frames:
            raise ValueError(_no_mask(item))
        labelled = labelled or (mask is not None and bool((mask < len(data.labels)).any()))
        if progress is not None:
            progress(done, len(data))
    if not labelled:
        raise ValueError(NOTHING)


def _no_mask(item: Item) -> str:
    return f"{item.image} has no mask: evaluation needs labelled images."


def pairs(data: Dataset, indices: range) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Image (1, 3, H, W) uint8 and mask (1, H, W) of each labelled item."""
    for index in indices:
        image, mask = data.read(data[index])
        if mask is None:
            raise ValueError(_no_mask(data[index]))
        yield torch.from_numpy(image).permute(2, 0, 1)[None], torch.from_numpy(mask)[None].long()


@dataclass(frozen=True)
class Part:
    """What of a model is measured on videos."""

    name: str
    """Under which it is reported."""
    model: DeepParsingNetwork
    way: Literal["network", "rigid", "linked"]
    """The network alone; the whole model, frames as they lie; the whole model, frames linked along the flow."""

    def __call__(self, log_p: Tensor, frames: Tensor, flow: Flow) -> Tensor:
        """log_p (1, L, T, H, W), frames (1, 3, T, H, W) -> (1, L, T, H, W)."""
        if self.way == "network":
            return log_p
        return self.model.refined(log_p, frames, flow if self.way == "linked" else None)

    def reach(self) -> int:
        """How many frames away a frame can be and still change this one."""
        return 0 if self.way == "network" else temporal_reach(self.model.mean_field)


def video_parts(models: dict[str, DeepParsingNetwork]) -> list[Part]:
    """All there is to measure of models by name: each network once, models of images, models of clips both ways."""
    parts: list[Part] = []
    for name, model in models.items():
        if not any(same_network(part.model, model) for part in parts):
            parts.append(Part("network alone" if not parts else f"{name}, network alone", model, "network"))
        if model.mean_field is not None and model.mean_field.dims == 2:
            parts.append(Part(f"{name}, 2-D", model, "rigid"))
        elif model.mean_field is not None:
            parts += [Part(f"{name}, 3-D rigid", model, "rigid"), Part(f"{name}, 3-D linked", model, "linked")]
    return parts


def same_network(first: DeepParsingNetwork, second: DeepParsingNetwork) -> bool:
    """Do two models have the same network, so that its output can be shared?"""
    if first is second:
        return True
    a, b = first.unary.state_dict(), second.unary.state_dict()
    return list(a) == list(b) and all(a[n].shape == b[n].shape and bool((a[n] == b[n]).all()) for n in a)


@dataclass
class VideoScores:
    """What was measured of one part on videos."""

    scores: Scores
    consistency: float
    """Temporal consistency: the share of pixels that keep their label along the flow; NaN without linked frames."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        known = self.consistency == self.consistency
        return {**self.scores.to_dict(), "temporal_consistency": self.consistency if known else None}


@torch.inference_mode()
def evaluate_video(
    parts: Sequence[Part],
    data: Dataset,
    device: torch.device | str = "cpu",
    progress: Step | None = None,
    share: tuple[int, int] = (0, 1),
) -> dict[str, VideoScores]:
    """Scores by part over all sequences of `data`, in one pass, by one flow; frames need not all be labelled.

    With several processes, `share` = (this one, how many) splits the sequences.
    """
    if not any(item.mask for item in data):
        raise ValueError(f"None of these {len(data)} images has a mask: evaluation needs labelled images.")
    labels = data.labels
    scores = {p.name: SegmentationMetrics(len(labels), labels.ignore, labels.names).to(device) for p in parts}
    steady = {p.name: TemporalConsistency(labels.ignore).to(device) for p in parts}
    mine = sequences(data)[share[0] :: share[1]]
    whole, done = sum(map(len, mine)), 0
    for items in mine:
        last: dict[str, Tensor] = {}
        for window in _windows(items, data, parts, device):
            for part in parts:
                found = window.labels(part)  # (T, H, W)
                for one, mask in zip(found, window.masks, strict=True):
                    if mask is not None:
                        scores[part.name].update(one, mask)
                before = last.get(part.name)
                linked = found if before is None else torch.cat([before, found])
                steady[part.name].update(linked, window.flow_of_labels)
                last[part.name] = found[-1:]
            done += len(window.masks)
            if progress is not None:
                progress(done, whole)
    return {p.name: VideoScores(_computed(scores[p.name]), float(steady[p.name].compute())) for p in parts}


def sequences(data: Dataset) -> list[list[Item]]:
    """The frames of each unbroken sequence, in order; an image on its own is a sequence of one."""
    pairs = data.clips(2, labelled_only=False)  # (the frame before or, at the start, itself; the frame)
    after = {a: b for a, b in pairs if a != b}
    found = []
    for a, b in pairs:
        if a == b:
            found.append([b])
            while found[-1][-1] in after:
                found[-1].append(after[found[-1][-1]])
    return found


@dataclass
class _Seen:
    """A frame that is in memory."""

    image: Tensor
    """(3, H, W) of uint8."""
    mask: Tensor | None
    log_p: list[Tensor]
    """(L, H, W) of each network."""


@dataclass
class _Window:
    """Frames `start` to `stop` - 1 of those in memory are wanted, the others lie around them."""

    frames: list[_Seen]
    flow: Flow
    start: int
    stop: int
    networks: list[DeepParsingNetwork]

    @property
    def masks(self) -> list[Tensor | None]:
        """Of the wanted frames."""
        return [frame.mask for frame in self.frames[self.start : self.stop]]

    @property
    def flow_of_labels(self) -> Flow:
        """Of the wanted frames and, if there is one, the frame before."""
        return self.flow.cut(max(self.start - 1, 0), self.stop)

    def labels(self, part: Part) -> Tensor:
        """Of the wanted frames, (T, H, W), from as many around them as the part sees."""
        first, last = max(self.start - part.reach(), 0), min(self.stop + part.reach(), len(self.frames))
        at = next(i for i, model in enumerate(self.networks) if same_network(model, part.model))
        log_p = torch.stack([frame.log_p[at] for frame in self.frames[first:last]], 1)[None]
        images = torch.stack([frame.image for frame in self.frames[first:last]], 1)[None]
        found = part(log_p, images, self.flow.cut(first, last)).argmax(1)[0]
        return found[self.start - first : self.stop - first]


def _windows(
    items: Sequence[Item], data: Dataset, parts: Sequence[Part], device: torch.device | str
) -> Iterator[_Window]:
    """A sequence a few frames at a time, each read, run through the networks and linked to the next once."""
    networks: list[DeepParsingNetwork] = []
    for part in parts:
        if not any(same_network(part.model, known) for known in networks):
            networks.append(part.model)
    reach = max(1, *(part.reach() for part in parts))  # one frame before, for the consistency of labels
    frames: dict[int, _Seen] = {}
    flows: dict[int, Flow] = {}
    for start in range(0, len(items), TOGETHER):
        stop = min(start + TOGETHER, len(items))
        first, last = max(start - reach, 0), min(stop + reach, len(items))
        for gone in [i for i in frames if i < first]:
            frames.pop(gone), flows.pop(gone, None)
        for index in range(first, last):
            if index not in frames:
                frames[index] = _seen(items[index], data, networks, device)
                _check_size(frames[index], frames[first], items[index])
        for a, b in itertools.pairwise(range(first, last)):
            if a not in flows:
                pair = torch.stack([frames[a].image, frames[b].image]).permute(0, 2, 3, 1)
                flows[a] = estimate(pair).to(device)
        near = [frames[index] for index in range(first, last)]
        single = torch.stack([near[0].image]).permute(0, 2, 3, 1)
        flow = join([flows[a] for a in range(first, last - 1)]) if len(near) > 1 else estimate(single).to(device)
        yield _Window(near, flow, start - first, stop - first, networks)


def _seen(item: Item, data: Dataset, networks: list[DeepParsingNetwork], device: torch.device | str) -> _Seen:
    image, mask = data.read(item)
    frame = torch.from_numpy(image).permute(2, 0, 1).to(device)
    truth = None if mask is None else torch.from_numpy(mask).long().to(device)
    return _Seen(frame, truth, [model.log_unary(frame[None])[0] for model in networks])


def _check_size(frame: _Seen, first: _Seen, item: Item) -> None:
    if frame.image.shape != first.image.shape:
        (height, width), (tall, wide) = frame.image.shape[1:], first.image.shape[1:]
        raise ValueError(
            f"{item.image} is {width} x {height} pixels but its sequence began with {wide} x {tall}: "
            "give all frames of a sequence one size."
        )
