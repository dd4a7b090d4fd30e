"""Networks of other libraries: wrapped in one line, and built again from what a model folder says."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from deepmrf import DeepParsingNetwork, MeanField, load
from deepmrf.models.folder import CONFIG
from deepmrf.models.parsing_network import read_model
from deepmrf.unary import from_smp, from_torchvision, from_transformers, wrap
from deepmrf.unary.libraries import description, rebuild

IMAGE = torch.rand(1, 3, 40, 50)
NAMES = ["road", "sky", "tree", "car"]


def segformer(**changes):
    transformers = pytest.importorskip("transformers")
    settings = {"depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 1, 2, 2]}
    config = transformers.SegformerConfig(**(settings | {"decoder_hidden_size": 16, "num_labels": 4} | changes))
    return transformers.SegformerForSemanticSegmentation(config).eval()


def around(unary, labels=NAMES):
    mean_field = MeanField(len(labels), window=5, contexts=2, context_size=3, kernel="gaussian")
    return DeepParsingNetwork(unary, mean_field, labels).eval()


@torch.no_grad()
def test_a_segformer_comes_back_by_itself(tmp_path):
    model = around(from_transformers(segformer()))
    model.save_pretrained(tmp_path)
    again = load(tmp_path).model
    assert type(again.unary.module).__name__ == "SegformerForSemanticSegmentation"
    assert torch.equal(again(IMAGE), model(IMAGE))
    assert again.config() == model.config()
    assert "_name_or_path" not in json.loads((tmp_path / CONFIG).read_text())["unary"]["source"]["config"]


def test_its_normalisation_is_the_processors():
    network = segformer()
    assert from_transformers(network).config == wrap(network, 4).config
    processor = SimpleNamespace(image_mean=[0.5] * 3, image_std=[0.25] * 3, do_normalize=True, do_rescale=True)
    assert from_transformers(network, processor).mean == (0.5,) * 3
    assert from_transformers(network, processor).std == (0.25,) * 3
    processor.rescale_factor = 2 / 255
    assert from_transformers(network, processor).value_range == (0.0, 2.0)
    processor.do_rescale = processor.do_normalize = False
    plain = from_transformers(network, processor, multiple=32)
    assert (plain.mean, plain.std, plain.value_range, plain.multiple) == ((0,) * 3, (1,) * 3, (0, 255), 32)
    with pytest.raises(TypeError, match=r"no config\.num_labels: .*wrap"):
        from_transformers(nn.Conv2d(3, 3, 1))


def test_a_network_that_was_changed_is_asked_for(tmp_path):
    network = segformer()
    network.decode_head.classifier = nn.Conv2d(16, 3, 1)
    assert description(network) is None
    network.config.num_labels = 3
    network.decode_head.classifier = nn.Conv2d(16, 3, 3, padding=1)
    around(wrap(network, 3), NAMES[:3]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"network of your own: pass network=transformers\.\S+Segformer"):
        read_model(tmp_path)


def test_a_class_of_the_users_own_is_asked_for():
    class Mine(type(segformer())):
        pass

    assert description(Mine(segformer().config)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"class": "os"}, "has no network os"),
        ({"class": "SegformerConfig"}, "has no network SegformerConfig"),
        ({"library": "subprocess"}, "library 'subprocess', which is not one of transformers"),
        ({"config": {"num_labels": 4}}, "also holds|lacks|size mismatch"),
        ({"config": {"num_labels": 4, "decoder_hidden_size": 2**17}}, "bytes, more than|size mismatch"),
    ],
    ids=["function", "other class", "other library", "other settings", "huge"],
)
def test_folders_that_lie_get_one_sentence(tmp_path, change, reason):
    around(from_transformers(segformer())).save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    config["unary"]["source"] |= change
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"The model in .* cannot be used \(.*{reason}"):
        read_model(tmp_path)


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    described = {"library": "segmentation_models_pytorch", "class": "Unet", "config": {}}
    with pytest.raises(ImportError, match=r"cannot be imported .*: pip install segmentation-models-pytorch\.$"):
        rebuild(described)


class Unet(nn.Module):
    """A network with the parts that those of segmentation_models_pytorch have."""

    __module__ = "segmentation_models_pytorch.decoders.unet"

    def __init__(self, encoder_name="resnet34", encoder_weights="imagenet", classes=1):
        super().__init__()
        assert encoder_weights is None, "this would download weights"
        self.config = {"encoder_name": encoder_name, "encoder_weights": encoder_weights, "classes": classes}
        self.encoder = nn.Conv2d(3, 8, 3, padding=1)
        self.encoder.output_stride = 16
        self.segmentation_head = nn.Sequential(nn.Conv2d(8, classes, 3, padding=1), nn.Identity())

    def forward(self, x):
        assert not any(size % 16 for size in x.shape[-2:])
        return self.segmentation_head(self.encoder(x))


@torch.no_grad()
def test_a_network_of_smp_comes_back_by_itself(tmp_path, monkeypatch):
    library = ModuleType("segmentation_models_pytorch")
    library.Unet = Unet
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", library)
    network = from_smp(Unet("resnet18", None, 4).eval())
    assert (network.labels, network.multiple) == (4, 16)
    model = around(network)
    model.save_pretrained(tmp_path)
    again = load(tmp_path).model
    assert again.unary.module.config["encoder_name"] == "resnet18"
    assert torch.equal(again(IMAGE), model(IMAGE))


@torch.no_grad()
def test_a_network_of_torchvision_is_asked_for(tmp_path):
    class FCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 4, 1))

        def forward(self, x):
            return {"out": self.classifier(x), "aux": x}

    model = around(from_torchvision(FCN()))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"pass network=\S+FCN\(\.\.\.\)"):
        load(tmp_path)
    assert torch.equal(load(tmp_path, network=FCN()).model(IMAGE), model(IMAGE))
    with pytest.raises(TypeError, match=r"no classifier that ends in a convolution: use deepmrf\.unary\.wrap"):
        from_torchvision(nn.Conv2d(3, 4, 1))


def test_the_real_smp():
    smp = pytest.importorskip("segmentation_models_pytorch", exc_type=ImportError)
    network = smp.Unet("resnet18", encoder_weights=None, classes=4).eval()
    described = description(network)
    again = rebuild(described)
    assert description(again) == described
    assert from_smp(network)(IMAGE).shape == (1, 4, 40, 50)


def test_the_real_torchvision():
    segmentation = pytest.importorskip("torchvision.models.segmentation", exc_type=(ImportError, RuntimeError))
    network = segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4).eval()
    assert from_torchvision(network)(IMAGE).shape == (1, 4, 40, 50)
