"""MeanField.inflate: a layer for images becomes one for clips, which at first returns the same for each frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepmrf.layers.mean_field import MeanField


@torch.no_grad()
def inflate(mrf: MeanField, window_frames: int, context_frames: int, frame_spacing: float) -> MeanField:
    """Return a layer of the same class for clips; MeanField.inflate says what the arguments mean."""
    penalty, contexts = mrf.triple_penalty, mrf.label_contexts
    if not mrf.can_inflate:
        raise ValueError(f"Only layers for images can be inflated: dims={mrf.dims}, kernel={penalty.kernel!r}.")
    if contexts is not None and (contexts.rank is not None or contexts.stride > 1):
        raise ValueError("Compressed contexts cannot be inflated: inflate the layer they came from.")
    settings: dict[str, Any] = mrf.settings | {"dims": 3, "temporal": True}
    settings["window"] = [window_frames, *penalty.window]
    settings["spacing"] = [float(frame_spacing), *penalty.spacing]
    if contexts is not None:
        settings["context_size"] = [context_frames, *contexts.size]
    inflated = type(mrf)(**settings).to(penalty.scale)
    _copy_penalty(mrf, inflated)
    if contexts is not None and inflated.label_contexts is not None:
        inflated.label_contexts.weight.zero_()
        inflated.label_contexts.weight[:, :, context_frames // 2] = contexts.weight
        inflated.label_contexts.bias.copy_(contexts.bias)
    if mrf.label_scaling is not None and inflated.label_scaling is not None:
        inflated.label_scaling.load_state_dict(mrf.label_scaling.state_dict())
    learned = {name: parameter.requires_grad for name, parameter in mrf.named_parameters()}
    for name, parameter in inflated.named_parameters():
        parameter.requires_grad_(learned.get(name, penalty.scale.requires_grad))  # frame weights: as the scale
    return inflated


def _copy_penalty(mrf: MeanField, inflated: MeanField) -> None:
    """The same b12 within a frame; the window's number of pixels and its corner now count frames: cancel that."""
    old, new = mrf.triple_penalty, inflated.triple_penalty
    new.load_state_dict(old.state_dict() | {"frame_weights": torch.zeros_like(new.frame_weights)})
    new.scale.mul_(old.pixel_share / new.pixel_share)
    if old.kernel == "distance":
        new.position.mul_(old.corner_share / new.corner_share)
