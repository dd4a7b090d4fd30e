"""One frame of a volume alone: the same numbers and gradients as the whole gives there; contexts with more maps."""

from __future__ import annotations

import pytest
import torch

from deepmrf import ops
from deepmrf.ops import contexts
from deepmrf.ops.contexts import cpu as contexts_cpu

SIZE, SPACING = (4, 5, 6), (0.7, 1.0, 2.0)


def real(*shape, low=0.0):
    return (torch.rand(*shape, dtype=torch.float64) + low).requires_grad_()


def arguments(kernel):
    given = (real(2, 3, *SIZE), real(2, 3, *SIZE))
    return (*given, real(3)) if kernel == "distance" else (*given, real(2), real(2, low=0.5))


@pytest.mark.parametrize("implementation", ["torch", "numba"])
@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("window", [(3, 4, 3), (2, 3, 5), (1, 3, 3), (7, 1, 2)], ids=str)
@pytest.mark.parametrize("frame", [0, 1, 3])
def test_one_frame_is_that_of_the_whole(implementation, kernel, gate, window, frame, agree):
    if implementation == "numba":
        pytest.importorskip("numba")
    run, given = getattr(ops, f"{kernel}_penalty"), arguments(kernel)
    with ops.use(implementation):
        all_frames, one_frame = run(*given, window, SPACING, gate), run(*given, window, SPACING, gate, frame=frame)
        agree(one_frame, all_frames[:, :, frame], 1e-9)
        grad = torch.randn_like(one_frame)
        gradients = [torch.autograd.grad(t, given, grad) for t in (one_frame, all_frames[:, :, frame])]
    for actual, expected in zip(*gradients, strict=True):
        agree(actual, expected, 1e-9)


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_one_row_of_an_image(kernel, agree):
    """The first axis may be any: nothing is gained there, but it is right."""
    given = [x.detach()[..., 0] if x.dim() > 1 else x for x in arguments(kernel)]
    run = getattr(ops, f"{kernel}_penalty")
    agree(run(*given, (3, 2), frame=2), run(*given, (3, 2))[:, :, 2])


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_nan_touches_what_it_touches_in_the_whole(kernel):
    run, given = getattr(ops, f"{kernel}_penalty"), [x.detach() for x in arguments(kernel)]
    given[0][0, 1, 0, 2, 2] = torch.nan
    for frame in range(4):
        actual, expected = run(*given, (3, 3, 3), frame=frame), run(*given, (3, 3, 3))[:, :, frame]
        assert torch.equal(actual.isnan(), expected.isnan())
        assert actual.isnan().any() == (frame < 2)


@pytest.mark.parametrize("window", [(3, 4, 3), (2, 3, 5)], ids=str)
def test_one_frame_of_a_blur(window, agree):
    q, width = real(2, 3, *SIZE), real(1, low=0.5)[0]
    blurred = ops.gaussian_blur(q, width, window, SPACING)
    for frame in range(4):
        agree(ops.gaussian_blur(q, width, window, SPACING, frame), blurred[:, :, frame])


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_operators_keep_their_promises_to_pytorch(kernel):
    operator = getattr(torch.ops.deepmrf, f"{kernel}_penalty").default
    torch.library.opcheck(operator, (*arguments(kernel), [3, 2, 2], [1.0, 2.0, 0.5], True, True, 1))


@pytest.mark.parametrize(
    "labels, maps", [(2, 6), (3, 6), (5, 11)]
)  # of which none compiles a forward kernel of its own
def test_contexts_over_the_maps_of_several_frames(labels, maps, agree):
    """Fewer labels pay than t has maps: plain, in the frequency domain, and by loops."""
    patterns = 3
    t, weight, bias = real(2, maps, 13, 17), real(labels * patterns, maps, 3, 4), real(labels * patterns)
    given = contexts.Arguments(t, weight, bias, patterns)
    plain, active = contexts.operator.plain.forward(given)
    assert plain.shape == (2, labels, 13, 17)
    fast, fast_active = contexts_cpu.IMPLEMENTATION.forward(given)
    agree(fast, plain)
    assert torch.equal(active, fast_active)
    grad = torch.randn_like(plain)
    results = [
        by.backward(grad, active, given, (True, True, True))
        for by in (contexts.operator.plain, contexts_cpu.IMPLEMENTATION)
    ]
    for actual, expected in zip(*results, strict=True):
        agree(actual, expected)
    small = given._replace(t=t[..., :4, :5].detach())
    agree(contexts.operator.plain.forward(small)[0], contexts.label_contexts_reference(*small))
    if labels == 2:
        torch.library.opcheck(torch.ops.deepmrf.label_contexts.default, (t, weight, bias, patterns))
