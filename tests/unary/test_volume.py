"""The 3-D U-Net: any size, any unit, one volume or many, and what build promises."""

from __future__ import annotations

import pytest
import torch

from deepmrf.unary import Volume, build


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return build("volume", 3, width=8).eval()


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 6, 2), (7, 9, 5), (8, 12, 16)], ids=str)
def test_logits_have_the_volumes_size(network, size):
    with torch.no_grad():
        logits = network(torch.rand(2, 1, *size))
    assert logits.shape == (2, 3, *size)
    assert logits.isfinite().all()


def test_the_unit_of_intensities_does_not_matter(network, agree):
    volume = torch.rand(1, 1, 8, 9, 10)
    with torch.no_grad():
        agree(network(700 * volume - 1000), network(volume), 1e-3)
        counts = torch.randint(-1000, 3000, (1, 1, 8, 9, 10), dtype=torch.int16)
        agree(network(counts), network(counts.float()))
        assert network(torch.zeros(1, 1, 4, 4, 4)).isfinite().all()


@pytest.mark.parametrize("training", [False, True])
def test_volumes_of_a_batch_do_not_mix(agree, training):
    model = Volume(3, width=8, dropout=0.0).train(training)
    volumes = torch.rand(2, 1, 6, 8, 7)
    with torch.no_grad():
        agree(model(volumes)[1:], model(volumes[1:]))


def test_a_shift_by_whole_cells_shifts_the_inside(agree):
    """No level is off by half a voxel: what moves by the coarsest stride comes out moved."""
    model = Volume(2, width=8, levels=2).eval().double()
    volume = torch.zeros(1, 1, 40, 8, 8).double()
    volume[..., 16:20, 2:5, 2:5] = torch.rand(4, 3, 3).double()
    with torch.no_grad():
        # The norms' averages include the borders, which do not move: 1e-6. Half a voxel would be 0.1.
        agree(model(volume.roll(2, 2))[:, :, 12:28], model(volume)[:, :, 10:26], 1e-4)


def test_every_parameter_gets_a_gradient():
    model = Volume(3, width=8, dropout=0.0).train()
    model(torch.rand(2, 1, 9, 12, 8)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_config_and_state_make_the_same_network(network):
    twin = build(network.name, **network.config).eval()
    twin.load_state_dict(network.state_dict())
    volume = torch.rand(1, 1, 5, 6, 7)
    with torch.no_grad():
        assert torch.equal(twin(volume), network(volume))
    assert twin.config == network.config
    parameters = sum(p.numel() for p in build("volume", 3).parameters())
    assert 300_000 < parameters < 1_000_000


def test_half_precision(network):
    model = build("volume", **network.config).eval().to(torch.bfloat16)
    with torch.no_grad():
        assert model(3000 * torch.rand(1, 1, 5, 6, 7)).dtype == torch.bfloat16


def test_dropout_works_in_training_only():
    model = Volume(3, width=8, dropout=0.5)
    volume = torch.rand(1, 1, 5, 6, 7)
    with torch.no_grad():
        assert not torch.equal(model.train()(volume), model(volume))
        assert torch.equal(model.eval()(volume), model(volume))


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        (torch.rand(8, 8, 8), r"add axes with \[None\]"),
        (torch.rand(1, 3, 8, 8, 8), r"must have shape \(B, 1, D, H, W\)"),
        (torch.rand(1, 1, 0, 8, 8), "no voxels"),
    ],
    ids=["no axes", "three channels", "empty"],
)
def test_errors_say_what_to_do(network, volume, message):
    with pytest.raises(ValueError, match=message):
        network(volume)


def test_wrong_kinds(network):
    with pytest.raises(TypeError, match="real numbers"):
        network(torch.zeros(1, 1, 4, 4, 4, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        network([0])
    with pytest.raises(ValueError, match="multiple of 8"):
        Volume(3, width=12)
    with pytest.raises(ValueError, match="leave the ImageNet weights out"):
        network.load_imagenet("weights.safetensors")
    with pytest.raises(ValueError, match="'volume' for volumes"):
        build("volumes", 3)
