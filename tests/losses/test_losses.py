"""CRF losses against every pair of pixels written out; masks, labels left out, gradients, one to three axes."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepmrf.losses import DenseCRFLoss, GatedCRFLoss


def every_pair(p, image, mask, *, colour_width, position_width, window=None, ignore=(), self_edges=False):
    """The non-negative energy, pair by pair. p (L, *S), image (F, *S), mask (*S)."""
    pixels = list(itertools.product(*[range(n) for n in p.shape[1:]]))
    counted = [label for label in range(len(p)) if label not in ignore]
    total = 0.0
    for j, z in itertools.product(pixels, pixels):
        if j == z and not self_edges:
            continue
        if window is not None and max(abs(a - b) for a, b in zip(j, z, strict=True)) > window // 2:
            continue
        at_j, at_z = (slice(None), *j), (slice(None), *z)
        colour = (image[at_j] - image[at_z]).square().sum() / (2 * colour_width**2)
        position = sum((a - b) ** 2 for a, b in zip(j, z, strict=True)) / (2 * position_width**2)
        sums = p[at_j][counted].sum() * p[at_z][counted].sum() - (p[at_j][counted] * p[at_z][counted]).sum()
        total = total + torch.exp(-colour - position) * mask[j] * mask[z] * sums
    return total / mask.sum().clamp_min(1)


@pytest.mark.parametrize("size", [(9,), (5, 6), (3, 4, 2)], ids=["1-D", "2-D", "3-D"])
@pytest.mark.parametrize("ignore", [(), (0,)], ids=["all labels", "without label 0"])
def test_the_gated_loss_is_the_sum_over_pairs(size, ignore):
    p = torch.randn(2, 3, *size, dtype=torch.float64).softmax(1)
    image, mask = torch.rand(2, 2, *size, dtype=torch.float64), torch.rand(2, *size) < 0.7
    loss = GatedCRFLoss(window=3, colour_width=0.4, position_width=1.5, ignore_labels=ignore)(p, image, mask)
    pairs = [
        every_pair(p[b], image[b], mask[b].double(), colour_width=0.4, position_width=1.5, window=3, ignore=ignore)
        * mask[b].sum()
        for b in range(2)
    ]
    torch.testing.assert_close(loss, sum(pairs) / mask.sum())


def test_the_dense_loss_is_near_the_sum_over_pairs():
    torch.manual_seed(1)
    rows, columns = torch.meshgrid(torch.arange(14.0), torch.arange(13.0), indexing="ij")
    image = torch.stack([rows / 14, columns / 13, (rows + columns) / 27])[None].double()
    p = (torch.stack([rows, columns, 9 - rows])[None].double() / 4).softmax(1)
    settings = {"colour_width": 0.3, "position_width": 5.0}
    ours = [DenseCRFLoss(**settings)(p, image), DenseCRFLoss(**settings)(p.roll(3, 3), image)]
    exact = [every_pair(q[0], image[0], torch.ones(14, 13), **settings, self_edges=True) for q in (p, p.roll(3, 3))]
    # The lattice scales all sums alike.
    ratios = [float(a / b) for a, b in zip(ours, exact, strict=True)]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.05)
    assert 0.4 < ratios[0] < 1.2


@pytest.mark.parametrize("loss", [DenseCRFLoss(position_width=3.0), GatedCRFLoss(window=5)], ids=["dense", "gated"])
def test_it_is_zero_where_all_agree_and_positive_else(loss):
    image = torch.rand(1, 3, 8, 9)
    same = torch.zeros(1, 3, 8, 9)
    same[:, 1] = 1
    assert float(loss(same, image)) == pytest.approx(0, abs=1e-5)
    assert float(loss(torch.full_like(same, 1 / 3), image)) > 0
    assert float(loss(same, image, torch.zeros(1, 8, 9))) == 0


@pytest.mark.parametrize(
    "loss",
    [
        DenseCRFLoss(position_width=3.0, colour_width=0.5),
        DenseCRFLoss(position_width=3.0, scale=0.5),
        GatedCRFLoss(window=5),
        GatedCRFLoss(window=3, nonnegative=False),
    ],
    ids=["dense", "dense, half size", "gated", "gated, rloss's form"],
)
def test_gradients(loss):
    image = torch.rand(2, 3, 6, 5, dtype=torch.float64)
    scores = torch.randn(2, 3, 6, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(2, 6, 5) < 0.8
    assert torch.autograd.gradcheck(lambda scores: loss(scores.softmax(1), image, mask), scores)


def test_both_forms_have_the_same_gradient():
    image = torch.rand(1, 3, 6, 7, dtype=torch.float64)
    gradients = []
    for nonnegative in (True, False):
        scores = torch.randn(1, 4, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        scores.requires_grad_()
        GatedCRFLoss(window=5, nonnegative=nonnegative)(scores.softmax(1), image).backward()
        gradients.append(scores.grad)
    torch.testing.assert_close(*gradients)


def test_bytes_stand_for_parts_of_255():
    image = torch.randint(0, 256, (1, 3, 7, 6), dtype=torch.uint8)
    p = torch.randn(1, 3, 7, 6).softmax(1)
    for loss in (DenseCRFLoss(), GatedCRFLoss()):
        torch.testing.assert_close(loss(p, image), loss(p, image.float() / 255))


def test_it_teaches_a_network_what_the_image_shows():
    """One label known per half, the image says where the border is."""
    image = torch.zeros(1, 3, 12, 16)
    image[..., 6:] = 1
    scores = torch.zeros(1, 2, 12, 16, requires_grad=True)
    target = torch.full((1, 12, 16), 255)
    target[0, 6, 2], target[0, 6, 12] = 0, 1
    optimiser, loss = torch.optim.Adam([scores], 0.3), DenseCRFLoss(position_width=8.0)
    for _ in range(60):
        optimiser.zero_grad()
        known = torch.nn.functional.cross_entropy(scores, target, ignore_index=255)
        (known + loss(scores.softmax(1), image)).backward()
        optimiser.step()
    labels = scores.argmax(1)[0]
    assert bool((labels[:, :6] == 0).all())
    assert bool((labels[:, 6:] == 1).all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GatedCRFLoss(colour_width=0), "widths must be positive"),
        (lambda: DenseCRFLoss(position_width=-1), "widths must be positive"),
        (lambda: DenseCRFLoss(scale=2), "scale=2 must lie above 0"),
        (lambda: GatedCRFLoss()(P, torch.rand(1, 3, 4, 5)), "of the same batch and size"),
        (lambda: GatedCRFLoss()(P.log(), IMAGE), "pass scores.softmax"),
        (lambda: GatedCRFLoss()(P * float("nan"), IMAGE), "must be finite"),
        (lambda: GatedCRFLoss()(P, IMAGE, torch.ones(1, 2, 4, 4)), "The mask has shape"),
        (lambda: GatedCRFLoss(ignore_labels=(7,))(P, IMAGE), "must name some, not all"),
        (lambda: GatedCRFLoss(ignore_labels=(0, 1))(P, IMAGE), "must name some, not all"),
        (lambda: GatedCRFLoss(window=(3, 3, 3))(P, IMAGE), "has 3 sizes, but dims=2"),
    ],
)
def test_bad_input_gets_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


P, IMAGE = torch.full((1, 2, 4, 4), 0.5), torch.rand(1, 3, 4, 4)


@pytest.mark.parametrize("loss", [DenseCRFLoss(), GatedCRFLoss()], ids=["dense", "gated"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_summed_in_float32(loss, dtype):
    p, image = torch.randn(1, 21, 300, 300).softmax(1).to(dtype).requires_grad_(), torch.rand(1, 3, 300, 300)
    value = loss(p, image)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, loss(p.detach().float(), image))
    value.backward()
    assert p.grad.dtype == dtype
    assert p.grad.isfinite().all()
