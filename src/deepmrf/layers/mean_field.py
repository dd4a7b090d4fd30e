"""One mean-field step of the paper's MRF (b12 to b15), to put behind any segmentation network.

    q[u, i] ~ exp( ln p[u, i] - min over k of sum over v, j of mu_k(u, v, j - i) t[v, j] )

p is the network's output (b11), t the triple penalty (b12, triple_penalty.py), mu_k the label contexts (b13 and b14,
label_contexts.py). Everything stays in log space: log q = log_softmax(ln o11 - o14). With more than one iteration,
q takes p's place in t, and p stays the unary term.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepmrf.layers.inputs import check_finite, check_image, check_maps, check_real
from deepmrf.layers.label_contexts import QUIET, LabelContexts
from deepmrf.layers.triple_penalty import Kernel, TriplePenalty

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
    features, spacing, average, smoothness, normalize, size: see TriplePenalty.

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
    ) -> None:
        super().__init__()
        if isinstance(labels, bool) or not isinstance(labels, int) or labels < 1:
            raise ValueError(f"labels={labels!r} must be how many labels there are, at least 1.")
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
            raise ValueError(f"iterations={iterations!r} must be at least 1: the paper uses one.")
        if unary not in ("softmax", "sigmoid"):
            raise ValueError(f"unary={unary!r} is unknown: choose 'softmax' or 'sigmoid'.")
        self.labels, self.dims, self.iterations, self.unary = labels, dims, iterations, unary
        self.settings: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in locals().items()
            if name not in ("self", "__class__")
        }
        """The constructor's arguments, as plain JSON."""
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
        )
        self.label_contexts: LabelContexts | None = None
        if contexts:
            self.label_contexts = LabelContexts(
                labels, contexts, context_size, dims=dims, rank=context_rank, stride=context_stride
            )
            self.label_contexts.reset_parameters(QUIET / self.triple_penalty.largest)
        else:
            nn.init.zeros_(self.triple_penalty.scale)  # t goes straight to the sum, and must start at nothing

    def forward(self, log_p: Tensor, image: Tensor | None = None) -> Tensor:
        check_maps("log_p", log_p, self.labels, self.dims, "labels")
        check_real("log_p", log_p)
        check_image(image if self.triple_penalty.features else None, log_p, self.triple_penalty.features, self.dims)
        check_finite("log_p", log_p)
        with torch.autocast(log_p.device.type, enabled=False):  # the sums lose too much in half precision
            return self._iterate(log_p, image).to(log_p.dtype)

    def _iterate(self, log_p: Tensor, image: Tensor | None) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(log_p.dtype, self.triple_penalty.scale.dtype), torch.float32)
        real = log_p.to(dtype)
        unary = real.log_softmax(1) if self.unary == "softmax" else real
        if not self.triple_penalty.features:
            image = None
        elif image is not None and image.dtype != torch.uint8:
            image = image.to(dtype)
        norms = self.triple_penalty.norms(unary, image)
        log_q = unary
        for _ in range(self.iterations):
            t = self.triple_penalty(log_q.exp(), image, norms)  # b12
            penalty = t if self.label_contexts is None else self.label_contexts(t)  # b13, b14
            energy = unary - penalty if torch.is_grad_enabled() else torch.sub(unary, penalty, out=penalty)
            log_q = energy.log_softmax(1)  # b15
        return log_q

    def compress(self, rank: int | None = None, stride: int = 1) -> MeanField:
        """A copy with cheaper label contexts; `label_contexts.error` says how near its patterns are."""
        if self.label_contexts is None:
            raise ValueError("This mean field has no label contexts to compress: it was built with contexts=0.")
        made = copy.deepcopy(self)
        made.label_contexts = self.label_contexts.compress(rank, stride)
        made.settings |= {"context_rank": rank, "context_stride": stride}
        return made

    def extra_repr(self) -> str:
        return f"labels={self.labels}, dims={self.dims}, iterations={self.iterations}, unary={self.unary!r}"
