"""The settings that a model may have: kinds and limits, checked before anything is built.

Model folders come from strangers, recipes from tired people. `check_settings` refuses what is not in the tables below,
with the name of the setting. Values within the limits can still add up, so `skeleton` builds a model without memory,
whose bytes are counted before the model itself is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepmrf import unary as unaries
from deepmrf.data.spelling import did_you_mean

MAX_AXES = 8
MAX_BYTES = 2**34
"""The largest weights of a model, in bytes."""
MAX_LETTERS = 60
"""Letters of a value that an error shows."""


@dataclass(frozen=True)
class Setting:
    """What a setting may be, in words and as a test."""

    description: str
    accepts: Callable[[Any], bool]


def whole(low: int, high: int) -> Setting:
    """A whole number."""
    return Setting(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def real(low: float, high: float) -> Setting:
    """A number; NaN is none."""
    kinds = (int, float)
    return Setting(f"a number from {low:g} to {high:g}", lambda value: type(value) in kinds and low <= value <= high)


def numbers(each: Setting, low: int = 1, high: int = MAX_AXES) -> Setting:
    """A list."""

    def accepts(value: Any) -> bool:
        return isinstance(value, list | tuple) and low <= len(value) <= high and all(map(each.accepts, value))

    return Setting(f"a list, each {each.description}", accepts)


def per_axis(each: Setting) -> Setting:
    """One for all axes, or one per axis."""
    listed = numbers(each)
    return Setting(f"{each.description}, or one per axis", lambda value: each.accepts(value) or listed.accepts(value))


def optional(setting: Setting) -> Setting:
    """The same, or nothing."""
    return Setting(f"{setting.description}, or null", lambda value: value is None or setting.accepts(value))


def word(*choices: str) -> Setting:
    """One of some words."""
    return Setting(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


FLAG = Setting("true or false", lambda value: isinstance(value, bool))
ANYTHING = Setting("anything", lambda value: True)
MEAN_FIELD: dict[str, Setting] = {
    "labels": whole(1, 255),
    "dims": whole(1, MAX_AXES),
    "window": optional(per_axis(whole(1, 1001))),
    "contexts": whole(0, 255),
    "context_size": optional(per_axis(whole(1, 255))),
    "context_rank": optional(whole(1, 2**16)),
    "context_stride": whole(1, 64),
    "iterations": whole(1, 100),
    "kernel": word("distance", "gaussian", "global", "learned"),
    "gate": FLAG,
    "features": whole(0, 4096),
    "unary": word("softmax", "sigmoid"),
    "spacing": optional(numbers(real(1e-9, 1e9))),
    "average": FLAG,
    "smoothness": FLAG,
    "normalize": FLAG,
    "size": optional(per_axis(whole(1, 2**14))),
    "temporal": FLAG,
    "temperature": real(0.1, 10),
    "label_scaling": FLAG,
}
"""Arguments of MeanField."""
VIDEO: dict[str, Setting] = {"frames": whole(2, 255), "temperature": real(0.1, 10), "allows_bfloat16": FLAG}
"""Arguments of VideoPart."""
NETWORK: dict[str, Setting] = {
    "labels": whole(1, 255),
    "width": whole(1, 1024),
    "channels": whole(1, 8192),
    "levels": whole(1, 8),
    "stride": whole(1, 64),
    "zoom": real(1, 4),
    "lite": whole(0, 2),
    "mirror": FLAG,
    "dropout": real(0, 1),
    "norm_momentum": real(0, 1),
    "encoder_norm": FLAG,
}
"""Arguments of the networks of deepmrf.unary; each has some of them."""
WRAPPER: dict[str, Setting] = {
    **{"labels": whole(1, 255), "output": ANYTHING, "multiple": whole(1, 4096)},
    **{name: numbers(real(-1e6, 1e6), high=4096) for name in ("mean", "std")},
    "value_range": numbers(real(-1e6, 1e6), 2, 2),
}
"""Arguments of the wrapper of other networks."""


def network_schema(name: object) -> dict[str, Setting] | None:
    """The arguments of the network of deepmrf.unary of that name; None for other names."""
    for network in unaries.NETWORKS:
        if network.name == name:
            return {argument: NETWORK[argument] for argument in inspect.signature(network).parameters}
    return None


def check_settings(settings: Any, schema: Mapping[str, Setting], table: str) -> None:
    """Raise a ValueError that names the first setting which the schema does not allow; table: what they belong to."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"{table} is {shortened(settings)}, not settings")
    for key, value in settings.items():
        if key not in schema:
            guess = did_you_mean(str(key), schema)
            raise ValueError(f"{table} has no setting {shortened(key)}{guess}: there are {', '.join(schema)}")
        if not schema[key].accepts(value):
            raise ValueError(f"{table}.{key}={shortened(value)} must be {schema[key].description}")


def shortened(value: Any) -> str:
    """The value as an error shows it, on one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 3]}..."


_RANDOM = {Tensor.normal_, Tensor.uniform_} | {
    getattr(nn.init, name) for name in ("normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_")
}


class WithoutInitialWeights(TorchFunctionMode):
    """Build modules without random weights, which take seconds in a large network: their values are undefined."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _RANDOM:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def skeleton(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The state_dict of what `build` returns, without memory for its tensors; a ValueError where it is too large."""
    with torch.device("meta"), WithoutInitialWeights():
        tensors = build().state_dict()
    bytes_needed = count_bytes(tensors)
    if bytes_needed > MAX_BYTES:
        raise ValueError(f"its weights would take {bytes_needed:,} bytes, more than {MAX_BYTES:,}")
    return dict(tensors)


def count_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of all tensors."""
    return sum(value.numel() * value.element_size() for value in tensors.values())
