"""Label contexts as a layer: a start that changes nothing yet tells patterns apart, and compatibilities."""

from __future__ import annotations

import pytest
import torch

from deepmrf import LabelContexts
from deepmrf.layers.label_contexts import QUIET
from deepmrf.ops.contexts import label_contexts_reference


@pytest.mark.parametrize(("dims", "size"), [(1, 3), (2, (3, 4)), (3, (1, 2, 3)), (4, 2)])
def test_equals_the_reference(dims, size, agree):
    layer = LabelContexts(2, 3, size, dims=dims).double().requires_grad_(False)
    layer.weight.normal_()
    layer.bias.normal_()
    t = torch.randn(2, 2, *(4, 3, 2, 2)[:dims], dtype=torch.float64)
    agree(layer(t), label_contexts_reference(t, layer.weight, layer.bias, 3))


def test_untrained_it_stays_below_notice():
    """t of RGB in [0, 255] reaches 3 * 255^2 per pixel; the penalty must not show in log-probabilities."""
    layer = LabelContexts(4)
    t = torch.rand(1, 4, 20, 20)
    t = 3 * 255**2 * t / t.sum(1, keepdim=True)
    assert 0 < layer(t).abs().max() < 1e-4


def test_untrained_patterns_differ():
    layer = LabelContexts(3, contexts=4, size=3)
    patterns = layer.weight.detach().unflatten(0, (3, 4)).flatten(2)
    for label in patterns:
        assert torch.pdist(label / QUIET).min() > 1e-3


def test_reset_starts_again():
    layer = LabelContexts(2, 2, 3)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.fill_(1)
    layer.reset_parameters()
    assert layer.weight.abs().max() <= QUIET
    assert layer.bias.eq(0).all()


@pytest.mark.parametrize("size", [1, 3, 4, (3, 2)])
@pytest.mark.parametrize("contexts", [1, 3])
def test_compatibility_is_a_matrix_at_the_same_pixel(size, contexts, agree):
    layer = LabelContexts(3, contexts, size).double()
    mu = torch.randn(3, 3, dtype=torch.float64)
    layer.set_compatibility(mu)
    t = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    agree(layer(t), torch.einsum("uv,bvhw->buhw", mu, t))


def test_compatibility_of_another_size_is_an_error():
    with pytest.raises(ValueError, match=r"shape \(2, 3\): pass \(3, 3\)\.$"):
        LabelContexts(3).set_compatibility(torch.zeros(2, 3))


def test_the_active_pattern_changes_from_pixel_to_pixel():
    layer = LabelContexts(1, contexts=2, size=1).requires_grad_(False)
    layer.weight.copy_(torch.tensor([1.0, -1.0]).view(2, 1, 1, 1))
    t = torch.tensor([[[[2.0, -3.0]]]])
    torch.testing.assert_close(layer(t), -t.abs())


def test_every_parameter_gets_a_gradient():
    layer = LabelContexts(3, 2, 3)
    layer(torch.randn(2, 3, 9, 9)).square().sum().backward()
    assert (layer.weight.grad != 0).all()
    assert (layer.bias.grad != 0).all()


def test_repr_tells_the_settings():
    assert repr(LabelContexts(3, 2, (3, 5))) == "LabelContexts(labels=3, contexts=2, size=(3, 5), dims=2)"
