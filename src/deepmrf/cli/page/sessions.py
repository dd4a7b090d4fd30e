"""Session: one person's picture or clip, the network's output for it, and results.

The network runs once for each frame; moving the MRF computes the MRF alone. Sessions have names that cannot be guessed,
so that nobody sees another person's pictures; those that were not used for longest are dropped when memory is short.
"""

from __future__ import annotations

import copy
import re
import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepmrf.cli.page.controls import adjust
from deepmrf.cli.page.uploads import Clip, Limits, read_clip, read_prediction, received
from deepmrf.cli.page.views import compare, maps_url, palette, picture_url
from deepmrf.data.files import Bytes, read_image
from deepmrf.data.images import shrunk
from deepmrf.data.labels import LabelSet
from deepmrf.evaluation.explain import Picture, explain
from deepmrf.layers import MeanField
from deepmrf.layers.crf import PRESETS, preset
from deepmrf.models.names import find_folder
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.predict.result import Segmentation
from deepmrf.predict.scales import Labels, enlarged_labels, enlarged_probabilities
from deepmrf.predict.segmenter import Segmenter, load
from deepmrf.refine.label_ids import LabelIds

Values = Mapping[str, float | None]
"""Values of controls, by name."""
OWN = "the model's own"
"""The MRF that a model was trained with."""
PRESET_NAMES = tuple(name for name, settings in PRESETS.items() if settings.get("dims", 2) == 2)
EXAMPLE = "example.jpg"
"""The picture in a model's folder."""
MAX_NETWORK_SIDE = 640
"""Pixels: what a network sees of a larger picture, where its training does not tell."""
MAX_VIEW_SIDE = 1024
"""Pixels: the longer side of what the browser shows."""
MAX_CACHED_FRAMES = 8
"""Frames of a clip whose network output is kept."""
MAX_PROBABILITIES = 1 << 27
"""Labels times pixels of probabilities to download."""


@dataclass
class NetworkOutput:
    """What the network says of one frame."""

    image: Tensor
    """(1, 3, h, w) of uint8: the frame as the network saw it."""
    log_p: Tensor
    """(1, L, h, w)."""
    picture: str
    """The frame as the browser shows it."""
    labels: Labels
    """At that size."""
    maps: str
    """The same, for the browser."""

    @property
    def nbytes(self) -> int:
        """Memory that this takes."""
        arrays = (self.image, self.log_p, *self.labels)
        return sum(array.nbytes for array in arrays) + len(self.picture) + len(self.maps)


@dataclass
class Session:
    """One person's picture or clip."""

    clip: Clip
    labels: LabelSet
    fields: dict[str, MeanField]
    """MRFs to choose from, by name."""
    run_network: Callable[[Bytes], tuple[Tensor, Tensor]] = field(repr=False)
    """From a frame (H, W, 3) to the image (1, 3, h, w) and the log-probabilities (1, L, h, w)."""
    computing: threading.Lock = field(repr=False)
    """One computation at a time uses all cores."""
    folder: Path
    """For files that exist while a download is prepared."""
    label_ids: LabelIds | None = None
    note: str = ""
    """What an uploaded prediction was taken for."""
    last: tuple[str, Values, int] = ("", {}, 0)
    """The MRF, its values and the frame that were shown last: what is downloaded."""
    outputs: OrderedDict[int, NetworkOutput] = field(default_factory=OrderedDict, repr=False)

    @property
    def nbytes(self) -> int:
        """Memory that this session takes, roughly."""
        return sum(output.nbytes for output in list(self.outputs.values())) + sum(f.nbytes for f in self.clip.frames)

    def view(self, chosen: str, values: Values, frame: int = 0) -> dict[str, Any]:
        """What the browser shows: the network's labels and those of the chosen MRF with these values, as plain JSON."""
        start = time.perf_counter()
        frame = min(max(int(frame), 0), len(self.clip.frames) - 1)
        with self.computing, torch.inference_mode():
            output = self._output(frame)
            result = enlarged_labels(self._refine(output, chosen, values), *output.labels[0].shape)
        self.last = (chosen, values, frame)
        return {
            "picture": output.picture,
            "names": list(self.labels.names),
            "colours": palette(self.labels),
            "network": output.maps,
            "result": maps_url(result),
            "note": self.note,
            **compare(len(self.labels), output.labels, result),
            "seconds": time.perf_counter() - start,
        }

    def _output(self, frame: int) -> NetworkOutput:
        if frame not in self.outputs:
            picture = shrunk(self.clip.frames[frame], MAX_VIEW_SIDE)
            image, log_p = self.run_network(self.clip.frames[frame])
            labels = enlarged_labels(log_p[0].softmax(0), *picture.shape[:2])
            self.outputs[frame] = NetworkOutput(image, log_p, picture_url(picture), labels, maps_url(labels))
            while len(self.outputs) > MAX_CACHED_FRAMES:
                self.outputs.popitem(last=False)
        self.outputs.move_to_end(frame)
        return self.outputs[frame]

    def _refine(self, output: NetworkOutput, chosen: str, values: Values) -> Tensor:
        """Probabilities (L, h, w)."""
        if chosen not in self.fields:
            raise ValueError(f"There is no MRF {chosen!r} here: choose one of {', '.join(self.fields)}.")
        mrf = adjust(self.fields[chosen], values)
        log_q = DeepParsingNetwork(nn.Identity(), mrf, self.labels).refined(output.log_p, output.image)
        return log_q[0].exp()

    def segmentation(self, frame: int | None = None, probabilities: bool = False) -> Segmentation:
        """The result as it was shown last, at the picture's own size; of another frame, if given."""
        chosen, values, shown = self.last
        frame = shown if frame is None else frame
        image = self.clip.frames[frame]
        height, width = image.shape[:2]
        with self.computing, torch.inference_mode():
            p = self._refine(self._output(frame), chosen, values)
            labels, confidence = enlarged_labels(p, height, width)
            if probabilities and len(self.labels) * height * width > MAX_PROBABILITIES:
                raise ValueError(f"The probabilities of {width} x {height} pixels are too many: use a smaller one.")
            large = enlarged_probabilities(p, height, width) if probabilities else None
        return Segmentation(labels, confidence, image, self.labels, large)


class Sessions:
    """All sessions of a server, and the models that they use; folder: for files while they are needed."""

    def __init__(
        self, models: Sequence[str], folder: Path, limits: Limits | None = None, device: str | None = None
    ) -> None:
        self.models, self.folder, self.limits, self.device = list(models), folder, limits or Limits(), device
        self.computing, self._lock = threading.Lock(), threading.Lock()
        self._segmenters: dict[str, Segmenter] = {}
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def segment(self, path: Path, model: str) -> str:
        """Begin a session with a picture or clip, which is deleted; returns the session's name."""
        with received(path):
            self._check_model(model)
            return self.segment_clip(read_clip(path, self.limits), model)

    def segment_clip(self, clip: Clip, model: str) -> str:
        """Begin a session with frames that were read already, such as those of another session."""
        segmenter = self.segmenter(model)
        own = segmenter.model.mean_field
        fields = ({} if own is None else {OWN: own}) | _presets(segmenter.labels, segmenter.device)
        network = partial(_run_network, segmenter)
        return self._add(Session(clip, segmenter.labels, fields, network, self.computing, self.folder))

    def refine(self, image: Path, prediction: Path) -> str:
        """Begin a session with a picture and its prediction, which are deleted; returns the session's name."""
        with received(image, prediction):
            given = read_prediction(image, prediction, self.limits)
            tensors = torch.from_numpy(given.image).permute(2, 0, 1)[None].contiguous(), given.log_p[None]
            clip, fields = Clip(given.name, [given.image], [Fraction(0)]), _presets(given.labels, torch.device("cpu"))
            session = Session(clip, given.labels, fields, lambda _: tensors, self.computing, self.folder)
            session.label_ids, session.note = given.label_ids, f"{prediction.name} was taken for {given.kind}."
            return self._add(session)

    def segment_example(self, model: str) -> str:
        """Begin a session with the picture that comes with the model."""
        self._check_model(model)
        path = find_folder(model) / EXAMPLE
        if not path.is_file():
            raise ValueError(f"No picture comes with the model {model}: choose one of your own.")
        return self.segment_clip(Clip(path.stem, [read_image(path)], [Fraction(0)]), model)

    def explain(self, model: str, name: str = "") -> str:
        """HTML: what the model's MRF has learned and, if a session is named, what it does to that picture."""
        pictures = []
        if name:
            clip, frame = self[name].clip, self[name].last[2]
            pictures = [Picture(clip.name, clip.frames[frame])]
        explained = copy.deepcopy(self.segmenter(model).model)  # it may move to another device
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            page = explain(explained, model, pictures, Path(folder)).page.read_text(encoding="utf-8")
        return re.sub(r" <a href='[^']+'>PNG</a>, <a href='[^']+'>SVG</a>", "", page)  # those files are gone

    def segmenter(self, model: str) -> Segmenter:
        """The model of that name, read once."""
        self._check_model(model)
        with self._lock:
            if model not in self._segmenters:
                segmenter = load(model, device=self.device)
                segmenter.size = segmenter.size or MAX_NETWORK_SIDE
                self._segmenters[model] = segmenter
            return self._segmenters[model]

    def _check_model(self, model: str) -> None:
        if model not in self.models:
            raise ValueError(f"There is no model {model!r} here: choose one of {', '.join(self.models)}.")

    def _add(self, session: Session) -> str:
        name = secrets.token_urlsafe(16)
        with self._lock:
            self._sessions[name] = session
        self[name]  # makes room for it
        return name

    def close(self, name: str | None) -> None:
        """Forget a session, if it is there."""
        with self._lock:
            self._sessions.pop(name or "", None)

    def __getitem__(self, name: str) -> Session:
        with self._lock:
            if name not in self._sessions:
                raise KeyError("This picture is no longer here: drop it again.")
            self._sessions.move_to_end(name)
            while len(self._sessions) > 1 and self.nbytes > self.limits.session_bytes:
                self._sessions.popitem(last=False)
            return self._sessions[name]

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """Memory that all sessions take, roughly."""
        return sum(session.nbytes for session in self._sessions.values())


def _run_network(segmenter: Segmenter, frame: Bytes) -> tuple[Tensor, Tensor]:
    seen = np.ascontiguousarray(segmenter.shrunk(frame).transpose(2, 0, 1)[None])
    image = torch.from_numpy(seen).to(segmenter.device)
    return image, segmenter.model.log_unary(image)


def _presets(labels: LabelSet, device: torch.device) -> dict[str, MeanField]:
    return {f"dense CRF: {name}": preset(name, len(labels)).to(device) for name in PRESET_NAMES}
