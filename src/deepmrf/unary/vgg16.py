"""VGG16, the paper's unary network (b1 to b11 of Table 1): VGG-16 at stride 8, fc6 and fc7 as convolutions.

    group      b1   b2   b3   b4   b5   b6   b7   b8    b9    b10   b11
    layers     2    max  2    max  3    max  3    3     1     1     1
    filter     3    2    3    2    3    2    3    5     25    1     1
    channels   64   64   128  128  256  256  512  512   4096  4096  L
    size       512  256  256  128  128  64   64   64    64    64    512

VGG-16's poolings a8 and a10 are left out, so the filters behind them must skip pixels: the paper pads 3 x 3 filters
with zeros to 5 x 5, and fc6's 7 x 7 to 25 x 25. Here they are convolutions with dilation 2 and 4, which give the same
without multiplying by zeros. b11 gives logits, upsampled bilinearly; softmax or sigmoid follow in the MRF.

The parts of VGG-16 below, `groups`, `fully_connected` and `load_vgg16`, also serve the networks strong, fcn8s, segnet,
dilation8 and deeplab.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepmrf.unary.imagenet import VGG16_CONVOLUTIONS, Loaded, read, transfer
from deepmrf.unary.network import IMAGENET_MEAN, IMAGENET_STD, Network, Normalise, enlarge

STRIDE = 8
"""Pixels of the image per cell of b7 to b11."""
GROUPS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and convolutions of VGG-16's groups; a pooling stands between two groups."""
FC6_SIZE = 7
"""Rows and columns of the filters of VGG-16's fc6."""


def convolutions(inputs: int, outputs: int, count: int, dilation: int = 1, norm: bool = False) -> nn.Sequential:
    """Return a group of VGG-16: `count` convolutions of 3 x 3 with ReLU, and batch norm between them if asked."""
    layers: list[nn.Module] = []
    for index in range(count):
        layers.append(convolution(inputs if index == 0 else outputs, outputs, 3, dilation))
        if norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def groups(norm: bool = False, last_dilation: int = 1) -> nn.ModuleList:
    """Return the five groups of VGG-16's convolutions; last_dilation: of the fifth group's filters."""
    inputs = (3, *[channels for channels, _ in GROUPS])
    dilations = (1, 1, 1, 1, last_dilation)
    return nn.ModuleList(
        [convolutions(inputs[i], outputs, n, dilations[i], norm) for i, (outputs, n) in enumerate(GROUPS)]
    )


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


def convolution(inputs: int, outputs: int, size: int, dilation: int = 1) -> nn.Conv2d:
    """Return a convolution whose output has its input's size, for a rectifier behind it."""
    layer = SparseConvolution(inputs, outputs, size, padding=dilation * (size // 2), dilation=dilation)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # no batch norm follows to correct the scale
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def fully_connected(inputs: int, channels: int, size: int, dilation: int, dropout: float) -> nn.Sequential:
    """Return fc6 or fc7 as a convolution, with rectifier and dropout."""
    return nn.Sequential(convolution(inputs, channels, size, dilation), nn.ReLU(inplace=True), nn.Dropout(dropout))


def classifier(channels: int, labels: int, size: int = 1, std: float = 0.01) -> nn.Conv2d:
    """Return the convolution that scores labels; std: of its initial weights."""
    layer = nn.Conv2d(channels, labels, size, padding=size // 2)
    nn.init.normal_(layer.weight, std=std)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


class VGGNetwork(Network):
    """A network on VGG-16's groups, with ImageNet's normalisation and weights."""

    ENCODER: ClassVar[tuple[str, ...]] = ("encoder",)
    """The modules that hold the thirteen convolutions."""
    FULLY_CONNECTED: ClassVar[tuple[str, ...]] = ()
    """fc6 and fc7."""

    def __init__(self, labels: int, dropout: float, **counts: int) -> None:
        super().__init__(labels, dropout, **counts)
        self.normalise = Normalise(IMAGENET_MEAN, IMAGENET_STD)

    def load_imagenet(self, path: str | os.PathLike[str]) -> Loaded:
        """Load ImageNet's VGG-16 from a safetensors file with torchvision's names.

        fc6 and fc7 come from classifier.0 and classifier.3 if the file has them; with fewer channels, from evenly
        spaced filters of them. Otherwise they stay random, as what scores labels always does.
        """
        return load_vgg16(self, path, self.ENCODER, self.FULLY_CONNECTED)


class VGG16(VGGNetwork):
    """image (B, 3, H, W), floats in [0, 1] or uint8 -> logits (B, L, H, W).

    labels: L. channels: of b9 and b10, 4096 in the paper; 1024 is as good on most data, with a sixth of the parameters.
    dropout: probability of dropping a value behind b9 and b10, while training.
    """

    name = "vgg16"
    ENCODER = ("b1", "b3", "b5", "b7", "b8")
    FULLY_CONNECTED = ("b9.0", "b10.0")
    FC6: ClassVar[tuple[int, int]] = (FC6_SIZE, 4)
    """Size and dilation of b9's filters."""

    def __init__(self, labels: int, *, channels: int = 4096, dropout: float = 0.5) -> None:
        super().__init__(labels, dropout, channels=channels)
        self.b1, self.b3, self.b5, self.b7, self.b8 = groups(last_dilation=2)
        self.b2, self.b4, self.b6 = pooling(), pooling(), pooling()
        self.b9 = fully_connected(512, channels, *self.FC6, dropout)
        self.b10 = fully_connected(channels, channels, 1, 1, dropout)
        self.b11 = classifier(channels, labels)

    def features(self, image: Tensor) -> Tensor:
        """b1 to b8: images (B, 3, H, W) -> (B, 512, H / 8, W / 8)."""
        x = self.normalise(image)  # (B, 3, H, W)
        x = self.b6(self.b5(self.b4(self.b3(self.b2(self.b1(x))))))  # (B, 256, H / 8, W / 8)
        return self.b8(self.b7(x))  # type: ignore[no-any-return]

    def scores(self, image: Tensor) -> Tensor:
        """b1 to b11 before upsampling: (B, L, H / 8, W / 8)."""
        return self.b11(self.b10(self.b9(self.features(image))))  # type: ignore[no-any-return]

    def forward(self, image: Tensor) -> Tensor:
        return enlarge(self.scores(image), STRIDE, image.shape[-2:])  # (B, L, H, W)


def load_vgg16(
    network: nn.Module, path: str | os.PathLike[str], encoder: Iterable[str], fully: Sequence[str] = ()
) -> Loaded:
    """See VGGNetwork: encoder and fully are its ENCODER and FULLY_CONNECTED."""
    source = read(path)
    parts = {f"{name}.{layer}": part for name in encoder for layer, part in network.get_submodule(name).named_modules()}
    convolutions = [name for name, part in parts.items() if isinstance(part, nn.Conv2d)]
    names = _tensor_names([f"features.{index}" for index in VGG16_CONVOLUTIONS], convolutions)
    dense = _tensor_names(["classifier.0", "classifier.3"][: len(fully)], fully)
    if not dense or not all(name in source for name in dense):
        return transfer(network, path, source, names)
    channels, _, size, _ = network.get_submodule(fully[0]).weight.shape  # type: ignore[misc]
    tensors = [source[name] for name in dense]
    source |= dict(zip(dense, _choose(tensors, channels, size), strict=True))
    adapted = dense.values() if channels != len(tensors[0]) or size != FC6_SIZE else ()
    return transfer(network, path, source, names | dense, adapted)


def _tensor_names(layers: Sequence[str], modules: Sequence[str]) -> dict[str, str]:
    """Map the names of weights and biases in torchvision's layers to those in our modules."""
    return {f"{a}.{kind}": f"{b}.{kind}" for a, b in zip(layers, modules, strict=True) for kind in ("weight", "bias")}


def _choose(tensors: Sequence[Tensor], channels: int, size: int) -> tuple[Tensor, ...]:
    """Choose `channels` evenly spaced filters of fc6, `size` x `size` cells of each, and inputs and outputs of fc7."""
    fc6, fc6_bias, fc7, fc7_bias = tensors
    width = len(fc6)
    if channels > width:
        raise ValueError(f"The file has {width} filters, but the network has channels={channels}: use at most {width}.")
    index = torch.arange(channels) * width // channels
    cells = torch.linspace(0, FC6_SIZE - 1, size).long()
    filters = fc6[index].view(-1, 512, FC6_SIZE, FC6_SIZE)[..., cells, :][..., cells]
    # fc7 sums over fewer inputs: scale them up to keep the sum's size.
    fewer = fc7[index][:, index].float() * (width / channels)
    return filters, fc6_bias[index], fewer[..., None, None], fc7_bias[index]
