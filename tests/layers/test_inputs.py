"""Bad input: every mistake gets one sentence that repeats what was given and says what to pass instead."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from deepmrf import LabelContexts, MeanField, TriplePenalty, dense_crf

MRF = MeanField(2, window=3, contexts=2, context_size=3)
Q, IMAGE = torch.randn(1, 2, 4, 5), torch.rand(1, 3, 4, 5)


def wrong(call, error, *parts):
    """`call` raises `error` with one sentence that holds all `parts`."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert len(re.findall(r"[.!?](?=\s|$)", message)) == 1, message
    assert message.endswith("."), message
    for part in parts:
        assert part in message, message


def with_value(maps, value):
    maps = maps.clone()
    maps[0, 0, 0, 0] = value
    return maps


MISTAKES = {
    "no batch axis": (Q[0], IMAGE, ValueError, "log_p", "(B, 2, H, W)", "(2, 4, 5)", "[None]"),
    "no batch and no label axis": (Q[0, 0], IMAGE, ValueError, "log_p", "(4, 5)", "2 spatial axes"),
    "too many axes": (Q[None], IMAGE, ValueError, "log_p", "(1, 1, 2, 4, 5)", "dims=3"),
    "other labels": (Q[:, [0, 1, 1]], IMAGE, ValueError, "log_p", "(1, 3, 4, 5)", "labels=3"),
    "no pixels": (Q[..., :0], IMAGE[..., :0], ValueError, "log_p", "(1, 2, 4, 0)", "at least one"),
    "integer logits": (Q.long(), IMAGE, TypeError, "log_p", "torch.int64", "log_p.float()"),
    "numpy logits": (Q.numpy(), IMAGE, TypeError, "log_p", "ndarray", "torch.from_numpy"),
    "list of logits": (Q.tolist(), IMAGE, TypeError, "log_p", "list", "torch.Tensor"),
    "NaN in the unary": (with_value(Q, torch.nan), IMAGE, ValueError, "log_p", "NaN", "division by zero"),
    "+inf in the unary": (with_value(Q, torch.inf), IMAGE, ValueError, "log_p", "+inf", "overflow"),
    "no image": (Q, None, ValueError, "features=3", "pass the image", "features=0"),
    "image without batch axis": (Q, IMAGE[0], ValueError, "image", "(3, 4, 5)", "[None]"),
    "image with too many axes": (Q, IMAGE[None], ValueError, "image", "(1, 1, 3, 4, 5)", "dims=3"),
    "other features": (Q, IMAGE[:, :1], ValueError, "image", "(1, 1, 4, 5)", "features=1"),
    "channels last": (Q, IMAGE.movedim(1, -1), ValueError, "image", "(1, 4, 5, 3)", "(B, 3, H, W)"),
    "other size": (Q, IMAGE[..., :4], ValueError, "image", "(1, 3, 4, 4)", "(1, 3, 4, 5)", "resize"),
    "other batch": (Q, IMAGE.expand(2, -1, -1, -1), ValueError, "image", "(2, 3, 4, 5)", "(1, 3, 4, 5)", "batch"),
    "int64 image": (Q, IMAGE.long(), TypeError, "image", "torch.int64", "uint8"),
    "bool image": (Q, IMAGE > 0.5, TypeError, "image", "torch.bool", "uint8"),
    "numpy image": (Q, IMAGE.numpy(), TypeError, "image", "ndarray", "torch.from_numpy"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_tensors(mistake):
    log_p, image, error, *parts = MISTAKES[mistake]
    wrong(lambda: MRF(log_p, image), error, *parts)


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if "labels" not in m and "unary" not in m])
def test_bad_tensors_for_the_triple_penalty(mistake):
    q, image, error, first, *parts = MISTAKES[mistake]
    if first == "log_p":
        parts = [part.replace("log_p", "q") for part in parts if not part.startswith("(B")]
    wrong(lambda: MRF.triple_penalty(q, image), error, *parts)


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if "image" not in m and MISTAKES[m][3] == "log_p"])
def test_bad_tensors_for_the_label_contexts(mistake):
    t, _, error, _, *parts = MISTAKES[mistake]
    if "unary" not in mistake:
        wrong(lambda: MRF.label_contexts(t), error, *[part.replace("log_p", "t") for part in parts])


SETTINGS = [
    ({"window": 0}, ValueError, "at least 1 pixel"),
    ({"window": -3}, ValueError, "at least 1 pixel"),
    ({"window": 2.5}, TypeError, "pass ints"),
    ({"window": 5.0}, TypeError, "pass ints"),
    ({"window": "wide"}, TypeError, "pass ints"),
    ({"window": (3, 2.5)}, TypeError, "pass ints"),
    ({"window": True}, TypeError, "pass ints"),
    ({"window": (3, 3, 3)}, ValueError, "one int or 2 of them"),
    ({"window": (3,)}, ValueError, "one int or 2 of them"),
    ({"window": (3, 0)}, ValueError, "at least 1 pixel"),
    ({"context_size": 0}, ValueError, "at least 1 pixel"),
    ({"context_size": 1.5}, TypeError, "pass ints"),
    ({"context_size": (3, 3, 3)}, ValueError, "one int or 2 of them"),
    ({"contexts": -1}, ValueError, "whole number"),
    ({"contexts": 2.5}, ValueError, "whole number"),
    ({"contexts": 300}, ValueError, "255"),
    ({"kernel": "cauchy"}, ValueError, "'distance', 'gaussian', 'global', 'learned'"),
    ({"iterations": 0}, ValueError, "at least 1"),
    ({"iterations": -2}, ValueError, "at least 1"),
    ({"iterations": 1.5}, ValueError, "at least 1"),
    ({"unary": "relu"}, ValueError, "'softmax' or 'sigmoid'"),
    ({"dims": 0}, ValueError, "number of spatial axes"),
    ({"dims": 2.0}, ValueError, "number of spatial axes"),
    ({"features": -1}, ValueError, "whole number, at least 0"),
    ({"features": 1.5}, ValueError, "whole number, at least 0"),
    ({"spacing": (1.0,)}, ValueError, "2 positive numbers"),
    ({"spacing": (1.0, 0.0)}, ValueError, "2 positive numbers"),
    ({"spacing": (1.0, -1.0)}, ValueError, "2 positive numbers"),
    ({"spacing": (1.0, float("inf"))}, ValueError, "2 positive numbers"),
    ({"spacing": 2.0}, (TypeError, ValueError), "2 positive numbers"),
    ({"size": 5}, ValueError, "kernel='learned'"),
]


@pytest.mark.parametrize(("settings", "error", "advice"), SETTINGS, ids=[str(s[0]) for s in SETTINGS])
def test_bad_settings(settings, error, advice):
    [(name, value)] = settings.items()
    wrong(lambda: MeanField(2, **settings), error, f"{name}={value!r}", advice)


@pytest.mark.parametrize("labels", [0, -1, 2.5, True, "21"])
def test_bad_labels(labels):
    wrong(lambda: MeanField(labels), ValueError, f"labels={labels!r}", "at least 1")
    wrong(lambda: LabelContexts(labels), ValueError, f"labels={labels!r}", "at least 1")


def test_learned_filters_want_a_size():
    wrong(lambda: TriplePenalty(3, kernel="learned"), ValueError, "kernel='learned'", "size")


@pytest.mark.parametrize("name", ["smoothness", "normalize"])
def test_settings_of_the_gaussian_kernel_alone(name):
    wrong(lambda: TriplePenalty(3, **{name: True}), ValueError, "kernel='gaussian'", "kernel='distance'", name)


def test_learned_filters_of_another_size():
    mrf = MeanField(2, window=3, kernel="learned", size=(4, 6))
    wrong(lambda: mrf(Q), ValueError, "(4, 6)", "(4, 5)", "resize")


def test_bad_compatibility():
    wrong(lambda: MRF.label_contexts.set_compatibility(torch.eye(3)), ValueError, "(3, 3)", "(2, 2)")


@pytest.mark.parametrize("name", ["colour_width", "position_width", "smooth_width", "appearance"])
@pytest.mark.parametrize("value", [0, -1.5, float("nan")])
def test_bad_crf_settings(name, value):
    wrong(lambda: dense_crf(2, **{name: value}), ValueError, f"{name}={value!r}", "positive")


def test_other_device():
    meta = torch.empty_like(IMAGE, device="meta")
    wrong(lambda: MRF(Q, meta), ValueError, "image is on meta", "cpu", ".to(device)")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_an_image_that_is_not_finite(value, dtype):
    wrong(lambda: MRF(Q, with_value(IMAGE, value).to(dtype)), ValueError, "image holds NaN (or inf)", "overflow")


@pytest.mark.parametrize("value", [1e20, -1e20])
@pytest.mark.parametrize("kernel", ["distance", "gaussian", "global"])
def test_an_image_whose_squares_overflow(kernel, value):
    mrf = MeanField(2, window=None if kernel == "global" else 3, kernel=kernel)
    wrong(lambda: mrf(Q, with_value(IMAGE, value)), ValueError, "image holds NaN (or inf), or its squares", "1e+30")


@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_large_features_give_finite_results(kernel):
    mrf = MeanField(2, window=3, kernel=kernel)
    mrf.check_values = False
    assert mrf(Q, IMAGE * 1e12).isfinite().all()


def test_a_pixel_without_a_possible_label():
    log_p = Q.clone()
    log_p[0, :, 1, 2] = -torch.inf
    wrong(lambda: MRF(log_p, IMAGE), ValueError, "log_p is -inf for all labels of a pixel", "finite score")
    wrong(lambda: MRF(log_p.double(), IMAGE), ValueError, "log_p is -inf for all labels of a pixel")


@pytest.mark.parametrize("name", ["gate", "average", "smoothness", "normalize", "temporal"])
@pytest.mark.parametrize("value", [{}, 1, "yes", None])
def test_flags_are_flags(name, value):
    wrong(lambda: MeanField(2, **{name: value}), ValueError, f"{name}={value!r} must be True or False")


@pytest.mark.parametrize("value", [[10**400, 1], ["1", 1], [None, 1], [float("nan"), 1], [1], 3])
def test_distances_are_numbers(value):
    wrong(lambda: MeanField(2, spacing=value), ValueError, "spacing=", "must be 2 positive numbers")


def test_impossible_labels_are_no_mistake():
    assert MRF(with_value(Q, -torch.inf), IMAGE).isnan().sum() == 0


@pytest.mark.parametrize("image", [None, IMAGE, IMAGE[:, :1, :2]], ids=["none", "beside", "other size"])
@pytest.mark.parametrize("settings", [{"kernel": "gaussian", "features": 0}, {"kernel": "learned", "size": (4, 5)}])
def test_an_image_nobody_looks_at_is_no_mistake(settings, image):
    assert MeanField(2, window=3, **settings)(Q, image).shape == Q.shape


def test_good_input_passes():
    assert MRF(Q, IMAGE).shape == Q.shape
    assert MRF(Q, (255 * IMAGE).to(torch.uint8)).shape == Q.shape
    assert MRF(torch.from_numpy(np.zeros((1, 2, 4, 5))), IMAGE).dtype == torch.float64
