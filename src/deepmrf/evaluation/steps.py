"""What each layer of a model makes of an image, and the numbers of its MRF, as arrays for figures.

network         b11
after b12       stage 2's model: the triple penalty with label contexts as the identity, log_softmax(ln p - t)
after b13, b14  with label contexts; the model where there is one iteration
model           after all iterations, where there are more
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.data.files import Bytes
from deepmrf.figures.window import WindowKernel
from deepmrf.layers import LabelContexts, MeanField, TriplePenalty
from deepmrf.models.names import score
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.ops.contexts import window_convolution

Ids = NDArray[np.uint8]
METRICS = ("ta", "la", "ba")


@dataclass(frozen=True)
class LayerSteps:
    """The labels of an image after each layer."""

    label_maps: list[tuple[str, Ids]]
    """(name of the step, labels (H, W)), from the network to the model."""
    active: Ids | None
    """Of the model's label at each pixel, the context that won in the first iteration, (H, W). None where there are
    no contexts, or contexts at a stride."""


@torch.no_grad()
def layer_steps(model: DeepParsingNetwork, image: Bytes) -> LayerSteps:
    """Run a model on an image (H, W, 3), layer by layer; a model of clips takes it as a clip of one frame."""
    pixels = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
    log_p, mrf = model.log_unary(pixels), model.mean_field
    maps = [("network", log_p)]
    if mrf is None:
        return LayerSteps([("network", _labels(log_p))], None)
    if mrf.dims == 3:
        log_p, pixels = log_p[:, :, None], pixels[:, :, None]
    t = mrf.triple_penalty(mrf.belief(log_p), pixels if mrf.triple_penalty.features else None)
    maps.append(("after b12", stage_two(mrf).from_penalty(log_p, t)))
    if mrf.label_contexts is not None:
        maps.append(("after b13, b14", mrf.from_penalty(log_p, t)))
    if mrf.iterations > 1:
        maps.append(("model", mrf(log_p, pixels)))
    label_maps = [(name, _labels(values)) for name, values in maps]
    return LayerSteps(label_maps, _active(mrf.label_contexts, t, label_maps[-1][1]))


def stage_two(mrf: MeanField) -> MeanField:
    """Return a copy as stage 2 has it: o14 = t, since label contexts that are the identity change nothing."""
    alone = copy.deepcopy(mrf)
    alone.label_contexts = None
    return alone


def _labels(log_q: Tensor) -> Ids:
    labels: Ids = log_q.argmax(1).reshape(log_q.shape[-2:]).to(torch.uint8).numpy()
    return labels


def _active(contexts: LabelContexts | None, t: Tensor, labels: Ids) -> Ids | None:
    if contexts is None or contexts.stride > 1:
        return None
    o13 = window_convolution(t, context_weight(contexts)).flatten(2) + contexts.bias[:, None]  # (1, L K, H W)
    k = o13.view(contexts.labels, contexts.contexts, *labels.shape).argmin(1)  # (L, H, W)
    active: Ids = k.gather(0, torch.from_numpy(labels)[None].long())[0].to(torch.uint8).numpy()
    return active


def context_weight(contexts: LabelContexts) -> Tensor:
    """Return the patterns (L K, L, *N); those of low rank multiplied out."""
    if contexts.rank is None:
        return contexts.weight.detach()
    return torch.einsum("rvyi,urix->uvyx", contexts.first.detach(), contexts.second.detach())


@torch.no_grad()
def window_kernel(penalty: TriplePenalty) -> WindowKernel | None:
    """Return the numbers of b12's d(j, z) within a frame; None for kernels that are no formula of two pixels."""
    if penalty.kernel not in ("distance", "gaussian") or penalty.normalize:
        return None
    if penalty.kernel == "distance":
        colour, position = float(penalty.colour), float(penalty.position) * penalty.corner_share
    else:
        colour, position = (1 / (2 * penalty.widths() ** 2)).tolist()
    return WindowKernel(
        gaussian=penalty.kernel == "gaussian",
        colour=colour if penalty.features else 0.0,
        position=position,
        smooth_weight=float(penalty.smooth_weight) if penalty.smoothness else 0.0,
        smooth_width=float(penalty.log_smooth_width.exp()) if penalty.smoothness else 1.0,
        window=(penalty.window[-2], penalty.window[-1]),
        spacing=(penalty.spacing[-2], penalty.spacing[-1]),
    )


def stage_scores(model: DeepParsingNetwork) -> dict[str, dict[str, float]]:
    """Return {stage: {"TA": score, ...}} of the recipe's stages whose scores the model's card holds, in their order."""
    val, stages = model.card.metrics.get("val"), model.card.recipe.get("stage")
    result = {}
    for stage in stages if isinstance(stages, list) else ():
        name = stage.get("name") if isinstance(stage, dict) else None
        values = val.get(name) if isinstance(name, str) and isinstance(val, dict) else None
        scores = {metric.upper(): score(values.get(metric)) for metric in METRICS} if isinstance(values, dict) else {}
        known = {metric: value for metric, value in scores.items() if value is not None}
        if len(known) == len(METRICS):
            result[str(name)] = known
    return result
