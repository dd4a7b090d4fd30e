"""Strong, a unary network for accuracy: VGG-16's encoder (ImageNet), a context block and a U-shaped decoder.

    stride     1    2    4    8    16
    encoder    64   128  256  512  512      VGG-16's five groups of convolutions
    context                        256      1 x 1 and dilated 3 x 3 convolutions side by side, and the image's mean
    decoder    64   128  192  256           upsampled x 2, beside the encoder's map of the same size, two convolutions;
                                            labels at stride 1 (or 2, 4, 8)

VGG-16 has no batch norm, and its activations grow from group to group. So every map that leaves the encoder first
passes a 1 x 1 convolution with batch norm. ImageNet's features stay untouched.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmrf.unary.imagenet import Loaded
from deepmrf.unary.network import IMAGENET_MEAN, IMAGENET_STD, Normalise, UShapedNetwork, enlarge
from deepmrf.unary.vgg16 import groups, load_vgg16, pooling

CONTEXT_DILATIONS = (2, 4, 8)


def _unit(inputs: int, outputs: int, size: int = 3, dilation: int = 1) -> nn.Sequential:
    """Convolution, batch norm, rectifier."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=dilation * (size // 2), dilation=dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Context(nn.Module):
    """Join surroundings at several distances and the image's mean: (B, inputs, H, W) -> (B, outputs, H, W)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        part = outputs // 2
        self.reduce = _unit(inputs, outputs, 1)
        self.near = _unit(outputs, part, 1)
        self.around = nn.ModuleList([_unit(outputs, part, dilation=dilation) for dilation in CONTEXT_DILATIONS])
        # No batch norm: a batch of one image has one value per channel, and no statistics.
        self.whole = nn.Sequential(nn.Conv2d(outputs, part, 1), nn.ReLU(inplace=True))
        self.join = _unit(part * (len(CONTEXT_DILATIONS) + 2), outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.reduce(x)
        mean = self.whole(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        return self.join(torch.cat([self.near(x), *[dilated(x) for dilated in self.around], mean], 1))  # type: ignore[no-any-return]


class Up(nn.Module):
    """Halve the stride: coarse (B, inputs, h, w) and the encoder's map (B, skip, H, W) -> (B, outputs, H, W)."""

    def __init__(self, inputs: int, skip: int, outputs: int) -> None:
        super().__init__()
        self.lateral = _unit(skip, outputs, 1)
        self.merge = nn.Sequential(_unit(inputs + outputs, outputs), _unit(outputs, outputs))

    def forward(self, coarse: Tensor, skip: Tensor) -> Tensor:
        larger = enlarge(coarse, 2, skip.shape[-2:])
        return self.merge(torch.cat([larger, self.lateral(skip)], 1))  # type: ignore[no-any-return]


class Strong(UShapedNetwork):
    """image (B, 3, H, W), floats in [0, 1] or uint8 -> logits (B, L, H, W).

    labels: L. width: the decoder's channels at full resolution; it has 2, 3 and 4 times as many at strides 2, 4 and 8.
    dropout: probability of dropping a channel after the context block and before the last layer, while training.
    encoder_norm: batch norm behind each of VGG-16's convolutions too, which then relearns their scale.
    stride: where the decoder ends, 1, 2, 4 or 8. The finest levels cost the most time, and an MRF repairs borders.
    zoom: enlarge images by this factor first, and shrink the logits back. The network finds small things better, also
    where it is zoomed only after its training at random scales (`zoom` of a recipe); time grows with the square.
    """

    name = "strong"
    STRIDES = (1, 2, 4, 8)

    def __init__(
        self,
        labels: int,
        *,
        width: int = 64,
        dropout: float = 0.1,
        encoder_norm: bool = False,
        stride: int = 1,
        zoom: float = 1,
    ) -> None:
        super().__init__(labels, width, dropout, stride, zoom)
        self.encoder_norm = encoder_norm
        self.normalise = Normalise(IMAGENET_MEAN, IMAGENET_STD)
        self.encoder = groups(norm=encoder_norm)
        self.pool = pooling()
        self.context = Context(512, 4 * width)
        self.bottom_dropout = nn.Dropout2d(dropout)
        self.decoder = nn.ModuleList(
            [
                Up(4 * width, 512, 4 * width),
                Up(4 * width, 256, 3 * width),
                Up(3 * width, 128, 2 * width),
                Up(2 * width, 64, width),
            ][: 4 - self.STRIDES.index(stride)]
        )
        channels = (1 + self.STRIDES.index(stride)) * width
        self.classify = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(channels, labels, 1))

    def encode(self, image: Tensor) -> list[Tensor]:
        maps: list[Tensor] = []
        for group in self.encoder:
            maps.append(group(self.pool(maps[-1]) if maps else image))
        return [*maps[:-1], self.bottom_dropout(self.context(maps[-1]))]  # (B, 4 width, H / 16, W / 16)

    def upsample(self, logits: Tensor, size: Sequence[int]) -> Tensor:
        return logits if self.stride == 1 else enlarge(logits, self.stride, size)

    def load_imagenet(self, path: str | os.PathLike[str]) -> Loaded:
        """Load ImageNet's VGG-16 into the encoder from a safetensors file with torchvision's names."""
        return load_vgg16(self, path, ("encoder",))
