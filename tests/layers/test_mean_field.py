"""The whole step: the paper's equation by loops, its symmetries, precisions and compilers, its start, and learning."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.nn import functional

from deepmrf import LabelContexts, MeanField, TriplePenalty, dense_crf

few = settings(max_examples=10, deadline=None, derandomize=True)


def small(kernel="distance", **settings):
    """A step on 5 x 6 pixels that changes its input: contexts are random and matter."""
    chosen = {"window": (3, 5), "contexts": 2, "context_size": 3, "kernel": kernel, **settings}
    if kernel == "learned":
        chosen["size"] = (5, 6)
    mrf = MeanField(3, **chosen)
    with torch.no_grad():
        for name, parameter in mrf.named_parameters():
            if name.startswith("label_contexts"):
                parameter.normal_()
            elif name.endswith("width"):
                parameter.fill_(0.3)
    return mrf


def inputs(batch=2, size=(5, 6), dtype=None):
    return torch.randn(batch, 3, *size, dtype=dtype), torch.rand(batch, 3, *size, dtype=dtype)


# The equation


@pytest.mark.parametrize(
    ("size", "window", "context_size"), [((3, 4), (3, 4), (3, 2)), ((2, 3, 2), (3, 2, 5), (1, 3, 2))]
)
@pytest.mark.parametrize("iterations", [1, 2])
def test_equals_the_papers_update(size, window, context_size, iterations, newq, agree):
    labels, contexts, dims = 2, 3, len(size)
    mrf = MeanField(
        labels,
        dims=dims,
        window=window,
        contexts=contexts,
        context_size=context_size,
        iterations=iterations,
        average=False,
        spacing=(0.5, 2.0, 1.0)[:dims],
    )
    mrf = mrf.double().requires_grad_(False)
    mrf.label_contexts.weight.normal_()
    mrf.label_contexts.bias.normal_()
    for parameter, value in zip(
        (mrf.triple_penalty.scale, mrf.triple_penalty.colour, mrf.triple_penalty.position),
        (0.5, 2.0, 0.25),
        strict=True,
    ):
        parameter.fill_(value)
    log_p = torch.randn(1, labels, *size, dtype=torch.float64).log_softmax(1)
    image = torch.rand(1, 3, *size, dtype=torch.float64)
    rgb, weight = image[0].numpy(), mrf.label_contexts.weight.numpy()

    def d(j, z):
        colour = sum((rgb[(c, *j)] - rgb[(c, *z)]) ** 2 for c in range(3))
        position = sum(((jj - zz) * s) ** 2 for jj, zz, s in zip(j, z, (0.5, 2.0, 1.0), strict=False))
        return 0.5 * (2.0 * colour + 0.25 * position)

    def mu(k, i, u, j, v):
        index = [jj - ii + n // 2 for ii, jj, n in zip(i, j, context_size, strict=True)]
        return weight[(u * contexts + k, v, *index)]

    phi, q = -log_p[0].numpy(), log_p[0].exp().numpy()
    bias = mrf.label_contexts.bias.numpy().reshape(labels, contexts)
    for _ in range(iterations):
        q = newq(phi, q, d, mu, bias, window, context_size)
    agree(mrf(log_p, image).exp()[0], q)
    assert np.abs(q - log_p[0].exp().numpy()).max() > 0.05


def test_without_contexts_the_triple_penalty_is_the_penalty(agree):
    log_p, image = inputs()
    mrf = MeanField(3, window=3, contexts=0).requires_grad_(False)
    mrf.triple_penalty.scale.fill_(0.8)
    p = log_p.softmax(1)
    agree(mrf(log_p, image), (p.log() - mrf.triple_penalty(p, image)).log_softmax(1))


@pytest.mark.parametrize("settings", [{}, {"contexts": 0}, {"unary": "sigmoid"}], ids=str)
def test_what_follows_the_triple_penalty_alone(settings, agree):
    mrf = small(**settings)
    log_p, image = inputs()
    log_p = functional.logsigmoid(log_p) if settings.get("unary") else log_p.log_softmax(1)
    t = mrf.triple_penalty(log_p.exp(), image)
    with torch.no_grad():
        given = t.clone()
        agree(mrf.from_penalty(log_p, given), mrf(log_p, image))
        assert torch.equal(given, t)  # nothing is written into what was passed
    with pytest.raises(ValueError, match="t has"):
        mrf.from_penalty(log_p, t[:, :2])


def test_sigmoid_takes_independent_probabilities(agree):
    log_p = functional.logsigmoid(torch.randn(2, 3, 5, 6))
    image = torch.rand(2, 3, 5, 6)
    mrf = small(unary="sigmoid")
    t = mrf.triple_penalty(log_p.exp(), image)
    agree(mrf(log_p, image), (log_p - mrf.label_contexts(t)).log_softmax(1))


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"gate": False, "iterations": 2},
        {"kernel": "gaussian"},
        {"kernel": "gaussian", "gate": False, "smoothness": True, "normalize": True, "iterations": 2},
        {"kernel": "learned"},
        {"contexts": 0},
        {"unary": "sigmoid"},
    ],
    ids=str,
)
def test_gradients(chosen, double_default):
    mrf = small(**{"context_size": (2, 3), **chosen})
    if mrf.triple_penalty.size is None:
        log_p, image = torch.randn(1, 3, 3, 4), torch.rand(1, 3, 3, 4)
    else:
        log_p, image = inputs(batch=1)
    if mrf.unary == "sigmoid":
        log_p = functional.logsigmoid(log_p)
    names, values = zip(*mrf.named_parameters(), strict=True)

    def run(log_p, image, *values):
        return functional_call(mrf, dict(zip(names, values, strict=True)), (log_p, image))

    open_image = image.requires_grad_(mrf.triple_penalty.features > 0)
    assert torch.autograd.gradcheck(run, (log_p.requires_grad_(), open_image, *values), fast_mode=True)
    used = (log_p, *[image] * image.requires_grad, *values)
    for gradient in torch.autograd.grad(run(log_p, image, *values)[:, 0].square().sum(), used):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_gradients_entry_by_entry(kernel, double_default):
    """The slow and thorough kind of gradcheck, on four pixels."""
    mrf = MeanField(2, dims=1, window=3, contexts=2, context_size=3, kernel=kernel, features=1)
    with torch.no_grad():
        mrf.label_contexts.weight.normal_()
    names, values = zip(*mrf.named_parameters(), strict=True)
    log_p, image = torch.randn(1, 2, 4, requires_grad=True), (0.1 * torch.rand(1, 1, 4)).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda log_p, image, *v: functional_call(mrf, dict(zip(names, v, strict=True)), (log_p, image)),
        (log_p, image, *values),
    )


# Symmetries


@few
@given(order=st.permutations(range(3)), kernel=st.sampled_from(["distance", "gaussian"]), seed=st.integers(0, 99))
def test_renaming_labels_renames_the_output(order, kernel, seed):
    torch.manual_seed(seed)
    mrf, renamed = small(kernel), small(kernel)
    log_p, image = inputs()
    contexts = mrf.label_contexts
    with torch.no_grad():
        weight = contexts.weight.unflatten(0, (3, contexts.contexts))[order][:, :, order]
        renamed.label_contexts.weight.copy_(weight.flatten(0, 1))
        renamed.label_contexts.bias.copy_(contexts.bias.view(3, -1)[order].flatten())
    torch.testing.assert_close(renamed(log_p[:, order], image), mrf(log_p, image)[:, order], rtol=1e-4, atol=1e-4)


@few
@given(axes=st.sets(st.sampled_from([2, 3]), min_size=1), kernel=st.sampled_from(["distance", "gaussian"]))
def test_flipping_the_image_flips_the_output(axes, kernel):
    """With odd windows, and contexts flipped likewise."""
    torch.manual_seed(0)
    axes = sorted(axes)
    mrf = small(kernel)
    flipped = copy.deepcopy(mrf)
    with torch.no_grad():
        flipped.label_contexts.weight.copy_(mrf.label_contexts.weight.flip(axes))
    log_p, image = inputs()
    actual = flipped(log_p.flip(axes), image.flip(axes))
    torch.testing.assert_close(actual, mrf(log_p, image).flip(axes), rtol=1e-4, atol=1e-4)


@few
@given(batch=st.integers(2, 4), kernel=st.sampled_from(["distance", "gaussian", "learned"]), seed=st.integers(0, 99))
def test_items_of_a_batch_do_not_touch(batch, kernel, seed):
    torch.manual_seed(seed)
    mrf = small(kernel, iterations=2)
    log_p, image = inputs(batch)
    alone = torch.cat([mrf(log_p[b : b + 1], image[b : b + 1]) for b in range(batch)])
    torch.testing.assert_close(mrf(log_p, image), alone, rtol=1e-4, atol=1e-4)


@few
@given(
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    iterations=st.integers(1, 3),
    scale=st.sampled_from([0.1, 1.0, 100.0]),
)
def test_output_is_a_distribution(height, width, iterations, scale):
    torch.manual_seed(0)
    log_p, image = inputs(size=(height, width))
    log_q = small(iterations=iterations)(scale * log_p, image)
    torch.testing.assert_close(log_q.logsumexp(1), torch.zeros(2, height, width), rtol=0, atol=1e-5)


def test_impossible_labels_stay_impossible():
    """ln 0 = -inf is a legal log-probability, in the gradient too."""
    log_p, image = inputs()
    log_p[:, 0] = -torch.inf
    log_p.requires_grad_()
    mrf = small(iterations=2)
    log_q = mrf(log_p, image)
    assert (log_q[:, 0] == -torch.inf).all()
    assert log_q[:, 1:].isfinite().all()
    log_q[:, 1:].square().sum().backward()
    for gradient in (log_p.grad, *[p.grad for p in mrf.parameters()]):
        assert gradient.isfinite().all()


# Precisions, memory layouts, modes


@pytest.mark.parametrize("kernel", ["distance", "gaussian", "learned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_precisions(kernel, dtype, agree):
    mrf = small(kernel)
    log_p, image = (x.to(torch.bfloat16).to(torch.float16).float() for x in inputs())  # held exactly by all of them
    actual = mrf(log_p.to(dtype), image.to(dtype))
    assert actual.dtype == dtype
    agree(actual, mrf(log_p, image), 1e-4 if dtype == torch.float64 else None)


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_double_precision_is_used(kernel, double_default, agree):
    """A double network gets a double result, not a single one in disguise."""
    mrf = small(kernel)
    log_p, image = inputs(dtype=torch.float64)
    single = copy.deepcopy(mrf).float()
    error = (single(log_p.float(), image.float()) - mrf(log_p, image)).abs().max()
    assert 1e-9 < error < 1e-4


@pytest.mark.parametrize("kernel", ["distance", "gaussian", "learned"])
def test_memory_layout_does_not_matter(kernel, agree):
    mrf = small(kernel)
    log_p, image = inputs()
    expected = mrf(log_p, image)
    agree(mrf(log_p.contiguous(memory_format=torch.channels_last), image.transpose(2, 3).contiguous().mT), expected)
    agree(mrf(log_p.repeat_interleave(2, 3)[..., ::2], image.expand(2, *image.shape[1:])), expected)


@pytest.mark.parametrize("kernel", ["distance", "gaussian", "learned"])
def test_gradients_or_not_the_output_is_the_same(kernel):
    mrf = small(kernel, iterations=2)
    log_p, image = inputs()
    expected = mrf(log_p, image)
    with torch.no_grad():
        torch.testing.assert_close(mrf(log_p, image), expected)
    with torch.inference_mode():
        torch.testing.assert_close(mrf(log_p, image), expected)
    torch.testing.assert_close(mrf(log_p.requires_grad_(), image.requires_grad_()), expected)
    torch.testing.assert_close(mrf.requires_grad_(False)(log_p, image), expected)


@pytest.mark.parametrize("kernel", ["distance", "gaussian", "learned"])
def test_copies_give_identical_outputs(kernel):
    mrf, fresh = small(kernel), small(kernel)
    log_p, image = inputs()
    expected = mrf(log_p, image)
    assert torch.equal(copy.deepcopy(mrf)(log_p, image), expected)
    assert not torch.equal(fresh(log_p, image), expected)
    fresh.load_state_dict(mrf.state_dict())
    assert torch.equal(fresh(log_p, image), expected)


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_autocast_keeps_the_sums_in_full_precision(kernel, agree):
    mrf = small(kernel)
    log_p, image = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = mrf(log_p, image)
    agree(actual, mrf(log_p, image))


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_behind_a_network_under_autocast(kernel):
    network, mrf = torch.nn.Conv2d(3, 3, 3, padding=1), small(kernel)
    image = torch.rand(2, 3, 5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_q = mrf(network(image), image)
    log_q[:, 0].sum().backward()
    assert log_q.dtype == torch.bfloat16
    assert network.weight.grad.isfinite().all()
    assert network.weight.grad.abs().sum() > 0


def test_devices(device, agree):
    mrf = small()
    log_p, image = inputs()
    moved = copy.deepcopy(mrf).to(device)(log_p.to(device), image.to(device))
    assert moved.device.type == device.type
    agree(moved, mrf(log_p, image))


# Compilers


def value_and_gradients(run, parameters, log_p, image):
    log_p, image = log_p.clone().requires_grad_(), image.clone().requires_grad_()
    log_q = run(log_p, image)
    return [log_q, *torch.autograd.grad(log_q[:, 0].sum(), [log_p, image, *parameters])]


def assert_compiled_agrees(mrf, backend):
    torch.compiler.reset()
    parameters = list(mrf.parameters())
    compiled = torch.compile(mrf, backend=backend, fullgraph=True)
    given_ = inputs()
    actual = value_and_gradients(compiled, parameters, *given_)
    for a, b in zip(actual, value_and_gradients(mrf, parameters, *given_), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "chosen",
    [{"iterations": 2}, {"kernel": "gaussian", "smoothness": True, "normalize": True, "gate": False}],
    ids=["distance", "gaussian"],
)
def test_compiles(chosen):
    assert_compiled_agrees(small(**chosen), "aot_eager")


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler")
def test_compiles_with_inductor(monkeypatch):
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)  # kept code calls operators as they were
    assert_compiled_agrees(small(), "inductor")


@pytest.mark.parametrize("kernel", ["distance", "gaussian", "learned"])
def test_exports(kernel, agree):
    mrf = small(kernel).requires_grad_(False)
    log_p, image = inputs()
    program = torch.export.export(mrf, (log_p, image), strict=False)
    other = inputs()
    agree(program.module()(*other), mrf(*other))


# The start


PICTURES = {
    "unit": lambda *shape: torch.rand(*shape),
    "255": lambda *shape: 255 * torch.rand(*shape).round(),
    "normal": lambda *shape: torch.randn(*shape),
    "uint8": lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8),
}


@pytest.mark.filterwarnings("ignore::deepmrf.InputWarning")  # of bytes as floats
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
@pytest.mark.parametrize("chosen", [{}, {"contexts": 0}, {"gate": False}], ids=str)
def test_untrained_it_returns_its_input(kernel, dims, picture, chosen):
    size = (60, 6, 5) if dims == 1 else (12, 9, 4)
    log_p = torch.randn(1, 4, *size[:dims]).mul(3).log_softmax(1)
    image = PICTURES[picture](1, 3, *size[:dims])
    mrf = MeanField(4, dims=dims, **chosen)
    torch.testing.assert_close(mrf(log_p, image), log_p, rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore::deepmrf.InputWarning")  # of bytes as floats
@pytest.mark.parametrize("chosen", [{"average": False}, {"iterations": 3}, {"window": 3}], ids=str)
def test_untrained_it_returns_its_input_in_other_settings(chosen):
    log_p = torch.randn(1, 4, 60, 60).mul(3).log_softmax(1)
    image = PICTURES["255"](1, 3, 60, 60)
    torch.testing.assert_close(MeanField(4, **chosen)(log_p, image), log_p, rtol=0, atol=1e-3)


def test_untrained_learned_filters_return_the_input():
    log_p = torch.randn(1, 4, 8, 9).mul(3).log_softmax(1)
    torch.testing.assert_close(MeanField(4, kernel="learned", size=(8, 9), window=7)(log_p), log_p, rtol=0, atol=1e-3)


def test_untrained_sigmoid_normalises_its_input():
    log_p = functional.logsigmoid(torch.randn(1, 4, 12, 9))
    log_q = MeanField(4, unary="sigmoid")(log_p, torch.rand(1, 3, 12, 9))
    torch.testing.assert_close(log_q, log_p.log_softmax(1), rtol=0, atol=1e-3)


# Learning


def noisy_halves():
    """A picture of two colours, its labels, and a unary that is wrong at a quarter of the pixels."""
    truth = torch.zeros(2, 16, 16, dtype=torch.long)
    truth[0, :, 8:] = 1
    truth[1, 5:] = 1
    image = truth[:, None].expand(-1, 3, -1, -1) * 0.8 + 0.1 + 0.02 * torch.randn(2, 3, 16, 16)
    seen = torch.where(torch.rand(truth.shape) < 0.25, 1 - truth, truth)
    log_p = functional.one_hot(seen, 2).movedim(-1, 1).float().mul(0.5).add(0.25).log()
    return log_p, image, truth


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
@pytest.mark.parametrize("gate", [True, False])
def test_learns(kernel, gate):
    log_p, image, truth = noisy_halves()
    unary_loss = functional.nll_loss(log_p, truth).item()
    mrf = MeanField(2, window=9, contexts=3, context_size=3, kernel=kernel, gate=gate)
    optimiser = torch.optim.Adam(mrf.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        loss = functional.nll_loss(mrf(log_p, image), truth)
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.9 * unary_loss
    patterns = mrf.label_contexts.weight.detach().unflatten(0, (2, 3)).flatten(2)
    for label in patterns:
        assert torch.pdist(label).min() > 0.05, "the K patterns have stayed the same"


def test_learned_filters_learn():
    log_p, _, truth = noisy_halves()
    mrf = MeanField(2, window=5, contexts=1, context_size=1, kernel="learned", size=16, gate=False)
    before = mrf.triple_penalty.filters.detach().clone()
    optimiser = torch.optim.Adam(mrf.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        losses.append(functional.nll_loss(mrf(log_p), truth))
        losses[-1].backward()
        optimiser.step()
    assert losses[-1] < 0.9 * losses[0]
    assert (mrf.triple_penalty.filters - before).abs().max() > 0.05


def test_repr_tells_the_settings():
    assert "labels=3, dims=2, iterations=1, unary='softmax'" in repr(small())


@pytest.mark.parametrize(
    ("settings", "window", "context_size"),
    [
        ({}, (50, 50), (9, 9)),
        ({"dims": 1}, (50,), (9,)),
        ({"dims": 3}, (9, 9, 9), (5, 5, 5)),
        ({"dims": 3, "temporal": True}, (3, 50, 50), (3, 7, 7)),
    ],
    ids=["image", "line", "volume", "clip"],
)
def test_default_sizes_suit_the_axes(settings, window, context_size):
    """Images and clips get the paper's sizes; a volume is not summed over 50 slices."""
    mrf = MeanField(2, **settings)
    assert (mrf.triple_penalty.window, mrf.label_contexts.size) == (window, context_size)
    saved = MeanField(**json.loads(json.dumps(mrf.settings)))  # a saved model keeps its sizes if the defaults change
    assert saved.settings == mrf.settings
    assert None not in (mrf.settings["window"], mrf.settings["context_size"])
    if "temporal" not in settings:
        assert TriplePenalty(**settings).window == window
        assert LabelContexts(2, **settings).size == context_size
    assert MeanField(2, window=7, context_size=3, **settings).triple_penalty.window == (7,) * len(window)


# Copies and what is set later


@pytest.mark.parametrize("copied", [lambda m: m.inflate(), lambda m: m.compress(stride=2), lambda m: m.compress(2)])
@pytest.mark.parametrize(
    "make",
    [
        lambda labels: dense_crf(labels, window=5),
        lambda labels: MeanField(labels, window=3, contexts=2, context_size=3),
    ],
)
def test_what_is_frozen_stays_frozen_in_copies(make, copied):
    assert all(p.requires_grad for p in copied(make(3).requires_grad_(True)).parameters())
    assert not any(p.requires_grad for p in copied(make(3).requires_grad_(False)).parameters())
    half = make(3).requires_grad_(True)
    half.label_contexts.requires_grad_(False)
    for name, parameter in copied(half).named_parameters():
        assert parameter.requires_grad == name.startswith(("triple_penalty", "trajectory_weights")), name


def test_iterations_may_be_set_later(agree):
    mrf = small()
    mrf.iterations = 3
    log_p, image = inputs()
    for copied in (copy.deepcopy(mrf), mrf.inflate(), mrf.compress(stride=2), MeanField(**mrf.settings)):
        assert copied.iterations == 3
    other = small(iterations=3)
    other.load_state_dict(mrf.state_dict())
    agree(mrf(log_p, image), other(log_p, image))
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"iterations={wrong!r} must be a whole number, at least 1"):
            mrf.iterations = wrong
    assert mrf.iterations == 3
