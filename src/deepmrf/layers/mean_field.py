"""One mean-field step of the paper's MRF (b12 to b15), to put behind any segmentation network.

    q[u, i] ~ exp( ln p[u, i] - min over k of sum over v, j of mu_k(u, v, j - i) t[v, j] )

p is the network's output (b11), ln p divided by the temperature, t the triple penalty (b12, triple_penalty.py), mu_k
the label contexts (b13 and b14, label_contexts.py). Everything stays in log space: log q = log_softmax(ln o11 - o14).
With more than one iteration, q takes p's place in t, and p stays the unary term.

In a clip (dims=3, the first axis is time), a pixel's neighbours in other frames are those at the same place, a rigid
cube, or, with `flow`, those on its trajectory along the optical flow (linking.py). `inflate` makes a layer for clips of
a trained one for images; at first it gives each frame what that gave.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepmrf.flow import Flow
from deepmrf.layers.inputs import (
    check_finite,
    check_image,
    check_iterations,
    check_maps,
    check_real,
    check_temperature,
)
from deepmrf.layers.label_contexts import QUIET, LabelContexts
from deepmrf.layers.linking import Links
from deepmrf.layers.triple_penalty import Kernel, TriplePenalty
from deepmrf.ops.window import reaches

Unary = Literal["softmax", "sigmoid"]


class MeanField(nn.Module):
    """log_p (B, L, *S), image (B, F, *S) -> normalised log-probabilities (B, L, *S).

    labels: L. dims: how many spatial axes. The defaults are the paper's setting for images.
    window: of the triple penalty, pixels along each axis, one int or one per axis. kernel: "distance" (the paper's),
    "gaussian" (dense CRF's) or "learned" (a filter per position; give `size`). gate: the factor q[v, j].
    contexts: K patterns per label; 0 leaves b13 and b14 out, so that o14 = t. context_size: of the patterns.
    context_rank, context_stride: cheaper, approximate patterns; see LabelContexts and `compress`.
    iterations: how often the step is repeated, with the same parameters.
    unary: "softmax" for log-probabilities or logits, which are normalised first; "sigmoid" for ln sigmoid(logits), one
    independent probability per label, as in the paper's Table 1.
    temperature: log_p is divided by it. Networks are surer of new images than they should be, most of all after long
    training; above 1, the MRF has more say, and probabilities mean what they say. `deepmrf calibrate` finds it.
    features, spacing, average, smoothness, normalize, size, temporal: see TriplePenalty.

    Untrained, it returns its input (normalised): adding it to a trained network breaks nothing.
    """

    def __init__(
        self,
        labels: int,
        *,
        dims: int = 2,
        window: int | Sequence[int] = 50,
        contexts: int = 5,
        context_size: int | Sequence[int] = 9,
        context_rank: int | None = None,
        context_stride: int = 1,
        iterations: int = 1,
        kernel: Kernel = "distance",
        gate: bool = True,
        features: int = 3,
        unary: Unary = "softmax",
        spacing: Sequence[float] | None = None,
        average: bool = True,
        smoothness: bool = False,
        normalize: bool = False,
        size: int | Sequence[int] | None = None,
        temporal: bool = False,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        if isinstance(labels, bool) or not isinstance(labels, int) or labels < 1:
            raise ValueError(f"labels={labels!r} must be how many labels there are, at least 1.")
        if unary not in ("softmax", "sigmoid"):
            raise ValueError(f"unary={unary!r} is unknown: choose 'softmax' or 'sigmoid'.")
        self.labels, self.dims, self.unary = labels, dims, unary
        self.settings: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in locals().items()
            if name not in ("self", "__class__")
        }
        """The constructor's arguments, as plain JSON."""
        self.iterations, self.temperature = iterations, temperature
        self.triple_penalty = TriplePenalty(
            window,
            dims=dims,
            kernel=kernel,
            gate=gate,
            features=features,
            spacing=spacing,
            average=average,
            smoothness=smoothness,
            normalize=normalize,
            size=size,
            temporal=temporal,
        )
        self.label_contexts: LabelContexts | None = None
        if contexts:
            self.label_contexts = LabelContexts(
                labels, contexts, context_size, dims=dims, rank=context_rank, stride=context_stride
            )
            self.label_contexts.reset_parameters(QUIET / self.triple_penalty.largest)
        else:
            nn.init.zeros_(self.triple_penalty.scale)  # t goes straight to the sum, and must start at nothing

    @property
    def iterations(self) -> int:
        """How often the step is repeated; may be set at any time."""
        return int(self.settings["iterations"])

    @iterations.setter
    def iterations(self, value: int) -> None:
        self.settings["iterations"] = check_iterations(value)

    @property
    def temperature(self) -> float:
        """What log_p is divided by; may be set at any time."""
        return float(self.settings["temperature"])

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.settings["temperature"] = check_temperature(value)

    def tempered(self, log_p: Tensor) -> Tensor:
        """The unary term, ln p of b15: not normalised."""
        return log_p if self.temperature == 1 else log_p / self.temperature

    def belief(self, log_p: Tensor) -> Tensor:
        """What b12 takes for q at first."""
        return self._probabilities(self.tempered(log_p))

    def _probabilities(self, unary: Tensor) -> Tensor:
        return unary.softmax(1) if self.unary == "softmax" else unary.exp()

    def forward(self, log_p: Tensor, image: Tensor | None = None, flow: Flow | None = None) -> Tensor:
        check_maps("log_p", log_p, self.labels, self.dims, "labels")
        check_real("log_p", log_p)
        check_image(image if self.triple_penalty.features else None, log_p, self.triple_penalty.features, self.dims)
        check_finite("log_p", log_p)
        if image is not None and self.triple_penalty.features and image.is_floating_point():
            check_finite("image", image, either_way=True)
        if flow is not None:
            self._check_flow(flow, log_p)
        with torch.autocast(log_p.device.type, enabled=False):  # the sums lose too much in half precision
            return self._iterate(log_p, image, flow).to(log_p.dtype)

    def _check_flow(self, flow: Flow, log_p: Tensor) -> None:
        if not isinstance(flow, Flow):
            raise TypeError(f"flow is a {type(flow).__name__}: pass a deepmrf.flow.Flow, such as estimate(frames).")
        if self.dims != 3 or self.triple_penalty.kernel == "learned":
            raise ValueError(
                f"flow links the frames of clips, with kernels 'distance' and 'gaussian', but dims={self.dims}, "
                f"kernel={self.triple_penalty.kernel!r}: build the layer so, or `inflate` a trained one."
            )
        expected = (log_p.shape[0], *log_p.shape[2:])
        if flow.shape != expected:
            raise ValueError(
                f"flow is of clips (B, T, H, W) = {flow.shape}, but log_p of {expected}: estimate it on the same "
                "frames, at the same size."
            )
        if flow.forward.device != log_p.device:
            raise ValueError(f"flow is on {flow.forward.device}, log_p on {log_p.device}: move one with .to(device).")

    def _iterate(self, log_p: Tensor, image: Tensor | None, flow: Flow | None) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(log_p.dtype, self.triple_penalty.scale.dtype), torch.float32)
        # What all labels of a pixel have in common is lost in softmax, so that log_p need not be normalised for b15.
        log_q = unary = self.tempered(log_p.to(dtype))
        q = self._probabilities(unary)
        if not self.triple_penalty.features:
            image = None
        elif image is not None and image.dtype != torch.uint8:
            image = image.to(dtype)
        links = self._links(flow, dtype, log_p.shape[2])
        norms = self.triple_penalty.norms(unary, image, links)
        for iteration in range(self.iterations):
            t = self.triple_penalty(log_q.exp() if iteration else q, image, norms, links)  # b12
            log_q = self._update(unary, t, links)
        return log_q

    def _update(self, unary: Tensor, t: Tensor, links: Links | None = None) -> Tensor:
        penalty = t if self.label_contexts is None else self.label_contexts(t, links)  # b13, b14
        energy = unary - penalty if torch.is_grad_enabled() else torch.sub(unary, penalty, out=penalty)
        return energy.log_softmax(1)  # b15

    def from_penalty(self, log_p: Tensor, t: Tensor) -> Tensor:
        """b13 to b15 of the first iteration, b12 having given t = triple_penalty(belief(log_p), image) before."""
        check_maps("log_p", log_p, self.labels, self.dims, "labels")
        check_maps("t", t, self.labels, self.dims, "labels")
        with torch.autocast(log_p.device.type, enabled=False):
            return self._update(self.tempered(log_p), t.clone() if self.label_contexts is None else t)

    def _links(self, flow: Flow | None, dtype: torch.dtype, frames: int) -> Links | None:
        """What b12 and b13 see of other frames; None leaves clips and volumes to the operators as they are."""
        if flow is None:
            return Links(frames) if self.triple_penalty.temporal else None
        windows = [self.triple_penalty.window, *[c.size for c in (self.label_contexts,) if c is not None]]
        return Links.along(flow, dtype, *[reaches(window)[0] for window in windows])

    @torch.no_grad()
    def inflate(self, window_frames: int = 3, context_frames: int = 3, frame_spacing: float = 1.0) -> MeanField:
        """A layer for clips (B, L, T, H, W) of this one for images, whose weights become its centre slice.

        Untrained, it gives every frame what this layer gives it, with a flow and without: other frames weigh nothing in
        b12 (frame_weights = link_weights = 0) and b13 (patterns are 0 there). All learn from the first step on.
        window_frames, context_frames: how many frames b12 and b13 see; 2 is the frame and the one before it.
        frame_spacing: how many pixels of distance a frame is worth; time is no third direction of space, and nothing
        else says so. In the Gaussian kernel it only scales frame_weights, so it is learned anyway; in the distance
        kernel it adds to d(j, z).
        """
        contexts, old = self.label_contexts, self.triple_penalty
        if self.dims != 2 or old.kernel == "learned":
            raise ValueError(f"Only layers for images can be inflated: dims={self.dims}, kernel={old.kernel!r}.")
        if contexts is not None and (contexts.rank is not None or contexts.stride > 1):
            raise ValueError("Compressed contexts cannot be inflated: inflate the layer they came from.")
        settings = self.settings | {"dims": 3, "temporal": True}
        settings["window"] = [window_frames, *old.window]
        settings["spacing"] = [float(frame_spacing), *old.spacing]
        if contexts is not None:
            settings["context_size"] = [context_frames, *contexts.size]
        made = MeanField(**settings).to(old.scale)
        new = made.triple_penalty
        nothing = torch.zeros_like(new.frame_weights)
        new.load_state_dict(old.state_dict() | {"frame_weights": nothing, "link_weights": nothing})
        # What is averaged over, and the corner that distances are measured by, count the frames: take that out again.
        new.scale.mul_(old.share / new.share)
        if old.kernel == "distance":
            new.position.mul_(old.per_distance / new.per_distance)
        if contexts is not None and made.label_contexts is not None:
            made.label_contexts.weight.zero_()
            made.label_contexts.weight[:, :, context_frames // 2] = contexts.weight
            made.label_contexts.bias.copy_(contexts.bias)
        learned = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(learned.get(name, old.scale.requires_grad))  # the frames' own follow the scale
        return made

    def compress(self, rank: int | None = None, stride: int = 1) -> MeanField:
        """A copy with cheaper label contexts; `label_contexts.error` says how near its patterns are."""
        if self.label_contexts is None:
            raise ValueError("This mean field has no label contexts to compress: it was built with contexts=0.")
        made = copy.deepcopy(self)
        made.label_contexts = self.label_contexts.compress(rank, stride)
        made.settings |= {"context_rank": rank, "context_stride": stride}
        return made

    def extra_repr(self) -> str:
        said = f"labels={self.labels}, dims={self.dims}, iterations={self.iterations}, unary={self.unary!r}"
        return said if self.temperature == 1 else f"{said}, temperature={self.temperature:g}"
