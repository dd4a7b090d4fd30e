"""The Gaussian filter on the permutohedral lattice against sums over all pairs, and its gradients."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from deepmrf import ops
from deepmrf.ops.lattice import (
    build_lattice,
    cpu,
    cpu_mean_field,
    gaussian_filter,
    gaussian_filter_reference,
    lattice_filter,
)
from deepmrf.ops.lattice.build import build_plain
from deepmrf.ops.lattice.features import bilateral_features, position_features, position_lattice
from deepmrf.ops.lattice.mean_field import PairwiseTerm, mean_field, normalisation


def smooth_points(axes, side=33, scale=0.15, dtype=torch.float32):
    """(1, axes, side^2) points: a plane with smooth features on it."""
    rows, columns = position_features((side, side), 1 / scale, dtype=dtype)[0]
    more = [torch.sin(rows / (k + 1) + k * columns) for k in range(axes - 2)]
    return torch.stack([rows, columns, *more][:axes])[None]


@pytest.mark.parametrize("axes", [1, 2, 3, 4, 5])
def test_near_the_sum_over_all_pairs(axes):
    features = smooth_points(axes)
    values = torch.stack([torch.sin(k + features[0].sum(0)) for k in range(3)])[None]
    exact = gaussian_filter_reference(values, features)
    approximate = lattice_filter(values, build_lattice(features))
    ones = torch.ones_like(values[:, :1])
    exact = exact / gaussian_filter_reference(ones, features)
    approximate = approximate / lattice_filter(ones, build_lattice(features))
    assert (approximate - exact).abs().mean() < 0.06 * exact.std()


def test_weights_are_barycentric_and_rebuild_the_points():
    features = torch.randn(2, 3, 50, dtype=torch.float64) * 5
    lattice = build_lattice(features)
    assert lattice.weight.min() > -1e-12
    torch.testing.assert_close(lattice.weight.sum(2), torch.ones(2, 50, dtype=torch.float64))
    assert lattice.vertex[1].min() == lattice.vertex[0].max() + 1
    assert lattice.vertices == lattice.vertex.max() + 1 == lattice.neighbours.shape[2]


def test_neighbours_point_at_each_other():
    lattice = build_lattice(smooth_points(3))
    for before, after in lattice.neighbours.long():
        here = torch.arange(lattice.vertices)
        assert torch.equal(after[before[before >= 0]], here[before >= 0])
        assert torch.equal(before[after[after >= 0]], here[after >= 0])
        assert (after >= 0).sum() > lattice.vertices // 2


@pytest.mark.parametrize("transpose", [False, True])
def test_gradient_to_the_values(transpose):
    lattice = build_lattice(torch.randn(2, 3, 15, dtype=torch.float64))
    values = torch.randn(2, 2, 15, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: lattice_filter(v, lattice, transpose=transpose), values)
    assert torch.autograd.gradgradcheck(lambda v: lattice_filter(v, lattice, transpose=transpose), values)


def test_operator_is_registered_as_pytorch_wants():
    lattice = build_lattice(torch.randn(2, 3, 15))
    values = torch.randn(2, 2, 15, requires_grad=True)
    tables = [lattice.run_ends] if lattice.links.dim() == 1 else []
    arguments = (values, lattice.vertex, lattice.weight, lattice.links, tables, lattice.vertices, False)
    torch.library.opcheck(torch.ops.deepmrf.lattice_filter, arguments)


def test_transpose_is_the_adjoint():
    lattice = build_lattice(smooth_points(4))
    x, y = torch.rand(2, 1, 7, lattice.vertex.shape[1])
    torch.testing.assert_close(
        (lattice_filter(x, lattice) * y).sum(),
        (x * lattice_filter(y, lattice, transpose=True)).sum(),
        rtol=1e-5,
        atol=0,
    )


def test_gradient_to_the_features_in_the_mean():
    features = smooth_points(3, dtype=torch.float64).requires_grad_()
    values = torch.rand(1, 2, features.shape[2], dtype=torch.float64, requires_grad=True)
    weight = torch.sin(features[:, :1].detach() * 2)
    exact = torch.autograd.grad((gaussian_filter_reference(values, features) * weight).sum(), (values, features))
    ours = torch.autograd.grad((gaussian_filter(values, features) * weight).sum(), (values, features))
    for a, b in zip(ours, exact, strict=True):
        cosine = torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0)
        assert cosine > 0.98
        assert 0.7 < a.norm() / b.norm() < 1.3


@pytest.mark.parametrize("backend", ["torch", None])
@pytest.mark.parametrize("points", [0, 1, 2, 77])
def test_any_number_of_points_and_labels(points, backend):
    features = torch.randn(2, 2, points)
    values = torch.rand(2, 200, points)
    with ops.use(backend):
        out = lattice_filter(values, build_lattice(features))
    assert out.shape == values.shape
    assert out.isfinite().all()
    if points == 1:  # alone, a point gets the sum of squares of its weights, and what comes back from its neighbours
        assert (out > 0).all()
        assert (out <= values * 1.0001).all()


def test_one_lattice_serves_a_batch(agree):
    lattice = position_lattice((5, 7), 2.0)
    values = torch.rand(3, 4, 35)
    each = torch.cat([lattice_filter(v[None], lattice) for v in values])
    agree(lattice_filter(values, lattice), each)
    assert position_lattice((5, 7), (2, 2)) is lattice


def test_batches_do_not_mix(agree):
    features, values = torch.randn(3, 4, 40), torch.rand(3, 4, 40)
    each = [lattice_filter(v[None], build_lattice(f[None])) for v, f in zip(values, features, strict=True)]
    agree(lattice_filter(values, build_lattice(features)), torch.cat(each))


def test_keys_of_any_range(agree):
    """Twelve axes and tiny widths: keys no longer fit digit by digit, and every point is alone."""
    features = torch.rand(1, 12, 30) * 1e5
    lattice = build_lattice(features)
    assert lattice.vertices == 30 * 13
    values = torch.rand(1, 2, 30)
    assert (lattice_filter(values, lattice) > 0.01 * values).all()


def test_features():
    image = torch.arange(24).view(1, 2, 3, 4).to(torch.uint8)
    features = bilateral_features(image, (2, 4), (5.0, 10.0))
    assert features[0, :, 7].tolist() == pytest.approx([0.5, 0.75, 7 / 5, 19 / 10])
    swapped = bilateral_features(image, (2, 4), (5.0, 10.0), reverse=True)
    assert torch.equal(swapped, features[:, [1, 0, 2, 3]])
    with pytest.raises(ValueError, match="positive"):
        position_features((3, 4), 0.0)
    with pytest.raises(ValueError, match="2 widths"):
        position_features((3, 4), (1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="finite"):
        build_lattice(torch.tensor([[[1.0, float("nan")]]]))


@pytest.mark.skipif(not cpu.can_build(torch.zeros(1, 2, 1)), reason="numba is not installed")
@pytest.mark.parametrize("largest", [1e7, 1e12, 1e30])
def test_points_too_far_apart_are_refused(largest):
    """Compiled kernels would write outside of their arrays."""
    with pytest.raises(ValueError, match=r"Features reach .* widths, .*: give larger widths\.$"):
        build_lattice(largest * torch.rand(1, 5, 2000))
    build_lattice(1e4 * torch.rand(1, 5, 2000))
    with pytest.raises(ValueError, match="points"):
        lattice_filter(torch.rand(1, 2, 5), position_lattice((3, 4), 1.0))


def test_compiles():
    lattice = build_lattice(torch.randn(1, 2, 20))
    values = torch.rand(1, 2, 20)
    function = torch.compile(lambda v: lattice_filter(v * 2, lattice), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(function(values), lattice_filter(values * 2, lattice))
    with torch.inference_mode():
        torch.testing.assert_close(lattice_filter(values * 2, lattice), function(values))


@pytest.mark.parametrize("kind", ["symmetric", "before", "after", "none"])
def test_mean_field_by_hand(kind):
    """One iteration written out with K as a matrix."""
    features = smooth_points(3, side=6)
    lattice = build_lattice(features)
    matrix = lattice_filter(torch.eye(36)[None], lattice)[0].T
    unary, compatibility = torch.rand(1, 4, 36), torch.rand(4, 4)
    total = matrix.sum(1)
    before = {"symmetric": total**-0.5, "before": 1 / total}.get(kind, torch.ones(36))
    after = {"symmetric": total**-0.5, "after": 1 / total}.get(kind, torch.ones(36))
    q = torch.softmax(-unary[0], 0)
    message = (matrix @ (q * before).T).T * after
    expected = torch.softmax(-unary[0] - compatibility @ message, 0)
    term = PairwiseTerm(lattice, compatibility, *normalisation(lattice, kind))
    torch.testing.assert_close(mean_field(unary, [term], 1)[0], expected, rtol=1e-5, atol=1e-6)


def test_plain_build_is_the_same(agree):
    features = torch.randn(2, 4, 300) * 2
    plain, chosen = build_plain(features), build_lattice(features)
    assert plain.vertices == chosen.vertices
    for name in ("vertex", "weight", "neighbours"):
        assert torch.equal(getattr(plain, name), getattr(chosen, name)), name


def photograph(height, width):
    """(1, 3, height, width) uint8: smooth colours, an edge, and some noise."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    waves = [torch.sin(rows / (7 + k) + columns / (11 - k)) * 60 + 90 for k in range(3)]
    image = torch.stack(waves) + 60 * (columns > width // 3) + torch.randint(0, 9, (3, height, width))
    return image.to(torch.uint8)[None]


def dense_crf_terms(image, kind="symmetric", compatibility=(-3.0, -10.0)):
    """A position kernel and a bilateral kernel, with the settings most people use."""
    lattices = [
        position_lattice(image.shape[2:], 3.0, reverse=True),
        build_lattice(bilateral_features(image, 40.0, 13.0, reverse=True)),
    ]
    weights = [torch.as_tensor(w) for w in compatibility]
    return [PairwiseTerm(x, w, *normalisation(x, kind)) for x, w in zip(lattices, weights, strict=True)]


@pytest.mark.parametrize("labels", [1, 2, 21, 33, 200])
def test_fast_mean_field_is_the_plain_one(labels, agree):
    image = photograph(101, 91)  # large enough to be shared by threads
    unary = torch.rand(1, labels, 101 * 91) * 4
    plain = mean_field(unary.clone().requires_grad_(), dense_crf_terms(image), 3)
    fast = mean_field(unary, dense_crf_terms(image), 3)
    agree(fast, plain, 1e-5)
    assert torch.equal(fast, mean_field(unary, dense_crf_terms(image), 3))


@pytest.mark.parametrize("kind", ["symmetric", "before", "after", "none"])
@pytest.mark.parametrize("form", ["negative", "diagonal", "matrix"])
def test_fast_mean_field_of_every_kind(kind, form, agree):
    image = torch.cat([photograph(9, 14), photograph(9, 14).flip(3)])
    compatibility = {"negative": torch.tensor(0.1), "diagonal": torch.rand(5), "matrix": torch.rand(5, 5)}[form]
    terms = dense_crf_terms(image, kind, [compatibility / 10] * 2)
    unary = torch.rand(2, 5, 9 * 14) * 4
    agree(mean_field(unary, terms, 2), mean_field(unary.clone().requires_grad_(), terms, 2), 1e-5)


def test_plain_pytorch_calls_no_kernel(agree, monkeypatch):
    image, unary = photograph(9, 14), torch.rand(1, 5, 9 * 14) * 4
    expected = mean_field(unary, dense_crf_terms(image), 3)  # its lattice of positions is cached, and not for the other

    def refuse(*_):
        raise AssertionError("a kernel was called")

    for module in (cpu, cpu_mean_field):
        monkeypatch.setattr(module, "run_jobs", refuse)
    with ops.use("torch"):
        assert not cpu.can_build(torch.zeros(1, 2, 1))
        terms = dense_crf_terms(image)
        assert [term.lattice.links.dim() for term in terms] == [3, 3]
        agree(mean_field(unary, terms, 3), expected, 1e-5)


def test_threads_find_the_same_lattice():
    features = bilateral_features(photograph(120, 110), 20.0, 7.0)
    lattices, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            lattices.append(build_lattice(features))
    finally:
        torch.set_num_threads(threads)
    for other in lattices[1:]:
        for name in ("vertex", "weight", "neighbours"):
            assert torch.equal(getattr(lattices[0], name), getattr(other, name)), name


def test_noise_needs_little_memory():
    """Peak of numpy's arrays: two arrays of rows, and less than eight times the unary for all the rest."""
    image = torch.randint(0, 256, (1, 3, 128, 128), dtype=torch.uint8)
    terms = dense_crf_terms(image)
    unary = torch.rand(1, 8, 128 * 128)
    mean_field(unary[:, :, :16].contiguous(), dense_crf_terms(image[:, :, :4, :4]), 1)  # compile
    tracemalloc.start()
    mean_field(unary, terms, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    rows = sum(t.lattice.vertices for t in terms) * 8 * 4
    assert peak < 2.2 * rows + 8 * unary.numel() * 4


def test_label_maps_of_pydensecrf():
    """Equal in every pixel."""
    densecrf = pytest.importorskip("pydensecrf.densecrf")
    image, unary = photograph(61, 53), torch.rand(21, 61 * 53) * 3
    pydensecrf = densecrf.DenseCRF2D(53, 61, 21)
    pydensecrf.setUnaryEnergy(unary.numpy())
    pydensecrf.addPairwiseGaussian(sxy=3, compat=3)
    pydensecrf.addPairwiseBilateral(sxy=40, srgb=13, rgbim=image[0].permute(1, 2, 0).contiguous().numpy(), compat=10)
    expected = torch.from_numpy(np.array(pydensecrf.inference(10)))
    result = mean_field(unary[None], dense_crf_terms(image), 10)[0]
    assert torch.equal(result.argmax(0), expected.argmax(0))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


def test_tiny_widths():
    """Coordinates that need more than 16 bits, which end other programs: every colour is alone."""
    lattice = build_lattice(bilateral_features(photograph(20, 20), 80.0, 1e-3))
    ones = torch.ones(1, 1, 400)
    assert (lattice_filter(ones, lattice) < 8).all()


def test_one_pixel_and_no_iterations():
    unary = torch.tensor([[[0.5], [1.0]]])
    terms = dense_crf_terms(torch.zeros(1, 3, 1, 1, dtype=torch.uint8))
    assert mean_field(unary, terms, 5).sum() == pytest.approx(1.0)
    torch.testing.assert_close(mean_field(unary, terms, 0), torch.softmax(-unary, 1))


def test_moved_lattice_filters_alike(agree):
    lattice = build_lattice(torch.randn(2, 3, 50))
    values = torch.rand(2, 4, 50)
    agree(lattice_filter(values, lattice.to("cpu")), lattice_filter(values, lattice))
