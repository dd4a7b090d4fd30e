"""The Gaussian kernel and dense CRF's blur: against loops over pairs of pixels, and their gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepmrf import ops
from deepmrf.ops import gaussian

pytestmark = pytest.mark.usefixtures("plain_torch")

SPACING = (0.5, 2.0, 1.0, 1.5)
WEIGHTS = (0.7, 0.1)
WIDTHS = (0.6, 2.5)
CASES = [
    ((9,), (1,)),
    ((9,), (2,)),
    ((9,), (5,)),
    ((9,), (50,)),
    ((80,), (50,)),
    ((4, 6), (1, 1)),
    ((4, 6), (2, 2)),
    ((6, 4), (5, 5)),
    ((5, 4), (50, 50)),
    ((5, 6), (3, 4)),
    ((4, 7), (50, 1)),
    ((3, 4, 2), (2, 2, 2)),
    ((3, 4, 5), (5, 1, 4)),
    ((2, 3, 4), (5, 6, 9)),
    ((2, 3, 2, 4), (3, 2, 5, 50)),
]


@pytest.fixture
def by_hand(pixels, neighbours):
    """sum over z in N(j), z != j, of exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2) q_z, pair by pair."""

    def sums(q, features, widths, window, spacing):
        q, features, (a, b) = q.numpy(), features.numpy(), widths
        size, total = q.shape[2:], np.zeros_like(q)
        for j in pixels(size):
            for z in neighbours(j, window, size):
                if z != j:
                    squared = sum(((jj - zz) * s) ** 2 for jj, zz, s in zip(j, z, spacing, strict=True))
                    step = ((features[(..., *j)] - features[(..., *z)]) ** 2).sum(1)  # (B,)
                    s = np.exp(-step / (2 * a**2) - squared / (2 * b**2))
                    total[(..., *j)] += s[:, None] * q[(..., *z)]
        return total

    return sums


def make(size, features=3, labels=2):
    return torch.rand(2, labels, *size, dtype=torch.float64), torch.rand(2, features, *size, dtype=torch.float64)


def parameters():
    return torch.tensor(WEIGHTS, dtype=torch.float64), torch.tensor(WIDTHS, dtype=torch.float64)


def test_two_pixels():
    q = torch.tensor([[[[0.5, 1.0]]]])
    image = torch.tensor([[[[0.0, 1.0]]]])
    # s = exp(-1 / 2 - 1 / 8), each pixel is paid by the other one, twice as much, plus 3
    t = ops.gaussian_penalty(q, image, torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]), (3, 3))
    torch.testing.assert_close(t, torch.full((1, 1, 1, 2), 0.5 * 2 * math.exp(-0.625) + 3))


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("size", "window"), CASES)
def test_equals_the_sum_over_pairs(size, window, gate, by_hand, agree):
    q, features = make(size)
    spacing = SPACING[: len(size)]
    total = by_hand(q, features, WIDTHS, window, spacing)
    expected = WEIGHTS[0] * (q.numpy() * total if gate else total) + WEIGHTS[1]
    agree(ops.gaussian_penalty(q, features, *parameters(), window, spacing, gate), expected)
    agree(gaussian.gaussian_penalty_reference(q, features, *parameters(), window, spacing, gate), expected)


@pytest.mark.parametrize("channels", [0, 1, 3, 7])
def test_any_number_of_features(channels, by_hand, agree):
    q, features = make((4, 5), channels)
    expected = WEIGHTS[0] * by_hand(q, features, WIDTHS, (4, 3), (1.0, 1.0)) + WEIGHTS[1]
    agree(ops.gaussian_penalty(q, features, *parameters(), (4, 3), gate=False), expected)


def test_dtype_and_device_are_kept(device, dtype, agree):
    q, features = make((5, 6))
    moved = [x.to(device, dtype) for x in (q, features, *parameters())]
    t = ops.gaussian_penalty(*moved, (3, 4))
    assert (t.dtype, t.device.type) == (dtype, device.type)
    agree(t, gaussian.gaussian_penalty_reference(q, features, *parameters(), (3, 4), (1.0, 1.0), True))


def test_bytes_stand_for_value_over_255(agree):
    q, _ = make((5, 6))
    image = torch.randint(0, 256, (2, 3, 5, 6), dtype=torch.uint8)
    actual = ops.gaussian_penalty(q, image, *parameters(), (3, 4))
    agree(actual, ops.gaussian_penalty(q, image.double() / 255, *parameters(), (3, 4)))


def test_non_contiguous_maps(agree):
    q, features = make((5, 6))
    expected = ops.gaussian_penalty(q, features, *parameters(), (3, 4))
    shuffled = q.transpose(1, 3).contiguous().transpose(1, 3), features.permute(0, 2, 3, 1).contiguous().movedim(-1, 1)
    agree(ops.gaussian_penalty(*shuffled, *parameters(), (3, 4)), expected)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("size", "window"), [((5,), (4,)), ((3, 4), (3, 2)), ((2, 3, 2), (2, 50, 1))])
def test_gradients(size, window, gate):
    inputs = [x.requires_grad_() for x in (*make(size, 2), *parameters())]
    spacing = SPACING[: len(size)]
    assert torch.autograd.gradcheck(lambda *x: ops.gaussian_penalty(*x, window, spacing, gate), inputs)


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_gradient_to_one_input_alone(wanted):
    inputs = [*make((3, 4), 2), *parameters()]
    inputs[wanted].requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: ops.gaussian_penalty(*x, (3, 2)), inputs)


def test_gradient_without_features():
    q, features = make((3, 4), 0)
    inputs = [x.requires_grad_() for x in (q, *parameters())]
    assert torch.autograd.gradcheck(lambda q, w, widths: ops.gaussian_penalty(q, features, w, widths, (3, 2)), inputs)


@pytest.mark.parametrize(
    ("size", "window"),
    [
        ((9,), (4,)),
        ((5, 6), (3, 50)),
        ((2, 3, 4), (2, 5, 1)),
        ((2, 3, 2, 3), (2, 3, 1, 50)),
        ((31,), (4,)),  # windows that are short beside the lines
        ((25, 31), (3, 5)),
    ],
)
def test_blur_is_the_kernel_of_positions_alone(size, window, by_hand, agree):
    q, features = make(size, 0)
    spacing = SPACING[: len(size)]
    expected = by_hand(q, features, (1.0, 1.7), window, spacing)
    width = torch.tensor(1.7, dtype=torch.float64)
    agree(ops.gaussian_blur(q, width, window, spacing), expected)
    with torch.inference_mode():  # tap by tap, where windows are short
        agree(ops.gaussian_blur(q, width, window, spacing), expected)


@pytest.mark.parametrize(("size", "window"), [((5,), (4,)), ((3, 4), (3, 2)), ((2, 3, 2), (2, 5, 1))])
def test_blur_gradients(size, window):
    q, _ = make(size)
    width = torch.tensor(1.7, dtype=torch.float64)
    inputs = (q.requires_grad_(), width.requires_grad_())
    assert torch.autograd.gradcheck(lambda *x: ops.gaussian_blur(*x, window, SPACING[: len(size)]), inputs)


@pytest.mark.parametrize("width", [0.25, 0.5, 3.0])
def test_blur_in_single_precision(width, agree):
    """The centre is left out: a narrow kernel must not lose its small neighbours beside it."""
    q, width = torch.rand(1, 2, 9, 8), torch.tensor(width)
    single = ops.gaussian_blur(q, width, (5, 5), (1.0, 1.0))
    agree(single, ops.gaussian_blur(q.double(), width.double(), (5, 5), (1.0, 1.0)))
