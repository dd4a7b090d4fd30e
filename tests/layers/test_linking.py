"""Dynamic node linking: known motion by explicit loops, motion larger than the window, breaks, and 2-D made 3-D."""

from __future__ import annotations

import copy
import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from deepmrf import MeanField, TriplePenalty, ops
from deepmrf.flow import Flow
from deepmrf.layers import linking
from deepmrf.layers.linking import Links

# A moving square on a moving background


class Scene:
    """A square of 3 x 3 pixels that moves over a background which moves, too; whole pixels a frame."""

    frames, size = 4, (9, 12)
    square, background = (-2, 1), (1, 0)  # (x, y) a frame
    start = 7, 2  # left and top of the square in frame 0

    def part(self, t, y, x):
        """What is seen at a pixel: the square, or the background."""
        left, top = self.start[0] + t * self.square[0], self.start[1] + t * self.square[1]
        return "square" if left <= x < left + 3 and top <= y < top + 3 else "background"

    def step(self, t, y, x, sign):
        """The pixel in the next frame (or the one before) that shows the same point of the scene, or None."""
        velocity = getattr(self, self.part(t, y, x))
        t, y, x = t + sign, y + sign * velocity[1], x + sign * velocity[0]
        if not (0 <= t < self.frames and 0 <= y < self.size[0] and 0 <= x < self.size[1]):
            return None
        # The point may be behind the square there.
        return (t, y, x) if getattr(self, self.part(t, y, x)) == velocity else None

    def trajectory(self, j, dt):
        """Where the point of the scene seen at j = (t, y, x) is dt frames on, if it is seen all the way; else None."""
        for _ in range(abs(dt)):
            j = j and self.step(*j, 1 if dt > 0 else -1)
        return j

    def flow(self):
        """The true flow; which links are reliable is left to the forward-backward check."""
        ways = torch.zeros(2, 1, 2, self.frames - 1, *self.size, dtype=torch.float64)
        for t, y, x in itertools.product(range(self.frames - 1), *map(range, self.size)):
            ways[0, 0, :, t, y, x] = torch.tensor(getattr(self, self.part(t, y, x)))
            ways[1, 0, :, t, y, x] = -torch.tensor(getattr(self, self.part(t + 1, y, x)))
        return Flow(*ways)

    def inputs(self, labels=2):
        generator = torch.Generator().manual_seed(0)
        shape = (self.frames, *self.size)
        log_p = torch.randn(1, labels, *shape, dtype=torch.float64, generator=generator).log_softmax(1)
        return log_p, torch.rand(1, 3, *shape, dtype=torch.float64, generator=generator)


SCENE = Scene()


def test_the_check_finds_what_the_square_hides():
    trajectories = SCENE.flow().trajectories(2, 2)
    hidden = 0
    for dt, (way, reliable) in trajectories.items():
        for j in itertools.product(range(4), *map(range, SCENE.size)):
            z = SCENE.trajectory(j, dt)
            assert bool(reliable[(0, 0, *j)]) == (z is not None), (dt, j)
            if z is not None:
                assert way[(0, slice(None), *j)].tolist() == pytest.approx([z[2] - j[2], z[1] - j[1]], abs=1e-9)
            hidden += z is None and 0 <= j[0] + dt < 4 and 2 < j[2] < 9 and 2 < j[1] < 6
    assert hidden > 10


def window_offsets(window):
    return list(itertools.product(*[range(-(m // 2), m - m // 2) for m in window]))


def linked_sum(q, rgb, kernel, window, weights, trajectory):
    """sum over dt and z in N(j) of d(j, z') q[v, z'], z' being where z is dt frames on. q (L, T, H, W)"""
    total = np.zeros_like(q)
    size = q.shape[1:]
    for j in itertools.product(*map(range, size)):
        for dt, dy, dx in window_offsets(window):
            z = (j[0], j[1] + dy, j[2] + dx)
            if not all(0 <= a < n for a, n in zip(z, size, strict=True)):
                continue
            there = trajectory(z, dt)
            if there is None:
                continue
            colour = ((rgb[(slice(None), *j)] - rgb[(slice(None), *there)]) ** 2).sum()
            total[(slice(None), *j)] += weights[abs(dt)] * kernel(colour, dt, dy, dx) * q[(slice(None), *there)]
    return total


def straight_sum(q, frames, weights, trajectory):
    """sum over dt of weights[|dt| - 1] q[v, j'], j' being where j is dt frames on. q (L, T, H, W)"""
    total = np.zeros_like(q)
    for j in itertools.product(*map(range, q.shape[1:])):
        for dt in range(-(frames // 2), frames - frames // 2):
            there = trajectory(j, dt) if dt else None
            if there is not None:
                total[(slice(None), *j)] += weights[abs(dt) - 1] * q[(slice(None), *there)]
    return total


def distance(spacing, w1, w2):
    return lambda colour, *step: w1 * colour + w2 * sum((o * s) ** 2 for o, s in zip(step, spacing, strict=True))


def gaussian(spacing, a, b):
    def s(colour, *step):
        apart = sum((o * s) ** 2 for o, s in zip(step, spacing, strict=True))
        return math.exp(-colour / (2 * a**2) - apart / (2 * b**2)) if any(step) else 0.0

    return s


WINDOWS = [(3, 3, 3), (5, 3, 2), (2, 1, 3), (4, 3, 1)]
SPACING = (1.5, 1.0, 0.5)


def layer(kernel, window, gate=True, **settings):
    penalty = TriplePenalty(window, dims=3, kernel=kernel, gate=gate, average=False, spacing=SPACING, **settings)
    penalty = penalty.double().requires_grad_(False)
    penalty.scale.fill_(0.7)
    penalty.shift.fill_(0.1)
    if kernel == "distance":
        penalty.colour.fill_(2)
        penalty.position.fill_(0.3)
        return penalty, distance(SPACING, 2, 0.3)
    penalty.log_colour_width.fill_(math.log(0.5))
    penalty.log_position_width.fill_(math.log(2))
    return penalty, gaussian(SPACING, 0.5, 2)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
@pytest.mark.parametrize("implementation", ["torch", None])
def test_triple_penalty_over_true_trajectories(kernel, window, implementation, agree):
    """b12 with links is the sum over the true trajectories; those of hidden and departed points weigh nothing."""
    log_p, image = SCENE.inputs()
    q, gate = log_p.exp(), window[0] != 5
    penalty, d = layer(kernel, window, gate, temporal=True)
    penalty.frame_weights.copy_(torch.tensor([0.6, 0.3])[: len(penalty.frame_weights)])
    total = linked_sum(
        q[0].numpy(), image[0].numpy(), d, window, (1, *penalty.frame_weights.tolist()), SCENE.trajectory
    )
    links = Links.along(SCENE.flow(), torch.float64, (2, 2))
    with ops.use(implementation):
        actual = penalty(q, image, None, links)
    agree(actual[0], 0.7 * (q[0].numpy() * total if gate else total) + 0.1, 1e-9)


@pytest.mark.parametrize("temporal", [False, True])
@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_the_whole_step_over_true_trajectories(kernel, temporal, agree):
    """b12 to b15: contexts reach along trajectories, farther than the window does; b15 asks the pixels on them."""
    labels, contexts, window, context_size, iterations = 2, 3, (3, 3, 3), (5, 3, 2), 2
    mrf = MeanField(
        labels, dims=3, window=window, contexts=contexts, context_size=context_size, kernel=kernel, spacing=SPACING,
        average=False, iterations=iterations, temporal=temporal,
    )  # fmt: skip
    mrf.triple_penalty, d = layer(kernel, window, temporal=temporal)
    mrf = mrf.double().requires_grad_(False)
    if temporal:
        mrf.trajectory_weights.fill_(1.3)
    mrf.label_contexts.weight.normal_(0, 0.2)
    mrf.label_contexts.bias.normal_()
    log_p, image = SCENE.inputs()
    weight, bias = mrf.label_contexts.weight.numpy(), mrf.label_contexts.bias.numpy()
    unary, size = log_p[0].numpy(), log_p.shape[2:]
    q = np.exp(unary)
    for _ in range(iterations):
        t = 0.7 * q * linked_sum(q, image[0].numpy(), d, window, (1, 1), SCENE.trajectory) + 0.1
        penalty = np.zeros_like(q)
        for i in itertools.product(*map(range, size)):
            o13 = bias.copy()
            for dt, dy, dx in window_offsets(context_size):
                j = (i[0], i[1] + dy, i[2] + dx)
                there = SCENE.trajectory(j, dt) if all(0 <= a < n for a, n in zip(j, size, strict=True)) else None
                if there is not None:
                    index = [o + n // 2 for o, n in zip((dt, dy, dx), context_size, strict=True)]
                    o13 += weight[(..., *index)] @ t[(slice(None), *there)]
            penalty[(slice(None), *i)] = o13.reshape(labels, contexts).min(1)
        said = straight_sum(q, window[0], [1.3 if temporal else 0.0], SCENE.trajectory)
        q = np.exp(unary - penalty + said)
        q /= q.sum(0)
    agree(mrf(log_p, image, SCENE.flow()).exp()[0], q, 1e-9)
    assert np.abs(q - np.exp(unary)).max() > 0.05


def random_flow(batch, frames, size, reach=1.5, dtype=torch.float64):
    """Motion between pixels, in and out of the picture, a third of it not reliable."""
    ways = reach * torch.randn(2, batch, 2, frames - 1, *size, dtype=dtype)
    masks = torch.rand(2, batch, 1, frames - 1, *size) < 2 / 3
    return Flow(*ways, *masks)


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
@pytest.mark.parametrize("window", [(3, 3, 3), (5, 1, 3)], ids=str)
def test_motion_between_pixels_by_loops(kernel, window, agree):
    """Bilinear mixtures of q and of colours, along one or two flows; what breaks or departs weighs nothing."""
    size = (3, 4, 5)
    q, image = torch.rand(2, 2, *size, dtype=torch.float64), torch.rand(2, 3, *size, dtype=torch.float64)
    flow = random_flow(2, 3, size[1:])
    penalty, d = layer(kernel, window)

    def sample(picture, x, y):
        x, y = min(max(x, 0), size[2] - 1), min(max(y, 0), size[1] - 1)
        corners = []
        for yy, xx in itertools.product((math.floor(y), math.floor(y) + 1), (math.floor(x), math.floor(x) + 1)):
            share = (1 - abs(y - yy)) * (1 - abs(x - xx))
            if share > 0:
                corners.append((share, picture[..., yy, xx]))
        return sum(share * value for share, value in corners), [value for _, value in corners]

    def follow(b, t, y, x, dt):
        """The place of (y, x) dt frames on, or None."""
        sign = 1 if dt > 0 else -1
        ways, masks = (flow.forward, flow.forward_reliable) if dt > 0 else (flow.backward, flow.backward_reliable)
        for _ in range(abs(dt)):
            pair = t if dt > 0 else t - 1
            if not 0 <= pair < size[0] - 1:
                return None
            (dx, dy), _ = sample(ways[b, :, pair], x, y)
            if not all(bool(m) for m in sample(masks[b, 0, pair], x, y)[1]):
                return None
            t, y, x = t + sign, y + float(dy), x + float(dx)
            if not (-0.5 <= x <= size[2] - 0.5 and -0.5 <= y <= size[1] - 0.5):
                return None
        return y, x

    total = torch.zeros_like(q)
    for b, *j in itertools.product(range(2), *map(range, size)):
        for dt, dy, dx in window_offsets(window):
            y, x = j[1] + dy, j[2] + dx
            if not (0 <= j[0] + dt < size[0] and 0 <= y < size[1] and 0 <= x < size[2]):
                continue
            position = follow(b, j[0], y, x, dt)
            if position is None:
                continue
            near, _ = sample(q[b, :, j[0] + dt], position[1], position[0])
            colours, _ = sample(image[b, :, j[0] + dt], position[1], position[0])
            colour = (image[(b, slice(None), *j)] - colours).square().sum().item()
            total[(b, slice(None), *j)] += d(colour, dt, dy, dx) * near
    agree(penalty(q, image, None, Links.along(flow, torch.float64, (2, 2))), 0.7 * q * total + 0.1, 1e-9)


def test_labels_survive_motion_larger_than_the_window():
    """A square that the middle frame cannot tell is known from the others, if it is looked for where it was."""
    frames, size, speed = 3, (9, 24), 8
    truth = torch.zeros(frames, *size, dtype=torch.long)
    ways = torch.zeros(2, 1, 2, frames - 1, *size)
    for t in range(frames):
        columns = slice(1 + speed * t, 5 + speed * t)
        truth[t, 3:7, columns] = 1
        if t < frames - 1:
            ways[0, 0, 0, t, 3:7, columns] = speed
        if t:
            ways[1, 0, 0, t - 1, 3:7, columns] = -speed
    log_p = functional.one_hot(truth, 2).movedim(-1, 0)[None].float().mul(0.8).add(0.1).log()
    log_p[:, :, 1] = torch.tensor([0.55, 0.45]).log().view(2, 1, 1)  # "background, if anything"
    # A frame is a fifth of a pixel away: who is on the trajectory counts most.
    settings = {"window": (3, 3, 3), "spacing": (0.2, 1.0, 1.0), "contexts": 1, "context_size": 1, "features": 0}
    mrf = MeanField(2, dims=3, kernel="gaussian", gate=False, **settings)
    mrf.label_contexts.set_compatibility(1 - torch.eye(2))
    with torch.no_grad():
        mrf.triple_penalty.scale.fill_(20)
    assert torch.equal(mrf(log_p, flow=Flow(*ways)).argmax(1)[0], truth)
    rigid = mrf(log_p).argmax(1)[0]
    assert torch.equal(rigid[[0, 2]], truth[[0, 2]])
    assert not rigid[1].any()


# The rigid cube


def small(kernel="distance", **settings):
    """A step that changes its input: contexts are random and matter."""
    chosen = {"dims": 3, "window": (3, 3, 4), "contexts": 2, "context_size": (3, 3, 2), "kernel": kernel, **settings}
    mrf = MeanField(3, **chosen)
    with torch.no_grad():
        for name, parameter in mrf.named_parameters():
            if name.startswith("label_contexts"):
                parameter.normal_()
            elif name.endswith("width"):
                parameter.fill_(0.3)
    return mrf


def clip(batch=2, frames=4, size=(5, 6), dtype=None):
    shape = (batch, 3, frames, *size)
    return torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype)


def still(batch=2, frames=4, size=(5, 6)):
    way = torch.zeros(batch, 2, frames - 1, *size)
    return Flow(way, way)


SETTINGS = [
    {},
    {"kernel": "gaussian", "gate": False, "iterations": 2},
    {"kernel": "gaussian", "smoothness": True, "normalize": True},
    {"contexts": 0},
    {"features": 0},
    {"window": (1, 3, 3)},
    {"context_size": (1, 3, 3)},
    {"window": (2, 3, 3), "context_size": (5, 1, 1)},
]


@pytest.mark.parametrize("chosen", SETTINGS, ids=str)
@pytest.mark.parametrize("frames", [1, 2, 4])
def test_without_motion_it_is_the_rigid_cube(chosen, frames, double_default, agree):
    mrf = small(**chosen).requires_grad_(False)
    if not mrf.settings["contexts"]:
        mrf.triple_penalty.scale.fill_(0.8)
    log_p, image = clip(frames=frames)
    expected = mrf(log_p, image)
    agree(mrf(log_p, image, still(frames=frames)), expected, 1e-9)
    # With weights of their own, which start at 1, frames are stacked without a flow, too.
    temporal = MeanField(**mrf.settings | {"temporal": True})
    temporal.load_state_dict(mrf.state_dict(), strict=False)
    agree(temporal(log_p, image), expected, 1e-9)


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_bytes_are_unit_colours(kernel, agree):
    mrf, (log_p, _) = small(kernel), clip()
    image = torch.randint(0, 256, (2, 3, 4, 5, 6), dtype=torch.uint8)
    flow = random_flow(2, 4, (5, 6))
    agree(mrf(log_p, image, flow), mrf(log_p, image.float() / 255, flow))


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_without_a_reliable_link_every_frame_is_alone(kernel, agree):
    mrf = small(kernel)
    log_p, image = clip()
    flow = Flow(*torch.full((2, 2, 2, 3, 5, 6), torch.nan))
    expected = torch.cat([mrf(log_p[:, :, t : t + 1], image[:, :, t : t + 1]) for t in range(4)], 2)
    agree(mrf(log_p, image, flow), expected)


def test_clips_of_a_batch_do_not_touch(agree):
    mrf, (log_p, image), flow = small(iterations=2), clip(), random_flow(2, 4, (5, 6))
    parts = [Flow(*(x[b : b + 1] for x in vars(flow).values())) for b in range(2)]
    alone = torch.cat([mrf(log_p[b : b + 1], image[b : b + 1], parts[b]) for b in range(2)])
    agree(mrf(log_p, image, flow), alone)


@pytest.mark.parametrize("budget", [0, 40_000])
def test_some_frames_at_a_time_is_all_of_them(monkeypatch, budget):
    mrf, (log_p, image), flow = small(), clip(), random_flow(2, 4, (5, 6))
    expected = mrf(log_p, image, flow)
    monkeypatch.setitem(linking.STACK_BYTES, "cpu", budget)
    torch.testing.assert_close(mrf(log_p, image, flow), expected)


# Gradients, precisions, devices


@pytest.mark.parametrize(
    "chosen",
    [{}, {"kernel": "gaussian"}, {"kernel": "gaussian", "gate": False, "normalize": True, "smoothness": True}],
    ids=str,
)
def test_gradients(chosen, double_default):
    mrf = small(**{"temporal": True, "iterations": 2, "contexts": 2, "context_size": (3, 2, 1), **chosen})
    log_p, image = clip(1, 3, (3, 4))
    flow = random_flow(1, 3, (3, 4), reach=0.7)
    names, values = zip(*mrf.named_parameters(), strict=True)

    def run(log_p, image, *values):
        return functional_call(mrf, dict(zip(names, values, strict=True)), (log_p, image, flow))

    inputs = (log_p.requires_grad_(), image.requires_grad_(), *values)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    for gradient in torch.autograd.grad(run(*inputs)[:, 0].square().sum(), inputs):
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
@pytest.mark.parametrize("implementation", ["torch", "numba"])
def test_gradients_entry_by_entry(kernel, implementation, double_default):
    """The slow and thorough kind, with both evaluations."""
    mrf = MeanField(
        2, dims=3, window=(3, 1, 3), contexts=2, context_size=(3, 1, 1), kernel=kernel, features=1, temporal=True
    )
    with torch.no_grad():
        mrf.label_contexts.weight.normal_()
        mrf.triple_penalty.frame_weights.fill_(0.6)
        mrf.trajectory_weights.fill_(-0.7)
    log_p, image = torch.randn(1, 2, 3, 1, 3, requires_grad=True), (0.1 * torch.rand(1, 1, 3, 1, 3)).requires_grad_()
    flow = random_flow(1, 3, (1, 3), reach=0.4)
    names, values = zip(*mrf.named_parameters(), strict=True)
    if implementation == "numba":
        pytest.importorskip("numba")
    with ops.use(implementation):
        assert torch.autograd.gradcheck(
            lambda log_p, image, *v: functional_call(mrf, dict(zip(names, v, strict=True)), (log_p, image, flow)),
            (log_p, image, *values),
        )


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_gradients_or_not_the_output_is_the_same(kernel):
    mrf, (log_p, image), flow = small(kernel, temporal=True), clip(), random_flow(2, 4, (5, 6))
    expected = mrf(log_p, image, flow)
    with torch.inference_mode():
        torch.testing.assert_close(mrf(log_p, image, flow), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(mrf(log_p, image, flow), expected)
    half = mrf(log_p.bfloat16(), image, flow)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.2)


def test_impossible_labels_stay_impossible():
    mrf, (log_p, image), flow = small(iterations=2), clip(), random_flow(2, 4, (5, 6))
    log_p[:, 0] = -torch.inf
    log_q = mrf(log_p.requires_grad_(), image, flow)
    assert (log_q[:, 0] == -torch.inf).all()
    log_q[:, 1:].square().sum().backward()
    assert log_p.grad.isfinite().all()


def test_devices(device, agree):
    mrf, (log_p, image), flow = small(), clip(), random_flow(2, 4, (5, 6), dtype=torch.float32)
    moved = copy.deepcopy(mrf).to(device)(log_p.to(device), image.to(device), flow.to(device))
    assert moved.device.type == device.type
    agree(moved, mrf(log_p, image, flow), 1e-3)


# A layer for images made one for clips


FLAT = [
    {"kernel": "distance"},
    {"kernel": "distance", "gate": False, "average": False},
    {"kernel": "gaussian"},
    {"kernel": "gaussian", "gate": False, "iterations": 2},
    {"kernel": "gaussian", "smoothness": True, "normalize": True},
    {"kernel": "gaussian", "smoothness": True, "spacing": (2.0, 0.5), "window": (4, 3)},
    {"kernel": "distance", "contexts": 0, "unary": "sigmoid"},
]


def flat(**settings):
    mrf = small(**{"dims": 2, "window": 5, "context_size": 3, **settings})
    with torch.no_grad():
        mrf.triple_penalty.scale.fill_(0.8)
    return mrf


@pytest.mark.parametrize("chosen", FLAT, ids=str)
@pytest.mark.parametrize("frames", [(3, 3), (2, 5), (1, 3), (5, 1)], ids=str)
def test_inflated_it_gives_every_frame_the_same(chosen, frames, agree):
    mrf = flat(**chosen)
    log_p, image = clip()
    if mrf.unary == "sigmoid":
        log_p = functional.logsigmoid(log_p)
    expected = torch.stack([mrf(log_p[:, :, t], image[:, :, t]) for t in range(4)], 2)
    inflated = mrf.inflate(*frames, frame_spacing=3.0)
    agree(inflated(log_p, image), expected)
    agree(inflated(log_p, image, random_flow(2, 4, (5, 6))), expected)
    agree(inflated(log_p[:, :, :1], image[:, :, :1]), expected[:, :, :1])


def test_inflated_in_double_precision_all_digits_agree(double_default, agree):
    for chosen in FLAT[:4]:
        mrf, (log_p, image) = flat(**chosen), clip()
        expected = torch.stack([mrf(log_p[:, :, t], image[:, :, t]) for t in range(4)], 2)
        agree(mrf.inflate()(log_p, image, random_flow(2, 4, (5, 6))), expected, 1e-12)


@pytest.mark.parametrize("chosen", FLAT, ids=str)
@pytest.mark.parametrize("linked", [True, False])
def test_inflated_it_learns_from_the_first_step(chosen, linked):
    mrf = flat(**chosen).inflate()
    log_p, image = clip()
    log_p = functional.logsigmoid(log_p) if mrf.unary == "sigmoid" else log_p
    truth = torch.randint(0, 3, (2, 4, 5, 6))
    optimiser = torch.optim.SGD(mrf.parameters(), lr=0.1)
    functional.nll_loss(mrf(log_p, image, random_flow(2, 4, (5, 6)) if linked else None), truth).backward()
    assert mrf.triple_penalty.frame_weights.grad.abs().min() > 1e-8
    assert mrf.trajectory_weights.grad.abs().min() > 1e-8
    optimiser.step()
    assert mrf.triple_penalty.frame_weights.abs().min() > 0
    assert mrf.trajectory_weights.abs().min() > 0
    if mrf.label_contexts is not None:
        assert mrf.label_contexts.weight[:, :, [0, 2]].abs().amax((0, 1, 3, 4)).min() > 0


@pytest.mark.parametrize("linked", [True, False])
def test_normalised_windows_of_other_frames_learn_steadily(linked):
    """A pixel of a colour of its own sees itself alone, in other frames, whose weights start at zero."""
    mrf = flat(kernel="gaussian", normalize=True, gate=False, contexts=0).inflate()
    mrf.triple_penalty.scale.data.fill_(3.0)
    image = torch.zeros(1, 3, 4, 5, 6)
    image[..., 2, 3] = 1
    truth, log_p = torch.randint(0, 3, (1, 4, 5, 6)), torch.randn(1, 3, 4, 5, 6)
    flow = random_flow(1, 4, (5, 6)) if linked else None
    optimiser, losses = torch.optim.SGD(mrf.parameters(), lr=1e-3), []
    for _ in range(4):
        loss = functional.nll_loss(mrf(log_p, image, flow), truth)
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        assert mrf.triple_penalty.frame_weights.grad.abs().max() < 100
        optimiser.step()
    assert losses[-1] < losses[0] + 1e-3
    with torch.no_grad():
        mrf.triple_penalty.frame_weights.fill_(-0.3)
        t = mrf.triple_penalty(
            mrf.belief(log_p), image, links=None if flow is None else mrf._links(flow, log_p.dtype, 4, None)
        )
    assert t.abs().max() < 3000


def test_inflated_it_is_rebuilt_from_its_settings():
    inflated = flat(kernel="gaussian", spacing=(1.0, 2.0)).inflate(3, 2, frame_spacing=5.0)
    settings = json.loads(json.dumps(inflated.settings))
    assert (settings["dims"], settings["window"], settings["context_size"]) == (3, [3, 5, 5], [2, 3, 3])
    assert settings["spacing"] == [5.0, 1.0, 2.0]
    again = MeanField(**settings)
    again.load_state_dict(inflated.state_dict())
    log_p, image = clip()
    flow = random_flow(2, 4, (5, 6))
    assert torch.equal(again(log_p, image, flow), inflated(log_p, image, flow))


def test_inflated_keeps_precision_and_leaves_the_original_alone():
    mrf = flat().double()
    before = copy.deepcopy(mrf.state_dict())
    inflated = mrf.inflate()
    assert {p.dtype for p in inflated.parameters()} == {torch.float64}
    with torch.no_grad():
        for parameter in inflated.parameters():
            parameter.add_(1)
    for name, value in mrf.state_dict().items():
        assert torch.equal(value, before[name])


def test_other_frames_weigh_what_is_learned(agree):
    """t = the frame's own + frame_weights * the others'."""
    penalty = TriplePenalty((3, 3, 3), dims=3, temporal=True).requires_grad_(False)
    q, image = torch.rand(1, 2, 3, 4, 5), torch.rand(1, 3, 3, 4, 5)
    results = []
    for weight in (0.0, 1.0, 0.25):
        penalty.frame_weights.fill_(weight)
        results.append(penalty(q, image))
    agree(results[2], results[0] + 0.25 * (results[1] - results[0]))
    assert (results[1] - results[0]).abs().max() > 0.01


# Errors


def test_flow_for_another_clip():
    mrf, (log_p, image) = small(), clip()
    for flow, message in (
        (still(frames=3), r"\(B, T, H, W\) = \(2, 3, 5, 6\), log_p \(2, 4, 5, 6\): estimate it on the same"),
        (still(size=(6, 5)), r"on the same frames\.$"),
        (still(batch=1), r"= \(1, 4, 5, 6\), log_p \(2, 4, 5, 6\)"),
    ):
        with pytest.raises(ValueError, match=message):
            mrf(log_p, image, flow)
    with pytest.raises(TypeError, match=r"flow is a Tensor: pass a deepmrf\.flow\.Flow"):
        mrf(log_p, image, torch.zeros(2, 2, 3, 5, 6))


def test_flow_is_for_clips():
    log_p, image = torch.randn(1, 3, 5, 6), torch.rand(1, 3, 5, 6)
    with pytest.raises(ValueError, match=r"dims=2, kernel='distance': build the layer so, or `inflate`"):
        MeanField(3, window=3)(log_p, image, still(1, 5, (6, 1)))
    learned = MeanField(3, dims=3, window=3, kernel="learned", size=(2, 5, 6))
    with pytest.raises(ValueError, match=r"dims=3, kernel='learned'"):
        learned(torch.randn(1, 3, 2, 5, 6), flow=still(1, 2))
    with pytest.raises(ValueError, match=r"temporal is for clips \(dims=3\).* but dims=2"):
        MeanField(3, temporal=True)


def test_what_cannot_be_inflated():
    with pytest.raises(ValueError, match=r"Only layers for images can be inflated: dims=3"):
        small().inflate()
    with pytest.raises(ValueError, match=r"kernel='learned'"):
        MeanField(3, window=3, kernel="learned", size=(5, 6)).inflate()
    with pytest.raises(ValueError, match=r"inflate the layer they came from\.$"):
        flat().compress(stride=2).inflate()
    with pytest.raises(ValueError, match=r"window=\[0, 5, 5\] must be at least 1 pixel"):
        flat().inflate(window_frames=0)
    with pytest.raises(ValueError, match=r"spacing=\[-1\.0, 1\.0, 1\.0\] must be 3 positive numbers"):
        flat().inflate(frame_spacing=-1)


def test_repr_tells_that_frames_have_weights():
    assert "temporal=True" in repr(flat().inflate())


# Windows of other frames left out, some frames alone


def steady_clip(labels=3, frames=6, size=(17, 22), seed=0, dtype=torch.float64):
    """A clip with a flow of fractions of pixels, of which some leave the image and some are not reliable."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator)

    log_p, image = random(2, labels, frames, *size).log_softmax(1), random(2, 3, frames, *size).sigmoid()
    ways = [3 * random(2, 2, frames - 1, 1, 1) + 0.2 * random(2, 2, frames - 1, *size) for _ in range(2)]
    masks = [random(2, 1, frames - 1, *size) > -1 for _ in range(2)]
    return log_p, image, Flow(*ways, *masks)


def inflated(frames=5, kernel="gaussian", **settings):
    torch.manual_seed(0)
    flat = MeanField(3, window=5, contexts=2, context_size=3, kernel=kernel, **settings).double()
    with torch.no_grad():
        flat.label_contexts.weight.normal_(std=0.3)
        clips = flat.inflate(frames, 1)
        clips.trajectory_weights.copy_(torch.tensor([0.7, -0.4, 0.2])[: frames // 2])
    return clips


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("kernel", ["gaussian", "distance"])
def test_frame_weights_of_zero_cost_no_windows(gate, kernel, agree):
    """Without gradients, windows of other frames are left out where they weigh nothing: the result is the same."""
    log_p, image, flow = steady_clip()
    clips = inflated(kernel=kernel, gate=gate)
    slow = clips(log_p, image, flow).detach()  # frame weights may get gradients, so that the windows are there
    with torch.no_grad():
        assert not clips.triple_penalty.sees_windows_of_other_frames()
        agree(clips(log_p, image, flow), slow, 1e-9)
        agree(clips(log_p, image), clips.requires_grad_(True)(log_p, image).detach(), 1e-9)
        with ops.use("torch"):
            agree(clips(log_p, image, flow), slow, 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_trajectory_adds(dtype, agree):
    from deepmrf.ops.linked import Way, add_linked, add_linked_reference, suits

    log_p, _, flow = steady_clip(dtype=dtype)
    q, t = log_p.exp(), torch.rand(2, 3, 17, 22, dtype=dtype)
    ways = [
        Way(torch.tensor(0.3 * dt), q[:, :, 4 + dt], way[:, :, 0], reliable[:, :, 0])
        for dt, (way, reliable) in flow.trajectories(2, 1, slice(4, 5)).items()
    ]
    with torch.no_grad():
        expected = add_linked_reference(t, ways)
        assert suits(t, ways)
        with ops.use("torch"):
            agree(linking.add_along(t, ways), expected, 1e-5 if dtype == torch.float32 else 1e-12)
        agree(add_linked(t, ways), expected, 1e-5 if dtype == torch.float32 else 1e-12)
    assert not suits(t, ways)  # gradients could be wanted


@pytest.mark.parametrize("settings", [{}, {"iterations": 2}, {"normalize": True}], ids=["plain", "iterations", "norms"])
@pytest.mark.parametrize("with_flow", [True, False])
def test_some_frames_alone(settings, with_flow, agree):
    log_p, image, flow = steady_clip()
    clips = inflated(**settings).requires_grad_(False)
    flow = flow if with_flow else None
    everything = clips(log_p, image, flow)
    for frames in (slice(2, 4), slice(0, 1), slice(-1, None)):
        agree(clips(log_p, image, flow, frames), everything[:, :, frames], 1e-12)
    for frames in (slice(3, 3), slice(0, 6, 2)):
        with pytest.raises(ValueError, match="choose some frames in a row"):
            clips(log_p, image, flow, frames)
    wider = MeanField(3, window=5, contexts=2, context_size=3, kernel="gaussian").double().inflate(3, 3)
    agree(wider(log_p, image, flow, slice(1, 3)), wider(log_p, image, flow)[:, :, 1:3], 1e-12)
    with pytest.raises(ValueError, match="choose some frames in a row"):
        MeanField(3)(log_p[:, :, 0], image[:, :, 0], None, slice(0, 1))
