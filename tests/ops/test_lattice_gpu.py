"""The lattice by Triton kernels against plain PyTorch: on the GPU, or in Triton's interpreter without one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from deepmrf import ops
from deepmrf.ops.lattice import gpu, gpu_mean_field, lattice_filter
from deepmrf.ops.lattice.build import build_plain
from deepmrf.ops.lattice.features import bilateral_features, position_features
from deepmrf.ops.lattice.mean_field import PairwiseTerm, mean_field, normalisation
from tests.ops.test_interpreted import DEVICE, runs_here


@runs_here
@pytest.mark.parametrize("axes", [1, 2, 5])
def test_same_lattice_as_plain(axes):
    features = torch.randn(2, axes, 70, device=DEVICE) * 2
    plain, sorted_lattice = build_plain(features), gpu.build(features)
    assert torch.equal(plain.weight, sorted_lattice.weight)
    assert plain.vertices == sorted_lattice.vertices
    row = torch.empty(plain.vertices, dtype=torch.long, device=DEVICE)  # of each vertex of plain in the other
    row[plain.vertex.flatten().long()] = sorted_lattice.vertex.flatten().long()
    assert torch.equal(row[plain.vertex.long()].int(), sorted_lattice.vertex)
    linked = torch.where(plain.neighbours < 0, -1, row[plain.neighbours.long()].int())
    assert torch.equal(linked, sorted_lattice.neighbours[:, :, row])


@runs_here
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("channels", [1, 5, 33])
def test_filter(channels, transpose, agree):
    """More points in one place than a chunk has entries, so that there are partial sums."""
    features = torch.cat([torch.randn(2, 3, 40), torch.randn(2, 3, 1).expand(-1, -1, 150)], dim=2).to(DEVICE)
    lattice = gpu.build(features)
    assert len(lattice.splat_tables[4]) >= 8
    values = torch.rand(2, channels, 190, device=DEVICE)
    with ops.use("triton"):
        result = lattice_filter(values, lattice, transpose=transpose)
        assert torch.equal(result, lattice_filter(values, lattice, transpose=transpose))
    with ops.use("torch"):
        agree(result, lattice_filter(values.double(), lattice, transpose=transpose), 2e-6)


@runs_here
def test_one_lattice_serves_a_batch(agree):
    lattice = gpu.build(position_features((5, 7), 2.0, device=DEVICE))
    values = torch.rand(3, 4, 35, device=DEVICE)
    with ops.use("torch"):
        expected = lattice_filter(values.double(), lattice)
    agree(lattice_filter(values, lattice), expected, 2e-6)


@runs_here
@pytest.mark.parametrize("kind", ["symmetric", "before", "none"])
@pytest.mark.parametrize("form", ["number", "diagonal", "matrix"])
def test_mean_field(kind, form, agree):
    image = torch.rand(2, 3, 9, 13, device=DEVICE)
    lattices = [
        gpu.build(position_features((9, 13), 3.0, device=DEVICE)),
        gpu.build(bilateral_features(image, 5.0, 0.3)),
    ]
    compatibility = {"number": torch.tensor(-2.0), "diagonal": -torch.rand(6), "matrix": torch.rand(6, 6)}[form]
    terms = [PairwiseTerm(x, compatibility.to(DEVICE), *normalisation(x, kind)) for x in lattices]
    unary = torch.rand(2, 6, 117, device=DEVICE) * 3
    assert gpu_mean_field.suits(unary, terms)
    with ops.use("torch"):
        assert not gpu_mean_field.suits(unary, terms)
        assert not gpu.can_build(unary)
        plain = mean_field(unary, terms, 2)
    result = gpu_mean_field.mean_field(unary, terms, 2)
    expected = mean_field(unary.clone().requires_grad_(), terms, 2)
    agree(result, expected, 1e-5)
    agree(plain, expected, 1e-5)
