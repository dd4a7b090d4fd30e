"""Dilation8 (Yu and Koltun, 2016), a baseline: VGG-16 at stride 8, then a context module on the scores.

    layer      1    2    3    4    5    6    7    8
    filter     3    3    3    3    3    3    3    1
    dilation   1    1    2    4    8    16   1    1
    sees       3    5    9    17   33   65   67   67     cells of stride 8

The front end is VGG16 of vgg16.py. Every layer of the context module has L channels and starts as the identity. Its
rectifiers cut negative scores, and a label that is cut everywhere cannot learn. So the front end's scores start at
INITIAL_SCORE, an offset of all labels that softmax does not see, and both parts learn together.
"""

from __future__ import annotations

from torch import Tensor, nn

from deepmrf.unary.images import enlarge
from deepmrf.unary.vgg16 import STRIDE, VGG16, convolution

DILATIONS = (1, 1, 2, 4, 8, 16, 1)
"""Dilations of the context module's 3 x 3 filters."""
INITIAL_SCORE = 5.0
"""The front end's scores of all labels before training."""


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
    """image (B, 3, H, W), floats in [0, 1] or uint8 -> logits (B, L, H, W).

    labels: L. channels: of fc6 and fc7, 4096 as published. dropout: probability of dropping a value behind them.
    """

    name = "dilation8"

    def __init__(self, labels: int, *, channels: int = 1024, dropout: float = 0.5) -> None:
        super().__init__(labels, channels=channels, dropout=dropout)
        assert self.b11.bias is not None
        nn.init.constant_(self.b11.bias, INITIAL_SCORE)
        self.context = context_module(labels)

    def forward(self, image: Tensor) -> Tensor:
        return enlarge(self.context(self.scores(image)), STRIDE, image.shape[-2:])  # (B, L, H, W)
