"""What unary networks share: the constructor's arguments and, in U-shaped ones, the way through the network."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

from torch import Tensor, nn

from deepmrf.layers.inputs import check_count
from deepmrf.unary.images import NO_ZOOM, check_zoom, unzoomed, zoomed


class Network(nn.Module):
    """A unary network. It has an attribute for each of its constructor's arguments."""

    name: ClassVar[str]

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's arguments: a network built with them has the same architecture."""
        values = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {name: float(value) if isinstance(value, Fraction) else value for name, value in values.items()}


class UShapedNetwork(Network):
    """image (B, 3, H, W) -> logits (B, L, H, W), through maps of ever coarser strides and back to ever finer ones.

    labels: L. width: channels, as each network counts them. dropout: probability of dropping a channel while training.
    stride: where the decoder ends, one of STRIDES. zoom: outside training, enlarge images by this factor first.
    """

    STRIDES: ClassVar[tuple[int, ...]]
    """Strides at which the decoder can end."""
    normalise: nn.Module
    decoder: nn.ModuleList
    """Each takes the last map and the encoder's map of half its stride."""
    classify: nn.Module

    def __init__(self, labels: int, width: int, dropout: float, stride: int, zoom: float) -> None:
        super().__init__()
        check_count("labels", labels)
        check_count("width", width)
        check_dropout(dropout)
        if stride not in self.STRIDES:
            choices = ", ".join(map(str, self.STRIDES))
            raise ValueError(f"stride={stride!r} is unknown: the decoder can end at {choices}.")
        self.labels, self.width, self.dropout, self.stride, self.zoom = labels, width, dropout, stride, check_zoom(zoom)

    @abstractmethod
    def encode(self, image: Tensor) -> list[Tensor]:
        """Return maps of a normalised image from fine to coarse; the last sees the whole image."""

    @abstractmethod
    def upsample(self, logits: Tensor, size: Sequence[int]) -> Tensor:
        """Resize logits at `stride` to the size of the image."""

    def forward(self, image: Tensor) -> Tensor:
        zoom = NO_ZOOM if self.training else self.zoom
        larger = zoomed(self.normalise(image), zoom)  # (B, 3, H zoom, W zoom)
        *maps, x = self.encode(larger)
        for up in self.decoder:
            x = up(x, maps.pop())
        logits = self.upsample(self.classify(x), larger.shape[-2:])
        return unzoomed(logits, image.shape[-2:], zoom)  # (B, L, H, W)


def check_dropout(value: float) -> None:
    """Require a probability below 1."""
    if not 0 <= value < 1:
        raise ValueError(f"dropout={value!r} must be a probability, at least 0 and under 1.")
