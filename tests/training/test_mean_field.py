"""Stages 2 and 3: where an MRF starts, what is cached, and what a step skips."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from deepmrf import MeanField
from deepmrf.training.mean_field import (
    Trust,
    calibrated_temperature,
    minimise,
    penalty_map,
    start_contexts,
    start_penalty,
)


@pytest.mark.parametrize("contexts", [0, 2])
def test_stage_2_starts_at_nothing_and_o14_is_t(contexts):
    mrf = MeanField(3, window=3, contexts=contexts, context_size=3)
    with torch.no_grad():
        for parameter in mrf.parameters():
            parameter.fill_(0.3)
    start_penalty(mrf)
    log_p, image = torch.randn(1, 3, 6, 7).log_softmax(1), torch.rand(1, 3, 6, 7)
    torch.testing.assert_close(mrf(log_p, image), log_p)
    with torch.no_grad():
        mrf.triple_penalty.scale.fill_(-1)
    t = mrf.triple_penalty(log_p.exp(), image)
    torch.testing.assert_close(mrf(log_p, image), (log_p - t).log_softmax(1))


def test_stage_3_tells_patterns_apart_by_little():
    contexts = MeanField(3, window=3, contexts=2, context_size=5).label_contexts
    contexts.set_compatibility(torch.eye(3))
    before = contexts.weight.detach().clone()
    start_contexts(contexts, seed=4)
    first, second = contexts.weight[0], contexts.weight[1]
    assert not torch.equal(first, second)
    assert (contexts.weight - before).abs().max() < 0.01
    again = MeanField(3, window=3, contexts=2, context_size=5).label_contexts
    again.set_compatibility(torch.eye(3))
    start_contexts(again, seed=4)
    assert torch.equal(contexts.weight, again.weight)


@pytest.mark.parametrize("features", [0, 3])
def test_the_cached_penalty_is_what_b12_gives(features):
    mrf = MeanField(3, window=3, contexts=2, context_size=3, features=features, temperature=2.0)
    log_p, image = torch.randn(3, 6, 7).log_softmax(0), torch.rand(3, 6, 7)
    t = penalty_map(mrf, log_p.half(), image)
    assert t.dtype == torch.float16
    q = (log_p.half().float() / 2).softmax(0)
    expected = mrf.triple_penalty(q[None], image[None] if features else None)[0]
    torch.testing.assert_close(t.float(), expected, atol=1e-3, rtol=1e-2)


def test_steps_lower_the_loss_at_a_falling_rate_and_skip_what_is_not_finite():
    module, progress, moves = Trust(), [], []
    losses = iter([1, math.nan, 1, 1, math.inf, 1])

    def loss():
        moves.append(float(module.log_factor.detach()))
        return next(losses) * module(torch.ones(()))

    minimise([module], loss, 6, 0.1, lambda done, total: progress.append((done, total)))
    moves.append(float(module.log_factor.detach()))
    steps = [after - before for before, after in itertools.pairwise(moves)]
    assert steps[1] == steps[4] == 0
    assert steps[0] < steps[2] < steps[5] < 0
    assert progress[0] == (1, 6)
    assert progress[-1] == (6, 6)
    assert not module.log_factor.requires_grad


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.75])
def test_the_temperature_of_a_network_that_is_too_sure_is_found(temperature):
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(5, 60, 70, generator=generator).mul(2).log_softmax(0)
    truth = torch.multinomial(log_p.exp().flatten(1).T, 1, generator=generator).view(60, 70).to(torch.uint8)
    truth[:3] = 255
    sure = (temperature * log_p).log_softmax(0).half()
    assert calibrated_temperature([sure], [truth], 255) == pytest.approx(temperature, abs=0.15)
    assert calibrated_temperature([sure], [torch.full_like(truth, 255)], 255) == 1
