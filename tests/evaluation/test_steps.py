"""What layers make of an image: against the model itself, stage 2's start, and the paper's sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepmrf.data.labels import LabelSet
from deepmrf.evaluation.steps import context_weight, layer_steps, stage_scores
from deepmrf.layers import LabelContexts, MeanField
from deepmrf.models.parsing_network import Card, DeepParsingNetwork
from deepmrf.ops.contexts import label_contexts_reference

pytestmark = pytest.mark.usefixtures("plain_torch")
IMAGE = np.random.default_rng(0).integers(0, 256, (13, 17, 3), dtype=np.uint8)
PIXELS = torch.from_numpy(IMAGE).permute(2, 0, 1)[None]


def model(**settings):
    """A network of one convolution with an MRF whose every layer changes some labels."""
    network = torch.nn.Conv2d(3, 4, 3, padding=1)
    settings = {"window": 5, "contexts": 3, "context_size": 3, **settings}
    mrf = MeanField(4, **settings)
    with torch.no_grad():
        mrf.triple_penalty.scale.fill_(-3 if settings["contexts"] else -8)
        if mrf.label_contexts is not None and mrf.label_contexts.rank is None:
            mrf.label_contexts.weight.normal_(std=3)
            mrf.label_contexts.bias.normal_()
    return DeepParsingNetwork(network, mrf, LabelSet(list("abcd"))).eval()


def labels(log_q):
    return log_q[0].argmax(0).numpy()


@torch.no_grad()
def test_steps_are_the_network_stage_two_and_the_model():
    dpn = model()
    result = layer_steps(dpn, IMAGE)
    assert [name for name, _ in result.label_maps] == ["network", "after b12", "after b13, b14"]
    network, after_b12, last = (ids for _, ids in result.label_maps)
    assert np.array_equal(network, labels(dpn.log_unary(PIXELS)))
    assert np.array_equal(last, labels(dpn(PIXELS)))
    active = result.active
    o13 = []  # by each context alone, the paper's sum
    mrf = dpn.mean_field
    t = mrf.triple_penalty(mrf.belief(dpn.log_unary(PIXELS)), PIXELS)
    for k in range(3):
        layer = mrf.label_contexts
        o13.append(label_contexts_reference(t, layer.weight[k::3], layer.bias[k::3], 1)[0])
    winner = torch.stack(o13).argmin(0)  # (L, H, W)
    assert np.array_equal(active, winner.gather(0, torch.from_numpy(last)[None].long())[0].numpy())
    assert len(np.unique(active)) == 3
    mrf.label_contexts.set_compatibility(torch.eye(4))  # as before stage 2
    assert np.array_equal(after_b12, labels(dpn(PIXELS)))
    assert (network != after_b12).any()
    assert (after_b12 != last).any()


@torch.no_grad()
def test_more_iterations_are_one_more_step():
    dpn = model(iterations=3)
    result = layer_steps(dpn, IMAGE)
    assert [name for name, _ in result.label_maps] == ["network", "after b12", "after b13, b14", "model"]
    assert np.array_equal(result.label_maps[-1][1], labels(dpn(PIXELS)))
    dpn.mean_field.iterations = 1
    assert np.array_equal(result.label_maps[-2][1], labels(dpn(PIXELS)))


@torch.no_grad()
def test_models_without_contexts_or_mrf_have_fewer_steps():
    dpn = model(contexts=0)
    result = layer_steps(dpn, IMAGE)
    assert [name for name, _ in result.label_maps] == ["network", "after b12"]
    assert np.array_equal(result.label_maps[1][1], labels(dpn(PIXELS)))
    assert result.active is None
    dpn.mean_field = None
    assert [name for name, _ in layer_steps(dpn, IMAGE).label_maps] == ["network"]
    assert layer_steps(model(context_stride=2), IMAGE).active is None


@torch.no_grad()
def test_models_of_clips_take_one_frame():
    flat = model(kernel="gaussian")
    flat_steps, deep_steps = layer_steps(flat, IMAGE), layer_steps(flat.inflate(), IMAGE)
    for (_, a), (_, b) in zip(flat_steps.label_maps, deep_steps.label_maps, strict=True):
        assert np.array_equal(a, b)
    assert np.array_equal(flat_steps.active, deep_steps.active)


def test_patterns_of_low_rank_are_multiplied_out():
    layer = LabelContexts(3, 2, 5)
    torch.nn.init.normal_(layer.weight)
    torch.testing.assert_close(context_weight(layer.compress(rank=15)), layer.weight.detach(), atol=1e-4, rtol=0)


def test_scores_are_those_of_the_recipes_stages():
    values = {"ta": 0.5, "la": 0.25, "ba": 0.75, "miou": 0.1}
    metrics = {"val": {"a": values, "a, network alone": values, "b": {"miou": 0.5}, "c": values}, "seed": 0}
    recipe = {"stage": [{"name": "c"}, {"name": "a"}, {"name": "b"}]}
    dpn = DeepParsingNetwork(torch.nn.Conv2d(3, 2, 1), None, ["a", "b"], Card(metrics, recipe))
    assert stage_scores(dpn) == {name: {"TA": 0.5, "LA": 0.25, "BA": 0.75} for name in ("c", "a")}
    assert list(stage_scores(dpn)) == ["c", "a"]
    for metrics, recipe in (({}, {}), ({"val": 3}, {"stage": 3}), ({"val": {}}, {"stage": ["a", {}, {"name": []}]})):
        dpn.card = Card(metrics, recipe)
        assert stage_scores(dpn) == {}


@pytest.mark.parametrize("value", [[1], True, 1.5, -1, 10**400, None])
def test_odd_scores_are_not_drawn(value):
    stages = {"a": {"ta": value, "la": 0.25, "ba": 0.75}, "b": {"ta": 1, "la": 0, "ba": 0.75}}
    card = Card({"val": stages}, {"stage": [{"name": "a"}, {"name": "b"}]})
    model = DeepParsingNetwork(torch.nn.Conv2d(3, 2, 1), None, ["a", "b"], card)
    assert stage_scores(model) == {"b": {"TA": 1.0, "LA": 0.0, "BA": 0.75}}
