"""EfficientNet-Lite's parts: TensorFlow's padding, folded batch norm, and upsampling that keeps cells in place."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from deepmrf.unary.fast import EfficientNetLite, Fast, Unit, align


def same_padding(x, size):
    """TensorFlow's "same" for stride 2: as many cells as half the pixels, the odd row of zeros at the end."""
    pads = []
    for pixels in (x.shape[-1], x.shape[-2]):
        total = max((-(-pixels // 2) - 1) * 2 + size - pixels, 0)
        pads += [total // 2, total - total // 2]
    return functional.pad(x, pads)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("groups", [1, 4])
def test_strided_units_pad_as_tensorflow_does(size, groups, agree):
    unit = Unit(4, 4, size, stride=2, groups=groups, activate=False).eval()
    x = torch.randn(2, 4, 12, 18)
    expected = functional.conv2d(same_padding(x, size), unit.convolution.weight, stride=2, groups=groups)
    agree(unit(x), expected / (1 + 1e-3) ** 0.5)


@pytest.mark.parametrize("size", [3, 5])
def test_odd_sizes_have_the_geometry_of_even_ones(size, agree):
    """An odd image is the even one whose last row and column are black: no cell moves."""
    unit = Unit(4, 4, size, stride=2).eval()
    x = torch.randn(1, 4, 11, 17)
    agree(unit(x), unit(functional.pad(x, (0, 1, 0, 1))))


def test_folded_batch_norm_is_batch_norm(agree):
    unit = Unit(4, 6, 3, stride=2).double()
    for tensor in (unit.norm.weight, unit.norm.bias, unit.norm.running_mean, unit.norm.running_var):
        torch.nn.init.uniform_(tensor, 0.5, 2.0)
    x = torch.randn(2, 4, 12, 18, dtype=torch.float64)
    plain = unit.norm.eval()(functional.conv2d(same_padding(x, 3), unit.convolution.weight, stride=2))
    agree(unit.eval()(x), plain.clamp(0, 6))


@pytest.mark.parametrize(
    ("lite", "coarsest_channels", "blocks"), [(0, [40, 112, 320], 16), (1, [40, 112, 320], 21), (2, [48, 120, 352], 21)]
)
def test_the_encoder_gives_five_strides(lite, coarsest_channels, blocks):
    encoder = EfficientNetLite(lite).eval()
    assert len(encoder.blocks) == blocks
    maps = encoder(torch.rand(1, 3, 90, 120))
    assert [tuple(m.shape[1:]) for m in maps] == [
        (channels, -(-90 // stride), -(-120 // stride))
        for channels, stride in zip([16, 24, *coarsest_channels], (2, 4, 8, 16, 32), strict=True)
    ]


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_align_puts_cells_where_padding_centred_them(factor, agree):
    """Positions, upsampled, are positions: cell i is centred on pixel factor * i + factor - 1."""
    cells = factor * torch.arange(6.0) + factor - 1
    rows, columns = torch.meshgrid(cells, cells[:5], indexing="ij")
    larger = align(torch.stack([rows, columns])[None], factor, (6 * factor - 1, 5 * factor))
    pixels_down, pixels_across = torch.arange(6.0 * factor - 1), torch.arange(5.0 * factor)
    inside = slice(factor - 1, None)  # before the first cell there is nothing to interpolate with
    agree(larger[0, 0, inside, 0], pixels_down[inside])
    agree(larger[0, 1, 0, inside], pixels_across[inside])
    assert (larger[0, 0, : factor - 1] == factor - 1).all()


def test_the_mirror_image_is_averaged_but_for_training():
    torch.manual_seed(0)
    network, image = Fast(3, width=16, zoom=1.5).eval(), torch.rand(1, 3, 33, 47)
    alone = network(image)
    mirrored = Fast(**network.config | {"mirror": True}).eval()
    mirrored.load_state_dict(network.state_dict())
    both = mirrored(image)
    torch.testing.assert_close(both, (alone + network(image.flip(-1)).flip(-1)) / 2)
    torch.testing.assert_close(mirrored(image.flip(-1)).flip(-1), both)
    assert not torch.allclose(both, alone, atol=1e-3)
    torch.manual_seed(1)
    expected = network.train()(image)
    torch.manual_seed(1)
    torch.testing.assert_close(mirrored.train()(image), expected)


@torch.no_grad()
@pytest.mark.parametrize("packed", [True, False])
def test_a_copy_in_bfloat16_is_close_and_leaves_the_network_alone(packed, monkeypatch):
    if not packed:  # as with a PyTorch that lacks the operators
        monkeypatch.setattr("deepmrf.unary.fast.has_packed_filters", lambda: False)
    torch.manual_seed(0)
    network, image = Fast(3, width=16), torch.rand(1, 3, 64, 64)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # as after training: no two channels alike
            torch.nn.init.uniform_(module.weight, 0.8, 1.2)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
            torch.nn.init.normal_(module.running_mean, std=0.1)
    network.eval()
    before = network(image)
    half = network.in_bfloat16()
    logits = half(image)
    assert logits.dtype == torch.bfloat16
    assert half.config == network.config
    torch.testing.assert_close(logits.float(), before, atol=0.05 * float(before.abs().max()), rtol=0.1)
    assert torch.equal(network(image), before)


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("activate", [False, True])
def test_a_packed_unit_convolves_as_it_did(stride, activate):
    torch.manual_seed(0)
    unit = Unit(8, 8, 3, stride=stride, groups=8, activate=activate).eval()
    torch.nn.init.normal_(unit.norm.bias, 3)  # so that some values are above 6, and some below 0
    x = (4 * torch.randn(2, 8, 9, 11)).contiguous(memory_format=torch.channels_last)
    expected = unit(x)
    unit.pack(*unit.folded())
    torch.testing.assert_close(unit(x), expected)
    assert bool((expected < 0).any()) != activate
    assert float(expected.max()) == 6 or not activate
