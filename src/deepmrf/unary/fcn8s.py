"""FCN-8s (Long, Shelhamer and Darrell, 2015), a baseline: VGG-16 with scores at strides 32, 16 and 8.

    pool5 -> fc6 7 x 7 -> fc7 -> scores at stride 32
                                 x 2, + scores of pool4 = stride 16
                                                          x 2, + scores of pool3 = stride 8
                                                                                   x 8, the image's size

The two upsamplings by 2 are learned and start bilinear; that by 8 is bilinear. The scores of pool4 and pool3 start at
zero. fc6 is padded by 3 cells, where the published network pads the image by 100 pixels.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from deepmrf.unary.imagenet import Loaded
from deepmrf.unary.images import enlarge
from deepmrf.unary.vgg16 import FC6_SIZE, STRIDE, VGGNetwork, classifier, fully_connected, groups, load_vgg16, pooling


class Double(nn.ConvTranspose2d):
    """Twice the size, by a learned filter per label that starts bilinear: (B, L, h, w) -> (B, L, 2 h, 2 w)."""

    def __init__(self, labels: int) -> None:
        super().__init__(labels, labels, 4, stride=2, padding=1, bias=False)
        profile = torch.tensor([0.25, 0.75, 0.75, 0.25])
        with torch.no_grad():
            self.weight.copy_(torch.eye(labels)[..., None, None] * torch.outer(profile, profile))


class FCN8s(VGGNetwork):
    """image (B, 3, H, W), floats in [0, 1] or uint8 -> logits (B, L, H, W).

    labels: L. channels: of fc6 and fc7, 4096 as published. dropout: probability of dropping a value behind them.
    """

    name = "fcn8s"

    def __init__(self, labels: int, *, channels: int = 1024, dropout: float = 0.5) -> None:
        super().__init__(labels, channels, dropout)
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

    def load_imagenet(self, path: str | os.PathLike[str]) -> Loaded:
        """Load ImageNet's VGG-16 from a safetensors file with torchvision's names; fc6 and fc7 if the file has them."""
        return load_vgg16(self, path, ("encoder",), ("fc6.0", "fc7.0"))
