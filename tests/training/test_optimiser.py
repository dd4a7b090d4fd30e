"""Steps of the optimiser: one gradient that is no number must not spoil the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepmrf.training.optimiser import NormStatistics, step_if_finite

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_with_a_bad_gradient_is_left_out(device, fused, bad):
    weights = [torch.nn.Parameter(torch.ones(3, device=device)), torch.nn.Parameter(torch.ones(2, 2, device=device))]
    optimiser = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.01, fused=fused)

    def step(first: float) -> float:
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.5)
        weights[0].grad[0] = first
        norm = torch.nn.utils.clip_grad_norm_(weights, 5.0)
        return float(step_if_finite(optimiser, optimiser, norm))

    assert step(0.5) == 0
    before = [weight.detach().clone() for weight in weights]
    assert not torch.equal(before[0], torch.ones_like(before[0]))
    assert step(bad) == 1
    for weight, then in zip(weights, before, strict=True):
        assert torch.equal(weight, then)
    assert step(0.5) == 0
    for weight, then in zip(weights, before, strict=True):
        assert torch.isfinite(weight).all()
        assert (weight < then).all()


def test_running_statistics_are_the_mean_of_all_steps_until_their_momentum_is_faster():
    torch.manual_seed(0)
    norm, batches = nn.BatchNorm2d(3, momentum=0.2).train(), torch.randn(8, 4, 3, 5, 5)
    statistics, expected = NormStatistics(nn.Sequential(norm)), torch.zeros(3)
    for step, batch in enumerate(batches):
        statistics.begin(step)
        norm(batch)
        mean = batch.mean((0, 2, 3))
        expected = batches[: step + 1].mean((0, 1, 3, 4)) if step < 5 else 0.8 * expected + 0.2 * mean
        torch.testing.assert_close(norm.running_mean, expected)
    statistics.end()
    assert norm.momentum == 0.2
