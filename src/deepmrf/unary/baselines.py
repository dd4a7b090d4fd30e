"""Baselines, all on VGG-16: FCN-8s, SegNet, Dilation8 and DeepLab-LargeFOV.

FCN8s (Long, Shelhamer and Darrell, 2015) adds scores at strides 32, 16 and 8:

    pool5 -> fc6 7 x 7 -> fc7 -> scores at stride 32
                                 x 2, + scores of pool4 = stride 16
                                                          x 2, + scores of pool3 = stride 8
                                                                                   x 8, the image's size

The two upsamplings by 2 are learned and start bilinear; that by 8 is bilinear. The scores of pool4 and pool3 start at
zero. fc6 is padded by 3 cells, where the published network pads the image by 100 pixels.

SegNet (Badrinarayanan, Kendall and Cipolla, 2017) is VGG-16 and its mirror image, joined by indices:

    stride     1    2    4    8    16   32
    encoder    64   128  256  512  512       VGG-16's groups with batch norm, then maxima of 2 x 2 and where they were
    decoder    L    64   128  256  512       values go back to where the maxima were, zeros elsewhere; convolutions

A group of the decoder has as many convolutions as the encoder's, and its last one gives the channels of the next group.

Dilation8 (Yu and Koltun, 2016) is VGG16 of vgg16.py, then a context module on the scores:

    layer      1    2    3    4    5    6    7    8
    filter     3    3    3    3    3    3    3    1
    dilation   1    1    2    4    8    16   1    1
    sees       3    5    9    17   33   65   67   67     cells of stride 8

Every layer of the context module has L channels and starts as the identity. Its rectifiers cut negative scores, and a
label that is cut everywhere cannot learn. So the front end's scores start at INITIAL_SCORE, an offset of all labels
that softmax does not see, and both parts learn together.

DeepLab (Chen et al., 2015) differs from VGG16 in two points: fc6 has 3 x 3 filters at dilation 12, and the last two
poolings stay, 3 x 3 at stride 1. Published DeepLab has a dense CRF behind it: `deepmrf.dense_crf`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmrf.unary.network import enlarge
from deepmrf.unary.vgg16 import (
    FC6_SIZE,
    GROUPS,
    STRIDE,
    VGG16,
    VGGNetwork,
    classifier,
    convolution,
    convolutions,
    fully_connected,
    groups,
    pooling,
)

DILATIONS = (1, 1, 2, 4, 8, 16, 1)
"""Dilations of the 3 x 3 filters of Dilation8's context module."""
INITIAL_SCORE = 5.0
"""The scores of all labels in front of that module before training."""


class Double(nn.ConvTranspose2d):
    """Twice the size, by a learned filter per label that starts bilinear: (B, L, h, w) -> (B, L, 2 h, 2 w)."""

    def __init__(self, labels: int) -> None:
        super().__init__(labels, labels, 4, stride=2, padding=1, bias=False)
        profile = torch.tensor([0.25, 0.75, 0.75, 0.25])
        with torch.no_grad():
            self.weight.copy_(torch.eye(labels)[..., None, None] * torch.outer(profile, profile))


class FCN8s(VGGNetwork):
    """FCN-8s, with the arguments of VGG16; 4096 channels as published."""

    name = "fcn8s"
    FULLY_CONNECTED = ("fc6.0", "fc7.0")

    def __init__(self, labels: int, *, channels: int = 1024, dropout: float = 0.5) -> None:
        super().__init__(labels, dropout, channels=channels)
        self.encoder, self.pool = groups(), pooling()
        self.fc6 = fully_connected(512, channels, FC6_SIZE, 1, dropout)
        self.fc7 = fully_connected(channels, channels, 1, 1, dropout)
        self.score = classifier(channels, labels)
        self.score_pool4, self.score_pool3 = classifier(512, labels, std=0), classifier(256, labels, std=0)
        self.upsample_pool5, self.upsample_pool4 = Double(labels), Double(labels)

    def forward(self, image: Tensor) -> Tensor:
        x, maps = self.normalise(image), []
        for group in self.encoder:
            x = self.pool(group(x))
            maps.append(x)  # strides 2, 4, 8, 16, 32
        scores = self.score(self.fc7(self.fc6(x)))  # (B, L, H / 32, W / 32)
        for upsample, score, features in (
            (self.upsample_pool5, self.score_pool4, maps[3]),
            (self.upsample_pool4, self.score_pool3, maps[2]),
        ):
            height, width = features.shape[-2:]
            scores = upsample(scores)[..., :height, :width] + score(features)
        return enlarge(scores, STRIDE, image.shape[-2:])  # (B, L, H, W)


def unpool(x: Tensor, indices: Tensor, size: Sequence[int]) -> Tensor:
    """Put pooled values (B, C, h, w) back to where they were in a map (B, C, *size), zeros elsewhere."""
    empty = x.new_zeros(*x.shape[:2], size[0] * size[1])
    return empty.scatter(2, indices.flatten(2), x.flatten(2)).view(*x.shape[:2], *size)


class SegNet(VGGNetwork):
    """SegNet, with the arguments of VGG16 but channels; without dropout as published."""

    name = "segnet"

    def __init__(self, labels: int, *, dropout: float = 0.0) -> None:
        super().__init__(labels, dropout)
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


def _mirrored(index: int) -> nn.Sequential:
    """Return the decoder's group for the encoder's group `index`; the last one lacks its last layer, the scores."""
    channels, count = GROUPS[index]
    group = convolutions(channels, channels, count - 1, norm=True)
    return group if index == 0 else nn.Sequential(*group, *convolutions(channels, GROUPS[index - 1][0], 1, norm=True))


def context_module(labels: int) -> nn.Sequential:
    """Return the context module on L score maps; before training it only cuts negative scores."""
    layers: list[nn.Module] = []
    for dilation in DILATIONS:
        layers += [_identity(labels, 3, dilation), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, _identity(labels, 1, 1))


def _identity(labels: int, size: int, dilation: int) -> nn.Conv2d:
    layer = convolution(labels, labels, size, dilation)
    nn.init.dirac_(layer.weight)
    return layer


class Dilation8(VGG16):
    """Dilation8, with the arguments of VGG16; 4096 channels as published."""

    name = "dilation8"

    def __init__(self, labels: int, *, channels: int = 1024, dropout: float = 0.5) -> None:
        super().__init__(labels, channels=channels, dropout=dropout)
        assert self.b11.bias is not None
        nn.init.constant_(self.b11.bias, INITIAL_SCORE)
        self.context = context_module(labels)

    def forward(self, image: Tensor) -> Tensor:
        return enlarge(self.context(self.scores(image)), STRIDE, image.shape[-2:])  # (B, L, H, W)


class DeepLab(VGG16):
    """DeepLab-LargeFOV, with the arguments of VGG16; 1024 channels as published."""

    name = "deeplab"
    FC6 = (3, 12)

    def __init__(self, labels: int, *, channels: int = 1024, dropout: float = 0.5) -> None:
        super().__init__(labels, channels=channels, dropout=dropout)
        self.smooth = nn.MaxPool2d(3, 1, padding=1)

    def features(self, image: Tensor) -> Tensor:
        x = self.b6(self.b5(self.b4(self.b3(self.b2(self.b1(self.normalise(image)))))))  # (B, 256, H / 8, W / 8)
        return self.smooth(self.b8(self.smooth(self.b7(x))))  # type: ignore[no-any-return]
