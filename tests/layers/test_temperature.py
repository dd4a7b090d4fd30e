"""The temperature: ln p divided, everywhere alike, and kept by whatever is made of a mean field."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from deepmrf import MeanField


def small(**settings):
    torch.manual_seed(0)
    mrf = MeanField(3, **({"window": 3, "contexts": 2, "context_size": 3} | settings)).requires_grad_(False)
    for parameter in mrf.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    mrf.triple_penalty.scale.fill_(2.0)
    return mrf


def inputs(unary="softmax"):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(2, 3, 9, 11, generator=generator)
    log_p = functional.logsigmoid(logits) if unary == "sigmoid" else logits.log_softmax(1)
    return log_p, torch.rand(2, 3, 9, 11, generator=generator)


@pytest.mark.parametrize(
    "settings", [{}, {"kernel": "gaussian"}, {"contexts": 0}, {"iterations": 3}, {"unary": "sigmoid"}], ids=str
)
def test_is_what_ln_p_is_divided_by(settings, agree):
    mrf = small(**settings)
    log_p, image = inputs(settings.get("unary", "softmax"))
    plain = mrf(log_p, image)
    expected = mrf(log_p / 1.7, image)
    mrf.temperature = 1.7
    agree(mrf(log_p, image), expected)
    assert (expected.exp() - plain.exp()).abs().max() > 0.05
    if mrf.iterations == 1:
        t = mrf.triple_penalty(mrf.belief(log_p), image)
        agree(mrf.from_penalty(log_p, t), expected)


def test_untrained_it_only_flattens():
    log_p, image = inputs()
    flattened = MeanField(3, window=3, temperature=2.0)(log_p, image)
    torch.testing.assert_close(flattened, (log_p / 2).log_softmax(1), rtol=0, atol=1e-4)


def test_impossible_labels_stay_impossible():
    log_p, image = inputs()
    log_p = torch.where(torch.arange(3).view(1, 3, 1, 1) == 1, -torch.inf, log_p)
    log_q = small(temperature=3.0)(log_p, image)
    assert (log_q[:, 1] == -torch.inf).all()
    assert torch.isfinite(log_q[:, [0, 2]]).all()


def test_gradients_pass(double_default):
    mrf = small(temperature=1.7).double().requires_grad_(True)
    log_p, image = (part[:1, :, :4, :5].double() for part in inputs())
    assert torch.autograd.gradcheck(lambda maps: mrf(maps, image), (log_p.clone().requires_grad_(True),))


def test_goes_wherever_the_mean_field_goes():
    mrf = small(kernel="gaussian", temperature=1.5)
    assert mrf.settings["temperature"] == 1.5
    assert "temperature=1.5" in repr(mrf)
    assert "temperature" not in repr(small())
    for copied in (copy.deepcopy(mrf), mrf.inflate(), mrf.compress(stride=2), MeanField(**mrf.settings)):
        assert copied.temperature == 1.5
    other = mrf.inflate()
    other.temperature = 2
    assert (other.temperature, mrf.temperature) == (2.0, 1.5)
    assert MeanField(**{k: v for k, v in mrf.settings.items() if k != "temperature"}).temperature == 1  # saved earlier


@pytest.mark.parametrize("value", [0, -1.0, 11, True, "2", None, float("nan")])
def test_bad_ones(value):
    with pytest.raises(ValueError, match=r"temperature=.* must be a number from 0.1 to 10"):
        MeanField(3, temperature=value)
    mrf = small()
    with pytest.raises(ValueError, match="temperature="):
        mrf.temperature = value
    assert mrf.temperature == 1


def test_exports(agree):
    mrf, (log_p, image) = small(temperature=1.7), inputs()
    program = torch.export.export(mrf, (log_p, image))
    agree(program.module()(log_p, image), mrf(log_p, image))
