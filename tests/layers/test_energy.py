"""The energy against sums over all labelings of tiny grids."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from deepmrf import MeanField, dense_crf

SIZE, LABELS = (3, 3), 2
PIXELS = math.prod(SIZE)
EVERY_LABELING = torch.tensor(list(itertools.product(range(LABELS), repeat=PIXELS))).view(-1, *SIZE)  # (512, 3, 3)


def inputs():
    return torch.randn(1, LABELS, *SIZE).log_softmax(1), torch.rand(1, 3, *SIZE)


def crf(kernel="gaussian"):
    """A dense CRF with a symmetric, random compatibility: Psi is symmetric, no pixel is its own neighbour."""
    mrf = MeanField(LABELS, window=5, contexts=1, context_size=1, kernel=kernel, gate=False, average=False)
    compatibility = torch.randn(LABELS, LABELS)
    mrf.label_contexts.set_compatibility(compatibility + compatibility.T)
    with torch.no_grad():
        mrf.triple_penalty.log_colour_width.fill_(0.0) if kernel == "gaussian" else None
        mrf.triple_penalty.scale.fill_(0.7 if kernel == "gaussian" else 0.05)
    return mrf


def high_order():
    """The paper's: gate, patterns of 3 x 3 without their centre, one context."""
    mrf = MeanField(LABELS, window=3, contexts=1, context_size=3)
    with torch.no_grad():
        mrf.label_contexts.weight.normal_()
        mrf.label_contexts.weight[:, :, 1, 1] = 0
    return mrf


def every_energy(mrf, log_p, image):
    return mrf.energy(EVERY_LABELING, log_p.expand(512, -1, -1, -1), image.expand(512, -1, -1, -1))


def probability(log_q):
    """Q(y) of every labeling."""
    chosen = log_q.expand(512, -1, -1, -1).gather(1, EVERY_LABELING[:, None])
    return chosen.flatten(1).sum(1).exp()


def pixel_by_pixel(mrf, labels, log_p, image):
    """E(y) of a dense CRF, each pair of pixels once."""
    penalty = mrf.triple_penalty
    a, b = penalty.widths().tolist()
    mu = mrf.label_contexts.weight.view(LABELS, LABELS)
    places = list(itertools.product(*map(range, SIZE)))
    total = sum(-log_p[0, int(labels[i]), i[0], i[1]] for i in places)
    for i, j in itertools.combinations(places, 2):
        if max(abs(i[0] - j[0]), abs(i[1] - j[1])) <= 2:
            colour = (image[0, :, i[0], i[1]] - image[0, :, j[0], j[1]]).square().sum()
            far = (i[0] - j[0]) ** 2 + (i[1] - j[1]) ** 2
            edge = torch.exp(-colour / (2 * a**2) - far / (2 * b**2)) * penalty.scale
            total = total + mu[int(labels[i]), int(labels[j])] * edge
    return total


@pytest.fixture(autouse=True)
def doubles(double_default):
    pass


def test_the_energy_of_a_dense_crf_counts_every_pair_once():
    mrf, (log_p, image) = crf(), inputs()
    with torch.no_grad():
        for labels in EVERY_LABELING[::73]:
            torch.testing.assert_close(
                mrf.energy(labels[None], log_p, image)[0], pixel_by_pixel(mrf, labels, log_p, image)
            )


@pytest.mark.parametrize("make", [crf, lambda: crf("distance"), high_order], ids=["Gaussian", "distance", "high order"])
def test_the_free_energy_is_the_sum_over_all_labelings(make):
    mrf, (log_p, image) = make(), inputs()
    log_q = torch.randn(1, LABELS, *SIZE).log_softmax(1)
    q = probability(log_q)
    with torch.no_grad():
        energies = every_energy(mrf, log_p, image)
        free = mrf.free_energy(log_q, log_p, image)[0]
    assert q.sum() == pytest.approx(1)
    torch.testing.assert_close(free, (q * energies).sum() + (q * q.log()).sum())
    log_z = torch.logsumexp(-energies, 0)
    gibbs = (-energies - log_z).exp()
    torch.testing.assert_close(free + log_z, (q * (q / gibbs).log()).sum())  # KL(Q || P)
    assert free + log_z >= 0


@pytest.mark.parametrize("kernel", ["gaussian", "distance"])
def test_one_pixel_after_the_other_lowers_the_free_energy(kernel):
    mrf, (log_p, image) = crf(kernel), inputs()
    log_q = log_p.clone()
    mrf.iterations = 1
    with torch.no_grad():
        free = [mrf.free_energy(log_q, log_p, image)]
        for _ in range(3):
            for row, column in itertools.product(*map(range, SIZE)):
                t = mrf.triple_penalty(log_q.exp(), image)
                updated = mrf.from_penalty(log_p, t)  # b13 to b15
                log_q = log_q.clone()
                log_q[..., row, column] = updated[..., row, column]
                free.append(mrf.free_energy(log_q, log_p, image))
    steps = torch.cat(free).diff()
    assert (steps <= 1e-12).all()
    assert steps.sum() < -1e-3


def test_a_certain_distribution_has_the_energy_of_its_labeling():
    mrf, (log_p, image) = high_order(), inputs()
    labels = EVERY_LABELING[77][None]
    log_q = torch.where(torch.nn.functional.one_hot(labels).movedim(-1, 1) > 0, 0.0, -torch.inf)
    with torch.no_grad():
        torch.testing.assert_close(mrf.free_energy(log_q, log_p, image), mrf.energy(labels, log_p, image))


def test_the_dense_crf_over_all_pairs_has_an_energy_with_a_gradient():
    log_p, image = inputs()
    log_p.requires_grad_()
    dense_crf(LABELS, position_width=2.0).free_energy(log_p.detach(), log_p, image).sum().backward()
    assert log_p.grad.abs().sum() > 0


def test_bad_labels_get_a_sentence():
    mrf, (log_p, image) = crf(), inputs()
    with pytest.raises(ValueError, match=r"give whole numbers of shape \(1, 3, 3\)"):
        mrf.energy(torch.zeros(1, 3, 4, dtype=torch.long), log_p, image)
    with pytest.raises(ValueError, match="give 0 to 1"):
        mrf.energy(torch.full((1, 3, 3), 2), log_p, image)
    with pytest.raises(ValueError, match="unary='softmax'"):
        MeanField(LABELS, unary="sigmoid").energy(torch.zeros(1, 3, 3, dtype=torch.long), log_p, image)
