"""Controls: the numbers of an MRF that can be moved, their ranges, and the MRF with other numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from deepmrf.layers import MeanField

NAMES = (
    *("strength", "window", "colour", "position", "smoothness", "smooth_width"),
    *("contexts", "iterations", "temperature"),
)
"""All controls, in the order of the page. An MRF has some of them."""
MAX_WINDOW = {"gaussian": 41, "distance": 151}
"""Pixels. The distance kernel costs the same for every window; the Gaussian one must stay fast enough to be moved."""
MAX_ITERATIONS = 10
MIN_APPEARANCE = 1e-4
"""The smoothness is stored relative to the appearance, which must not be zero."""


class Control(NamedTuple):
    """A number of an MRF."""

    label: str
    low: float
    high: float
    step: float
    value: float
    """The number as the MRF has it."""

    def clamp(self, value: float | None) -> float:
        """The value brought into the range; without one, or with NaN, the MRF's own."""
        if value is None or math.isnan(value):
            return self.value
        value = min(max(value, self.low), self.high)
        return round(value) if self.step == 1 else float(value)


@torch.no_grad()
def controls(mrf: MeanField) -> dict[str, Control]:
    """The controls that this MRF has, with its numbers."""
    penalty, contexts = mrf.triple_penalty, mrf.label_contexts
    result = {"strength": Control("Strength, × its own", 0, 3, 0.05, 1)}
    if penalty.kernel == "global":
        result["strength"] = Control("Appearance", 0, 3 * float(penalty.scale), 0.5, float(penalty.scale))
    if penalty.kernel in MAX_WINDOW:
        window = penalty.window[-1]
        result["window"] = Control("Window, px", 1, max(MAX_WINDOW[penalty.kernel], window), 1, window)
    if penalty.kernel == "distance":
        result["colour"] = Control("Colour weight, × its own", 0, 3, 0.05, 1)
        result["position"] = Control("Position weight, × its own", 0, 3, 0.05, 1)
    elif penalty.kernel in ("gaussian", "global"):
        colour, position = (float(width) for width in penalty.widths())
        result["colour"] = _width("Colour width, of 255", 255 * colour, 64)
        result["position"] = _width("Position width, px", position, 160 if penalty.kernel == "global" else 40)
    if penalty.smoothness:
        weight = float(penalty.smooth_weight * penalty.scale)
        result["smoothness"] = Control("Smoothness", 0, max(15.0, 2 * weight), 0.5, weight)
        result["smooth_width"] = _width("Smoothness width, px", float(penalty.log_smooth_width.exp()), 15)
    if contexts is not None and contexts.rank is None and contexts.contexts > 1:
        result["contexts"] = Control("Label contexts", 1, contexts.contexts, 1, contexts.contexts)
    result["iterations"] = Control("Iterations", 1, max(MAX_ITERATIONS, mrf.iterations), 1, mrf.iterations)
    result["temperature"] = Control("Temperature", 0.25, max(4.0, mrf.temperature), 0.05, mrf.temperature)
    return result


def _width(label: str, value: float, high: float) -> Control:
    return Control(label, min(0.5, value), max(high, math.ceil(2 * value)), 0.5, value)


@torch.no_grad()
def adjust(mrf: MeanField, values: Mapping[str, float | None]) -> MeanField:
    """A copy of the MRF with these values of its controls, in their ranges; fewer contexts are the first ones."""
    known = controls(mrf)
    chosen = {name: control.clamp(values.get(name)) for name, control in known.items()}
    old, state = mrf.triple_penalty, mrf.state_dict()
    settings = mrf.settings | {"iterations": int(chosen["iterations"]), "temperature": chosen["temperature"]}
    if "window" in chosen and chosen["window"] != known["window"].value:
        settings["window"] = [*old.window[:-2], int(chosen["window"]), int(chosen["window"])]
    if "contexts" in chosen:
        settings["contexts"] = count = int(chosen["contexts"])
        for name in ("label_contexts.weight", "label_contexts.bias"):
            state[name] = state[name].unflatten(0, (mrf.labels, -1))[:, :count].flatten(0, 1)
    adjusted = MeanField(**settings).to(old.scale)
    new = adjusted.triple_penalty
    adjusted.load_state_dict(state)
    new.scale.mul_(old.pixel_share / new.pixel_share)
    if old.kernel == "global":
        new.scale.fill_(max(chosen["strength"], MIN_APPEARANCE))
    else:
        _scale(adjusted, chosen["strength"])
    if old.kernel == "distance":
        new.colour.mul_(chosen["colour"])
        new.position.mul_(chosen["position"] * old.corner_share / new.corner_share)
    elif "colour" in chosen:
        new.log_colour_width.fill_(math.log(chosen["colour"] / 255))
        new.log_position_width.fill_(math.log(chosen["position"]))
    if old.smoothness:
        scale = float(new.scale)
        new.smooth_weight.fill_(chosen["smoothness"] / math.copysign(max(abs(scale), MIN_APPEARANCE), scale))
        new.log_smooth_width.fill_(math.log(chosen["smooth_width"]))
    adjusted.check_values = False  # the network's own output needs no warning
    return adjusted.requires_grad_(False).eval()


def _scale(mrf: MeanField, strength: float) -> None:
    """Multiply o14, what the labels pay at each pixel, and their scaling: at 0 the network's output stays as it is."""
    contexts, penalty = mrf.label_contexts, mrf.triple_penalty
    if contexts is None:
        parameters = [penalty.scale, penalty.shift]
    else:
        parameters = [contexts.weight if contexts.rank is None else contexts.second, contexts.bias]
    if mrf.label_scaling is not None:
        parameters += [mrf.label_scaling.log_scale, mrf.label_scaling.bias]
    for parameter in parameters:
        parameter.mul_(strength)
