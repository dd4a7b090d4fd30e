"""Unary networks (b1 to b11): images (B, 3, H, W), floats in [0, 1] or uint8, of any size -> logits (B, L, H, W).

vgg16      VGG16: the paper's, Table 1
strong     Strong: VGG-16's encoder with a U-shaped decoder
fast       Fast: EfficientNet-Lite0 with a small decoder, for CPUs
baselines  FCN8s, SegNet, Dilation8 and DeepLab, to compare with
volume     Volume: a small 3-D U-Net, volumes (B, 1, D, H, W) -> logits (B, L, D, H, W)
wrap       wrap: any other network
libraries  from_transformers, from_smp, from_torchvision: networks of these libraries, in one line
own        a network of the user's own by the name of the function that builds it
imagenet   ImageNet weights from safetensors, and the report of what was loaded
network    what networks share: their arguments, checks and normalisation of images, zoom and upsampling

Each network normalises its images itself, and has `name`, `config` and `load_imagenet(path)`;
build(net.name, **net.config) builds the same architecture.
"""

from __future__ import annotations

from typing import Any

from deepmrf.unary.baselines import DeepLab, Dilation8, FCN8s, SegNet
from deepmrf.unary.fast import Fast
from deepmrf.unary.imagenet import Loaded
from deepmrf.unary.libraries import from_smp, from_torchvision, from_transformers
from deepmrf.unary.network import Network
from deepmrf.unary.strong import Strong
from deepmrf.unary.vgg16 import VGG16
from deepmrf.unary.volume import Volume
from deepmrf.unary.wrap import Wrapped, wrap

__all__ = [
    "VGG16",
    "DeepLab",
    "Dilation8",
    "FCN8s",
    "Fast",
    "Loaded",
    "SegNet",
    "Strong",
    "Volume",
    "Wrapped",
    "build",
    "from_smp",
    "from_torchvision",
    "from_transformers",
    "wrap",
]

NETWORKS = (VGG16, Strong, Fast, FCN8s, SegNet, Dilation8, DeepLab, Volume)
"""The networks that `build` knows by name."""


def build(name: str, labels: int, **options: Any) -> Network:
    """Build a network by its name, such as "vgg16", "strong", "fast" or "volume", with its constructor's options."""
    for network in NETWORKS:
        if network.name == name:
            try:
                return network(labels, **options)
            except TypeError as error:
                raise TypeError(f"{name!r} does not take these options ({error}): see {network.__name__}.") from error
    baselines = ", ".join(repr(network.name) for network in (FCN8s, SegNet, Dilation8, DeepLab))
    raise ValueError(
        f"There is no unary network {name!r}: choose 'vgg16', 'strong' or 'fast', a baseline ({baselines}), "
        "'volume' for volumes, or wrap your own."
    )
