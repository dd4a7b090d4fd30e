"""Dense CRF, CRF-RNN and the paper's reduction: against a mean field over all pairs of pixels, written on its own."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

from benchmarks.record_pydensecrf import SETTINGS as SETTINGS_OF_PYDENSECRF
from deepmrf import MeanField, crf_rnn, dense_crf
from deepmrf.layers.crf import preset

RECORDED = Path(__file__).parents[1] / "densecrf" / "pydensecrf2.npz"

SIZE, LABELS = (4, 5), 3
WIDE = (7, 9)  # covers the image from every pixel
SETTINGS = {
    "appearance": 2.5,
    "colour_width": 0.4,
    "position_width": 2.2,
    "smooth_width": 1.3,
    "spacing": (1.0, 1.5),
}


def softmax(x):
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def all_pairs(log_p, image, mu, iterations, smoothness, normalize, size=SIZE):
    """log_p (P, L), image (P, F): q after some iterations of q_i ~ exp(ln p_i - mu sum over z != i of k(i, z) q_z)."""
    positions = [np.array(p) * SETTINGS["spacing"] for p in np.ndindex(*size)]
    bilateral, spatial = np.zeros((2, len(positions), len(positions)))
    for i in range(len(positions)):
        for z in range(len(positions)):
            if z != i:
                far = ((positions[i] - positions[z]) ** 2).sum()
                unlike = ((image[i] - image[z]) ** 2).sum()
                bilateral[i, z] = math.exp(
                    -unlike / (2 * SETTINGS["colour_width"] ** 2) - far / (2 * SETTINGS["position_width"] ** 2)
                )
                spatial[i, z] = math.exp(-far / (2 * SETTINGS["smooth_width"] ** 2))
    if normalize:  # symmetric: by the root of what either end receives
        for kernel in (bilateral, spatial):
            received = kernel.sum(1)
            kernel /= np.sqrt(received[:, None] * received[None])
    edges = SETTINGS["appearance"] * bilateral + smoothness * spatial
    q = softmax(log_p)
    for _ in range(iterations):
        q = softmax(np.log(softmax(log_p)) - (edges @ q) @ mu.T)
    return q


def flat(maps):
    """(P, channels) of the one item of a batch."""
    return maps[0].flatten(1).T.numpy()


@pytest.fixture
def inputs(double_default):
    return 2 * torch.randn(1, LABELS, *SIZE), torch.rand(1, 3, *SIZE)


@pytest.mark.parametrize("iterations", [1, 5])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("smoothness", [0.0, 1.7])
def test_dense_crf_is_the_mean_field_over_all_pairs(iterations, normalize, smoothness, inputs, agree):
    log_p, image = inputs
    crf = dense_crf(LABELS, window=WIDE, iterations=iterations, normalize=normalize, smoothness=smoothness, **SETTINGS)
    potts = 1 - np.eye(LABELS)
    expected = all_pairs(flat(log_p), flat(image), potts, iterations, smoothness, normalize)
    agree(crf(log_p, image).exp()[0].flatten(1).T, expected, 1e-9)
    assert np.abs(expected - softmax(flat(log_p))).max() > 0.05  # the edges matter


@pytest.mark.parametrize("iterations", [1, 5])
@pytest.mark.parametrize("normalize", [True, False])
def test_crf_rnn_with_a_learned_compatibility(iterations, normalize, inputs, agree):
    log_p, image = inputs
    mu = torch.randn(LABELS, LABELS)
    crf = crf_rnn(LABELS, window=WIDE, iterations=iterations, normalize=normalize, smoothness=1.7, **SETTINGS)
    crf.label_contexts.set_compatibility(mu)
    expected = all_pairs(flat(log_p), flat(image), mu.numpy(), iterations, 1.7, normalize)
    agree(crf(log_p, image).exp()[0].flatten(1).T, expected, 1e-9)


def test_gradients_flow_through_five_iterations(double_default):
    crf = crf_rnn(2, dims=1, window=7, features=1, smoothness=0.5, colour_width=0.4, position_width=2, appearance=0.7)
    names, values = zip(*crf.named_parameters(), strict=True)
    assert {"label_contexts.weight", "triple_penalty.log_colour_width", "triple_penalty.log_smooth_width"} <= {*names}
    log_p, image = torch.randn(1, 2, 4, requires_grad=True), torch.rand(1, 1, 4, requires_grad=True)

    def run(log_p, image, *values):
        return functional_call(crf, dict(zip(names, values, strict=True)), (log_p, image))

    assert torch.autograd.gradcheck(run, (log_p, image, *values))


def test_compatibility_and_widths_learn():
    crf = crf_rnn(LABELS, window=5)
    crf(torch.randn(1, LABELS, *SIZE), torch.rand(1, 3, *SIZE))[:, 0].sum().backward()
    for name, parameter in crf.named_parameters():
        if name != "triple_penalty.shift":  # the same for every label: Potts lets it cancel
            assert parameter.grad.abs().sum() > 0, name


def test_dense_crf_is_frozen_until_asked_to_learn():
    assert not any(p.requires_grad for p in dense_crf(2).parameters())
    assert all(p.requires_grad for p in dense_crf(2, learn=True).parameters())
    assert all(p.requires_grad for p in crf_rnn(2).parameters())
    assert not any(p.requires_grad for p in crf_rnn(2, learn=False).parameters())


def test_crf_rnn_starts_as_dense_crf():
    log_p, image = torch.randn(1, 2, 6, 7), torch.rand(1, 3, 6, 7)
    torch.testing.assert_close(crf_rnn(2, window=9)(log_p, image), dense_crf(2, window=9)(log_p, image))


def test_dense_crf_cleans_a_noisy_mask():
    clean = torch.zeros(1, 1, 16, 16)
    clean[..., 8:] = 1
    image = clean.expand(-1, 3, -1, -1) * 0.6 + 0.2
    noisy = torch.where(torch.rand(clean.shape) < 0.2, 1 - clean, clean)
    log_p = torch.cat([1 - noisy, noisy], 1).mul(0.4).add(0.3).log()
    labels = dense_crf(2, window=15)(log_p, image).argmax(1, keepdim=True)
    assert (noisy != clean).float().mean() > 0.1
    assert torch.equal(labels, clean.long())


@pytest.mark.parametrize(
    "wrong", [{"colour_width": 0}, {"position_width": -1.0}, {"smooth_width": 0.0}, {"appearance": -2}]
)
def test_widths_and_appearance_are_positive(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=rf"^{name}={value} must be positive: it is [^.]*\.$"):
        dense_crf(2, **wrong)


@pytest.fixture
def tiny(double_default):
    log_p, image = torch.randn(1, 2, 2, 3).log_softmax(1), torch.rand(1, 3, 2, 3)

    def d(j, z):
        step = (image[(0, slice(None), *j)] - image[(0, slice(None), *z)]).square().sum().item()
        return 0.7 * step + 0.3 * sum((jj - zz) ** 2 for jj, zz in zip(j, z, strict=True))

    return log_p, image, d


def test_the_papers_update_reduces_to_the_classic_one(tiny, newq, pixels, agree):
    """K = 1, j = i, and without the factor q_j, Eqn (newq) is ~ exp(-phi - sum mu(u, v) sum over z != i of d q_z)."""
    log_p, image, d = tiny
    size = (2, 3)
    compatibility = np.random.default_rng(0).normal(size=(2, 2))
    phi, q = -log_p[0].numpy(), log_p[0].exp().numpy()

    classic = np.zeros_like(q)
    for u in range(2):
        for i in pixels(size):
            cost = sum(compatibility[u, v] * d(i, z) * q[(v, *z)] for v in range(2) for z in pixels(size) if z != i)
            classic[(u, *i)] = math.exp(-phi[(u, *i)] - cost)
    classic /= classic.sum(0)

    def mu(k, i, u, j, v):
        return compatibility[u, v] if i == j else 0.0

    reduced = newq(phi, q, d, mu, np.zeros((2, 1)), (3, 5), (3, 3), gate=False)
    np.testing.assert_allclose(reduced, classic, rtol=1e-12)

    mrf = MeanField(2, window=(3, 5), contexts=1, context_size=3, gate=False, average=False).requires_grad_(False)
    mrf.triple_penalty.scale.fill_(1)
    mrf.triple_penalty.colour.fill_(0.7)
    mrf.triple_penalty.position.fill_(0.3)
    mrf.label_contexts.set_compatibility(torch.from_numpy(compatibility))
    agree(mrf(log_p, image).exp()[0], classic)


def test_a_pixel_is_at_no_distance_from_itself(tiny, newq):
    """d(j, j) = 0: with the distance kernel, z = j may be in the sum or not."""
    log_p, _, d = tiny
    phi, q = -log_p[0].numpy(), log_p[0].exp().numpy()
    cost = np.random.default_rng(0).normal(size=(2, 2, 2))

    def mu(k, i, u, j, v):
        return cost[k, u, v]

    with_, without = (newq(phi, q, d, mu, np.zeros((2, 2)), (3, 3), (3, 3), z_is_j=own) for own in (True, False))
    np.testing.assert_array_equal(with_, without)


def test_the_default_window_suits_the_axes():
    assert dense_crf(2).triple_penalty.kernel == "global"
    assert dense_crf(2, window=9).triple_penalty.kernel == "gaussian"


@pytest.fixture(scope="module")
def recorded():
    with np.load(RECORDED) as file:
        return dict(file)


@pytest.mark.parametrize("name", SETTINGS_OF_PYDENSECRF)
@pytest.mark.parametrize("learn", [False, True], ids=["fused", "with gradients"])
def test_presets_give_the_label_maps_of_pydensecrf(name, learn, recorded):
    log_p = -torch.from_numpy(recorded[f"{name} unary"].astype(np.float32)).view(1, 4, 33, 46)
    image = torch.from_numpy(recorded[f"{name} image"]).permute(2, 0, 1)[None]
    q = preset(name, 4, learn=learn)(log_p, image).exp()[0].flatten(1).detach().numpy()
    expected = recorded[f"{name} 3"].astype(np.float32)
    assert np.abs(q - expected).max() < 2e-3
    assert (q.argmax(0) == expected.argmax(0)).mean() >= 0.9993


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_global_edges_in_any_number_of_axes_and_batches(dims):
    size = (12, 9, 5)[:dims]
    log_p, image = torch.randn(2, 3, *size), torch.rand(2, 1, *size)
    crf = dense_crf(3, dims=dims, features=1, position_width=4.0, smooth_width=2.0)
    both = crf(log_p, image)
    torch.testing.assert_close(both.exp().sum(1), torch.ones(2, *size))
    for b in range(2):
        torch.testing.assert_close(crf(log_p[b : b + 1], image[b : b + 1]), both[b : b + 1], rtol=1e-4, atol=1e-4)


def test_the_fused_inference_is_the_step_repeated():
    log_p, image = 2 * torch.randn(1, 4, 13, 17), torch.rand(1, 3, 13, 17)
    for compatibility in (1 - torch.eye(4), torch.randn(4, 4)):
        crf = dense_crf(4, position_width=6.0, colour_width=0.3, iterations=3)
        crf.label_contexts.set_compatibility(compatibility)
        fused = crf(log_p, image)
        stepwise = crf.requires_grad_(True)(log_p, image)
        torch.testing.assert_close(fused.exp(), stepwise.exp().detach(), rtol=1e-3, atol=1e-4)


def test_every_parameter_of_global_edges_learns():
    log_p, image = torch.randn(2, 3, 9, 8, requires_grad=True), torch.rand(2, 3, 9, 8, requires_grad=True)
    crf = crf_rnn(3, position_width=4.0, colour_width=0.4, smooth_width=1.5, iterations=2)
    crf(log_p, image)[:, 0].sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for name, p in crf.named_parameters() if not name.endswith("shift"))
    assert float(log_p.grad.abs().sum()) > 0
    assert float(image.grad.abs().sum()) > 0


def test_global_edges_are_saved_by_their_settings():
    crf = preset("voc", 3)
    again = MeanField(**crf.settings)
    again.load_state_dict(crf.state_dict())
    log_p, image = torch.randn(1, 3, 9, 8), torch.randint(0, 256, (1, 3, 9, 8), dtype=torch.uint8)
    torch.testing.assert_close(again(log_p, image), crf(log_p, image))
    assert crf.reach() == [(240, 240)] * 2
    with pytest.raises(ValueError, match="There is no preset 'cityscapes': choose one of voc, irn"):
        preset("cityscapes", 3)
    with pytest.raises(ValueError, match="which has none"):
        MeanField(3, kernel="global", window=5)


def test_coarser_patterns_are_as_coarse_without_gradients():
    log_p, image = torch.randn(1, 3, 16, 16), torch.rand(1, 3, 16, 16)
    crf = dense_crf(3, position_width=6.0, colour_width=0.3, iterations=3).compress(stride=4)
    torch.testing.assert_close(crf(log_p, image), crf.requires_grad_(True)(log_p, image), rtol=1e-3, atol=1e-3)


def test_the_reach_of_all_pairs_is_that_of_the_wider_term():
    narrow, wide = (dense_crf(2, position_width=4.0, smooth_width=width, smoothness=1.0) for width in (2.0, 30.0))
    assert narrow.reach() == [(12, 12)] * 2
    assert all(90 <= pixels <= 91 for reach in wide.reach() for pixels in reach)  # 3 widths, rounded up
    assert dense_crf(2, position_width=4.0, smoothness=0).reach() == [(12, 12)] * 2
