"""The losses against their equations."""

from __future__ import annotations

import pytest
import torch

from deepmrf.training import loss
from deepmrf.training.loss import cross_entropy, lovasz, lovasz_reference


def case(seed, labels=4, size=(2, 5, 7), ignore=255):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size[0], labels, *size[1:], generator=generator, dtype=torch.float64)
    target = torch.randint(labels, size, generator=generator)
    target[torch.rand(size, generator=generator) < 0.2] = ignore
    return logits.log_softmax(1).requires_grad_(), target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # sorted as whole numbers, and as they are
@pytest.mark.parametrize("seed", range(3))
def test_lovasz_is_the_equation(seed, dtype):
    log_q, target = case(seed)
    log_q = log_q.detach().to(dtype).requires_grad_()
    seen = target != 255
    p = log_q.exp().movedim(1, 0)[:, seen]
    expected = torch.stack([lovasz_reference(p[v], (target[seen] == v).long()) for v in range(4)]).mean()
    loss = lovasz(log_q, target, 255)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*[torch.autograd.grad(x, log_q, retain_graph=True)[0] for x in (loss, expected)])


def test_whole_numbers_sort_as_the_errors_do():
    log_q, target = case(0, size=(2, 97, 131))
    log_q = log_q.detach().float()
    log_q[0] = log_q[0, :, :1]  # equal errors in every column, among them those of certain pixels
    log_q[1, :, :9] = torch.tensor([0.0, *[-torch.inf] * 3])[:, None, None]
    single, double = log_q.requires_grad_(), log_q.detach().double().requires_grad_()
    losses = [lovasz(x, target, 255) for x in (single, double)]
    torch.testing.assert_close(losses[0].double(), losses[1])
    gradients = [torch.autograd.grad(loss, x)[0][1, :, 9:] for loss, x in zip(losses, (single, double), strict=True)]
    torch.testing.assert_close(gradients[0].double(), gradients[1], atol=1e-7, rtol=1e-4)


def test_certain_and_wrong_pixels_cost_the_iou_they_lose():
    truth = torch.tensor([[[0, 0, 1, 1, 1]]])
    labels = torch.tensor([0, 1, 1, 1, 0])
    log_q = torch.full((1, 2, 1, 5), -60.0, dtype=torch.float64)
    log_q[0, labels, 0, torch.arange(5)] = 0.0
    # label 0: 1 of 3 in common, label 1: 2 of 4
    torch.testing.assert_close(lovasz(log_q, truth, 255).item(), ((1 - 1 / 3) + (1 - 2 / 4)) / 2)


def test_labels_that_do_not_occur_and_empty_batches():
    log_q, target = case(0)
    target[target == 3] = 0
    three = lovasz(log_q, target, 255)
    seen = target != 255
    p = log_q.exp().movedim(1, 0)[:, seen]
    expected = torch.stack([lovasz_reference(p[v], (target[seen] == v).long()) for v in range(3)]).mean()
    torch.testing.assert_close(three, expected)
    nothing = lovasz(log_q, torch.full_like(target, 255), 255)
    assert nothing.item() == 0
    nothing.backward()


def test_many_pixels_are_thinned_out(monkeypatch):
    monkeypatch.setattr(loss, "MAX_SORTED_PIXELS", 8)
    log_q, target = case(1, size=(2, 8, 8))
    torch.manual_seed(0)
    [gradient] = torch.autograd.grad(lovasz(log_q, target, 255), log_q)
    assert (gradient != 0).any(1).sum() <= 8


def test_cross_entropy_over_labelled_pixels():
    log_q, target = case(2)
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    for given in (None, weights):
        total, count = cross_entropy(log_q, target, given, 255)
        expected = torch.nn.functional.nll_loss(log_q, target, given, ignore_index=255)
        torch.testing.assert_close(total / count, expected)
