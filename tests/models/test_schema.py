"""Folders of strangers: what they ask for is checked before anything is built, their weights before they are read."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepmrf import DeepParsingNetwork, MeanField
from deepmrf.data.labels import LabelSet
from deepmrf.layers.mean_field import MeanField as Layer
from deepmrf.models.folder import CONFIG, WEIGHTS, read_mrf, write_mrf
from deepmrf.models.parsing_network import read_model, write_model
from deepmrf.models.schema import MEAN_FIELD, network_schema
from deepmrf.unary import NETWORKS, wrap

LABELS = LabelSet(("a", "b", "c"))
SETTINGS = {"window": 3, "contexts": 1, "context_size": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A network with its mean field, a network for volumes, and a fitted MRF."""
    top = tmp_path_factory.mktemp("saved")
    write_model(DeepParsingNetwork.build("fast", LABELS, {"width": 8}, SETTINGS), top / "network")
    write_model(DeepParsingNetwork.build("volume", LABELS, {"width": 8, "levels": 1}, None), top / "volume")
    write_mrf(top / "mrf", MeanField(3, **SETTINGS), {"labels": LABELS.to_dict()})
    return top


@pytest.fixture
def copied(saved, tmp_path):
    """copied(name, change) -> the folder with a changed config."""

    def copy(name, change=lambda config: None):
        for file in (CONFIG, WEIGHTS):
            (tmp_path / file).write_bytes((saved / name / file).read_bytes())
        config = json.loads((tmp_path / CONFIG).read_text())
        change(config)
        (tmp_path / CONFIG).write_text(json.dumps(config))
        return tmp_path

    return copy


READ = {"network": read_model, "volume": read_model, "mrf": read_mrf}
MRF_SETTINGS = [
    ("labels", 10**9, "labels=1000000000 must be a whole number from 1 to 255"),
    ("labels", 2, "labels is not 3"),
    ("dims", 10**9, "dims=1000000000 must be"),
    ("window", 10**7, "window=10000000 must be"),
    ("window", [3] * 100, "window=.* must be .*, or one per axis"),
    ("contexts", 10**6, "contexts=1000000 must be a whole number from 0 to 255"),
    ("context_size", 10**5, "context_size=100000 must be"),
    ("context_size", 255, "size mismatch for .*label_contexts.weight"),
    ("context_rank", 10**12, "context_rank=1000000000000 must be"),
    ("context_stride", 10**9, "context_stride=1000000000 must be a whole number from 1 to 64"),
    ("iterations", 10**29, "iterations=1000.* must be a whole number from 1 to 100"),
    ("iterations", 10**400, r"iterations=1000.*\.\.\. must be"),
    ("iterations", True, "iterations=True must be"),
    ("features", -1, "features=-1 must be"),
    ("gate", {}, "gate={} must be true or false"),
    ("kernel", [], r"kernel=\[\] must be one of distance, gaussian"),
    ("spacing", [10**400, 1], "spacing=.* must be a list, each a number"),
    ("spacing", [float("nan"), 1.0], "spacing=.nan, 1.0. must be"),
    ("size", [10**9, 10**9], "size=.* must be"),
    ("temperature", "1", "temperature='1' must be a number from 0.1 to 10"),
    ("magic", 1, "mean_field has no setting 'magic'"),
]


@pytest.mark.parametrize(("key", "value", "says"), MRF_SETTINGS)
@pytest.mark.parametrize("name", ["network", "mrf"])
def test_mean_fields_have_limits(copied, name, key, value, says):
    folder = copied(name, lambda config: config["mean_field"].update({key: value}))
    refused(READ[name], folder, says)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("network", {"width": 10**9}, "unary.options.width=1000000000 must be a whole number from 1 to 1024"),
        ("network", {"width": 1024}, "size mismatch for unary"),
        ("network", {"zoom": 10**9}, "zoom=1000000000 must be a number from 1 to 4"),
        ("network", {"levels": 2}, "unary.options has no setting 'levels'"),
        ("volume", {"levels": 10**9}, "levels=1000000000 must be a whole number from 1 to 8"),
        ("volume", {"width": 1024, "levels": 8}, r"its weights would take \S+ bytes, more than 17,179,869,184"),
        ("volume", {"channels": 10**9}, "channels=1000000000 must be"),
    ],
)
def test_networks_have_limits(copied, name, options, says):
    refused(read_model, copied(name, lambda config: config["unary"]["options"].update(options)), says)


def test_a_small_width_masks_no_large_one(copied):
    """The settings of network and mean field are apart."""

    def change(config):
        config["unary"]["options"]["width"] = 10**9
        config["mean_field"]["width"] = 8

    refused(read_model, copied("network", change), "mean_field has no setting 'width'")


def test_wrappers_have_limits(tmp_path):
    write_model(DeepParsingNetwork(wrap(torch.nn.Conv2d(3, 3, 1), 3), None, LABELS), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    config["unary"]["options"]["multiple"] = 10**9  # images would be padded to that
    (tmp_path / CONFIG).write_text(json.dumps(config))
    refused(lambda folder: read_model(folder, torch.nn.Conv2d(3, 3, 1)), tmp_path, "multiple=1000000000 must be")


@pytest.mark.parametrize("name", ["network", "mrf"])
@pytest.mark.parametrize("kind", ["extra", "missing", "other shape"])
def test_weights_are_compared_before_they_are_read(copied, name, kind, monkeypatch):
    folder = copied(name)
    tensors = load_file(folder / WEIGHTS)
    last = list(tensors)[-1]
    if kind == "extra":
        tensors["ballast"] = torch.zeros(1000)
    elif kind == "missing":
        del tensors[last]
    else:
        tensors[last] = torch.zeros(2, 3)
    save_file(tensors, folder / WEIGHTS)
    monkeypatch.setattr(torch.Tensor, "float", lambda _: pytest.fail("weights were read"))
    monkeypatch.setattr(Layer, "load_state_dict", lambda *_: pytest.fail("weights were read"))
    says = {"extra": "also holds 'ballast'", "missing": f"lacks '{last}'", "other shape": f"size mismatch for {last}"}
    refused(READ[name], folder, says[kind])


@pytest.mark.parametrize("name", ["network", "mrf"])
@pytest.mark.parametrize(
    ("tensor", "value"),
    [("scale", "nan"), ("scale", "inf"), ("shift", "-inf"), ("colour", "1e30")],
)
def test_an_mrf_that_is_not_finite_is_refused(copied, name, tensor, value):
    folder = copied(name)
    tensors = load_file(folder / WEIGHTS)
    full = f"{'mean_field.' * (name == 'network')}triple_penalty.{tensor}"
    tensors[full].fill_(float(value))
    save_file(tensors, folder / WEIGHTS)
    refused(READ[name], folder, f"{tensor} holds NaN")


def test_widths_that_overflow_are_refused(tmp_path):
    mrf = MeanField(3, kernel="gaussian", **SETTINGS)
    with torch.no_grad():
        mrf.triple_penalty.log_colour_width.fill_(-1000)
    write_mrf(tmp_path, mrf, {"labels": LABELS.to_dict()})
    refused(read_mrf, tmp_path, "log_colour_width holds NaN, infinity or values beyond 40")


def test_a_network_that_holds_nan_is_refused(copied):
    folder = copied("network")
    tensors = load_file(folder / WEIGHTS)
    tensors["unary.classify.1.bias"][0] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    refused(read_model, folder, "unary.classify.1.bias holds NaN")


def test_reading_draws_no_random_numbers(saved):
    """Initial weights would be replaced at once, and take seconds in a large network."""
    before = torch.get_rng_state()
    read_model(saved / "network")
    assert torch.equal(torch.get_rng_state(), before)


def test_every_argument_has_a_limit():
    assert set(MEAN_FIELD) == set(MeanField(2).settings)
    for network in NETWORKS:
        assert set(network_schema(network.name) or {}) == set(inspect.signature(network).parameters)


def refused(read, folder, says):
    with pytest.raises(ValueError, match=says) as caught:
        read(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
