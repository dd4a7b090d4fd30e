"""Optimiser steps: parameter groups, rates, steps without a finite gradient, averages of weights and batch norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.training.recipe import Stage


def new_optimiser(model: DeepParsingNetwork, stage: Stage) -> torch.optim.Optimizer:
    """Return the stage's optimiser. Weight decay is for the network's filters, not for biases, norms and the MRF."""
    learned = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = []
    for prefix, rate in (("unary.encoder.", stage.rate * stage.encoder_rate), ("unary.", stage.rate)):
        part = [parameter for name, parameter in learned if name.startswith(prefix)]
        learned = [(name, parameter) for name, parameter in learned if not name.startswith(prefix)]
        groups.append({"params": [p for p in part if p.dim() > 1], "lr": rate, "weight_decay": stage.weight_decay})
        groups.append({"params": [p for p in part if p.dim() <= 1], "lr": rate, "weight_decay": 0.0})
    groups.append({"params": [parameter for _, parameter in learned], "lr": stage.mrf_rate, "weight_decay": 0.0})
    groups = [group for group in groups if group["params"]]
    if stage.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=stage.rate, momentum=0.9)
    on_gpu = next(model.parameters()).is_cuda  # fused: one launch for all parameters
    return torch.optim.AdamW(groups, lr=stage.rate, eps=stage.epsilon, fused=on_gpu)


def set_rates(optimiser: torch.optim.Optimizer, stage: Stage, step: int) -> None:
    """Set the learning rate of each group for a step."""
    for group in optimiser.param_groups:
        group["lr"] = group.setdefault("full_rate", group["lr"]) * rate_at(stage, step)


def rate_at(stage: Stage, step: int) -> float:
    """Return the share of the full rate at a step: it rises during the warm-up, then falls to zero."""
    if step < stage.warmup:
        return (step + 1) / stage.warmup
    left = (stage.steps - step) / max(stage.steps - stage.warmup, 1)
    return float(left**stage.power)


def step_if_finite(prepared: Any, optimiser: torch.optim.Optimizer, norm: Tensor) -> Tensor:
    """Take a step unless the gradient's norm is infinite or NaN; return 1 if the step was skipped, else 0.

    A single such gradient would make every weight NaN. A fused optimiser decides on the GPU, so that nothing waits.
    prepared: the optimiser as Accelerate wraps it.
    """
    skipped = (~torch.isfinite(norm)).float()
    if optimiser.defaults.get("fused"):
        optimiser.found_inf = skipped  # type: ignore[attr-defined]
        prepared.step()
    elif not skipped:
        prepared.step()
    return skipped


class NormStatistics:
    """Batch norms' running statistics of a network that learns from the start: at first, the mean over all steps.

    A momentum of 0.01 needs hundreds of steps to leave what the network began with; a shorter training would be
    measured with statistics that are not its own. From step 1 / momentum on, the momentum is the network's own.
    """

    def __init__(self, network: nn.Module) -> None:
        norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self.norms = [(norm, norm.momentum) for norm in norms if norm.momentum]

    def begin(self, step: int) -> None:
        """Set the momentum of a step, counted from 0."""
        for norm, momentum in self.norms:
            norm.momentum = max(momentum, 1 / (step + 1))

    def end(self) -> None:
        """Give the network its own momentum."""
        for norm, momentum in self.norms:
            norm.momentum = momentum


class MovingAverage:
    """Moves the weights of `average` towards those of `model`; values that are not learned are copied."""

    def __init__(self, average: nn.Module, model: nn.Module) -> None:
        state = model.state_dict()
        learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        pairs = {name: (value, state[name]) for name, value in average.state_dict().items()}
        self.learned = [pair for name, pair in pairs.items() if name in learned]
        self.fixed = [pair for name, pair in pairs.items() if name not in learned]

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Set average = decay * average + (1 - decay) * model."""
        # One call for hundreds of small tensors: a call for each would take longer than the step itself on a GPU.
        if self.learned:
            torch._foreach_lerp_([a for a, _ in self.learned], [b for _, b in self.learned], 1 - decay)
        if self.fixed:
            torch._foreach_copy_([a for a, _ in self.fixed], [b for _, b in self.fixed])
