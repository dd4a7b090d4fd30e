"""The distance kernel: exact against loops over pairs of pixels, its gradients, its precision, and its cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from deepmrf import ops
from deepmrf.ops import distance

pytestmark = pytest.mark.usefixtures("plain_torch")

SPACING = (0.5, 2.0, 1.0, 3.0, 0.25)
WEIGHTS = (0.7, 0.3, 0.1)
CASES = [
    ((9,), (1,)),
    ((9,), (2,)),
    ((9,), (5,)),
    ((9,), (50,)),
    ((120,), (50,)),
    ((4, 6), (1, 1)),
    ((4, 6), (2, 2)),
    ((6, 4), (5, 5)),
    ((5, 4), (50, 50)),
    ((5, 6), (3, 4)),
    ((4, 7), (50, 1)),
    ((56, 2), (50, 2)),
    ((3, 4, 2), (2, 2, 2)),
    ((3, 4, 5), (5, 1, 4)),
    ((2, 3, 4), (5, 6, 9)),
    ((2, 3, 2, 4), (3, 2, 5, 50)),
    ((2, 3, 2, 2, 3), (2, 3, 1, 4, 50)),
]


@pytest.fixture
def by_hand(pixels, neighbours):
    """(colour, position): sums over z in N(j) of |I_j - I_z|^2 q_z and of |j - z|^2 q_z, pair by pair."""

    def sums(q, features, window, spacing):
        q, features = q.numpy(), features.numpy()
        size = q.shape[2:]
        colour, position = np.zeros_like(q), np.zeros_like(q)
        for j in pixels(size):
            for z in neighbours(j, window, size):
                step = (features[(..., *j)] - features[(..., *z)]) ** 2  # (B, F)
                squared = sum(((jj - zz) * s) ** 2 for jj, zz, s in zip(j, z, spacing, strict=True))
                colour[(..., *j)] += step.sum(1)[:, None] * q[(..., *z)]
                position[(..., *j)] += squared * q[(..., *z)]
        return colour, position

    return sums


def make(size, features=3, labels=2, batch=2, dtype=torch.float64):
    return torch.rand(batch, labels, *size, dtype=dtype), torch.rand(batch, features, *size, dtype=dtype)


def test_two_pixels():
    q = torch.tensor([[[[0.5, 1.0]]]])
    image = torch.tensor([[[[0.0, 1.0]]]]).expand(1, 3, 1, 2)
    # d = 2 * 3 + 10 * 1 = 16, so both pixels pay 0.5 * 16 * 1.0 = 8
    t = ops.distance_penalty(q, image, torch.tensor([2.0, 10.0, 0.0]), (3, 3))
    torch.testing.assert_close(t, torch.tensor([[[[8.0, 8.0]]]]))


def test_an_even_window_looks_back_only():
    q = torch.tensor([[[0.5, 1.0]]])
    t = ops.distance_penalty(q, torch.zeros(1, 1, 2), torch.tensor([0.0, 1.0, 0.0]), (2,), gate=False)
    torch.testing.assert_close(t, torch.tensor([[[0.0, 0.5]]]))


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("size", "window"), CASES)
def test_equals_the_sum_over_pairs(size, window, gate, by_hand, agree):
    q, features = make(size)
    spacing = SPACING[: len(size)]
    colour, position = by_hand(q, features, window, spacing)
    total = WEIGHTS[0] * colour + WEIGHTS[1] * position
    expected = (q.numpy() * total if gate else total) + WEIGHTS[2]
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    agree(ops.distance_penalty(q, features, weights, window, spacing, gate), expected)
    agree(distance.distance_penalty_reference(q, features, weights, window, spacing, gate), expected)


@pytest.mark.parametrize("channels", [0, 1, 3, 7])
def test_any_number_of_features(channels, by_hand, agree):
    q, features = make((4, 5), channels)
    colour, position = by_hand(q, features, (4, 3), (1.0, 1.0))
    weights = torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64)
    agree(ops.distance_penalty(q, features, weights, (4, 3), gate=False), 0.7 * colour + 0.3 * position)


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0)])
def test_colour_and_position_apart(weights, by_hand, agree):
    q, features = make((5, 6))
    colour, position = by_hand(q, features, (3, 4), (1.0, 2.0))
    given = torch.tensor(weights, dtype=torch.float64)
    agree(ops.distance_penalty(q, features, given, (3, 4), (1.0, 2.0), gate=False), colour if weights[0] else position)


def test_dtype_and_device_are_kept(device, dtype, agree):
    q, features = make((5, 6))
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    t = ops.distance_penalty(q.to(device, dtype), features.to(device, dtype), weights.to(device, dtype), (3, 4))
    assert (t.dtype, t.device.type) == (dtype, device.type)
    agree(t, distance.distance_penalty_reference(q, features, weights, (3, 4), (1.0, 1.0), True))


def test_bytes_stand_for_value_over_255(agree):
    q, _ = make((5, 6))
    image = torch.randint(0, 256, (2, 3, 5, 6), dtype=torch.uint8)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    agree(
        ops.distance_penalty(q, image, weights, (3, 4)), ops.distance_penalty(q, image.double() / 255, weights, (3, 4))
    )


def test_labels_in_chunks_give_the_same(monkeypatch, agree):
    q, features = make((5, 6), labels=5)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)

    def value_and_gradients():
        inputs = [x.clone().requires_grad_() for x in (q, features, weights)]
        t = ops.distance_penalty(*inputs, (3, 4))
        return [t, *torch.autograd.grad(t.square().sum(), inputs)]

    at_once = value_and_gradients()
    monkeypatch.setattr(distance, "CHUNK_BYTES", {"cpu": 1})  # one label at a time
    for actual, expected in zip(value_and_gradients(), at_once, strict=True):
        agree(actual, expected)


def test_non_contiguous_maps(agree):
    q, features = make((5, 6))
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    expected = ops.distance_penalty(q, features, weights, (3, 4))
    shuffled = q.transpose(1, 3).contiguous().transpose(1, 3), features.permute(0, 2, 3, 1).contiguous().movedim(-1, 1)
    assert not any(x.is_contiguous() for x in shuffled)
    agree(ops.distance_penalty(*shuffled, weights, (3, 4)), expected)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(("size", "window"), [((5,), (4,)), ((3, 4), (3, 2)), ((2, 3, 2), (2, 50, 1))])
def test_gradients(size, window, gate):
    q, features = make(size, 2)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, features, weights)]
    spacing = SPACING[: len(size)]
    assert torch.autograd.gradcheck(lambda *x: ops.distance_penalty(*x, window, spacing, gate), inputs)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradient_to_one_input_alone(wanted):
    inputs = [*make((3, 4), 2), torch.tensor(WEIGHTS, dtype=torch.float64)]
    inputs[wanted].requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: ops.distance_penalty(*x, (3, 2)), inputs)


def test_gradient_without_features():
    q, features = make((3, 4), 0)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, weights: ops.distance_penalty(q, features, weights, (3, 2)), (q.requires_grad_(), weights)
    )


def noise(size):
    return 255 * torch.rand(1, 3, size, size)


def almost_white(size):
    return 248 + 4 * torch.rand(1, 3, size, size)


def two_halves(size):
    image = torch.rand(1, 3, size, size)
    image[..., size // 2 :] += 254
    return image


@pytest.mark.parametrize(
    ("picture", "labels", "window"),
    [(noise, 21, 50), (noise, 3, 101), (almost_white, 3, 50), (almost_white, 3, 101), (two_halves, 3, 101)],
)
def test_single_precision_at_full_size(picture, labels, window):
    """|I_j|^2 Box(q) - 2 I_j Box(Iq) + Box(|I|^2 q) cancels, most of all in bright or flat images."""
    q = torch.randn(1, labels, 512, 512).mul(3).softmax(1)
    image = picture(512)
    weights = torch.tensor([1.0, 0.0, 0.0])
    single = ops.distance_penalty(q, image, weights, (window, window)).double()
    double = ops.distance_penalty(q.double(), image.double(), weights.double(), (window, window))
    error = single - double
    assert error.abs().max() < 2e-5 * double.abs().max()
    assert error.norm() < 2e-5 * double.norm()
    before, after = window // 2, window - window // 2
    for y, x in torch.randint(0, 512, (8, 2)).tolist():  # and the double one, at a few pixels, by its definition
        z = (..., slice(max(0, y - before), y + after), slice(max(0, x - before), x + after))
        step = (image.double()[0, :, y, x, None, None] - image.double()[0][z]).square().sum(0)
        expected = q[0, :, y, x].double() * (step * q[0].double()[z]).sum((1, 2))
        torch.testing.assert_close(double[0, :, y, x], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("window", [50, 101])
def test_single_precision_of_positions_at_full_size(window):
    q = torch.randn(1, 3, 512, 512).mul(3).softmax(1)
    weights = torch.tensor([0.0, 1.0, 0.0])
    image = torch.zeros(1, 1, 512, 512)
    single = ops.distance_penalty(q, image, weights, (window, window)).double()
    double = ops.distance_penalty(q.double(), image.double(), weights.double(), (window, window))
    assert (single - double).abs().max() < 2e-5 * double.abs().max()


class Meter(TorchDispatchMode):
    """Counts the operators that run, and the bytes of all tensors they made that are alive at once."""

    def __init__(self):
        super().__init__()
        self.operators, self.peak, self.allocated, self._alive = [], 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.operators.append(str(func))
        self._alive = {key: alive for key, alive in self._alive.items() if not alive[0].expired()}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._alive:
                    self._alive[reference.cdata] = (reference, storage.nbytes())
                    self.allocated += storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return result


def cost(window, evaluate):
    q, features = make((96, 96), labels=5, batch=1, dtype=torch.float32)
    with Meter() as meter:
        evaluate(q, features, torch.tensor(WEIGHTS), (window, window))
    return meter


def forward(q, features, weights, window):
    return distance.operator.plain.forward(distance.Arguments(q, features, weights, window, (1.0, 1.0), True, True))


def backward(q, features, weights, window):
    arguments = distance.Arguments(q, features, weights, window, (1.0, 1.0), True, True)
    return distance.operator.plain.backward(q, q, arguments, (True, True, True))


@pytest.mark.parametrize("evaluate", [forward, backward])
def test_cost_does_not_depend_on_the_window(evaluate):
    small, large = cost(11, evaluate), cost(101, evaluate)
    assert len(small.operators) > 50  # the meter measures
    assert small.peak > 10 * 96 * 96 * 5 * 4
    assert large.operators == small.operators
    assert (large.peak, large.allocated) == (small.peak, small.allocated)
