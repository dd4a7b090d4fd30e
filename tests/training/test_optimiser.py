"""Steps of the optimiser: one gradient that is no number must not spoil the weights."""

from __future__ import annotations

import pytest
import torch

from deepmrf.training.optimiser import step_if_finite

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
