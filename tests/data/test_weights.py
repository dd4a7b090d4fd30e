"""ImageNet weights of the hub get the names that the networks read; nothing here uses the network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import weights
from deepmrf.data.weights import WEIGHTS, get_weights, lite_tensors, vgg16_tensors
from deepmrf.unary import build
from deepmrf.unary.fast import ENCODERS, STAGES, imagenet_names

RANDOM = np.random.default_rng(0)


def norm(name, channels):
    kinds = ("weight", "bias", "running_mean", "running_var")
    values = {f"{name}.{kind}": RANDOM.random(channels, dtype=np.float32) for kind in kinds}
    return values | {f"{name}.num_batches_tracked": np.array(0)}


def filters(*shape):
    return RANDOM.random(shape, dtype=np.float32)


def lite(number):
    """EfficientNet-Lite as the hub has it: timm's names."""
    tensors, inputs = {"conv_stem.weight": filters(32, 3, 3, 3), **norm("bn1", 32)}, 32
    for stage, (blocks, channels, (size, _, expansion)) in enumerate(zip(*ENCODERS[number], STAGES, strict=True)):
        for block in range(blocks):
            name, inner = f"blocks.{stage}.{block}", inputs * expansion
            tensors[f"{name}.conv_dw.weight"] = filters(inner, 1, size, size)
            if expansion == 1:
                tensors |= {f"{name}.conv_pw.weight": filters(channels, inner, 1, 1)}
                tensors |= norm(f"{name}.bn1", inner) | norm(f"{name}.bn2", channels)
            else:
                tensors |= {f"{name}.conv_pw.weight": filters(inner, inputs, 1, 1)}
                tensors |= {f"{name}.conv_pwl.weight": filters(channels, inner, 1, 1)}
                tensors |= norm(f"{name}.bn1", inner) | norm(f"{name}.bn2", inner) | norm(f"{name}.bn3", channels)
            inputs = channels
    return tensors | {"conv_head.weight": filters(1280, inputs, 1, 1), **norm("bn2", 1280)}


def vgg16(width=6):
    tensors, inputs = {}, 3
    outputs = (64, 64, 128, 128, 256, 256, 256, *[512] * 6)
    for index, channels in zip((0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28), outputs, strict=True):
        tensors |= {
            f"features.{index}.weight": filters(channels, inputs, 3, 3),
            f"features.{index}.bias": filters(channels),
        }
        inputs = channels
    tensors |= {"pre_logits.fc1.weight": filters(width, 512, 7, 7), "pre_logits.fc1.bias": filters(width)}
    return tensors | {"pre_logits.fc2.weight": filters(width, width, 1, 1), "pre_logits.fc2.bias": filters(width)}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_lite_fills_the_encoder_of_fast(tmp_path, number):
    source, network = lite(number), build("fast", 3, lite=number)
    converted = lite_tensors(source)
    assert set(converted) == set(imagenet_names(network.encoder))
    save_file(converted, tmp_path / "lite.safetensors")
    network.load_imagenet(tmp_path / "lite.safetensors")
    block = network.encoder.blocks[4 if number == 0 else 5]  # the second of stage 2
    assert np.array_equal(block.expand.convolution.weight.detach(), source["blocks.2.1.conv_pw.weight"])
    assert np.array_equal(block.depthwise.norm.running_var, source["blocks.2.1.bn2.running_var"])
    assert np.array_equal(block.project.norm.bias.detach(), source["blocks.2.1.bn3.bias"])
    first = network.encoder.blocks[0]  # it does not expand
    assert np.array_equal(first.project.convolution.weight.detach(), source["blocks.0.0.conv_pw.weight"])
    assert np.array_equal(first.depthwise.norm.weight.detach(), source["blocks.0.0.bn1.weight"])


def test_vgg16_fills_features_fc6_and_fc7(tmp_path):
    source, network = vgg16(), build("vgg16", 3, channels=6)
    save_file(vgg16_tensors(source), tmp_path / "vgg16.safetensors")
    report = network.load_imagenet(tmp_path / "vgg16.safetensors")
    assert len(report.loaded) == 30
    assert np.array_equal(network.b9[0].weight.detach(), source["pre_logits.fc1.weight"])
    assert torch.equal(network.b10[0].bias.detach(), torch.from_numpy(source["pre_logits.fc2.bias"]))


def test_the_command_writes_the_file_that_recipes_name(tmp_path, monkeypatch):
    save_file(vgg16(), tmp_path / "hub.safetensors")
    asked = []

    def fetch(repository, name):
        asked.append((repository, name))
        return str(tmp_path / "hub.safetensors")

    monkeypatch.setattr(weights.huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["data", "get", "vgg16_imagenet_features"])
    assert result.exit_code == 0, result.output
    assert asked == [("timm/vgg16.tv_in1k", "model.safetensors")]
    assert len(build("strong", 3).load_imagenet("weights/vgg16_imagenet_features.safetensors").unused) == 0
    assert "is there already" in CliRunner().invoke(app, ["data", "get", "vgg16_imagenet_features"]).output
    assert len(asked) == 1


def test_without_a_network_it_says_what_to_do(tmp_path, monkeypatch):
    def fetch(*_):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(weights.huggingface_hub, "hf_hub_download", fetch)
    with pytest.raises(OSError, match=r"could not be fetched .*\(no route\): check the connection .* in place as"):
        get_weights("vgg16_imagenet", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_help_names_all_weights():
    text = CliRunner().invoke(app, ["data", "get", "--help"], env={"COLUMNS": "300"}).output
    for name in WEIGHTS:
        assert name in text
