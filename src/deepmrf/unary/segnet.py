"""SegNet (Badrinarayanan, Kendall and Cipolla, 2017), a baseline: VGG-16 and its mirror image, joined by indices.

    stride     1    2    4    8    16   32
    encoder    64   128  256  512  512       VGG-16's groups with batch norm, then maxima of 2 x 2 and where they were
    decoder    L    64   128  256  512       values go back to where the maxima were, zeros elsewhere; convolutions

A group of the decoder has as many convolutions as the encoder's, and its last one gives the channels of the next group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor, nn

from deepmrf.layers.inputs import check_count
from deepmrf.unary.imagenet import Loaded
from deepmrf.unary.images import IMAGENET_MEAN, IMAGENET_STD, Normalise
from deepmrf.unary.network import Network, check_dropout
from deepmrf.unary.vgg16 import GROUPS, classifier, convolutions, groups, load_vgg16


def unpool(x: Tensor, indices: Tensor, size: Sequence[int]) -> Tensor:
    """Put pooled values (B, C, h, w) back to where they were in a map (B, C, *size), zeros elsewhere."""
    empty = x.new_zeros(*x.shape[:2], size[0] * size[1])
    return empty.scatter(2, indices.flatten(2), x.flatten(2)).view(*x.shape[:2], *size)


class SegNet(Network):
    """image (B, 3, H, W), floats in [0, 1] or uint8 -> logits (B, L, H, W).

    labels: L. dropout: probability of dropping a channel before the labels' scores, while training; none as published.
    """

    name = "segnet"

    def __init__(self, labels: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        check_count("labels", labels)
        check_dropout(dropout)
        self.labels, self.dropout = labels, dropout
        self.normalise = Normalise(IMAGENET_MEAN, IMAGENET_STD)
        self.encoder = groups(norm=True)
        self.pool = nn.MaxPool2d(2, 2, ceil_mode=True, return_indices=True)
        self.decoder = nn.ModuleList([_mirrored(index) for index in reversed(range(len(GROUPS)))])
        self.score = nn.Sequential(nn.Dropout2d(dropout), classifier(GROUPS[0][0], labels, size=3))

    def forward(self, image: Tensor) -> Tensor:
        x, pooled = self.normalise(image), []
        for group in self.encoder:
            x = group(x)
            size = x.shape[-2:]
            x, indices = self.pool(x)
            pooled.append((indices, size))
        for group in self.decoder:
            x = group(unpool(x, *pooled.pop()))
        return self.score(x)  # type: ignore[no-any-return]  # (B, L, H, W)

    def load_imagenet(self, path: str | os.PathLike[str]) -> Loaded:
        """Load ImageNet's VGG-16 into the encoder from a safetensors file with torchvision's names."""
        return load_vgg16(self, path, ("encoder",))


def _mirrored(index: int) -> nn.Sequential:
    """Return the decoder's group for the encoder's group `index`; the last one lacks its last layer, the scores."""
    channels, count = GROUPS[index]
    group = convolutions(channels, channels, count - 1, norm=True)
    return group if index == 0 else nn.Sequential(*group, *convolutions(channels, GROUPS[index - 1][0], 1, norm=True))
