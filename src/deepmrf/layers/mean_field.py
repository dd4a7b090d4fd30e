"""MeanField: one mean-field step of the paper's MRF, b12 to b15, to put behind any segmentation network.

    q[u, i] ~ exp( ln p[u, i] - min over k of sum over v, j of mu_k(u, v, j - i) t[v, j] )

    b11   p, the network's output; ln p is divided by the temperature, and may be rescaled per label: label_scaling.py
    b12   t, the triple penalty: triple_penalty.py
    b13   the sum over v and j, and
    b14   the minimum over the label contexts k: label_contexts.py
    b15   log q = log_softmax(ln p - o14), in `_update` below

More than one iteration replaces p by q in t; p stays the unary term.

In clips (dims=3, the first axis is time), a pixel's neighbours in other frames are those at the same position (a rigid
cube) or, with `flow`, those on its trajectory (linking.py). With `temporal`, b15 also asks the pixel i' that shows the
same thing dt frames away, on the trajectory:

    log q[u, i] = log_softmax( ln p[u, i] - o14[u, i] + sum over dt of trajectory_weights[|dt| - 1] q[u, i'] )

`inflate` turns a trained layer for images into one for clips, which at first returns the same for each frame.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepmrf.flow import Flow
from deepmrf.flow.clip import Link
from deepmrf.layers import energy, inflate
from deepmrf.layers.all_pairs import AllPairs
from deepmrf.layers.inputs import (
    check_count,
    check_features,
    check_flow,
    check_frames,
    check_image,
    check_maps,
    check_real,
    check_scores,
    check_temperature,
    readable,
    warn_of_image,
    warn_of_scores,
)
from deepmrf.layers.label_contexts import INITIAL_WEIGHT, LabelContexts, default_context_size
from deepmrf.layers.label_scaling import LabelScaling
from deepmrf.layers.linking import Links, add_along, weigh
from deepmrf.layers.triple_penalty import Kernel, TriplePenalty, default_window
from deepmrf.ops.lattice.mean_field import mean_field as dense_mean_field
from deepmrf.ops.linked import Way
from deepmrf.ops.registry import needs_gradient
from deepmrf.ops.softmax import exp, log, log_softmax_of_difference, negative, softmax
from deepmrf.ops.window import Reach, reaches

Unary = Literal["softmax", "sigmoid"]
GLOBAL_REACH = 3
"""Widths of the position term beyond which edges of the global kernel are left out where an image is cut into tiles."""


class MeanField(nn.Module):
    """log_p (B, L, *S), image (B, F, *S) -> normalised log-probabilities (B, L, *S).

    labels: L. dims: number of spatial axes. The other defaults are the paper's.
    window: pixels along each axis that the triple penalty sees, an int or one per axis. None: 50 x 50 for images,
    3 x 50 x 50 for clips (`temporal`), 9 along each axis of volumes.
    contexts: K patterns per label; 0 leaves b13 and b14 out, so that o14 = t.
    context_size: pixels along each axis of a pattern. None: 9 x 9 for images, 3 x 7 x 7 for clips, 5 for volumes.
    context_rank, context_stride: cheaper, approximate patterns; see LabelContexts and `compress`.
    iterations: how often the step is repeated, with the same parameters.
    kernel: "distance" (the paper's), "gaussian" (dense CRF's, inside the window), "global" (the same over the whole
    image; no window) or "learned" (a filter per position; give `size`).
    gate: the factor q[v, j].
    unary: "softmax" for log-probabilities or logits, which are normalised first; "sigmoid" for ln sigmoid(logits), one
    independent probability per label, as in the paper's Table 1.
    temperature: log_p is divided by it. Networks are overconfident on new images; above 1, the MRF has more influence
    and the probabilities are better calibrated. `deepmrf calibrate` chooses it.
    label_scaling: log_p also gets a learned factor and summand per label; for unary="softmax". See LabelScaling.
    features, spacing, average, smoothness, normalize, size, temporal: see TriplePenalty.

    Untrained, it returns its normalised input: adding it to a trained network breaks nothing. The first call warns of
    input that seems to be in another unit (InputWarning); `mrf.check_values = False` turns that off. NaN, a pixel
    where all labels are -inf and features beyond 1e12 are errors: on the CPU at every call, elsewhere at the first.
    """

    check_values: bool = True
    """Does the next call look at its numbers, and warn where they seem to be in another unit? The first call sets this
    to False."""

    def __init__(
        self,
        labels: int,
        *,
        dims: int = 2,
        window: int | Sequence[int] | None = None,
        contexts: int = 5,
        context_size: int | Sequence[int] | None = None,
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
        label_scaling: bool = False,
    ) -> None:
        super().__init__()
        check_count("labels", labels)
        if unary not in ("softmax", "sigmoid"):
            raise ValueError(f"unary={unary!r} is unknown: choose 'softmax' or 'sigmoid'.")
        if not isinstance(label_scaling, bool) or (label_scaling and unary == "sigmoid"):
            raise ValueError(f"label_scaling={label_scaling!r} must be True or False, and False with unary='sigmoid'.")
        if window is None:
            window = 1 if kernel == "global" else default_window(dims, temporal)
        context_size = default_context_size(dims, temporal) if context_size is None else context_size
        self.labels, self.dims, self.unary = labels, dims, unary
        self.settings: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in locals().items()
            if name not in ("self", "__class__")
        }
        """The constructor's arguments as plain JSON, defaults filled in."""
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
            self.label_contexts.reset_parameters(INITIAL_WEIGHT / self.triple_penalty.gain)
        else:
            nn.init.zeros_(self.triple_penalty.scale)  # o14 = t must start at zero
        self.label_scaling = LabelScaling(labels) if label_scaling else None
        if temporal:
            self.trajectory_weights = nn.Parameter(torch.zeros_like(self.triple_penalty.frame_weights))

    @property
    def iterations(self) -> int:
        """How often the step is repeated; can be set at any time."""
        return int(self.settings["iterations"])

    @iterations.setter
    def iterations(self, value: int) -> None:
        self.settings["iterations"] = check_count("iterations", value)

    @property
    def temperature(self) -> float:
        """The divisor of log_p; can be set at any time."""
        return float(self.settings["temperature"])

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.settings["temperature"] = check_temperature(value)

    def reach(self) -> list[Reach]:
        """How far the layer looks along each axis, (pixels before, pixels after): farther pixels change nothing.

        Each iteration looks as far as the window (b12) and the patterns (b13). Patterns at a stride look as far in
        blocks of `stride` pixels, plus the block of the pixel and the one it is interpolated with. `normalize` looks
        one window farther: the norm of a neighbour counts its own neighbours, and does not change with the iterations.
        Not so along frames that meet on trajectories alone, where a norm counts pixels of its own frame.
        The global kernel looks everywhere; beyond this reach, what it sees counts for little.
        """
        window = reaches(self.triple_penalty.window)
        if self.triple_penalty.kernel == "global":
            penalty = self.triple_penalty
            widths = [penalty.log_position_width, *([penalty.log_smooth_width] if penalty.smoothness else [])]
            width = max(float(width.detach().exp()) for width in widths)
            window = [(n, n) for n in (math.ceil(GLOBAL_REACH * width / s) for s in self.triple_penalty.spacing)]
        patterns, stride = [(0, 0)] * self.dims, 1
        if self.label_contexts is not None:
            patterns, stride = reaches(self.label_contexts.size), self.label_contexts.stride

        def along(window: int, pattern: int, norm: int) -> int:
            if stride > 1:
                pattern = stride * (-(-pattern // stride) + 2)
            if self.triple_penalty.kernel == "global":
                return window + self.iterations * pattern
            return self.iterations * (window + pattern) + (norm if self.triple_penalty.normalize else 0)

        # A norm looks as far to both sides, in even windows, too.
        reach = [(along(w[0], p[0], max(w)), along(w[1], p[1], max(w))) for w, p in zip(window, patterns, strict=True)]
        return [window[0], *reach[1:]] if self.links_frames_alone() else reach

    def tempered(self, log_p: Tensor) -> Tensor:
        """Return the unary term of b15, ln p at the temperature and scaled per label; not normalised."""
        log_p = log_p if self.temperature == 1 else log_p / self.temperature
        return log_p if self.label_scaling is None else self.label_scaling(log_p)

    def belief(self, log_p: Tensor) -> Tensor:
        """Return the probabilities that b12 takes for q in the first iteration."""
        return self._probabilities(self.tempered(log_p))

    def _probabilities(self, unary: Tensor) -> Tensor:
        return softmax(unary) if self.unary == "softmax" else exp(unary)

    def forward(
        self,
        log_p: Tensor,
        image: Tensor | None = None,
        flow: Flow | None = None,
        frames: slice | None = None,
    ) -> Tensor:
        """frames: of a clip, the frames to return; the others are only looked at."""
        check_maps("log_p", log_p, self.labels, self.dims, "labels")
        check_real("log_p", log_p)
        check_image(image if self.triple_penalty.features else None, log_p, self.triple_penalty.features, self.dims)
        self._check_numbers(log_p, image)
        if flow is not None:
            check_flow(flow, log_p, self.dims, self.triple_penalty.kernel)
        if frames is not None:
            check_frames(frames, log_p, self.dims)
        # In this order: a compiled graph must not depend on check_values.
        if not torch.compiler.is_compiling() and self.check_values and readable(log_p):
            self._check_units(log_p, image)
        with torch.autocast(log_p.device.type, enabled=False):  # half precision is not enough for the sums
            return self._iterate(log_p, image, flow, frames).to(log_p.dtype)

    def _check_numbers(self, log_p: Tensor, image: Tensor | None, wait: bool = False) -> None:
        check_scores(log_p, wait)
        if image is not None and self.triple_penalty.features and image.is_floating_point():
            check_features(image, wait)

    def _check_units(self, log_p: Tensor, image: Tensor | None) -> None:
        self.check_values = False
        if log_p.device.type != "cpu":
            self._check_numbers(log_p, image, wait=True)
        warn_of_scores(log_p, self.unary == "sigmoid")
        penalty = self.triple_penalty
        is_rgb = penalty.features == 3 and (self.dims == 2 or penalty.temporal)
        if image is not None and is_rgb and image.is_floating_point() and readable(image):
            gaussian = penalty.kernel in ("gaussian", "global")
            warn_of_image(image, float(penalty.log_colour_width.detach().exp()) if gaussian else None)

    def _iterate(self, log_p: Tensor, image: Tensor | None, flow: Flow | None, frames: slice | None = None) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(log_p.dtype, self.triple_penalty.scale.dtype), torch.float32)
        # b15's softmax removes what all labels of a pixel have in common, so log_p need not be normalised here.
        log_q = unary = self.tempered(log_p.to(dtype))
        if not self.triple_penalty.features:
            image = None
        elif image is not None and image.dtype != torch.uint8:
            image = image.to(dtype)
        wanted = frames if self._frames_are_independent() else None
        links = self._links(flow, dtype, log_p.shape[2], wanted)
        norms = self.triple_penalty.norms(unary, image, links)
        if isinstance(norms, AllPairs) and (compatibility := self._dense_crf_compatibility(unary, norms)) is not None:
            return self._infer(unary, norms, compatibility)
        q = self._probabilities(unary)
        unary = unary if wanted is None else unary[:, :, wanted]
        for iteration in range(self.iterations):
            q = exp(log_q) if iteration else q
            t = self.triple_penalty(q, image, norms, links)  # b12
            log_q = self._update(unary, t, links, q)
        return log_q if frames is None or wanted is not None else log_q[:, :, frames]

    def _frames_are_independent(self) -> bool:
        """Can some frames of a clip be computed without the results of others? Not if a later step looks at them."""
        return self._looks_once_at_other_frames() and not self.triple_penalty.normalize

    def _looks_once_at_other_frames(self) -> bool:
        """Is b12 of the only iteration, and what is added to b14, all that looks at other frames?"""
        penalty, contexts = self.triple_penalty, self.label_contexts
        return penalty.temporal and (contexts is None or contexts.size[0] == 1) and self.iterations == 1

    def _dense_crf_compatibility(self, unary: Tensor, pairs: AllPairs) -> Tensor | None:
        """C where this layer is a dense CRF, no gradient is needed and nothing else is added; else None."""
        contexts, penalty = self.label_contexts, self.triple_penalty
        if contexts is None or penalty.gate or self.unary != "softmax":
            return None
        if contexts.contexts > 1 or set(contexts.size) != {1} or contexts.rank is not None or contexts.stride > 1:
            return None
        features = () if pairs.edges.features is None else (pairs.edges.features,)
        if needs_gradient(unary, *features, *self.parameters()) or bool(contexts.bias.any() or penalty.shift.any()):
            return None
        matrix = contexts.weight.view(self.labels, self.labels)
        # Probabilities sum to one, so that a cost of 1 for every other label is as good as -1 for the same label.
        potts = bool((matrix == 1 - torch.eye(self.labels).to(matrix)).all())
        return -penalty.scale if potts else penalty.scale * matrix

    def _infer(self, unary: Tensor, pairs: AllPairs, compatibility: Tensor) -> Tensor:
        """All iterations of a dense CRF by the operator that fuses them."""
        smooth_weight = self.triple_penalty.smooth_weight if self.triple_penalty.smoothness else None
        energy = negative(unary).flatten(2)
        q = dense_mean_field(energy, pairs.terms(compatibility.to(energy), smooth_weight), self.iterations)
        return log(q).view(unary.shape)

    def _update(self, unary: Tensor, t: Tensor, links: Links | None = None, q: Tensor | None = None) -> Tensor:
        penalty = t if self.label_contexts is None else self.label_contexts(t, links)  # b13, b14
        if links is not None and q is not None and self.triple_penalty.temporal and weigh(self.trajectory_weights):
            # o14 less what the pixels on trajectories say of each label
            penalty = links.added(penalty, q, -self.trajectory_weights, reaches(self.triple_penalty.window)[0])
        return log_softmax_of_difference(unary, penalty)  # b15

    def over_time(self) -> list[nn.Parameter]:
        """The parameters that only weigh other frames: none without `temporal`."""
        return [self.triple_penalty.frame_weights, self.trajectory_weights] if self.triple_penalty.temporal else []

    def links_frames_alone(self) -> bool:
        """Do the frames of a clip meet on trajectories alone? Then `linked_frame` computes one by itself."""
        return self._looks_once_at_other_frames() and not self.triple_penalty.sees_windows_of_other_frames()

    def linked_frame(
        self, log_p: Tensor, image: Tensor | None, beliefs: Mapping[int, Tensor], links: Mapping[int, Link]
    ) -> Tensor:
        """Return log_q (B, L, H, W) of one frame, as `forward` does of a clip, where `links_frames_alone`.

        beliefs: `belief` of the frames dt frames away, {dt: (B, L, H, W)}; 0 is the frame itself.
        links: the flow to those that the window holds, (B, 2, H, W), and where it is reliable (B, 1, H, W),
        {dt: (flow, reliable)}.
        """
        with torch.autocast(log_p.device.type, enabled=False):
            t = self.triple_penalty.of_frame(beliefs[0][:, :, None], None if image is None else image[:, :, None])
            penalty = (t if self.label_contexts is None else self.label_contexts(t, Links(1)))[:, :, 0]
            ways = [Way(-self.trajectory_weights[abs(dt) - 1], beliefs[dt], *link) for dt, link in links.items()]
            unary = self.tempered(log_p.to(t.dtype))
            return log_softmax_of_difference(unary, add_along(penalty, ways)).to(log_p.dtype)

    def energy(self, labels: Tensor, log_p: Tensor, image: Tensor | None = None) -> Tensor:
        """Return the paper's E(y) of label maps (B, *S), a number per image (B,); energy.py says how pairs count."""
        return energy.energy(self, labels, log_p, image)

    def free_energy(self, log_q: Tensor, log_p: Tensor, image: Tensor | None = None) -> Tensor:
        """Return F(Q) = KL(Q || P) - ln Z of log_q (B, L, *S), a number per image (B,)."""
        return energy.free_energy(self, log_q, log_p, image)

    def from_penalty(self, log_p: Tensor, t: Tensor) -> Tensor:
        """Return b13 to b15 of the first iteration, given b12's t = triple_penalty(belief(log_p), image)."""
        check_maps("log_p", log_p, self.labels, self.dims, "labels")
        check_maps("t", t, self.labels, self.dims, "labels")
        with torch.autocast(log_p.device.type, enabled=False):
            return self._update(self.tempered(log_p), t.clone() if self.label_contexts is None else t)

    def _links(self, flow: Flow | None, dtype: torch.dtype, frames: int, wanted: slice | None) -> Links | None:
        """Return the links of a clip's frames; None for images, volumes and rigid cubes without frame weights."""
        if flow is None:
            return Links(frames, wanted=wanted) if self.triple_penalty.temporal else None
        windows = [self.triple_penalty.window, *[c.size for c in (self.label_contexts,) if c is not None]]
        return Links.along(flow, dtype, *[reaches(window)[0] for window in windows], wanted=wanted)

    @property
    def can_inflate(self) -> bool:
        """Is this a layer for images whose window can span frames?"""
        return self.dims == 2 and self.triple_penalty.kernel not in ("learned", "global")

    def inflate(self, window_frames: int = 3, context_frames: int = 3, frame_spacing: float = 1.0) -> MeanField:
        """Return a layer for clips (B, L, T, H, W) whose centre slice has the weights of this layer for images.

        Untrained, it returns for every frame what this layer returns, with a flow and without: other frames have weight
        zero in b12 (frame_weights), b13 (patterns) and b15 (trajectory_weights). All get gradients from the first step.
        window_frames, context_frames: number of frames that b12 and b13 see; 2 is the frame and the one before it.
        frame_spacing: how many pixels of distance a frame counts as. In the Gaussian kernel it only scales
        frame_weights, which are learned; in the distance kernel it adds to d(j, z).
        """
        return inflate.inflate(self, window_frames, context_frames, frame_spacing)

    def compress(self, rank: int | None = None, stride: int = 1) -> MeanField:
        """Return a copy with cheaper label contexts; `label_contexts.error` is the relative error of its patterns."""
        if self.label_contexts is None:
            raise ValueError("This mean field has no label contexts to compress: it was built with contexts=0.")
        cheaper = copy.deepcopy(self)
        cheaper.label_contexts = self.label_contexts.compress(rank, stride)
        cheaper.settings |= {"context_rank": rank, "context_stride": stride}
        return cheaper

    def extra_repr(self) -> str:
        text = f"labels={self.labels}, dims={self.dims}, iterations={self.iterations}, unary={self.unary!r}"
        return text if self.temperature == 1 else f"{text}, temperature={self.temperature:g}"
