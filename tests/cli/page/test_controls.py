"""The controls of an MRF: they begin at its own numbers, and each changes what it names."""

from __future__ import annotations

import math

import pytest
import torch

from deepmrf.cli.page.controls import NAMES, Control, adjust, controls
from deepmrf.layers import MeanField
from deepmrf.layers.crf import dense_crf, preset

pytestmark = pytest.mark.usefixtures("plain_torch")
LABELS = 3


def trained(kernel, **settings):
    mrf = MeanField(LABELS, kernel=kernel, window=5, contexts=3, context_size=3, temperature=1.5, **settings)
    with torch.no_grad():
        mrf.label_contexts.weight.normal_(std=0.4)
        mrf.label_contexts.bias.normal_(std=0.3)
        for parameter in mrf.label_scaling.parameters() if mrf.label_scaling is not None else ():
            parameter.normal_(std=0.3)
    return mrf.eval()


MRFS = {
    "distance": lambda: trained("distance", label_scaling=True),
    "gaussian": lambda: trained("gaussian", gate=False),
    "compressed": lambda: trained("gaussian").compress(rank=2),
    "without contexts": lambda: MeanField(LABELS, kernel="gaussian", window=5, contexts=0),
    "dense CRF": lambda: dense_crf(LABELS, appearance=0.4, smoothness=0.3, position_width=4.0, iterations=2),
}


@pytest.fixture
def maps():
    return torch.randn(1, LABELS, 9, 11).log_softmax(1), 0.1 * torch.rand(1, 3, 9, 11)


@pytest.mark.parametrize("name", MRFS)
def test_its_own_values_change_nothing(name, maps, agree):
    mrf = MRFS[name]()
    known = controls(mrf)
    assert set(known) <= set(NAMES)
    assert all(control.low <= control.value <= control.high for control in known.values())
    with torch.no_grad():
        agree(adjust(mrf, {name: control.value for name, control in known.items()})(*maps).exp(), mrf(*maps).exp())
        agree(adjust(mrf, {})(*maps).exp(), mrf(*maps).exp())


@pytest.mark.parametrize("name", ["distance", "gaussian", "compressed", "without contexts"])
def test_without_strength_the_network_stays(name, maps, agree):
    mrf = MRFS[name]()
    with torch.no_grad():
        agree(adjust(mrf, {"strength": 0})(*maps).exp(), (maps[0] / mrf.temperature).softmax(1))


@pytest.mark.parametrize("scale", [0.0, -0.5, 0.5])
def test_without_strength_or_scale_a_smoothness_does_nothing(scale, maps, agree):
    mrf = MeanField(LABELS, kernel="gaussian", window=7, contexts=0, smoothness=True)
    with torch.no_grad():
        mrf.triple_penalty.scale.fill_(scale)
        agree(adjust(mrf, {"strength": 0})(*maps).exp(), maps[0].softmax(1))
        agree(adjust(mrf, {})(*maps).exp(), mrf(*maps).exp())


@pytest.mark.parametrize("name", ["distance", "gaussian", "dense CRF"])
def test_every_control_changes_the_result(name, maps):
    mrf = MRFS[name]()
    with torch.no_grad():
        before = mrf(*maps).exp()
        for control_name, control in controls(mrf).items():
            value = control.high if control.high - control.value > control.value - control.low else control.low
            after = adjust(mrf, {control_name: value})(*maps).exp()
            assert (after - before).abs().max() > 1e-5, control_name


def test_another_window_leaves_the_weight_of_each_pair(agree):
    """The weights of the plain sum stay."""
    mrf = trained("distance")
    for window in (1, 3, 21):
        agree(adjust(mrf, {"window": window}).triple_penalty.weights(), mrf.triple_penalty.weights().detach())


def test_fewer_contexts_are_the_first_ones(maps, agree):
    mrf = trained("gaussian")
    fewer = adjust(mrf, {"contexts": 2})
    agree(
        fewer.label_contexts.weight.unflatten(0, (LABELS, 2)),
        mrf.label_contexts.weight.unflatten(0, (LABELS, 3))[:, :2].detach(),
    )


def test_a_dense_crf_has_its_own_numbers():
    known = controls(preset("voc", LABELS))
    values = {name: round(control.value, 3) for name, control in known.items()}
    assert values == {
        "strength": 10,
        "colour": 13,
        "position": 80,
        "smoothness": 3,
        "smooth_width": 3,
        "iterations": 10,
        "temperature": 1,
    }
    changed = adjust(preset("voc", LABELS), {"strength": 4, "smoothness": 6})
    assert float(changed.triple_penalty.smooth_weight * changed.triple_penalty.scale) == pytest.approx(6)


@pytest.mark.parametrize(
    ("given", "value"), [(None, 7), (math.nan, 7), (math.inf, 9), (-3, 1), (4.4, 4), (1e300, 9)], ids=str
)
def test_values_are_brought_into_their_range(given, value):
    assert Control("Iterations", 1, 9, 1, 7).clamp(given) == value
