"""Models against videos: the paper's metrics and temporal consistency.

A sequence is streamed: FRAMES_AT_A_TIME frames go through the mean field together with as many frames around them as it
sees, so that every frame gets the labels that the whole sequence would give it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepmrf.data.dataset import Dataset, Item, check_frame
from deepmrf.data.progress import Progress, no_progress
from deepmrf.evaluation.evaluate import computed, new_metrics
from deepmrf.evaluation.metrics import Scores, none_for_nan
from deepmrf.evaluation.temporal import TemporalConsistency
from deepmrf.flow import Flow, estimate, join
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.frames import Window, frame_reach, windows
from deepmrf.predict.scales import probabilities_of

FRAMES_AT_A_TIME = 12
"""Frames that go through the mean field together, besides those around them."""


@dataclass(frozen=True)
class VideoModel:
    """A model, or its network alone, as it is measured on videos."""

    name: str
    model: DeepParsingNetwork
    mode: Literal["network", "rigid", "linked"]
    """The network alone; with the mean field over frames as they lie; with frames linked along the flow."""

    def __call__(self, log_p: Tensor, frames: Tensor, flow: Flow | None, wanted: slice | None = None) -> Tensor:
        """log_p (1, L, T, H, W), frames (1, 3, T, H, W) -> (1, L, T, H, W), or the wanted frames of it."""
        wanted = wanted or slice(None)
        if self.mode == "network":
            return log_p[:, :, wanted]
        if not self.model.spans_time:
            return self.model.refined(log_p[:, :, wanted], frames[:, :, wanted])
        return self.model.refined(log_p, frames, flow if self.mode == "linked" else None, wanted)

    def reach(self) -> int:
        """Return how many frames away a frame can be and still change this one."""
        return 0 if self.mode == "network" else frame_reach(self.model.mean_field)


def video_models(models: dict[str, DeepParsingNetwork]) -> list[VideoModel]:
    """List what to measure: each network once, models of images also linked, models of clips both rigid and linked."""
    measured: list[VideoModel] = []
    for name, model in models.items():
        if not any(same_network(other.model, model) for other in measured):
            measured.append(VideoModel(f"{name}, network alone" if measured else "network alone", model, "network"))
        if model.mean_field is not None and model.mean_field.dims == 2:
            measured.append(VideoModel(f"{name}, frame by frame", model, "rigid"))
            if model.video is not None:
                measured.append(VideoModel(f"{name}, linked", model.for_video(), "linked"))
        elif model.mean_field is not None:
            measured.append(VideoModel(f"{name}, 3-D rigid", model, "rigid"))
            measured.append(VideoModel(f"{name}, 3-D linked", model, "linked"))
    return measured


def same_network(first: DeepParsingNetwork, second: DeepParsingNetwork) -> bool:
    """Do two models have the same network, so that they can share its output?"""
    if type(first) is not type(second):  # one gives its mean field's result as the output of a frame
        return False
    if first.unary is second.unary:
        return True
    a, b = first.unary.state_dict(), second.unary.state_dict()
    return list(a) == list(b) and all(a[n].shape == b[n].shape and bool((a[n] == b[n]).all()) for n in a)


@dataclass
class VideoScores:
    """Scores of one VideoModel."""

    scores: Scores
    consistency: float
    """Temporal consistency; NaN without linked frames."""

    def rows(self) -> list[tuple[str, float, float, float, float, float]]:
        """Return the rows of the scores, without consistency, which no class has."""
        return self.scores.rows()

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON."""
        return {**self.scores.to_dict(), "temporal_consistency": none_for_nan(self.consistency)}


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
    # Frames go once through a network, whatever models share it: that of the first of them.
    first_of = [next(i for i, first in enumerate(models) if same_network(first.model, m.model)) for m in models]
    networks = {index: models[index].model for index in first_of}
    reach = max(1, *(model.reach() for model in models))  # one frame before, for the consistency of labels
    shared = list(data.sequences())[share[0] :: share[1]]
    total, done = sum(map(len, shared)), 0
    for items in shared:
        previous: dict[str, Tensor] = {}  # the labels of the frame before the window
        for window in windows(_frames(items, data, networks, device), reach, FRAMES_AT_A_TIME):
            flow = _flow(window.frames)
            flow_of_labels = flow.cut(max(window.inner.start - 1, 0), window.inner.stop)
            for model, network in zip(models, first_of, strict=True):
                labels = _labels(model, window, flow, network)  # (T, H, W)
                for frame, values in zip(window.wanted, labels, strict=True):
                    if frame.mask is not None:
                        metrics[model.name].update(values, frame.mask)
                linked = torch.cat([previous[model.name], labels]) if model.name in previous else labels
                consistency[model.name].update(linked, flow_of_labels)
                previous[model.name] = labels[-1:]
            done += len(window.wanted)
            progress(done, total)
    return {name: VideoScores(computed(metrics[name]), float(consistency[name].compute())) for name in metrics}


@dataclass(frozen=True)
class _Frame:
    """A frame that is in memory."""

    image: Tensor
    """(3, H, W) of uint8."""
    mask: Tensor | None
    log_p: dict[int, Tensor]
    """The output (L, H, W) of each network."""
    link: Flow | None
    """The flow of the clip (the frame before, this frame); None for the first."""


def _frames(
    items: Sequence[Item], data: Dataset, networks: Mapping[int, DeepParsingNetwork], device: torch.device | str
) -> Iterator[_Frame]:
    """Read the frames of a sequence one by one, each once through the networks and linked to the one before."""
    previous: Tensor | None = None
    for item in items:
        pixels, mask = data.read(item)
        image = torch.from_numpy(pixels).permute(2, 0, 1).to(device)
        if previous is not None:
            check_frame(item, image.shape[1:], previous.shape[1:])
        link = None if previous is None else _estimated([previous, image])
        log_p = {index: network.log_unary(image[None])[0] for index, network in networks.items()}
        yield _Frame(image, None if mask is None else torch.from_numpy(mask).long().to(device), log_p, link)
        previous = image


def _estimated(images: Sequence[Tensor]) -> Flow:
    """Return the flow of a clip of images (3, H, W), on their device."""
    return estimate(torch.stack(list(images)).permute(0, 2, 3, 1)).to(images[0].device)


def _flow(frames: Sequence[_Frame]) -> Flow:
    """Return the flow of consecutive frames."""
    links = [frame.link for frame in frames[1:] if frame.link is not None]
    return join(links) if links else _estimated([frames[0].image])


def _labels(model: VideoModel, window: Window[_Frame], flow: Flow, network: int) -> Tensor:
    """Return the labels of the wanted frames (T, H, W), from as many frames around them as the model looks at."""
    start, stop = window.inner.start, window.inner.stop
    first, last = max(start - model.reach(), 0), min(stop + model.reach(), len(window.frames))
    frames = window.frames[first:last]
    log_p = torch.stack([frame.log_p[network] for frame in frames], 1)[None]
    images = torch.stack([frame.image for frame in frames], 1)[None]
    log_q = model(log_p, images, flow.cut(first, last), slice(start - first, stop - first))
    return probabilities_of(log_q).argmax(1)[0]
