"""Label contexts as a layer: a start that changes nothing yet tells patterns apart, and compatibilities."""

from __future__ import annotations

import pytest
import torch

from deepmrf import LabelContexts, MeanField
from deepmrf.layers.label_contexts import INITIAL_WEIGHT
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
        assert torch.pdist(label / INITIAL_WEIGHT).min() > 1e-3


def test_reset_starts_again():
    layer = LabelContexts(2, 2, 3)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.fill_(1)
    layer.reset_parameters()
    assert layer.weight.abs().max() <= INITIAL_WEIGHT
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


def test_compressed_at_full_rank_is_exact_and_lower_ranks_are_measured():
    layer = LabelContexts(3, contexts=2, size=5)
    torch.nn.init.normal_(layer.weight)
    t = torch.rand(1, 3, 12, 13)
    full = layer.compress(rank=15)
    assert full.error < 1e-6
    torch.testing.assert_close(full(t), layer(t), rtol=1e-4, atol=1e-4)
    errors = [layer.compress(rank=rank).error for rank in (1, 4, 9, 14)]
    assert errors == sorted(errors, reverse=True)
    assert 0 < errors[-1] < errors[0] < 1


def test_compressed_layers_learn_and_are_saved():
    mrf = MeanField(3, window=5, contexts=2, context_size=5)
    torch.nn.init.normal_(mrf.label_contexts.weight, std=0.1)
    cheaper = mrf.compress(rank=6, stride=2)
    log_p, image = torch.randn(1, 3, 9, 11), torch.rand(1, 3, 9, 11)
    cheaper(log_p, image).square().sum().backward()
    assert all(p.grad is not None for p in cheaper.label_contexts.parameters())
    again = MeanField(**cheaper.settings)
    again.load_state_dict(cheaper.state_dict())
    torch.testing.assert_close(again(log_p, image), cheaper(log_p, image))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 99}, "between 1 and"),
        ({"stride": 0}, "stride=0"),
        ({"rank": 2, "dims": 3}, "dims=3"),
    ],
)
def test_bad_compression(settings, says):
    with pytest.raises(ValueError, match=says):
        LabelContexts(3, size=5, **settings)


def test_contexts_that_are_compressed_cannot_be_again():
    with pytest.raises(ValueError, match="already"):
        LabelContexts(3, size=5).compress(rank=2).compress(rank=1)
