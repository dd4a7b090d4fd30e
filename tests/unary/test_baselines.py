"""FCN-8s, SegNet, Dilation8 and DeepLab: their layers, sizes, gradients, weights and files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from deepmrf.data.labels import LabelSet
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model, write_model
from deepmrf.unary import VGG16, build
from deepmrf.unary.baselines import INITIAL_SCORE, Double, context_module, unpool
from deepmrf.unary.imagenet import VGG16_CONVOLUTIONS

SMALL = {"fcn8s": {"channels": 8}, "segnet": {}, "dilation8": {"channels": 8}, "deeplab": {"channels": 8}}


@pytest.fixture(scope="module", params=SMALL)
def network(request):
    torch.manual_seed(0)
    return build(request.param, 5, **SMALL[request.param]).eval()


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (33, 47), (32, 64)], ids=str)
def test_logits_have_the_images_size(network, size):
    image = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    with torch.no_grad():
        logits = network(image)
        torch.testing.assert_close(network(image[1:].float() / 255), logits[1:], rtol=1e-4, atol=1e-5)
    assert logits.shape == (2, 5, *size)
    assert logits.isfinite().all()


def test_every_parameter_gets_a_gradient(network):
    model = build(network.name, **{**network.config, "dropout": 0.0}).train()
    model(torch.rand(2, 3, 64, 64)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_a_saved_model_comes_back(network, tmp_path):
    write_model(DeepParsingNetwork(network, None, LabelSet(tuple("abcde"))), tmp_path)
    model = read_model(tmp_path)
    assert (type(model.unary), model.unary.config) == (type(network), network.config)
    image = torch.rand(1, 3, 33, 47)
    with torch.no_grad():
        assert torch.equal(model.unary(image), network(image))


def test_layers_are_those_published():
    with torch.device("meta"):
        networks = {name: build(name, 11) for name in SMALL}
    filters = {
        name: [(m.kernel_size[0], m.dilation[0], m.out_channels) for m in net.modules() if isinstance(m, nn.Conv2d)]
        for name, net in networks.items()
    }
    vgg = [(3, 1, n) for n in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)]
    sparse = vgg[:10] + [(3, 2, 512)] * 3
    assert filters["fcn8s"] == [*vgg, (7, 1, 1024), (1, 1, 1024), *[(1, 1, 11)] * 3]
    context = [(3, dilation, 11) for dilation in (1, 1, 2, 4, 8, 16, 1)] + [(1, 1, 11)]
    assert filters["dilation8"] == [*sparse, (7, 4, 1024), (1, 1, 1024), (1, 1, 11), *context]
    assert filters["deeplab"] == [*sparse, (3, 12, 1024), (1, 1, 1024), (1, 1, 11)]
    mirror = [(3, 1, n) for n in (512, 512, 512, 512, 512, 256, 256, 256, 128, 128, 64, 64, 11)]
    assert filters["segnet"] == [*vgg, *mirror]
    assert sum(isinstance(m, nn.BatchNorm2d) for m in networks["segnet"].modules()) == 25


def test_fcn8s_upsampling_starts_bilinear():
    x = torch.rand(2, 3, 5, 7)
    expected = functional.interpolate(x, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(Double(3)(x)[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1])


@pytest.mark.parametrize(("layer", "stride"), [("score_pool3", 8), ("score_pool4", 16)])
def test_fcn8s_adds_scores_at_their_places(layer, stride):
    """The score of a cell lies over the pixels of that cell."""
    network, image = build("fcn8s", 1, channels=4).eval(), torch.rand(1, 3, 80, 96)
    nn.init.zeros_(network.score.weight)
    scores = torch.zeros(1, 1, 80 // stride, 96 // stride)
    scores[..., 2, 3] = 1
    getattr(network, layer).register_forward_hook(lambda *_: scores)
    with torch.no_grad():
        bump = network(image)[0, 0].sum(1)
    centre = (bump * torch.arange(80.0)).sum() / bump.sum()
    assert abs(float(centre) - (2.5 * stride - 0.5)) < 0.01


@pytest.mark.parametrize("size", [(6, 8), (5, 7), (1, 1), (2, 3)], ids=str)
def test_segnet_puts_maxima_back_where_they_were(size):
    x = torch.rand(2, 3, *size) + 1
    pooled, indices = nn.MaxPool2d(2, 2, ceil_mode=True, return_indices=True)(x)
    back = unpool(pooled, indices, size)
    assert back.shape == x.shape
    assert torch.equal(back[back > 0], x[back > 0])
    again = functional.max_pool2d(back, 2, 2, ceil_mode=True)
    assert torch.equal(again, pooled)
    assert (back > 0).sum() == pooled.numel()


class PoolAndBack(nn.Module):
    def forward(self, x):
        pooled, indices = functional.max_pool2d(x, 2, 2, ceil_mode=True, return_indices=True)
        return unpool(2 * pooled, indices, x.shape[-2:])


def test_segnets_indices_can_be_exported():
    batch = torch.export.Dim("batch", min=1, max=8)
    exported = torch.export.export(PoolAndBack(), (torch.rand(2, 3, 5, 6),), dynamic_shapes=({0: batch},)).module()
    images = torch.rand(3, 3, 5, 6)
    assert torch.equal(exported(images), PoolAndBack()(images))


def test_dilation8_starts_as_its_front_end_and_sees_67_cells():
    net = build("dilation8", 3, channels=4).eval()
    image = torch.rand(1, 3, 40, 56)
    with torch.no_grad():
        torch.testing.assert_close(net(image), VGG16.forward(net, image))
    assert (net.b11.bias == INITIAL_SCORE).all()
    context = context_module(2).double()
    for parameter in context.parameters():
        nn.init.constant_(parameter, 0.1)
    x = torch.ones(1, 2, 71, 71, dtype=torch.float64, requires_grad=True)
    context(x)[0, 0, 35, 35].backward()
    assert (x.grad[0, 0, 35] != 0).nonzero().flatten().tolist() == list(range(2, 69))


def test_deeplab_keeps_its_cells_at_stride_8():
    net = build("deeplab", 3, channels=4).eval()
    with torch.no_grad():
        assert net.scores(torch.rand(1, 3, 33, 47)).shape == (1, 3, 5, 6)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    shapes = [m.weight.shape for m in build("segnet", 3).encoder.modules() if isinstance(m, nn.Conv2d)]
    tensors = {}
    for number, (index, shape) in enumerate(zip(VGG16_CONVOLUTIONS, shapes, strict=True)):
        tensors[f"features.{index}.weight"] = torch.full(shape, number / 16, dtype=torch.float16)
        tensors[f"features.{index}.bias"] = torch.full(shape[:1], float(number))
    path = tmp_path_factory.mktemp("weights")
    save_file(tensors, path / "features.safetensors")
    tensors |= {"classifier.0.weight": torch.randn(8, 512 * 49).half(), "classifier.0.bias": torch.arange(8.0)}
    tensors |= {"classifier.3.weight": torch.randn(8, 8).half(), "classifier.3.bias": torch.arange(8.0) + 10}
    save_file(tensors, path / "all.safetensors")
    return path, tensors


def test_imagenet_fills_the_thirteen_convolutions(network, imagenet):
    path, tensors = imagenet
    model = build(network.name, **network.config)
    report = model.load_imagenet(path / "features.safetensors")
    assert len(report.loaded) == 26
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [float(layer.bias[0].detach()) for layer in layers[:13]] == list(range(13))
    report = model.load_imagenet(path / "all.safetensors")
    if network.name == "segnet":
        assert len(report.unused) == 4
        return
    fc6, fc7 = layers[13:15]
    expected = tensors["classifier.0.weight"].float().view(8, 512, 7, 7)
    assert torch.equal(fc6.weight, expected[..., ::3, ::3] if network.name == "deeplab" else expected)
    assert torch.equal(fc7.weight[..., 0, 0], tensors["classifier.3.weight"].float())
    assert bool(report.adapted) == (network.name == "deeplab")
