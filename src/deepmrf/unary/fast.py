"""Fast, a unary network for CPUs and phones: EfficientNet-Lite (ImageNet) and a small decoder.

    stride     2    4    8    16   32
    encoder    16   24   40   112  320      Lite0: inverted residual blocks, ReLU6, no squeeze-and-excite
    decoder    48   96   128  128  128      upsampled coarser map plus the encoder's map; labels at stride 2 (or 4, 8)

Geometry: TensorFlow's "same" padding puts the odd pixel of a strided filter behind the image, so cell i of stride s is
centred on pixel s i + s - 1. This holds for every image size here, odd ones too, and upsampling follows it exactly
(`align`): cell i of a map is cell 2 i + 1 of the map twice as large.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepmrf.unary.imagenet import Loaded, read, transfer
from deepmrf.unary.network import Network, Normalise, UShapedNetwork

STAGES = ((3, 1, 1), (3, 2, 6), (5, 2, 6), (3, 2, 6), (5, 1, 6), (5, 2, 6), (3, 1, 6))
"""EfficientNet-Lite: filter size, stride and expansion of each stage."""
LAST_STAGES = (0, 1, 2, 4, 6)
"""The last stage at strides 2, 4, 8, 16 and 32."""
ENCODERS = {
    0: ((1, 2, 2, 3, 3, 4, 1), (16, 24, 40, 80, 112, 192, 320)),
    1: ((1, 3, 3, 4, 4, 5, 1), (16, 24, 40, 80, 112, 192, 320)),
    2: ((1, 3, 3, 4, 4, 5, 1), (16, 24, 48, 88, 120, 208, 352)),
}
"""Blocks and channels of each stage, by the number of the EfficientNet-Lite."""
NORM_MOMENTUM = 0.01
"""EfficientNet's momentum of batch norm."""


class Unit(nn.Module):
    """Convolution, batch norm, and ReLU6 if asked. Strided ones pad as TensorFlow does."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        activate: bool = True,
    ) -> None:
        super().__init__()
        # With stride 2, the filter also runs one step early, and that output is cut off: cheaper than a padded copy.
        padding = dilation * (size // 2) + (stride - 1)
        self.convolution = nn.Conv2d(
            inputs, outputs, size, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=False
        )
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=NORM_MOMENTUM)
        self.activate = activate
        self.packed: tuple[Tensor, Tensor] | None = None
        """What `pack` gave, of a network for inference; None: weights and bias are computed at each call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:  # convolves and activates at once: a pass over the maps less, the same numbers
            activation = ("hardtanh", [0.0, 6.0]) if self.activate else ("none", [])
            convolve = torch.ops.mkldnn._convolution_pointwise
            return self._cropped(convolve(x, *self.packed, *self._geometry(), *activation, ""))
        if self.training:
            x = self.norm(self._convolve(x, self.convolution.weight, None))
        else:
            x = self._convolve(x, *self.folded())
        # Not in place in a traced graph: writing through the crop would become a scatter.
        return functional.relu6(x, inplace=not torch.compiler.is_compiling()) if self.activate else x

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return weights and bias with batch norm in them: it is linear, but for training."""
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None  # BatchNorm2d tracks both
        assert variance is not None
        scale = self.norm.weight * torch.rsqrt(variance + self.norm.eps)
        shift = self.norm.bias - mean * scale
        return self.convolution.weight * scale[:, None, None, None], shift

    def pack(self, weight: Tensor, bias: Tensor) -> None:
        """Keep these for inference on a CPU, in the order in which oneDNN reads them."""
        self.packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *self._geometry(), None), bias

    def _geometry(self) -> tuple[Any, ...]:
        filters = self.convolution
        return filters.padding, filters.stride, filters.dilation, filters.groups

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding, stride, dilation, groups = self._geometry()
        return self._cropped(functional.conv2d(x, weight, bias, stride, padding, dilation, groups))

    def _cropped(self, x: Tensor) -> Tensor:
        return x[..., 1:, 1:] if self.convolution.stride[0] == 2 else x


class Block(nn.Module):
    """An inverted residual block: expand, filter each channel, project back; plus the input where shapes allow."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = Unit(inputs, inner, 1) if expansion > 1 else nn.Identity()
        self.depthwise = Unit(inner, inner, size, stride=stride, groups=inner)
        self.project = Unit(inner, outputs, 1, activate=False)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


class EfficientNetLite(nn.Module):
    """x (B, 3, H, W) -> maps at strides 2, 4, 8, 16 and 32 with `channels`; sizes are rounded up."""

    def __init__(self, lite: int = 0) -> None:
        """lite: a key of ENCODERS."""
        super().__init__()
        if lite not in ENCODERS:
            raise ValueError(f"lite={lite!r} is unknown: there are EfficientNet-Lite {', '.join(map(str, ENCODERS))}.")
        counts, channels = ENCODERS[lite]
        self.channels = [channels[stage] for stage in LAST_STAGES]
        self.last_blocks = [sum(counts[: stage + 1]) - 1 for stage in LAST_STAGES]
        self.stem = Unit(3, 32, 3, stride=2)
        blocks, inputs = [], 32
        for count, outputs, (filter_size, stride, expansion) in zip(counts, channels, STAGES, strict=True):
            for index in range(count):
                blocks.append(Block(inputs, outputs, filter_size, stride if index == 0 else 1, expansion))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        maps = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.last_blocks:
                maps.append(x)
        return maps


def separable(inputs: int, outputs: int, size: int = 3, dilation: int = 1) -> nn.Sequential:
    """Return a depthwise and a 1 x 1 convolution: a convolution at a fraction of its cost."""
    return nn.Sequential(
        Unit(inputs, inputs, size, groups=inputs, dilation=dilation, activate=False), Unit(inputs, outputs, 1)
    )


def align(maps: Tensor, factor: int, size: Sequence[int]) -> Tensor:
    """Resize bilinearly to `factor` times the size, cropped to `size`: cell i goes to factor * i + factor - 1."""
    height, width = maps.shape[-2:]
    # A copy of the first row and column stands for cell -1, which goes to pixel -1: corners then map to corners.
    padded = functional.pad(maps, (1, 0, 1, 0), mode="replicate")
    larger = functional.interpolate(
        padded, size=(factor * height + 1, factor * width + 1), mode="bilinear", align_corners=True
    )
    return larger[..., 1 : size[0] + 1, 1 : size[1] + 1]


class Context(nn.Module):
    """Add surroundings at two distances and the image's mean: (B, inputs, H, W) -> (B, outputs, H, W)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.reduce = Unit(inputs, outputs, 1)
        self.near, self.far = separable(outputs, outputs, 5), separable(outputs, outputs, 5, dilation=2)
        self.whole = nn.Conv2d(outputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.reduce(x)
        return x + self.near(x) + self.far(x) + self.whole(x.mean((2, 3), keepdim=True))  # type: ignore[no-any-return]


class Up(nn.Module):
    """Halve the stride: coarse (B, inputs, h, w) and the encoder's map (B, skip, H, W) -> (B, outputs, H, W)."""

    def __init__(self, inputs: int, skip: int, outputs: int, *refine: nn.Module) -> None:
        super().__init__()
        # Reduce channels before upsampling, on a quarter of the cells.
        self.reduce = Unit(inputs, outputs, 1, activate=False) if inputs != outputs else nn.Identity()
        self.lateral = Unit(skip, outputs, 1, activate=False)
        self.refine = nn.Sequential(*refine)

    def forward(self, coarse: Tensor, skip: Tensor) -> Tensor:
        joined = align(self.reduce(coarse), 2, skip.shape[-2:]) + self.lateral(skip)
        return self.refine(functional.relu6(joined, inplace=True))  # type: ignore[no-any-return]


class Fast(UShapedNetwork):
    """image (B, 3, H, W), floats in [0, 1] or uint8 -> logits (B, L, H, W).

    labels: L. width: the decoder's channels at strides 32, 16 and 8; 3/4 of it at 4 and 3/8 at 2.
    stride: where the decoder ends, 2, 4 or 8. The finest levels cost the most time, and an MRF repairs borders.
    zoom: enlarge images by this factor first, and shrink the logits back. The network finds small things better, also
    where it is zoomed only after its training at random scales (`zoom` of a recipe); time grows with the square.
    dropout: probability of dropping a channel before the last layer, while training.
    norm_momentum: momentum of batch norm's running statistics; short trainings from scratch need more than 0.01.
    lite: the encoder, EfficientNet-Lite 0, 1 or 2; the larger, the slower and the better.
    mirror: average the logits of the image and of its mirror image, in twice the time; training sees each as it comes.
    """

    name = "fast"
    STRIDES = (2, 4, 8)

    def __init__(
        self,
        labels: int,
        *,
        width: int = 128,
        dropout: float = 0.1,
        stride: int = 2,
        norm_momentum: float = NORM_MOMENTUM,
        zoom: float = 1,
        lite: int = 0,
        mirror: bool = False,
    ) -> None:
        super().__init__(labels, width, dropout, stride, zoom)
        self.mirror = mirror
        if width % 8:
            raise ValueError(f"width={width} must be a multiple of 8: the finer levels have 3/4 and 3/8 of it.")
        self.norm_momentum = norm_momentum
        self.normalise = Normalise((127.0,) * 3, (128.0,) * 3, (0.0, 255.0))
        self.lite, self.encoder = lite, EfficientNetLite(lite)
        *skips, coarsest = self.encoder.channels
        fine, finest = width * 3 // 4, width * 3 // 8
        self.context = Context(coarsest, width)
        self.decoder = nn.ModuleList(
            [
                Up(width, skips[3], width, Unit(width, width, 3), Unit(width, width, 3)),
                Up(width, skips[2], width, Unit(width, width, 3), Unit(width, width, 3)),
                Up(width, skips[1], fine, Unit(fine, fine, 3), separable(fine, fine, 5)),
                Up(fine, skips[0], finest, Unit(finest, finest, 3), Unit(finest, finest, 3)),
            ][: 4 - self.STRIDES.index(stride)]
        )
        channels = (finest, fine, width)[self.STRIDES.index(stride)]
        self.classify = nn.Sequential(nn.Dropout2d(dropout), nn.Conv2d(channels, labels, 1))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = norm_momentum

    def encode(self, image: Tensor) -> list[Tensor]:
        # Depthwise filters are faster on CPUs in channels-last memory.
        *maps, coarsest = self.encoder(image.contiguous(memory_format=torch.channels_last))
        return [*maps, self.context(coarsest)]  # (B, width, H / 32, W / 32)

    def upsample(self, logits: Tensor, size: Sequence[int]) -> Tensor:
        return align(logits, self.stride, size)

    @torch.no_grad()
    def in_bfloat16(self) -> Network:
        network = super().in_bfloat16()
        packs = has_packed_filters() and next(self.parameters()).device.type == "cpu"
        for own, unit in zip(self.modules(), network.modules(), strict=True):
            if packs and isinstance(own, Unit) and isinstance(unit, Unit):  # folded in float32, and once
                weight, bias = own.folded()
                unit.pack(weight.bfloat16().contiguous(memory_format=torch.channels_last), bias.bfloat16())
        return network

    def load_imagenet(self, path: str | os.PathLike[str]) -> Loaded:
        """Load ImageNet's EfficientNet-Lite into the encoder from a safetensors file (`_conv_stem.weight`, ...)."""
        return transfer(self, path, read(path), imagenet_names(self.encoder))


def has_packed_filters() -> bool:
    """Does this PyTorch have the operators of oneDNN that `Unit.pack` needs? It does not document them."""
    operators = ("_reorder_convolution_weight", "_convolution_pointwise")
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and all(hasattr(torch.ops.mkldnn, name) for name in operators)


def imagenet_names(encoder: EfficientNetLite) -> dict[str, str]:
    """Map the usual names of EfficientNet-Lite's tensors to those of Fast."""
    units = {"_conv_stem": ("_bn0", "encoder.stem")}
    for index, block in enumerate(encoder.blocks):
        for number, part in enumerate(("expand", "depthwise", "project")):
            if isinstance(getattr(block, part), Unit):
                block_name = f"_blocks.{index}."
                units[f"{block_name}_{part}_conv"] = (f"{block_name}_bn{number}", f"encoder.blocks.{index}.{part}")
    names = {}
    for convolution, (norm, unit) in units.items():
        names[f"{convolution}.weight"] = f"{unit}.convolution.weight"
        for kind in ("weight", "bias", "running_mean", "running_var"):
            names[f"{norm}.{kind}"] = f"{unit}.norm.{kind}"
    return names
