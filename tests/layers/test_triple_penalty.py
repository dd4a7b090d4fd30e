"""The triple penalty as a layer: its parameters, its starting values, and its three kernels by explicit loops."""

from __future__ import annotations

import math

import pytest
import torch

from deepmrf import TriplePenalty

SIZE, WINDOW, SPACING = (4, 5), (3, 4), (0.5, 2.0)


def inputs(features=3):
    return torch.rand(2, 2, *SIZE, dtype=torch.float64), torch.rand(2, features, *SIZE, dtype=torch.float64)


@pytest.fixture
def window_sum(pixels, neighbours):
    """sum over z in N(j) of kernel(b, j, z) q[v, z]."""

    def total(q, kernel):
        result = torch.zeros_like(q)
        for b in range(len(q)):
            for j in pixels(SIZE):
                for z in neighbours(j, WINDOW, SIZE):
                    result[(b, slice(None), *j)] += kernel(b, j, z) * q[(b, slice(None), *z)]
        return result

    return total


def squared(j, z):
    return sum(((jj - zz) * s) ** 2 for jj, zz, s in zip(j, z, SPACING, strict=True))


def colour_step(image, b, j, z):
    return (image[(b, slice(None), *j)] - image[(b, slice(None), *z)]).square().sum().item()


def layer(**settings):
    penalty = TriplePenalty(WINDOW, spacing=SPACING, **{"average": False, **settings}).double().requires_grad_(False)
    penalty.scale.fill_(0.7)
    penalty.shift.fill_(0.1)
    return penalty


def test_two_pixels():
    q = torch.tensor([[[[0.5, 1.0]]]])
    image = torch.tensor([[[[0.0, 1.0]]]]).expand(1, 3, 1, 2)
    penalty = TriplePenalty(3, average=False).requires_grad_(False)
    penalty.colour.fill_(2)
    penalty.position.fill_(10)
    # d = 2 * 3 + 10 * 1 = 16, so both pixels pay 0.5 * 16 * 1.0 = 8
    torch.testing.assert_close(penalty(q, image), torch.tensor([[[[8.0, 8.0]]]]))


@pytest.mark.parametrize("gate", [True, False])
def test_distance(gate, window_sum, agree):
    q, image = inputs()
    penalty = layer(gate=gate)
    penalty.colour.fill_(2)
    penalty.position.fill_(3)
    total = window_sum(q, lambda b, j, z: 2 * colour_step(image, b, j, z) + 3 * squared(j, z))
    agree(penalty(q, image), 0.7 * (q * total if gate else total) + 0.1)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("smoothness", [True, False])
def test_gaussian(gate, smoothness, window_sum, agree):
    q, image = inputs()
    penalty = layer(kernel="gaussian", gate=gate, smoothness=smoothness)
    penalty.log_colour_width.fill_(math.log(0.5))
    penalty.log_position_width.fill_(math.log(2))
    if smoothness:
        penalty.smooth_weight.fill_(0.4)
        penalty.log_smooth_width.fill_(math.log(1.5))

    def kernel(b, j, z):
        if j == z:
            return 0.0
        appearance = math.exp(-colour_step(image, b, j, z) / (2 * 0.5**2) - squared(j, z) / (2 * 2**2))
        return appearance + smoothness * 0.4 * math.exp(-squared(j, z) / (2 * 1.5**2))

    total = window_sum(q, kernel)
    agree(penalty(q, image), 0.7 * (q * total if gate else total) + 0.1, 1e-9)


@pytest.mark.parametrize("gate", [True, False])
def test_learned_filters(gate, window_sum, agree):
    q, _ = inputs()
    penalty = layer(kernel="learned", size=SIZE, gate=gate)
    penalty.filters.normal_()
    before = [m // 2 for m in WINDOW]
    total = window_sum(
        q, lambda b, j, z: penalty.filters[(*[zz - jj + r for jj, zz, r in zip(j, z, before, strict=True)], *j)]
    )
    agree(penalty(q), 0.7 * (q * total if gate else total) + 0.1)


def test_learned_filters_start_as_squared_distances(agree):
    """The paper initialises them so: untrained they are the distance kernel of positions alone."""
    q, _ = inputs()
    image = torch.zeros(2, 1, *SIZE, dtype=torch.float64)
    learned, distance = layer(kernel="learned", size=SIZE, average=True), layer(features=1, average=True)
    agree(learned(q), distance(q, image), 1e-6)


def test_gradients_reach_the_learned_filters():
    q, _ = inputs()
    penalty = TriplePenalty(WINDOW, kernel="learned", size=SIZE, average=False).double()
    penalty(q).sum().backward()
    inside = penalty.filters.grad[1, 2]  # the centre's weight meets a pixel everywhere
    torch.testing.assert_close(inside, penalty.scale.detach() * q.square().sum((0, 1)))
    assert penalty.filters.grad[0, 0, 0].eq(0).all()  # above the first row there is nothing to weigh


def test_learned_filters_are_for_one_size():
    penalty = TriplePenalty(3, kernel="learned", size=SIZE)
    with pytest.raises(ValueError, match=r"of size \(4, 5\), but q has \(4, 6\): resize it\.$"):
        penalty(torch.rand(1, 2, 4, 6))


@pytest.mark.parametrize("kernel", ["gaussian", "learned"])
@pytest.mark.parametrize("gate", [True, False])
def test_average_divides_by_the_pixels_of_the_window(kernel, gate, agree):
    q, image = inputs()
    size = SIZE if kernel == "learned" else None
    sum_, average = (layer(kernel=kernel, gate=gate, size=size, average=a) for a in (False, True))
    agree(average(q, image) - 0.1, (sum_(q, image) - 0.1) / 12, 1e-9)


def test_average_measures_positions_by_the_windows_corner(agree):
    q, image = inputs()
    sum_, average = layer(average=False), layer(average=True)
    sum_.position.div_(0.5**2 + 4.0**2)  # the corner is 1 row of 0.5 and 2 columns of 2.0 away
    agree(average(q, image) - 0.1, (sum_(q, image) - 0.1) / 12, 1e-6)


def test_weights_are_those_of_the_plain_sum(agree):
    q, image = inputs()
    average, sum_ = layer(average=True), layer(average=False)
    w1, w2, b = average.weights()
    for parameter, value in ((sum_.scale, 1), (sum_.colour, w1), (sum_.position, w2), (sum_.shift, b)):
        parameter.fill_(value)
    agree(sum_(q, image), average(q, image))


def test_widths_are_the_bandwidths():
    penalty = TriplePenalty(3, kernel="gaussian").requires_grad_(False)
    penalty.log_colour_width.fill_(math.log(0.3))
    penalty.log_position_width.fill_(math.log(7))
    torch.testing.assert_close(penalty.widths(), torch.tensor([0.3, 7.0]))


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_any_number_of_labels(kernel):
    penalty = TriplePenalty(3, kernel=kernel)
    image = torch.rand(1, 3, 4, 5)
    q = torch.rand(1, 5, 4, 5)
    torch.testing.assert_close(penalty(q[:, :2], image), penalty(q, image)[:, :2])


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
@pytest.mark.parametrize("gate", [True, False])
def test_without_an_image(kernel, gate, agree):
    """features=0 uses positions alone: the same as an image of one colour."""
    q = torch.rand(2, 2, 4, 5)
    alone, beside = (TriplePenalty(3, kernel=kernel, gate=gate, features=f) for f in (0, 1))
    agree(alone(q), beside(q, torch.full((2, 1, 4, 5), 0.3)))


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_starts_at_order_one_whatever_the_window(kernel, dims):
    size = (9, 8, 7)[:dims]
    q, image = torch.rand(1, 2, *size), torch.rand(1, 3, *size)
    for window in (1, 4, 9):
        assert TriplePenalty(window, dims=dims, kernel=kernel)(q, image).abs().max() < 5


def test_parameters_are_the_kernels_own():
    def names(**settings):
        return {name for name, _ in TriplePenalty(3, **settings).named_parameters()}

    assert names() == {"scale", "shift", "colour", "position"}
    assert names(kernel="gaussian") == {"scale", "shift", "log_colour_width", "log_position_width"}
    assert names(kernel="gaussian", smoothness=True) - names(kernel="gaussian") == {"smooth_weight", "log_smooth_width"}
    assert names(kernel="learned", size=4) == {"scale", "shift", "filters"}


@pytest.mark.parametrize(
    "settings", [{}, {"kernel": "gaussian", "smoothness": True, "normalize": True}, {"kernel": "learned", "size": 4}]
)
def test_every_parameter_gets_a_gradient(settings):
    penalty = TriplePenalty(4, **settings)
    penalty(torch.rand(1, 2, 4, 4), torch.rand(1, 3, 4, 4)).square().sum().backward()
    for name, parameter in penalty.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("window", [(3, 4), (2, 2), (3, 3)])
def test_a_norm_counts_what_a_pixel_sees_or_what_sees_it(window, pixels, neighbours, agree):
    image = torch.rand(1, 3, *SIZE, dtype=torch.float64)
    penalty = TriplePenalty(window, kernel="gaussian", normalize=True, gate=False).double()
    width, position = penalty.widths().tolist()

    def weight(j, z):
        square = sum((jj - zz) ** 2 for jj, zz in zip(j, z, strict=True))
        return math.exp(-colour_step(image, 0, j, z) / (2 * width**2) - square / (2 * position**2))

    seen = {j: sum(weight(j, z) for z in neighbours(j, window, SIZE) if z != j) for j in pixels(SIZE)}
    seeing = {
        z: sum(weight(j, z) for j in pixels(SIZE) if j != z and z in set(neighbours(j, window, SIZE))) for z in seen
    }
    expected = torch.tensor([max(seen[j], seeing[j]) ** -0.5 for j in pixels(SIZE)]).view(1, 1, *SIZE)
    agree(penalty.norms(torch.rand(1, 2, *SIZE).double(), image)[0], expected, 1e-6)


@pytest.mark.parametrize("window", [6, 7])
def test_two_pixels_like_no_other_count_for_no_more_than_one_neighbour(window):
    """In an even window one of them sees the other, which sees none: the weight of that edge stays at 1 or less."""
    image = torch.full((1, 3, 1, 30), 0.5)
    image[..., [10, 13]] = 1
    penalty = TriplePenalty(window, kernel="gaussian", normalize=True, gate=False)
    assert penalty(torch.ones(1, 1, 1, 30), image).max() <= window


def test_normalised_sums_of_half_precision():
    image = torch.zeros(1, 3, 8, 8)
    image[:, :, 4, 4] = 1
    q = torch.rand(1, 2, 8, 8).half()
    penalty = TriplePenalty(5, kernel="gaussian", normalize=True, smoothness=True)
    for picture in (image.half(), (255 * image).byte()):
        t = penalty(q, picture)
        assert t.dtype == torch.float16
        torch.testing.assert_close(t.float(), penalty(q.float(), image), atol=2e-3, rtol=2e-3)


def test_repr_tells_the_settings():
    assert "window=(3, 3), dims=2, kernel='distance', gate=True, features=3" in repr(TriplePenalty(3))
    assert "size=(4, 5)" in repr(TriplePenalty(3, kernel="learned", size=(4, 5)))
