"""Table 1 (b) layer by layer, and the paper's zero-padded filters against dilated convolutions."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from deepmrf.unary import VGG16
from deepmrf.unary.imagenet import VGG16_CONVOLUTIONS
from deepmrf.unary.vgg16 import SparseConvolution

TABLE_1 = {
    # group: (channels, size, filter)
    "b1": (64, 512, 3),
    "b2": (64, 256, 2),
    "b3": (128, 256, 3),
    "b4": (128, 128, 2),
    "b5": (256, 128, 3),
    "b6": (256, 64, 2),
    "b7": (512, 64, 3),
    "b8": (512, 64, 5),
    "b9": (4096, 64, 25),
    "b10": (4096, 64, 1),
    "b11": (21, 64, 1),  # the table's 512 is after upsampling: the network's output
}
CONVOLUTIONS = {"b1": 2, "b3": 2, "b5": 3, "b7": 3, "b8": 3, "b9": 1, "b10": 1, "b11": 1}


def covered(layer):
    """How many pixels a filter reaches over, zeros included."""
    size, dilation = layer.kernel_size, layer.dilation
    size, dilation = (size[0], dilation[0]) if isinstance(size, tuple) else (size, dilation)
    return dilation * (size - 1) + 1


def test_the_layers_are_those_of_table_1():
    with torch.device("meta"):
        network, image = VGG16(21).eval(), torch.empty(1, 3, 512, 512)
    shapes = {}
    for name in TABLE_1:
        getattr(network, name).register_forward_hook(lambda _, __, out, name=name: shapes.update({name: out.shape}))
    output = network(image)
    assert {name: tuple(shape) for name, shape in shapes.items()} == {
        name: (1, channels, size, size) for name, (channels, size, _) in TABLE_1.items()
    }
    assert output.shape == (1, 21, 512, 512)
    for name, (_, _, size) in TABLE_1.items():
        layers = [m for m in getattr(network, name).modules() if isinstance(m, (nn.Conv2d, nn.MaxPool2d))]
        assert len(layers) == CONVOLUTIONS.get(name, 1)
        assert [covered(layer) for layer in layers] == [size] * len(layers)
        assert all(layer.stride in (2, (1, 1)) for layer in layers)


def padded_with_zeros(filters, step):
    """The paper's figure: the cells of a filter `step` apart, zeros between."""
    size = filters.shape[-1]
    padded = filters.new_zeros(*filters.shape[:2], step * (size - 1) + 1, step * (size - 1) + 1)
    padded[..., ::step, ::step] = filters
    return padded


@pytest.mark.parametrize(("group", "step", "size"), [("b8", 2, 5), ("b9", 4, 25)])
def test_padded_filters_are_dilated_convolutions(group, step, size, agree):
    network = VGG16(3, channels=4).double()
    layer = getattr(network, group)[0]
    padded = padded_with_zeros(layer.weight, step)
    assert padded.shape[-2:] == (size, size)
    x = torch.randn(1, 512, 9, 11, dtype=torch.float64)
    expected = functional.conv2d(x, padded, layer.bias, padding=size // 2)
    agree(layer(x), expected)
    # and their gradients are the same numbers, at the cells that are not zeros
    ours = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    expected_gradient = torch.autograd.grad(expected.square().sum(), layer.weight)[0]
    agree(ours, expected_gradient)


def test_without_a8_filters_see_every_other_pixel(agree):
    """Each filter of a9 is convolved on every other pixel of a7: at those, b8 does what VGG-16 did."""
    layer = VGG16(3, channels=4).b8[0]
    x = torch.randn(1, 512, 12, 14)
    expected = functional.conv2d(x[..., ::2, ::2], layer.weight, layer.bias, padding=1)
    agree(layer(x)[..., ::2, ::2], expected)


def test_upsampling_keeps_cells_in_place_whatever_the_size():
    """Cell i of stride 8 covers pixels 8 i .. 8 i + 7, also where 8 does not divide the image."""
    network = VGG16(1, channels=4).eval()
    logits = torch.zeros(1, 1, 5, 5)
    logits[..., 2, 2] = 1
    network.b11.register_forward_hook(lambda *_: logits)
    with torch.no_grad():
        peak = network(torch.rand(1, 3, 33, 38))[0, 0]
    rows, columns = (peak == peak.max()).nonzero().double().mean(0)
    assert (rows, columns) == (19.5, 19.5)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """A file of weights as torchvision lays them out, but with six channels in its classifier."""
    shapes = [m.weight.shape for m in VGG16(3, channels=6).modules() if isinstance(m, nn.Conv2d)][:13]
    tensors = {}
    for number, (index, shape) in enumerate(zip(VGG16_CONVOLUTIONS, shapes, strict=True)):
        tensors[f"features.{index}.weight"] = torch.full(shape, number / 16, dtype=torch.float16)
        tensors[f"features.{index}.bias"] = torch.full(shape[:1], float(number))
    tensors["classifier.0.weight"] = torch.randn(6, 512 * 7 * 7).half()
    tensors["classifier.0.bias"] = torch.arange(6.0)
    tensors["classifier.3.weight"] = torch.randn(6, 6).half()
    tensors["classifier.3.bias"] = torch.arange(6.0) + 10
    tensors["classifier.6.bias"] = torch.zeros(1000)
    folder = tmp_path_factory.mktemp("weights")
    save_file(tensors, folder / "whole.safetensors")
    save_file({k: v for k, v in tensors.items() if k.startswith("features")}, folder / "features.safetensors")
    return folder, tensors


def test_imagenet_fills_b1_to_b10(imagenet):
    folder, tensors = imagenet
    network = VGG16(3, channels=6)
    report = network.load_imagenet(folder / "whole.safetensors")
    assert len(report.loaded) == 30
    assert report.adapted == ()
    assert report.missing == ("b11.weight", "b11.bias")
    assert report.unused == ("classifier.6.bias",)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    for number, layer in enumerate(convolutions[:13]):
        assert (layer.weight == number / 16).all()
        assert (layer.bias == number).all()
    assert torch.equal(network.b9[0].weight, tensors["classifier.0.weight"].float().view(6, 512, 7, 7))
    assert torch.equal(network.b10[0].weight[..., 0, 0], tensors["classifier.3.weight"].float())


def test_fewer_channels_choose_among_the_filters(imagenet, agree):
    folder, tensors = imagenet
    network = VGG16(3, channels=3)
    report = network.load_imagenet(folder / "whole.safetensors")
    assert report.adapted == ("b9.0.weight", "b9.0.bias", "b10.0.weight", "b10.0.bias")
    assert network.b9[0].bias.tolist() == [0, 2, 4]
    agree(network.b10[0].weight[..., 0, 0], 2 * tensors["classifier.3.weight"].float()[::2, ::2])
    with pytest.raises(ValueError, match="use at most 6"):
        VGG16(3, channels=7).load_imagenet(folder / "whole.safetensors")


def test_the_report_says_what_stayed_random(imagenet):
    folder, _ = imagenet
    report = VGG16(3, channels=4).load_imagenet(folder / "features.safetensors")
    assert str(report) == (
        "features.safetensors: 26 tensors loaded into b1, b3, b5, b7, b8; "
        "b9, b10, b11 not in the file, left at their starting values."
    )


def test_errors_name_the_file(tmp_path, imagenet):
    network = VGG16(3, channels=4)
    with pytest.raises(FileNotFoundError, match="pass the path"):
        network.load_imagenet(tmp_path / "nothing.safetensors")
    (tmp_path / "text.safetensors").write_text("no weights here")
    with pytest.raises(ValueError, match="is no safetensors file"):
        network.load_imagenet(tmp_path / "text.safetensors")
    save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"lacks 'features\.0\.weight' and 25 more"):
        network.load_imagenet(tmp_path / "other.safetensors")
    _, tensors = imagenet
    wrong = {k: v for k, v in tensors.items() if k.startswith("features")}
    wrong["features.0.weight"] = torch.zeros(64, 3, 5, 5)
    save_file(wrong, tmp_path / "wrong.safetensors")
    with pytest.raises(ValueError, match=r"\(64, 3, 5, 5\) for b1\.0\.weight"):
        network.load_imagenet(tmp_path / "wrong.safetensors")


@pytest.mark.parametrize("size", [(9, 13), (8, 12), (1, 1)])
@pytest.mark.parametrize(("filter_size", "dilation"), [(3, 2), (7, 4)])
def test_interleaved_grids_are_the_dilated_convolution(size, filter_size, dilation):
    layer = SparseConvolution(3, 5, filter_size, padding=dilation * (filter_size // 2), dilation=dilation)
    x = torch.randn(2, 3, *size)
    torch.testing.assert_close(layer.interleaved(x), layer(x), rtol=1e-4, atol=1e-5)
