"""A factor and a summand for each label's log-probability: the equation, its gradients, and how they are learned."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from deepmrf import MeanField
from deepmrf.layers import LabelScaling
from deepmrf.layers.label_scaling import scale_labels
from deepmrf.models.folder import read_mrf, write_mrf
from deepmrf.training import mean_field as training
from deepmrf.training.mean_field import learn_scaling


def scaled(layer: MeanField, log_scale, bias) -> MeanField:
    with torch.no_grad():
        layer.label_scaling.log_scale.copy_(torch.tensor(log_scale))
        layer.label_scaling.bias.copy_(torch.tensor(bias))
    return layer


def test_by_hand():
    log_p = torch.tensor([[[-1.0, -2.0]], [[-3.0, -4.0]]])[None, :, 0]  # (1, 2, 2)
    result = scale_labels(log_p, torch.tensor([2.0, 0.5]), torch.tensor([0.25, -1.0]))
    torch.testing.assert_close(result, torch.tensor([[[-1.75, -3.75], [-2.5, -3.0]]]))


def test_untrained_it_changes_nothing():
    log_p = torch.randn(2, 5, 4, 7).log_softmax(1)
    torch.testing.assert_close(LabelScaling(5)(log_p), log_p)


@pytest.mark.parametrize("size", [(7,), (3, 5), (2, 3, 4)])
def test_gradients(size):
    log_p = torch.randn(2, 3, *size, dtype=torch.float64).log_softmax(1).requires_grad_()
    a = torch.rand(3, dtype=torch.float64).add(0.5).requires_grad_()
    b = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(scale_labels, (log_p, a, b))


def test_labels_that_are_ruled_out_stay_so_and_spoil_no_gradient():
    layer = scaled(
        MeanField(3, window=3, contexts=1, context_size=1, label_scaling=True), [-0.7, 0.2, 0.7], [1.0, 0, 3]
    )
    log_p = torch.tensor([0.0, -math.inf, -math.inf]).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    log_q = layer(log_p, torch.rand(1, 3, 4, 4))
    assert (log_q.exp()[:, 1:] == 0).all()
    log_q[:, 0].sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.label_scaling.parameters())
    with torch.no_grad():
        torch.testing.assert_close(layer(log_p, torch.zeros(1, 3, 4, 4)).exp(), log_p.exp())


@pytest.mark.parametrize("settings", [{}, {"kernel": "gaussian", "iterations": 2}, {"kernel": "global", "contexts": 1}])
def test_the_mean_field_sees_scaled_log_probabilities(settings):
    settings = {"contexts": 2, "context_size": 3, "gate": False, **settings}
    torch.manual_seed(0)
    layer = MeanField(4, label_scaling=True, temperature=1.5, **settings)
    plain = MeanField(4, **settings)
    plain.load_state_dict({n: v for n, v in layer.state_dict().items() if not n.startswith("label_scaling")})
    scaled(layer, [0.3, -0.2, 0.0, 0.5], [0.5, -1.0, 0.0, 0.2])
    log_p, image = torch.randn(1, 4, 9, 11).log_softmax(1), torch.rand(1, 3, 9, 11)
    factor, summand = torch.tensor([0.3, -0.2, 0.0, 0.5]).exp(), torch.tensor([0.5, -1.0, 0.0, 0.2])
    expected = plain(factor.view(4, 1, 1) * log_p / 1.5 + summand.view(4, 1, 1), image)
    with torch.no_grad():
        torch.testing.assert_close(layer(log_p, image), expected)
    torch.testing.assert_close(layer(log_p, image), expected)


def test_inflated_saved_and_read(tmp_path):
    layer = scaled(
        MeanField(3, window=5, contexts=1, context_size=3, label_scaling=True), [0.1, 0.5, -0.4], [1.0, 0, 2]
    )
    log_p, clip = torch.randn(1, 3, 2, 8, 9).log_softmax(1), torch.rand(1, 3, 2, 8, 9)
    frames = torch.stack([layer(log_p[:, :, t], clip[:, :, t]) for t in range(2)], 2)
    torch.testing.assert_close(layer.inflate(3, 1)(log_p, clip), frames)
    write_mrf(tmp_path / "mrf", layer, {"labels": {"names": ["a", "b", "c"]}})
    torch.testing.assert_close(read_mrf(tmp_path / "mrf")[0](log_p[:, :, 0], clip[:, :, 0]), frames[:, :, 0])


@pytest.mark.parametrize("given", [{"label_scaling": 1}, {"label_scaling": True, "unary": "sigmoid"}])
def test_what_is_refused(given):
    with pytest.raises(ValueError, match=r"label_scaling=.* must be True or False, and False with unary='sigmoid'"):
        MeanField(3, **given)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (3,)])
def test_other_labels_are_named(shape):
    with pytest.raises(ValueError, match=r"log_p must have shape \(B, 3"):
        LabelScaling(3)(torch.zeros(shape))


def images(count, size=(40, 50), labels=4, seed=0):
    """Log-probabilities that are right about themselves, and labels drawn by them."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        log_p = (2 * torch.randn(labels, *size, generator=random)).log_softmax(0)
        drawn = torch.multinomial(log_p.exp().flatten(1).T, 1, generator=random)
        yield log_p, drawn.view(size).to(torch.uint8)


def distorted(log_p):
    """What a network says that is too sure of label 0, and sees too much of label 1."""
    a, b = torch.tensor([2.0, 1.0, 1.0, 1.0]), torch.tensor([0.0, 1.5, 0.0, 0.0])
    return (a.view(4, *[1] * (log_p.dim() - 1)) * log_p + b.view(4, *[1] * (log_p.dim() - 1))).log_softmax(0)


@pytest.mark.parametrize(("size", "temperature"), [((40, 50), 1.0), ((41, 53), 1.7), ((9, 14, 16), 1.0)])
def test_learned_scaling_mends_what_a_network_says_of_labels(size, temperature):
    layer = MeanField(4, window=3, contexts=0, label_scaling=True, temperature=temperature)
    spoilt = [(distorted(log_p), mask) for log_p, mask in images(12, size)]
    learn_scaling(layer, iter(spoilt), 12, 255)
    assert not any(parameter.requires_grad for parameter in layer.label_scaling.parameters())
    losses, right = [0.0, 0.0], [0, 0]
    for log_p, mask in images(6, size, seed=1):
        said = distorted(log_p)[None]
        for number, scores in enumerate((said, layer.tempered(said))):
            losses[number] += float(functional.cross_entropy(scores, mask[None].long()))
            right[number] += int((scores[0].argmax(0) == mask).sum())
    assert losses[1] < losses[0] - 0.3
    assert right[1] > 1.05 * right[0]


def test_few_pixels_of_many_images_are_enough(monkeypatch):
    monkeypatch.setattr(training, "CALIBRATION_PIXELS", 4000)
    log_p, target = training._sampled_pixels(images(20), 20, 255)
    assert log_p.shape == (len(target), 4)
    assert 3000 <= len(target) <= 8000


def test_void_and_missing_labels():
    layer = MeanField(4, window=3, contexts=0, label_scaling=True)
    learn_scaling(layer, [(torch.zeros(4, 8, 8), torch.full((8, 8), 255))], 1, 255)
    assert not layer.label_scaling.bias.any()  # nothing was learned
    log_p, mask = next(images(1))
    log_p[2] = -math.inf  # a label that the network rules out, though it is there
    learn_scaling(layer, [(log_p, mask.where(mask != 3, 0))], 1, 255)  # and one that never occurs
    assert layer.label_scaling.bias.isfinite().all()
    assert layer.label_scaling.log_scale.abs().max() < 5
    assert layer.label_scaling.bias[3] < layer.label_scaling.bias[0]


def test_it_is_learned_alike_again(monkeypatch):
    """A training that goes on learns it a second time, from where it began the first."""
    monkeypatch.setattr("deepmrf.training.mean_field.SCALING_STEPS", 2)
    log_p, mask = torch.randn(4, 16, 16).log_softmax(0), torch.randint(0, 4, (16, 16))
    layer = MeanField(4, contexts=0, label_scaling=True)
    results = []
    for _ in range(2):
        learn_scaling(layer, [(log_p, mask)], 1, 255)
        results.append(torch.cat([layer.label_scaling.log_scale, layer.label_scaling.bias]).detach().clone())
    assert torch.equal(*results)
    assert results[0].abs().max() > 0.01
