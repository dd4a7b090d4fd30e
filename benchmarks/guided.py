"""Guided: the network `fast` with an MRF that compares pixels by the network's own features besides colours.

    d(j, z) = exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2),    I = (red, green, blue, f_1 .. f_F)

The features f come from the encoder's maps at strides 2 and 4 and from a filter on the image itself, and learn with the
network. benchmarks/strides.py trains it beside the network alone. It is one module, so that `train(network=...)` takes
it for a network that returns logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepmrf.layers import MeanField
from deepmrf.training.mean_field import start_contexts
from deepmrf.unary.fast import Fast, align

WINDOW = 25
CONTEXTS = {"contexts": 3, "context_size": 9}
INITIAL_ATTRACTION = 2.0
"""What a label gains at first where all neighbours that look alike have it: features learn nothing behind zero."""
HEAD_CHANNELS = 16


class Guided(Fast):
    """image (B, 3, H, W), floats in [0, 1] or uint8 -> log-probabilities (B, L, H, W).

    guide: F, the number of features; 0 compares colours alone. seed: of the starting values of label contexts.
    alone: return the network's logits without the MRF; can be set at any time.
    """

    def __init__(self, labels: int, *, guide: int = 5, seed: int = 0, **options: Any) -> None:
        super().__init__(labels, **options)
        self.alone, self.guide, self.seed, self.options = False, guide, seed, options
        self.mrf = MeanField(
            labels, kernel="gaussian", normalize=True, gate=False, window=WINDOW, features=3 + guide, **CONTEXTS
        )
        contexts = self.mrf.label_contexts
        assert contexts is not None
        contexts.set_compatibility(-INITIAL_ATTRACTION * torch.eye(labels))
        start_contexts(contexts, seed)
        if guide:
            fine, coarse, *_ = self.encoder.channels
            self.of_fine, self.of_coarse = nn.Conv2d(fine, HEAD_CHANNELS, 1), nn.Conv2d(coarse, HEAD_CHANNELS, 1)
            self.of_image = nn.Conv2d(3, HEAD_CHANNELS, 3, padding=1)
            self.to_features = nn.Conv2d(HEAD_CHANNELS, guide, 3, padding=1)
            nn.init.normal_(self.to_features.weight, std=1e-2)
        self.maps: list[Tensor] = []

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"labels": self.labels, "guide": self.guide, "seed": self.seed, **self.options}

    def encode(self, image: Tensor) -> list[Tensor]:
        maps = super().encode(image)
        self.maps = [image, *maps[:2]] if self.guide and not self.alone else []
        return maps

    def forward(self, image: Tensor) -> Tensor:
        logits = super().forward(image)
        if self.alone:
            return logits
        colours = image.float() / 255 if image.dtype == torch.uint8 else image.float()
        if self.guide:
            colours = torch.cat([colours, self._features(image.shape[-2:]).float()], 1)
        return self.mrf(logits.float().log_softmax(1), colours)  # type: ignore[no-any-return]

    def _features(self, size: Any) -> Tensor:
        image, fine, coarse = self.maps
        self.maps = []
        at_stride_2 = self.of_fine(fine) + align(self.of_coarse(coarse), 2, fine.shape[-2:])
        joined = align(at_stride_2, 2, size) + self.of_image(image)
        return self.to_features(functional.relu(joined))  # type: ignore[no-any-return]
