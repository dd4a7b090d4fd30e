"""Losses of training: cross-entropy per pixel, and a smooth approximation of the mean intersection over union.

The Lovász-softmax loss (Berman et al., 2018) of one label: let e[i] be how wrong its probability is at pixel i
(1 - p where the label is true, p where it is not), sorted from the worst down; then

    loss = sum over i of e[i] (J[i] - J[i-1]),     J[i] = 1 - (G - G_i) / (G + i - G_i)

where G is how many pixels have the label and G_i how many of them are among the i worst. J[i] is what the label would
lose in intersection over union if exactly the i worst pixels were wrong; the loss averages the labels that occur.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MAX_SORTED_PIXELS = 1 << 19
"""Pixels that the Lovász loss sorts at most; of more, it takes every n-th."""
MIN_CLASS_FREQUENCY = 1e-5
"""Rarer classes get the weight of this frequency."""


def cross_entropy(log_q: Tensor, target: Tensor, weights: Tensor | None, ignore: int) -> tuple[Tensor, Tensor]:
    """Return the sum over labelled pixels, and its divisor: their number, or the sum of their weights."""
    total = functional.nll_loss(log_q, target, weights, ignore_index=ignore, reduction="sum")
    labelled = target != ignore
    if weights is None:
        return total, labelled.sum().float()
    return total, (weights[target.clamp(max=len(weights) - 1)] * labelled).sum()


def class_weights(counts: Tensor, power: float) -> Tensor:
    """Return frequency ** -power for pixels per class (L,), scaled to average 1."""
    frequencies = (counts / counts.sum()).clamp_min(MIN_CLASS_FREQUENCY)
    weights = frequencies**-power
    return weights / weights.mean()


def lovasz(log_q: Tensor, target: Tensor, ignore: int) -> Tensor:
    """Return the Lovász-softmax loss of a batch, taken as one image: log_q (B, L, *S), labels (B, *S) -> scalar."""
    log_q, target = _thinned(log_q, target)
    p = log_q.exp().movedim(1, 0).flatten(1)  # (L, P)
    target = target.flatten()
    truth = (target == torch.arange(log_q.shape[1], device=target.device)[:, None]).to(p.dtype)  # (L, P)
    # Void pixels get an error of 0, which is sorted last and adds nothing. Removing them would make every step wait
    # until the GPU has counted them.
    errors = (truth - p).abs() * (target != ignore)
    occurs = (truth.sum(1) > 0).to(p.dtype)
    return ((errors * _weights(errors.detach(), truth)).sum(1) * occurs).sum() / occurs.sum().clamp_min(1)


def lovasz_reference(p: Tensor, truth: Tensor) -> Tensor:
    """The equation above for one label, a pixel at a time: p (P,), truth (P,) of 0 and 1. Slow: for tests."""
    wrong = [1 - a if t else a for a, t in zip(p, truth, strict=True)]
    order = sorted(range(len(wrong)), key=lambda i: -float(wrong[i].detach()))
    positives, hits, before = int(truth.sum()), 0, 0.0
    total = p.new_zeros(())
    for i, pixel in enumerate(order, start=1):
        hits += int(truth[pixel])
        lost = 1 - (positives - hits) / (positives + i - hits)
        total = total + wrong[pixel] * (lost - before)
        before = lost
    return total


def _weights(errors: Tensor, truth: Tensor) -> Tensor:
    """Return J[i] - J[i-1] of each label at the pixel that is the i-th worst: both (L, P) -> (L, P)."""
    if errors.device.type != "cpu" or errors.dtype != torch.float32:
        order = errors.argsort(dim=1, descending=True)
        return torch.empty_like(errors).scatter_(1, order, _steps(truth.gather(1, order)))
    weights = torch.zeros_like(errors)
    for label in truth.any(1).nonzero().flatten().tolist():  # a label at a time stays in the cache
        order, sorted_truth = _sorted_on_cpu(errors[label], truth[label])
        weights[label].scatter_(0, order, _steps(sorted_truth))
    return weights


def _sorted_on_cpu(errors: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pixels (P,) of a label from the worst error down, and the truth there.

    NumPy sorts whole numbers some ten times faster than PyTorch sorts numbers and remembers where they were. So each
    pixel is one: its error, whose bits rise with it since it is not negative, then its index, then its truth.
    """
    numbers = errors.view(torch.int32).long() << 32
    numbers |= torch.arange(len(errors)) << 1
    numbers |= truth.long()
    numbers.numpy().sort()
    numbers = numbers.flip(0)
    return (numbers & 0xFFFFFFFF) >> 1, (numbers & 1).to(errors.dtype)


def _steps(sorted_truth: Tensor) -> Tensor:
    """Return J[i] - J[i-1] for each label: (L, P) or (P,) of 0 and 1, worst pixel first -> the same shape."""
    hits = sorted_truth.cumsum(-1)
    positives = hits[..., -1:]
    count = torch.arange(1, hits.shape[-1] + 1, device=hits.device, dtype=hits.dtype)
    lost = 1 - (positives - hits) / (positives + count - hits)
    return torch.cat([lost[..., :1], lost[..., 1:] - lost[..., :-1]], dim=-1)


def _thinned(log_q: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Take every n-th pixel along the last two axes from a random start, so that at most MAX_SORTED_PIXELS remain."""
    step = 1
    while target.numel() > MAX_SORTED_PIXELS * step**2:
        step += 1
    if step == 1:
        return log_q, target
    top, left = torch.randint(step, (2,)).tolist()
    return log_q[..., top::step, left::step], target[..., top::step, left::step]
