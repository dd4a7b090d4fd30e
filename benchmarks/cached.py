"""MRFs learned behind a network whose output is computed once: what tables.py and ablations.py share.

outputs = cache(model, pairs, "cuda")
learn(mrf, [penalty_phase(mrf), contexts_phase(mrf, seed=0)], outputs, Training(labels=11, ignore=11))
measure(mrf, outputs, labels=11, ignore=11)["miou"]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import deepmrf
from deepmrf.layers import MeanField
from deepmrf.training.loss import class_weights, cross_entropy, lovasz
from deepmrf.training.mean_field import start_contexts, start_penalty
from deepmrf.training.optimiser import rate_at
from deepmrf.training.recipe import Stage

Pair = tuple[np.ndarray, np.ndarray]
"""An image (H, W, 3) and its mask (H, W), both of uint8."""
Cached = tuple[Tensor, Tensor, Tensor]
"""Log-probabilities (L, H, W) of float16, image (3, H, W) of uint8, mask (H, W) of uint8."""


@torch.inference_mode()
def cache(model: deepmrf.DeepParsingNetwork, pairs: Sequence[Pair], device: str) -> list[Cached]:
    """The network's output of each image, kept on the device."""
    outputs = []
    for image, mask in pairs:
        picture = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None].to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            log_p = model.log_unary(picture)
        outputs.append((log_p[0].half(), picture[0], torch.from_numpy(np.ascontiguousarray(mask)).to(device)))
    return outputs


@dataclass(frozen=True)
class Phase:
    """Parameters that learn together, for so many steps at such a rate that falls to 0."""

    parameters: Callable[[], list[nn.Parameter]]
    steps: int
    rate: float
    start: Callable[[], None] = lambda: None
    """Called before the first step."""


@dataclass(frozen=True)
class Training:
    """What all phases have in common."""

    labels: int
    ignore: int
    seed: int = 0
    batch: int = 8
    lovasz: float = 0.0
    """Weight of the Lovász loss beside cross-entropy."""
    balance: float = 0.0
    """As class_balance of a recipe."""
    clip: float = 5.0
    """Largest norm of a gradient."""


def penalty_phase(mrf: MeanField, steps: int = 200, rate: float = 5e-2) -> Phase:
    """Stage 2: the triple penalty behind label contexts that are the identity."""
    mrf.triple_penalty.shift.requires_grad_(False)  # the same for every label, so its gradient is rounding errors
    part = mrf.triple_penalty
    learned = [p for name, p in part.named_parameters() if name != "shift"]
    return Phase(lambda: learned, steps, rate, lambda: start_penalty(mrf))


def contexts_phase(mrf: MeanField, seed: int, steps: int = 1200, rate: float = 2e-3) -> Phase:
    """Stage 3: the label contexts, with the triple penalty fixed."""
    contexts = mrf.label_contexts
    assert contexts is not None
    return Phase(lambda: list(contexts.parameters()), steps, rate, lambda: start_contexts(contexts, seed))


def all_at_once(mrf: MeanField, seed: int, steps: int = 1400, rate: float = 2e-3) -> Phase:
    """Both parts from the start, for as many steps."""

    def start() -> None:
        start_penalty(mrf)
        if mrf.label_contexts is not None:
            start_contexts(mrf.label_contexts, seed)

    return Phase(lambda: list(mrf.parameters()), steps, rate, start)


def learn(mrf: MeanField, phases: Sequence[Phase], data: Sequence[Cached], training: Training) -> MeanField:
    """Take the steps of all phases on random batches of the cached outputs; return the same MRF."""
    device = data[0][0].device
    random = np.random.default_rng(training.seed)
    weights = _class_weights(data, training.labels, training.balance)
    mrf.to(device).train()
    for phase in phases:
        phase.start()
        mrf.requires_grad_(False)
        parameters = phase.parameters()
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimiser = torch.optim.Adam(parameters, lr=phase.rate)
        stage = Stage("", ("triple_penalty",), steps=phase.steps)
        for step in range(phase.steps):
            optimiser.param_groups[0]["lr"] = phase.rate * rate_at(stage, step)
            chosen = [data[i] for i in random.integers(len(data), size=training.batch)]
            log_p, image, target = (torch.stack(part) for part in zip(*chosen, strict=True))
            loss = _loss(mrf(log_p.float(), image), target.long(), weights, training)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, training.clip)
            optimiser.step()
    return mrf.eval()


def _loss(log_q: Tensor, target: Tensor, weights: Tensor | None, training: Training) -> Tensor:
    total, count = cross_entropy(log_q, target, weights, training.ignore)
    loss = total / count.clamp_min(1)
    return loss + training.lovasz * lovasz(log_q, target, training.ignore) if training.lovasz else loss


def _class_weights(data: Sequence[Cached], labels: int, balance: float) -> Tensor | None:
    if not balance:
        return None
    counts = torch.stack([torch.bincount(mask.flatten().long(), minlength=256) for _, _, mask in data]).sum(0)
    return class_weights(counts[:labels].float(), balance)


@torch.inference_mode()
def measure(mrf: nn.Module | None, data: Sequence[Cached], labels: int, ignore: int) -> dict[str, Any]:
    """mIoU, share of right pixels and IoU of each class over a cached split; no MRF: the network alone."""
    pairs = torch.zeros(labels * labels, device=data[0][0].device, dtype=torch.long)
    for log_p, image, mask in data:
        log_q = log_p[None].float() if mrf is None else mrf(log_p[None].float(), image[None])
        seen = mask != ignore
        pairs += torch.bincount(mask[seen].long() * labels + log_q[0].argmax(0)[seen], minlength=labels * labels)
    table = pairs.view(labels, labels).double()
    both = table.diag()
    iou = both / (table.sum(0) + table.sum(1) - both).clamp_min(1)
    return {
        "miou": round(100 * float(iou[table.sum(1) > 0].mean()), 3),
        "pixels": round(100 * float(both.sum() / table.sum()), 3),
        "iou": [round(100 * value, 2) for value in iou.tolist()],
    }
