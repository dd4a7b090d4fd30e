"""How stages 2 and 3 teach an MRF behind log-probabilities that stay as they are.

Stage 2 learns the triple penalty (b12) alone, with o14 = t. Stage 3 learns the label contexts (b13, b14) with the
triple penalty fixed, so that t is computed once per image. Training runs both on a network's cached output, `refine`
on predictions from files:

    start_penalty(mrf)                         before stage 2: o14 = t, and t = 0
    start_contexts(mrf.label_contexts, seed)   before stage 3: noise tells the K patterns of a label apart
    penalty_map(mrf, log_p, image)             t of one image, to be cached during stage 3

Before them, images that the network never saw tell how sure of itself it may be, in all and of each label:

    calibrated_temperature(outputs, masks, ignore)
    learn_scaling(mrf, outputs, count, ignore)

`refine` takes its steps by `minimise`, a run of known length, and by `Descent`, which goes on as long as it helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepmrf.data.progress import Progress, no_progress
from deepmrf.evaluation.dice import soft_iou
from deepmrf.layers import LabelContexts, MeanField

PATTERN_NOISE = 1e-2
"""The standard deviation of the noise that tells patterns apart, summed over the pixels of a pattern."""
SMALL_GRADIENT = 1e-3
"""Adam's epsilon in a Descent: weights whose gradients are smaller, as those of rare pairs of labels, move less.

With the usual 1e-8 they move as fast as all others, and learn the images instead of the labels: of a video, frames at
another time gained 0.3 points of mIoU instead of 0.9 with 1e-4. With 1e-3 instead of 1e-4 they gained 0.5 more, of
predictions at stride 8, and lost little of it when training went on.
"""
CALIBRATION_PIXELS = 200_000
"""About how many pixels choose a temperature, or the scaling of labels."""
LEAST_LOG_P_LEARNED = -20.0
"""Smaller ln p count as this while the scaling is learned: a label that was ruled out by mistake costs no more."""
SCALING_STEPS = 30
"""Steps of L-BFGS that learn the scaling of labels."""
SCALING_DECAY = 1e-3
"""What the squares of ln a and b add to the loss: labels of few pixels stay near a = 1 and b = 0."""
TEMPERATURES_TRIED = tuple(round(0.6 + 0.05 * index, 2) for index in range(49))
"""0.6 to 3."""
STEPS_IN_MEAN = 150
"""About how many of the last steps count in the mean weights of a Descent; of fewer steps, the last third."""


@torch.no_grad()
def start_penalty(mrf: MeanField) -> None:
    """Prepare stage 2: make o14 = t, whatever the label contexts were, and t = 0, so that the MRF changes nothing."""
    if mrf.label_contexts is not None:
        mrf.label_contexts.set_compatibility(torch.eye(mrf.labels))
    mrf.triple_penalty.scale.zero_()


@torch.no_grad()
def start_contexts(contexts: LabelContexts, seed: int) -> None:
    """Prepare stage 3: add noise to the patterns, since K equal patterns would learn the same."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(contexts.weight.shape, generator=generator) * PATTERN_NOISE / contexts.weight[0, 0].numel()
    contexts.weight.add_(noise.to(contexts.weight))


def calibrated_temperature(outputs: Sequence[Tensor], masks: Sequence[Tensor], ignore: int) -> float:
    """Return the temperature at which a network is as sure of these images as it is right: the least nll.

    outputs: log-probabilities (L, H, W); masks (H, W). A network is surer of new images than it should be, and an MRF
    that learns behind it would first of all learn to doubt it.
    """
    log_p, target = _sampled_pixels(zip(outputs, masks, strict=True), len(masks), ignore)
    if not len(target):
        return 1.0
    losses = [float(functional.cross_entropy(log_p / temperature, target)) for temperature in TEMPERATURES_TRIED]
    return TEMPERATURES_TRIED[losses.index(min(losses))]


def learn_scaling(
    mrf: MeanField, outputs: Iterable[tuple[Tensor, Tensor]], count: int, ignore: int, progress: Progress = no_progress
) -> None:
    """Learn the factor and the summand of each label from a network's output of images that it never saw.

    outputs: log-probabilities (L, *S) and labels (*S) of so many (`count`) images. The loss is cross-entropy and a
    soft IoU: the first makes confidences right, the second is the score that decides.
    """
    scaling = mrf.label_scaling
    assert scaling is not None, "a mean field without label_scaling"
    log_p, target = _sampled_pixels(outputs, count, ignore, progress)
    scaling.requires_grad_(bool(len(target)))
    if not len(target):
        return
    device = scaling.bias.device
    with torch.no_grad():  # begin alike, also where a training goes on that had learned it
        for parameter in scaling.parameters():
            parameter.zero_()
    log_p = (log_p.clamp_min(LEAST_LOG_P_LEARNED) / mrf.temperature).T[None].to(device)  # (1, L, N)
    target = target[None].to(device)  # (1, N)
    parameters = list(scaling.parameters())
    optimiser = torch.optim.LBFGS(parameters, max_iter=SCALING_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        scores = scaling(log_p)
        loss = functional.cross_entropy(scores, target) + 1 - soft_iou(scores.softmax(1), target)
        loss = loss + SCALING_DECAY * torch.stack([parameter.square().sum() for parameter in parameters]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimiser.step(closure)  # type: ignore[no-untyped-call]
    scaling.requires_grad_(False)


@torch.no_grad()
def _sampled_pixels(
    outputs: Iterable[tuple[Tensor, Tensor]], count: int, ignore: int, progress: Progress = no_progress
) -> tuple[Tensor, Tensor]:
    """Return labelled pixels on a grid, in all about CALIBRATION_PIXELS: log-probabilities (N, L) and labels (N)."""
    samples, targets = [torch.empty(0, 1)], [torch.empty(0, dtype=torch.long)]
    for number, (log_p, mask) in enumerate(outputs, start=1):
        share = mask.numel() * count / CALIBRATION_PIXELS  # of the pixels of this image, one in so many is taken
        step = max(1, math.floor(share ** (1 / mask.dim())))
        grid = (slice(step // 2, None, step),) * mask.dim()
        labelled = mask[grid] != ignore
        samples.append(log_p[(slice(None), *grid)].float()[:, labelled].T)
        targets.append(mask[grid][labelled].long())
        progress(number, count)
    return torch.cat(samples[1:] or samples), torch.cat(targets)


@torch.no_grad()
def penalty_map(mrf: MeanField, log_p: Tensor, image: Tensor) -> Tensor:
    """b12 of one image on the MRF's device: log_p (L, *S), image (F, *S) -> t (L, *S) of float16 on the CPU."""
    device = mrf.triple_penalty.scale.device
    q = mrf.belief(log_p[None].float().to(device))
    features = image[None].to(device) if mrf.triple_penalty.features else None
    t: Tensor = mrf.triple_penalty(q, features)
    return t[0].half().cpu()


class Trust(nn.Module):
    """A learned factor on all log-probabilities, for the loss alone: it changes no label, and nobody saves it.

    Without it, the MRF of an overconfident network learns to doubt the network (a penalty on whatever it predicts)
    instead of to correct it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_factor = nn.Parameter(torch.zeros(()))

    def forward(self, scores: Tensor) -> Tensor:
        return self.log_factor.exp() * scores


class Descent:
    """Steps of Adam at a constant rate, with the mean of the weights over the last steps.

    The mean is about as good as weights whose rate has fallen to 0, and it is so at every step: a run can be judged
    and then go on.
    """

    def __init__(self, modules: Sequence[nn.Module], rate: float) -> None:
        self.parameters: list[Tensor] = [p for module in modules for p in module.requires_grad_(True).parameters()]
        self.optimiser = torch.optim.Adam(self.parameters, lr=rate, eps=SMALL_GRADIENT)
        self.mean = [parameter.detach().clone() for parameter in self.parameters]
        self.steps = 0

    def run(self, loss: Callable[[], Tensor], steps: int, progress: Progress = no_progress) -> None:
        """Take more steps."""
        for step in range(steps):
            take_step(self.optimiser, loss())
            self.steps += 1
            share = max(1 / STEPS_IN_MEAN, 3 / (self.steps + 3))  # of the new weights; the first are soon forgotten
            with torch.no_grad():
                torch._foreach_lerp_(self.mean, self.parameters, share)
            progress(step + 1, steps)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the `with` block, the modules have the mean weights."""
        latest = [parameter.detach().clone() for parameter in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.mean)
            try:
                yield
            finally:
                torch._foreach_copy_(self.parameters, latest)


def minimise(
    modules: Sequence[nn.Module], loss: Callable[[], Tensor], steps: int, rate: float, progress: Progress = no_progress
) -> None:
    """Take `steps` steps of Adam on these modules; the rate falls from `rate` to 0 along half a cosine.

    `loss` draws a batch at each call.
    """
    parameters = [parameter for module in modules for parameter in module.requires_grad_(True).parameters()]
    optimiser = torch.optim.Adam(parameters, lr=rate)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        take_step(optimiser, loss())
        progress(step + 1, steps)
    for module in modules:
        module.requires_grad_(False)


def take_step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one step; a loss that is not finite, as of void pixels alone, is skipped."""
    if bool(loss.isfinite()):
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
