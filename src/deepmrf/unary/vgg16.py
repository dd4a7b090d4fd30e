"""VGG16, the paper's unary network (b1 to b11 of Table 1): VGG-16 at stride 8, fc6 and fc7 as convolutions.

    group      b1   b2   b3   b4   b5   b6   b7   b8    b9    b10   b11
    layers     2    max  2    max  3    max  3    3     1     1     1
    filter     3    2    3    2    3    2    3    5     25    1     1
    channels   64   64   128  128  256  256  512  512   4096  4096  L
    size       512  256  256  128  128  64   64   64    64    64    512

VGG-16's poolings a8 and a10 are left out, so the filters behind them must skip pixels: the paper pads 3 x 3 filters
with zeros to 5 x 5, and fc6's 7 x 7 to 25 x 25. Here they are convolutions with dilation 2 and 4, which give the same
without multiplying by zeros. b11 gives logits, upsampled bilinearly; softmax or sigmoid follow in the MRF.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepmrf.layers.inputs import check_count
from deepmrf.unary.imagenet import Loaded, convolution_names, read, transfer, vgg16_names
from deepmrf.unary.images import IMAGENET_MEAN, IMAGENET_STD, Normalise, enlarge
from deepmrf.unary.network import Network, check_dropout

STRIDE = 8
"""Pixels of the image per cell of b7 to b11."""


def convolutions(inputs: int, outputs: int, count: int, dilation: int = 1, norm: bool = False) -> nn.Sequential:
    """Return a group of VGG-16: `count` convolutions of 3 x 3 with ReLU, and batch norm between them if asked."""
    layers: list[nn.Module] = []
    for index in range(count):
        layers.append(_convolution(inputs if index == 0 else outputs, outputs, 3, dilation))
        if norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def pooling() -> nn.MaxPool2d:
    """Maxima of 2 x 2 at stride 2; an odd last row or column is a cell of its own, so that one pixel is enough."""
    return nn.MaxPool2d(2, 2, ceil_mode=True)


class SparseConvolution(nn.Conv2d):
    """A dilated convolution; on a GPU it runs as a plain one on d x d interleaved grids.

    cuDNN is slow for fc6's 7 x 7 filter with dilation 4. On every fourth row and column it is a plain 7 x 7 filter.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.interleaved(x) if x.is_cuda and self.dilation[0] > 1 else super().forward(x)

    def interleaved(self, x: Tensor) -> Tensor:
        """Compute the same sums grid by grid."""
        step, (batch, channels, height, width) = self.dilation[0], x.shape
        x = functional.pad(x, (0, -width % step, 0, -height % step))
        rows, columns = x.shape[2] // step, x.shape[3] // step
        grids = x.view(batch, channels, rows, step, columns, step).permute(3, 5, 0, 1, 2, 4)  # (d, d, B, C, h, w)
        grids = grids.reshape(-1, channels, rows, columns)
        padding = [n // step for n in self.padding if isinstance(n, int)]
        y = functional.conv2d(grids, self.weight, self.bias, padding=padding)
        y = y.view(step, step, batch, -1, rows, columns).permute(2, 3, 4, 0, 5, 1)
        return y.reshape(batch, -1, rows * step, columns * step)[..., :height, :width]


def _convolution(inputs: int, outputs: int, size: int, dilation: int = 1) -> nn.Conv2d:
    convolution = SparseConvolution(inputs, outputs, size, padding=dilation * (size // 2), dilation=dilation)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")  # no batch norm follows to correct the scale
    assert convolution.bias is not None
    nn.init.zeros_(convolution.bias)
    return convolution


class VGG16(Network):
    """image (B, 3, H, W), floats in [0, 1] or uint8 -> logits (B, L, H, W).

    labels: L. channels: of b9 and b10, 4096 in the paper; 1024 is as good on most data, with a sixth of the parameters.
    dropout: probability of dropping a value behind b9 and b10, while training.
    """

    name = "vgg16"

    def __init__(self, labels: int, *, channels: int = 4096, dropout: float = 0.5) -> None:
        super().__init__()
        check_count("labels", labels)
        check_count("channels", channels)
        check_dropout(dropout)
        self.labels, self.channels, self.dropout = labels, channels, dropout
        self.normalise = Normalise(IMAGENET_MEAN, IMAGENET_STD)
        self.b1, self.b2 = convolutions(3, 64, 2), pooling()
        self.b3, self.b4 = convolutions(64, 128, 2), pooling()
        self.b5, self.b6 = convolutions(128, 256, 3), pooling()
        self.b7 = convolutions(256, 512, 3)
        self.b8 = convolutions(512, 512, 3, dilation=2)
        self.b9 = nn.Sequential(_convolution(512, channels, 7, dilation=4), nn.ReLU(inplace=True), nn.Dropout(dropout))
        self.b10 = nn.Sequential(_convolution(channels, channels, 1), nn.ReLU(inplace=True), nn.Dropout(dropout))
        self.b11 = nn.Conv2d(channels, labels, 1)
        nn.init.normal_(self.b11.weight, std=0.01)
        assert self.b11.bias is not None
        nn.init.zeros_(self.b11.bias)

    def forward(self, image: Tensor) -> Tensor:
        x = self.normalise(image)  # (B, 3, H, W)
        x = self.b6(self.b5(self.b4(self.b3(self.b2(self.b1(x))))))  # (B, 256, H / 8, W / 8)
        x = self.b11(self.b10(self.b9(self.b8(self.b7(x)))))  # (B, L, H / 8, W / 8)
        return enlarge(x, STRIDE, image.shape[-2:])  # (B, L, H, W)

    def load_imagenet(self, path: str | os.PathLike[str]) -> Loaded:
        """Load ImageNet's VGG-16 from a safetensors file with torchvision's names.

        b9 and b10 come from classifier.0 and classifier.3 if the file has them; with fewer channels, from evenly spaced
        filters of them. Otherwise b9 and b10 stay random, as b11 always does.
        """
        source = read(path)
        groups = {name: getattr(self, name) for name in ("b1", "b3", "b5", "b7", "b8")}
        names = vgg16_names(f"{group}.{conv}" for group in groups for conv in convolution_names(groups[group]))
        classifier = {
            f"classifier.{index}.{kind}": f"{group}.0.{kind}"
            for index, group in ((0, "b9"), (3, "b10"))
            for kind in ("weight", "bias")
        }
        if not all(name in source for name in classifier):
            return transfer(self, path, source, names)
        fc6, fc6_bias, fc7, fc7_bias = (source[name] for name in classifier)
        chosen = _choose(fc6, fc6_bias, fc7, fc7_bias, self.channels)
        source |= dict(zip(classifier, chosen, strict=True))
        adapted = classifier.values() if self.channels != len(fc6) else ()
        return transfer(self, path, source, names | classifier, adapted)


def _choose(
    fc6: Tensor, fc6_bias: Tensor, fc7: Tensor, fc7_bias: Tensor, channels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose `channels` evenly spaced filters of fc6, and inputs and outputs of fc7."""
    width = len(fc6)
    if channels > width:
        raise ValueError(f"The file has {width} filters, but the network has channels={channels}: use at most {width}.")
    index = torch.arange(channels) * width // channels
    # fc7 sums over fewer inputs: scale them up to keep the sum's size.
    fewer = fc7[index][:, index].float() * (width / channels)
    return fc6[index].view(-1, 512, 7, 7), fc6_bias[index], fewer[..., None, None], fc7_bias[index]
