"""What unary networks share: their arguments, checks and normalisation of images, zoom and upsampling of maps."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepmrf.layers.inputs import check_count

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
NO_ZOOM = Fraction(1)


class Normalise(nn.Module):
    """Images (B, F, H, W), floats in [0, 1] or uint8, -> (image - mean) / std, in the network's dtype.

    mean, std: one number per channel, in units of value_range. value_range: the values of black and white before mean
    and std; (0, 255) for networks trained on bytes. The constants belong to the architecture, so state_dict does not
    hold them.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], value_range: tuple[float, float] = (0.0, 1.0)
    ) -> None:
        super().__init__()
        if not mean or len(mean) != len(std) or not all(s > 0 for s in std):
            raise ValueError(f"mean={mean!r} and std={std!r} must hold one number per channel, and std be positive.")
        black, white = value_range
        if black == white:
            raise ValueError(f"value_range={value_range!r} must be two different numbers, such as (0, 1) or (0, 255).")
        scale = [(white - black) / s for s in std]  # not by PyTorch, which imports a compiler for sums without memory
        shift = [(black - m) / s for m, s in zip(mean, std, strict=True)]
        self.register_buffer("scale", torch.tensor(scale).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("shift", torch.tensor(shift).view(1, -1, 1, 1), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        check_image(image, self.scale.shape[1])
        real = image.to(self.scale.dtype)
        if image.dtype == torch.uint8:
            real = real / 255
        return real * self.scale + self.shift


def check_image(image: Tensor, channels: int) -> None:
    """Require (B, channels, H, W), floats in [0, 1] or uint8, with at least one pixel."""
    if not isinstance(image, Tensor):
        raise TypeError(f"image is a {type(image).__name__}: pass a torch.Tensor (torch.from_numpy makes one).")
    shape = tuple(image.shape)
    if image.dim() != 4 or image.shape[1] != channels:
        remedy = "pass such a batch"
        if image.dim() == 3 and image.shape[0] == channels:
            remedy = "add the batch axis with [None]"
        elif image.dim() in (3, 4) and image.shape[-1] == channels:
            remedy = "bring the channels forward with .permute" + ("(0, 3, 1, 2)" if image.dim() == 4 else "(2, 0, 1)")
        raise ValueError(f"image must have shape (B, {channels}, H, W), but has {shape}: {remedy}.")
    if image.numel() == 0:
        raise ValueError(f"image has shape {shape}, which holds no pixels: pass at least one along every axis.")
    if image.dtype != torch.uint8 and not image.is_floating_point():
        raise TypeError(f"image is {image.dtype}: pass floats in [0, 1] or uint8.")
    # Only on the CPU: elsewhere it would wait for the device. Augmentation may overshoot [0, 1] a little.
    if image.is_floating_point() and image.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (float(x) for x in torch.aminmax(image.detach()))
        if not (low >= -0.5 and high <= 1.5):
            remedy = "divide bytes by 255 or pass them as uint8"
            if low < 0:
                remedy = "pass it as it was before it was normalised, by ImageNet's mean and std or by others"
            raise ValueError(
                f"image holds values from {low:.3g} to {high:.3g}, but must be in [0, 1] and not normalised: {remedy}."
            )


def check_zoom(value: float) -> Fraction:
    """Return a zoom from 1 to 4 as a fraction of small numbers, so that sizes are exact, also in exported graphs."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 4:
        raise ValueError(f"zoom={value!r} must be a number from 1 to 4: how many times larger the network sees images.")
    return Fraction(value).limit_denominator(8)


def zoomed(maps: Tensor, zoom: Fraction) -> Tensor:
    """Resize to `zoom` times the size, rounded up."""
    # Not -(-n // m): exported graphs round quotients towards zero.
    size = [(n * zoom.numerator + zoom.denominator - 1) // zoom.denominator for n in maps.shape[-2:]]
    return maps if zoom == 1 else _resampled(maps, zoom, size)


def unzoomed(maps: Tensor, size: Sequence[int], zoom: Fraction) -> Tensor:
    """Resize to 1 / `zoom` times the size, cropped to `size`."""
    return maps if zoom == 1 else _resampled(maps, 1 / zoom, size)


def _resampled(maps: Tensor, factor: Fraction, size: Sequence[int]) -> Tensor:
    """Resize bilinearly to `factor` times the size, cropped to `size`: pixel i is sampled at (i + 1/2) / factor - 1/2.

    The weights repeat every few pixels and are exact. Those of `interpolate` differ from program to program in the
    fifth digit, because it counts from the image's edge; networks amplify such differences.
    """
    outputs, inputs = factor.numerator, factor.denominator  # `inputs` pixels become `outputs` pixels
    # Where the pixels of a cell are sampled, counted from one pixel of padding.
    positions = [Fraction(2 * phase + 1, 2) / factor + Fraction(1, 2) for phase in range(outputs)]
    cells = [(n + inputs - 1) // inputs for n in maps.shape[-2:]]
    maps = functional.pad(maps, (1, inputs, 1, inputs), mode="replicate")
    for axis in (-2, -1):
        padded = maps.narrow(axis, 0, cells[axis] * inputs + 2)
        cuts = [slice(start, start - inputs - 1 or None, inputs) for start in range(inputs + 2)]  # a pixel of each cell
        pixels = [padded[..., cut, :] if axis == -2 else padded[..., cut] for cut in cuts]
        sampled = [torch.lerp(pixels[int(at)], pixels[int(at) + 1], float(at % 1)) for at in positions]
        maps = torch.stack(sampled, axis).flatten(axis - 1, axis).narrow(axis, 0, size[axis])
    return maps


def enlarge(maps: Tensor, factor: int, size: Sequence[int]) -> Tensor:
    """Resize bilinearly to `factor` times the size, cropped to `size`; cell i covers the pixels from factor * i on.

    Resizing directly to a size that `factor` does not divide would shift every cell but the first.
    """
    height, width = maps.shape[-2:]
    larger = functional.interpolate(maps, size=(factor * height, factor * width), mode="bilinear", align_corners=False)
    return larger[..., : size[0], : size[1]]


class Network(nn.Module):
    """A unary network, with an attribute per argument of its constructor; counts: whole numbers, at least 1."""

    name: ClassVar[str]
    labels: int
    width: int
    channels: int

    def __init__(self, labels: int, dropout: float, **counts: int) -> None:
        super().__init__()
        for name, value in {"labels": labels, **counts}.items():
            check_count(name, value)
            setattr(self, name, value)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout!r} must be a probability, at least 0 and under 1.")
        self.dropout = dropout

    def in_bfloat16(self) -> Network:
        """Return a copy for inference that computes in bfloat16."""
        return copy.deepcopy(self).eval().bfloat16()

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments: a network built with them has the same architecture."""
        values = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {name: float(value) if isinstance(value, Fraction) else value for name, value in values.items()}


class UShapedNetwork(Network):
    """image (B, 3, H, W) -> logits (B, L, H, W), through maps of ever coarser strides and back to ever finer ones."""

    mirror: bool = False
    """Average the logits of the image and of its mirror image, but for training."""
    STRIDES: ClassVar[tuple[int, ...]]
    """Strides at which the decoder can end."""
    normalise: nn.Module
    decoder: nn.ModuleList
    """Each takes the last map and the encoder's map of half its stride."""
    classify: nn.Module

    def __init__(self, labels: int, width: int, dropout: float, stride: int, zoom: float) -> None:
        super().__init__(labels, dropout, width=width)
        if stride not in self.STRIDES:
            choices = ", ".join(map(str, self.STRIDES))
            raise ValueError(f"stride={stride!r} is unknown: the decoder can end at {choices}.")
        self.stride, self.zoom = stride, check_zoom(zoom)

    @abstractmethod
    def encode(self, image: Tensor) -> list[Tensor]:
        """Return maps of a normalised image from fine to coarse; the last sees the whole image."""

    @abstractmethod
    def upsample(self, logits: Tensor, size: Sequence[int]) -> Tensor:
        """Resize logits at `stride` to the size of the image."""

    def forward(self, image: Tensor) -> Tensor:
        if not self.mirror or self.training:
            return self._of_image(image)
        both = self._of_image(torch.cat([image, image.flip(-1)]))  # (2 B, L, H, W)
        logits, mirrored = both.view(2, -1, *both.shape[1:]).unbind()
        return (logits + mirrored.flip(-1)) / 2

    def _of_image(self, image: Tensor) -> Tensor:
        larger = zoomed(self.normalise(image), self.zoom)  # (B, 3, H zoom, W zoom)
        *maps, x = self.encode(larger)
        for up in self.decoder:
            x = up(x, maps.pop())
        logits = self.upsample(self.classify(x), larger.shape[-2:])
        return unzoomed(logits, image.shape[-2:], self.zoom)  # (B, L, H, W)
