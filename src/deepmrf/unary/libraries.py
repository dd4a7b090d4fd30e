"""Networks of other libraries as unary networks, in one line each, and the same networks built again from a config.

    from_transformers(model)      Hugging Face's models for semantic segmentation
    from_smp(model)               segmentation_models_pytorch
    from_torchvision(model)       torchvision.models.segmentation

`description` says in plain JSON how to build a network of transformers or segmentation_models_pytorch, and `rebuild`
builds it: library, class and the library's own config. It builds classes of the installed library only, so that reading
a model folder runs no code that came with the folder. torchvision's networks do not know their own settings.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from deepmrf.unary.wrap import Wrapped

PACKAGES = {"transformers": "transformers", "segmentation_models_pytorch": "segmentation-models-pytorch"}
"""Libraries whose networks can be built again, and what to pass to pip install."""


def from_transformers(model: nn.Module, processor: Any = None, **options: Any) -> Wrapped:
    """Wrap a Hugging Face model whose output has `.logits`, such as SegformerForSemanticSegmentation.

    processor: its image processor, which knows mean and std; ImageNet's without one. options: see `wrap`.
    """
    config = getattr(model, "config", None)
    labels = getattr(config, "num_labels", None)
    if not isinstance(labels, int):
        raise TypeError(f"{type(model).__name__} has no config.num_labels: use deepmrf.unary.wrap(network, labels).")
    return Wrapped(model, labels, **(_normalisation(processor) | options))


def from_smp(model: nn.Module, **options: Any) -> Wrapped:
    """Wrap a model of segmentation_models_pytorch; images are padded to sizes that its encoder takes.

    The normalisation is ImageNet's. For encoders trained with another one, pass mean, std and value_range, which
    smp.encoders.get_preprocessing_params(encoder) tells. options: see `wrap`.
    """
    options.setdefault("multiple", getattr(getattr(model, "encoder", None), "output_stride", 1))
    return Wrapped(model, _head_labels(model, "segmentation_head"), **options)


def from_torchvision(model: nn.Module, **options: Any) -> Wrapped:
    """Wrap a model of torchvision.models.segmentation; options: see `wrap`."""
    options.setdefault("output", "out")
    return Wrapped(model, _head_labels(model, "classifier"), **options)


def _normalisation(processor: Any) -> dict[str, Any]:
    """Mean, std and value_range of an image processor of transformers."""
    if processor is None:
        return {}
    factor = getattr(processor, "rescale_factor", None) if getattr(processor, "do_rescale", True) else 1
    settings: dict[str, Any] = {} if factor is None else {"value_range": (0.0, 255.0 * float(factor))}
    if not getattr(processor, "do_normalize", True):
        return settings | {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return settings | {"mean": tuple(processor.image_mean), "std": tuple(processor.image_std)}


def _head_labels(model: nn.Module, head: str) -> int:
    """Number of channels of the last convolution of a network's head."""
    part = getattr(model, head, None)
    convolutions = [] if part is None else [layer for layer in part.modules() if isinstance(layer, nn.Conv2d)]
    if not convolutions:
        raise TypeError(f"{type(model).__name__} has no {head} that ends in a convolution: use deepmrf.unary.wrap.")
    return convolutions[-1].out_channels


def description(network: nn.Module) -> dict[str, Any] | None:
    """How to build this network again, as plain JSON: library, class and config. None where that is not known."""
    library = type(network).__module__.split(".")[0]
    if library not in PACKAGES:
        return None
    config: Any = getattr(network, "config", None)
    if library == "transformers" and config is not None:
        config = json.loads(config.to_json_string(use_diff=False))
        config.pop("_name_or_path", None)  # a folder of the machine it comes from
    described = {"library": library, "class": type(network).__name__, "config": config}
    try:
        described = json.loads(json.dumps(described))
        with torch.device("meta"):  # without memory for the weights
            same = _shapes(rebuild(described).state_dict()) == _shapes(network.state_dict())
    except Exception:  # whatever the library raises: the network was changed after it was built
        return None
    return described if same else None


def rebuild(described: Mapping[str, Any]) -> nn.Module:
    """Build the network of a description; its weights are random."""
    library, name = _library(str(described["library"])), str(described["class"])
    kind = getattr(library, name, None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise ValueError(f"{library.__name__} {getattr(library, '__version__', '')} has no network {name}")
    config = dict(described["config"])
    if library.__name__ == "transformers":
        return kind(kind.config_class.from_dict(config))  # type: ignore[attr-defined]
    return kind(**(config | {"encoder_weights": None}))


def _library(name: str) -> ModuleType:
    if name not in PACKAGES:
        raise ValueError(f"its network is of the library {name!r}, which is not one of {', '.join(PACKAGES)}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"The model's network is of {name}, which cannot be imported ({error}): pip install {PACKAGES[name]}."
        ) from error


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}
