"""Model folders: written together, read with care, and around networks of the user's own."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from deepmrf import DeepParsingNetwork, MeanField, load
from deepmrf.data.colours import distinct_colours
from deepmrf.data.labels import LabelSet
from deepmrf.models.folder import CONFIG, WEIGHTS, read_mrf, write_mrf
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import read_model, write_model
from deepmrf.unary import wrap

LABELS = LabelSet(("a", "b", "c"), distinct_colours(3))
IMAGE = torch.rand(1, 3, 8, 9)


class Named(nn.Conv2d):
    """A network with attributes that look like ours."""

    name = "fast"
    config = object()


def first(outputs):
    return outputs


def around(network):
    return DeepParsingNetwork(network, MeanField(3, window=3, contexts=1, context_size=3), LABELS).eval()


NETWORKS = {
    "wrapped": lambda: wrap(nn.Conv2d(3, 3, 1), 3),
    "wrapped with a function": lambda: wrap(nn.Conv2d(3, 3, 1), 3, output=first),
    "wrapped with a lambda": lambda: wrap(nn.Conv2d(3, 3, 1), 3, output=lambda outputs: outputs),
    "wrapped with a module": lambda: wrap(nn.Conv2d(3, 3, 1), 3, output=nn.Identity()),
    "bare": lambda: Named(3, 3, 1),
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_a_network_of_ones_own_is_asked_for(tmp_path, network):
    model = around(network())
    model.save_pretrained(tmp_path / "mine")
    for read in (read_model, open_model, DeepParsingNetwork.from_pretrained):
        with pytest.raises(ValueError, match=r"was saved around a network of your own: pass network=\S+\(\.\.\.\), or"):
            read(tmp_path / "mine")
    for again in (
        DeepParsingNetwork.from_pretrained(tmp_path / "mine", network=network()),
        DeepParsingNetwork.from_pretrained(tmp_path / "mine", unary=network()),  # its older name
        load(tmp_path / "mine", network=network()).model,
        load(tmp_path / "mine", network=network).model,
        load(tmp_path / "mine", tmp_path / "mine", network=network()).models[1],
    ):
        assert torch.equal(again(IMAGE), model(IMAGE))


def test_a_bare_network_gets_the_wrapper_it_had(tmp_path):
    model = around(wrap(nn.Conv2d(3, 3, 1), 3, mean=(0.5,) * 3, std=(0.5,) * 3, multiple=4))
    model.save_pretrained(tmp_path)
    again = read_model(tmp_path, nn.Conv2d(3, 3, 1))
    assert again.unary.config == model.unary.config
    assert torch.equal(again(IMAGE), model(IMAGE))


def test_a_function_that_finds_the_output_is_asked_for(tmp_path):
    write_model(around(wrap(nn.Conv2d(3, 3, 1), 3, output=first)), tmp_path)
    with pytest.raises(ValueError, match=r"function \S+first, which is not saved; pass .*output=function"):
        read_model(tmp_path, nn.Conv2d(3, 3, 1))


def test_weights_that_two_layers_share_are_saved(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    network[1].weight = network[0].weight
    model = around(network)
    model.save_pretrained(tmp_path)
    assert torch.equal(read_model(tmp_path, nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)))(IMAGE), model(IMAGE))


def test_folders_of_earlier_versions_ask_for_it_too(tmp_path):
    write_model(around(wrap(nn.Conv2d(3, 3, 1), 3)), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    config["unary"]["network"] = "wrapped"
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="was saved around a network of your own"):
        read_model(tmp_path)


def test_a_function_is_saved_by_its_name(tmp_path):
    write_model(around(NETWORKS["wrapped with a function"]()), tmp_path)
    options = json.loads((tmp_path / CONFIG).read_text())["unary"]["options"]
    assert options["output"] == {"function": f"{__name__}.first"}


def test_another_network_gets_one_sentence(tmp_path):
    write_model(around(wrap(nn.Conv2d(3, 3, 1), 3)), tmp_path)
    with pytest.raises(ValueError, match=r"do not fit the network that was passed \(.*size mismatch.*build it as"):
        read_model(tmp_path, wrap(nn.Conv2d(3, 3, 3), 3))


def test_both_files_are_replaced_or_neither(tmp_path, monkeypatch):
    old = MeanField(3, window=3, contexts=1, context_size=3)
    write_mrf(tmp_path, old, {"labels": LABELS.to_dict()})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {CONFIG, WEIGHTS}

    def full(*_):
        raise OSError(28, "No space left on device")

    new = MeanField(3, window=5, contexts=1, context_size=3)
    with monkeypatch.context() as patch:
        patch.setattr("deepmrf.models.folder.to_bytes", full)
        with pytest.raises(OSError, match="No space"):
            write_mrf(tmp_path, new, {"labels": LABELS.to_dict()})
    with pytest.raises(TypeError, match="JSON"):
        write_mrf(tmp_path, new, {"labels": LABELS.to_dict(), "metrics": object()})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_mrf(tmp_path, new, {"labels": LABELS.to_dict()})
    mean_field, config = read_mrf(tmp_path)
    assert mean_field.settings == config["mean_field"] == new.settings
    assert not mean_field.training
    assert LabelSet.from_dict(config["labels"]) == LABELS


def test_half_weights_are_read_as_float32(tmp_path):
    model = DeepParsingNetwork.build("fast", LABELS, {"width": 8}, None).eval()
    write_model(model, tmp_path / "half", half=True)
    write_model(model, tmp_path / "whole")
    half_bytes, full_bytes = ((tmp_path / name / WEIGHTS).stat().st_size for name in ("half", "whole"))
    assert half_bytes < 0.6 * full_bytes
    again = read_model(tmp_path / "half")
    assert {value.dtype for value in again.parameters()} == {torch.float32}
    torch.testing.assert_close(again(IMAGE), model(IMAGE), atol=0.05, rtol=0.05)
