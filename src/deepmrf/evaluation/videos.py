"""Models against videos: the paper's metrics and temporal consistency.

A sequence is streamed: FRAMES_AT_A_TIME frames go through the mean field together with as many frames around them as it
sees, so that every frame gets the labels that the whole sequence would give it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepmrf.data.dataset import Dataset, Item
from deepmrf.data.progress import Progress, no_progress
from deepmrf.evaluation.evaluate import computed, new_metrics
from deepmrf.evaluation.metrics import Scores
from deepmrf.evaluation.temporal import TemporalConsistency
from deepmrf.flow import Flow, estimate, join
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.frames import frame_reach

FRAMES_AT_A_TIME = 12
"""Frames that go through the mean field together, besides those around them."""


@dataclass(frozen=True)
class VideoModel:
    """A model, or its network alone, as it is measured on videos."""

    name: str
    model: DeepParsingNetwork
    mode: Literal["network", "rigid", "linked"]
    """The network alone; with the mean field over frames as they lie; with frames linked along the flow."""

    def __call__(self, log_p: Tensor, frames: Tensor, flow: Flow | None) -> Tensor:
        """log_p (1, L, T, H, W), frames (1, 3, T, H, W) -> (1, L, T, H, W)."""
        if self.mode == "network":
            return log_p
        return self.model.refined(log_p, frames, flow if self.mode == "linked" else None)

    def reach(self) -> int:
        """Return how many frames away a frame can be and still change this one."""
        return 0 if self.mode == "network" else frame_reach(self.model.mean_field)


def video_models(models: dict[str, DeepParsingNetwork]) -> list[VideoModel]:
    """List what to measure: each network once, models of images, and models of clips both rigid and linked."""
    measured: list[VideoModel] = []
    for name, model in models.items():
        if not any(same_network(other.model, model) for other in measured):
            measured.append(VideoModel(f"{name}, network alone" if measured else "network alone", model, "network"))
        if model.mean_field is not None and model.mean_field.dims == 2:
            measured.append(VideoModel(f"{name}, 2-D", model, "rigid"))
        elif model.mean_field is not None:
            measured.append(VideoModel(f"{name}, 3-D rigid", model, "rigid"))
            measured.append(VideoModel(f"{name}, 3-D linked", model, "linked"))
    return measured


def same_network(first: DeepParsingNetwork, second: DeepParsingNetwork) -> bool:
    """Do two models have the same network, so that they can share its output?"""
    if first is second:
        return True
    a, b = first.unary.state_dict(), second.unary.state_dict()
    return list(a) == list(b) and all(a[n].shape == b[n].shape and bool((a[n] == b[n]).all()) for n in a)


@dataclass
class VideoScores:
    """Scores of one VideoModel."""

    scores: Scores
    consistency: float
    """Temporal consistency; NaN without linked frames."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        consistency = None if math.isnan(self.consistency) else self.consistency
        return {**self.scores.to_dict(), "temporal_consistency": consistency}


@torch.inference_mode()
def evaluate_video(
    models: Sequence[VideoModel],
    data: Dataset,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
    share: tuple[int, int] = (0, 1),
) -> dict[str, VideoScores]:
    """Return each model's scores over all sequences of `data`, in one pass. Not every frame needs labels.

    share: (index of this process, number of processes); each process takes its share of the sequences.
    """
    if not any(item.mask for item in data):
        raise ValueError(f"None of these {len(data)} images has a mask: evaluation needs labelled images.")
    metrics = {model.name: new_metrics(data, device) for model in models}
    consistency = {model.name: TemporalConsistency(data.labels.ignore).to(device) for model in models}
    shared = sequences(data)[share[0] :: share[1]]
    total, done = sum(map(len, shared)), 0
    for items in shared:
        previous: dict[str, Tensor] = {}  # the labels of the frame before the window
        for window in _windows(items, data, models, device):
            for model in models:
                labels = window.labels(model)  # (T, H, W)
                for frame, mask in zip(labels, window.masks, strict=True):
                    if mask is not None:
                        metrics[model.name].update(frame, mask)
                linked = torch.cat([previous[model.name], labels]) if model.name in previous else labels
                consistency[model.name].update(linked, window.flow_of_labels)
                previous[model.name] = labels[-1:]
            done += len(window.masks)
            progress(done, total)
    return {name: VideoScores(computed(metrics[name]), float(consistency[name].compute())) for name in metrics}


def sequences(data: Dataset) -> list[list[Item]]:
    """Return the frames of each unbroken sequence, in order; an image on its own is a sequence of one."""
    pairs = data.clips(2, labelled_only=False)  # (the frame before or, at the start, itself; the frame)
    following = {first: second for first, second in pairs if first != second}
    starts = [second for first, second in pairs if first == second]
    result = []
    for start in starts:
        sequence = [start]
        while sequence[-1] in following:
            sequence.append(following[sequence[-1]])
        result.append(sequence)
    return result


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

    def labels(self, part: VideoModel) -> Tensor:
        """Of the wanted frames, (T, H, W), from as many around them as the part sees."""
        first, last = max(self.start - part.reach(), 0), min(self.stop + part.reach(), len(self.frames))
        at = next(i for i, model in enumerate(self.networks) if same_network(model, part.model))
        log_p = torch.stack([frame.log_p[at] for frame in self.frames[first:last]], 1)[None]
        images = torch.stack([frame.image for frame in self.frames[first:last]], 1)[None]
        found = part(log_p, images, self.flow.cut(first, last)).argmax(1)[0]
        return found[self.start - first : self.stop - first]


def _windows(
    items: Sequence[Item], data: Dataset, parts: Sequence[VideoModel], device: torch.device | str
) -> Iterator[_Window]:
    """A sequence a few frames at a time, each read, run through the networks and linked to the next once."""
    networks: list[DeepParsingNetwork] = []
    for part in parts:
        if not any(same_network(part.model, known) for known in networks):
            networks.append(part.model)
    reach = max(1, *(part.reach() for part in parts))  # one frame before, for the consistency of labels
    frames: dict[int, _Seen] = {}
    flows: dict[int, Flow] = {}
    for start in range(0, len(items), FRAMES_AT_A_TIME):
        stop = min(start + FRAMES_AT_A_TIME, len(items))
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
