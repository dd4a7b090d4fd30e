"""DeepLab-LargeFOV (Chen et al., 2015), a baseline: VGG-16 at stride 8 with a sparse fc6.

It differs from VGG16 of vgg16.py in two points: fc6 has 3 x 3 filters at dilation 12, and the last two poolings stay,
3 x 3 at stride 1. Published DeepLab has a dense CRF behind it: `deepmrf.dense_crf`.
"""

from __future__ import annotations

from torch import Tensor, nn

from deepmrf.unary.vgg16 import VGG16


class DeepLab(VGG16):
    """image (B, 3, H, W), floats in [0, 1] or uint8 -> logits (B, L, H, W).

    labels: L. channels: of fc6 and fc7, 1024 as published. dropout: probability of dropping a value behind them.
    """

    name = "deeplab"
    FC6 = (3, 12)

    def __init__(self, labels: int, *, channels: int = 1024, dropout: float = 0.5) -> None:
        super().__init__(labels, channels=channels, dropout=dropout)
        self.smooth = nn.MaxPool2d(3, 1, padding=1)

    def features(self, image: Tensor) -> Tensor:
        x = self.b6(self.b5(self.b4(self.b3(self.b2(self.b1(self.normalise(image)))))))  # (B, 256, H / 8, W / 8)
        return self.smooth(self.b8(self.smooth(self.b7(x))))  # type: ignore[no-any-return]
