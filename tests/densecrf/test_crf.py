"""deepmrf.densecrf against recorded answers of pydensecrf2, against all pairs written out, and on bad input."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import deepmrf.densecrf as dcrf
from benchmarks.record_pydensecrf import HEIGHT, LABELS, SETTINGS, WIDTH
from deepmrf.densecrf.utils import (
    compute_unary,
    create_pairwise_bilateral,
    create_pairwise_gaussian,
    unary_from_labels,
    unary_from_softmax,
)

RECORDED = Path(__file__).with_name("pydensecrf2.npz")


@pytest.fixture(scope="module")
def recorded():
    with np.load(RECORDED) as file:
        return dict(file)


@pytest.mark.parametrize("normalisation", range(4), ids=[n.name for n in dcrf.NormalizationType])
@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_pydensecrf(name, normalisation, recorded):
    smooth, bilateral, iterations = SETTINGS[name]
    crf = dcrf.DenseCRF2D(WIDTH, HEIGHT, LABELS)
    crf.setUnaryEnergy(recorded[f"{name} unary"].astype(np.float32))
    crf.addPairwiseGaussian(sxy=smooth[0], compat=smooth[1], normalization=normalisation)
    crf.addPairwiseBilateral(
        bilateral[0], bilateral[1], recorded[f"{name} image"], bilateral[2], normalization=normalisation
    )
    q, expected = crf.inference(iterations), recorded[f"{name} {normalisation}"].astype(np.float32)
    assert np.abs(q - expected).max() < 1e-3  # recorded as float16
    assert (q.argmax(0) == expected.argmax(0)).mean() >= 0.9993  # one pixel may be a tie


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_matrices_and_divergences_are_those_of_pydensecrf(name, recorded):
    crf = dcrf.DenseCRF2D(WIDTH, HEIGHT, LABELS)
    crf.setUnaryEnergy(recorded[f"{name} unary"].astype(np.float32))
    crf.addPairwiseBilateral((20, 30), (9, 11, 13), recorded[f"{name} image"], recorded["matrix"])
    q, work_1, work_2 = crf.startInference()
    divergences = [crf.klDivergence(q)]
    for _ in range(3):
        crf.stepInference(q, work_1, work_2)
        divergences.append(crf.klDivergence(q))
    np.testing.assert_allclose(divergences, recorded[f"{name} divergences"], rtol=1e-4)
    assert np.abs(q - recorded[f"{name} matrix"]).max() < 1e-2
    np.testing.assert_allclose(crf.inference(3), q, atol=1e-6)


def all_pairs(unary, terms, iterations):
    """Mean field with K written out, in float64: terms of (features (d, N), C (L, L))."""
    q = np.exp(-unary.astype(np.float64))
    q /= q.sum(0)
    kernels = []
    for features, c in terms:
        k = np.exp(-((features[:, :, None] - features[:, None]) ** 2).sum(0) / 2)
        n = k.sum(1) ** -0.5
        kernels.append((n[:, None] * k * n, c))
    for _ in range(iterations):
        energy = unary + sum(c @ q @ k for k, c in kernels)
        q = np.exp(-(energy - energy.min(0)))
        q /= q.sum(0)
    return q


def test_label_maps_are_near_those_of_all_pairs(recorded):
    image, unary = recorded["voc image"], recorded["voc unary"].astype(np.float32)
    smooth = create_pairwise_gaussian((3, 3), (HEIGHT, WIDTH))
    bilateral = create_pairwise_bilateral((80, 80), 13, image, chdim=2)
    crf = dcrf.DenseCRF(HEIGHT * WIDTH, LABELS)
    crf.setUnaryEnergy(unary)
    crf.addPairwiseEnergy(smooth, compat=3)
    crf.addPairwiseEnergy(bilateral, compat=10)
    exact = all_pairs(unary, [(smooth, -3 * np.eye(LABELS)), (bilateral, -10 * np.eye(LABELS))], 5)
    assert (crf.inference(5).argmax(0) == exact.argmax(0)).mean() > 0.98


def test_compatibility_as_number_vector_and_matrix(recorded):
    answers = []
    for compat in (4, np.full(LABELS, -4.0), -4 * np.eye(LABELS), 4 * (1 - np.eye(LABELS))):
        crf = dcrf.DenseCRF2D(WIDTH, HEIGHT, LABELS)
        crf.setUnaryEnergy(recorded["irn unary"])
        # K 1 differs from pixel to pixel unless edges are divided by it, and 4 (1 - I) is as good as -4 I only then
        crf.addPairwiseGaussian(3, compat=compat, normalization=dcrf.NORMALIZE_AFTER)
        answers.append(crf.inference(3))
    for answer in answers[1:]:
        np.testing.assert_allclose(answer, answers[0], atol=2e-5)


def test_whatever_holds_the_numbers_is_taken(recorded):
    unary, image = recorded["voc unary"].astype(np.float32), recorded["voc image"]

    def answer(unary, image, compat=10):
        crf = dcrf.DenseCRF2D(WIDTH, HEIGHT, LABELS)
        crf.setUnaryEnergy(unary)
        crf.addPairwiseBilateral(sxy=80, srgb=13, rgbim=image, compat=compat)
        return crf.inference(2)

    expected = answer(unary, image)
    assert expected.shape == (LABELS, HEIGHT * WIDTH)
    assert expected.dtype == np.float32
    for other in (unary.astype(np.float64), np.asfortranarray(unary), torch.from_numpy(unary).requires_grad_()):
        np.testing.assert_array_equal(answer(other, image), expected)
    np.testing.assert_array_equal(answer(unary.reshape(LABELS, HEIGHT, WIDTH), image), expected)
    for other in (image.astype(np.float64), np.asfortranarray(image), torch.from_numpy(image), image.tolist()):
        np.testing.assert_array_equal(answer(unary, other), expected)
    np.testing.assert_array_equal(answer(unary, image, np.float64(10)), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dcrf.DenseCRF2D(0, 4, 2), "w=0 must be a whole number of at least 1"),
        (lambda: dcrf.DenseCRF(4, 0), "nlabels=0 must be"),
        (lambda: small().setUnaryEnergy(np.zeros((3, 12))), r"give \(2, 12\)"),
        (lambda: small().setUnaryEnergy(np.zeros((2, 4, 3))), "takes the width first"),
        (lambda: small().setUnaryEnergy(np.full((2, 12), np.nan)), "holds NaN"),
        (lambda: small().setUnaryEnergy(np.full((2, 12), np.inf)), "infinite"),
        (lambda: small().addPairwiseBilateral(3, 3, np.zeros((4, 3, 3))), "takes the width first"),
        (lambda: small().addPairwiseBilateral(3, 3, np.zeros((3, 5, 3))), "rgbim has shape"),
        (lambda: small().addPairwiseBilateral(3, (3, 3), np.zeros((3, 4, 3))), "give 3 widths, or one number, not 2"),
        (lambda: small().addPairwiseBilateral(0, 3, np.zeros((3, 4, 3))), "must be positive"),
        (lambda: small().addPairwiseBilateral(3, -1, np.zeros((3, 4, 3))), "must be positive"),
        (lambda: small().addPairwiseBilateral(3, 3, np.full((3, 4, 3), np.nan)), "holds NaN"),
        (lambda: small().addPairwiseGaussian((1, 2, 3)), "has 3 values"),
        (lambda: small().addPairwiseGaussian(3, compat=np.zeros(3)), "compat has shape"),
        (lambda: small().addPairwiseGaussian(3, kernel=7), "choose CONST_KERNEL"),
        (lambda: small().addPairwiseGaussian(3, normalization=7), "choose NO_NORMALIZATION"),
        (lambda: small().addPairwiseEnergy(np.zeros((2, 11))), r"give \(axes, 12\)"),
        (lambda: small().inference(-1), "at least 0"),
        (lambda: small().klDivergence(np.zeros((2, 11))), r"give \(2, 12\)"),
    ],
)
def test_bad_input_gets_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def small():
    return dcrf.DenseCRF2D(4, 3, 2)


@pytest.mark.parametrize(("width", "height", "labels", "channels"), [(1, 1, 1, 3), (1, 7, 2, 1), (9, 8, 200, 11)])
def test_odd_sizes(width, height, labels, channels):
    random = np.random.default_rng(0)
    crf = dcrf.DenseCRF2D(width, height, labels)
    crf.setUnaryEnergy(random.random((labels, height * width)))
    crf.addPairwiseGaussian(2)
    crf.addPairwiseBilateral(3, 20, random.integers(0, 256, (height, width, channels)))
    q = crf.inference(3)
    assert q.shape == (labels, height * width)
    np.testing.assert_allclose(q.sum(0), 1, atol=1e-5)


def test_narrow_widths_do_not_overflow():
    image = np.random.default_rng(0).integers(0, 256, (12, 9, 3))
    crf = dcrf.DenseCRF2D(9, 12, 3)
    crf.setUnaryEnergy(np.random.default_rng(1).random((3, 108)))
    crf.addPairwiseBilateral(1, 0.001, image)
    assert np.isfinite(crf.inference(2)).all()


def test_a_crf_without_unary_or_edges():
    np.testing.assert_allclose(small().inference(2), 0.5)


def test_unary_from_labels():
    energy = unary_from_labels(np.array([[0, 1], [2, 2]]), 2, 0.7)
    half, right, wrong = -np.log([0.5, 0.7, 0.3])
    np.testing.assert_allclose(energy, [[half, right, wrong, wrong], [half, wrong, right, right]], rtol=1e-6)
    sure = unary_from_labels([0, 1, 2], 3, 0.5, zero_unsure=False)
    np.testing.assert_allclose(np.exp(-sure), [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]], rtol=1e-6)
    np.testing.assert_array_equal(compute_unary([0, 1], 2, 0.7), unary_from_labels([0, 1], 2, 0.7))
    for labels, zero_unsure in (([3], True), ([2], False), ([-1], True)):
        with pytest.raises(ValueError, match="they must be 0 to"):
            unary_from_labels(labels, 2, 0.7, zero_unsure)
    with pytest.raises(ValueError, match="gt_prob=1 must lie between 0 and 1"):
        unary_from_labels([0], 2, 1)


def test_unary_from_softmax():
    shares = np.array([[0.0, 0.5], [1.0, 0.5]])
    np.testing.assert_allclose(np.exp(-unary_from_softmax(shares)), [[1e-5, 0.5], [1, 0.5]], rtol=1e-4)
    np.testing.assert_allclose(np.exp(-unary_from_softmax(shares, scale=0.5)), [[0.25, 0.5], [0.75, 0.5]], rtol=1e-5)
    assert np.isinf(unary_from_softmax(shares, clip=None)).any()
    assert unary_from_softmax(torch.full((3, 4, 5), 1 / 3)).shape == (3, 20)


def test_features_of_any_number_of_axes():
    features = create_pairwise_gaussian((2, 4, 5), (2, 3, 4))
    assert features.shape == (3, 24)
    np.testing.assert_allclose(features[:, -1], [1 / 2, 2 / 4, 3 / 5])
    image = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_allclose(create_pairwise_bilateral((1, 1, 1), 2, image)[3], np.arange(24) / 2)
    colours = np.arange(36).reshape(3, 4, 3)
    np.testing.assert_allclose(
        create_pairwise_bilateral((1, 1), (1, 2, 3), colours, chdim=2)[4], colours[..., 2].ravel() / 3
    )
    with pytest.raises(ValueError, match="sdims has 3 widths"):
        create_pairwise_gaussian((1, 1, 1), (4, 5))


@pytest.mark.parametrize("kind", [tuple, list, np.array, torch.tensor])
@pytest.mark.parametrize(
    ("widths", "channels", "message"),
    [
        (
            [13.0],
            2,
            r"length 1, but the image has 2 channels: give one per channel \(\(13, 13\)\), or schan=13 for all",
        ),
        ([13.0, 5.0], 3, r"length 2, but the image has 3 channels: give one per channel \(\(13, 13, 13\)\), or schan"),
        ([13.0, 5.0], 1, r"length 2, but the image has 1 channel: give one per channel \(\(13,\)\), or schan=13"),
        ([13.0], 11, r"give one per channel \(11 widths\), or schan=13"),
        ([], 2, r"length 0, but the image has 2 channels: give one per channel \(\(1, 1\)\), or schan=1"),
        ([13.0, 5.0, 5.0], 0, r"but the image has 1 channel \(chdim=-1\): give one"),
    ],
)
def test_a_sequence_of_widths_is_one_per_channel(kind, widths, channels, message):
    """pydensecrf leaves the channels beyond the last width as they are, without a word."""
    image = np.ones((4, 3, channels) if channels else (4, 3))
    with pytest.raises(ValueError, match=message) as raised:
        create_pairwise_bilateral((1, 1), kind(widths), image, chdim=2 if channels else -1)
    assert len(re.findall(r"[.!?](?=\s|$)", str(raised.value))) == 1


@pytest.mark.parametrize("width", [4, 4.0, np.float32(4), np.int64(4), np.array(4.0), torch.tensor(4.0)])
def test_a_number_is_the_width_of_all_channels(width):
    image = np.random.default_rng(0).random((4, 3, 2))
    features = create_pairwise_bilateral((1, 1), width, image, chdim=2)
    np.testing.assert_allclose(features[2:], image.reshape(-1, 2).T / 4, rtol=1e-6)
    np.testing.assert_array_equal(create_pairwise_bilateral((1, 1), (4, 4), image, chdim=2), features)
    np.testing.assert_array_equal(create_pairwise_bilateral((1, 1), (4,), image[..., :1], chdim=2), features[:3])
    np.testing.assert_array_equal(create_pairwise_bilateral((1, 1), [4], image[..., 0]), features[:3])


def test_the_filter_of_rloss_writes_into_the_array_it_is_given():
    random = np.random.default_rng(0)
    images, values = random.random((2, 3, 6, 7)) * 40, random.random((2, 4, 6, 7))  # colours nearer than their width
    sums = np.zeros(values.size, np.float32)
    dcrf.bilateralfilter_batch(images.ravel(), values.ravel(), sums, 2, 4, 6, 7, 100.0, 40.0)
    positions = np.stack(np.meshgrid(np.arange(6), np.arange(7), indexing="ij")).reshape(2, -1) / 40.0
    for image, value, answer in zip(images, values, sums.reshape(2, 4, -1), strict=True):
        features = np.concatenate([positions, image.reshape(3, -1) / 100.0])
        k = np.exp(-((features[:, :, None] - features[:, None]) ** 2).sum(0) / 2)
        ratio = answer / (value.reshape(4, -1) @ k)  # the lattice scales all sums alike
        assert ratio.max() < 1.35 * ratio.min()
    single = np.zeros((6, 7), np.float32)
    dcrf.bilateralfilter(images[1], values[1, 2], single, 6, 7, 100.0, 40.0)
    np.testing.assert_allclose(single, sums.reshape(values.shape)[1, 2], rtol=1e-5)
    with pytest.raises(ValueError, match="need 252"):
        dcrf.bilateralfilter_batch(images[0], values, sums, 2, 4, 6, 7, 100.0, 40.0)


def test_the_example_of_the_docstring():
    from skimage import data

    image = data.chelsea()[::4, ::4]
    height, width = image.shape[:2]
    probabilities = np.random.default_rng(0).dirichlet(np.ones(3), (height, width)).transpose(2, 0, 1)
    crf = dcrf.DenseCRF2D(width, height, 3)
    crf.setUnaryEnergy(unary_from_softmax(probabilities))
    crf.addPairwiseGaussian(sxy=3, compat=3)
    crf.addPairwiseBilateral(sxy=80, srgb=13, rgbim=image, compat=10)
    labels = np.argmax(crf.inference(10), axis=0).reshape(height, width)
    assert 0 < (labels == probabilities.argmax(0)).mean() < 1


@pytest.mark.filterwarnings("error")
def test_tensors_of_bfloat16_and_arrays_that_cannot_be_written():
    p = torch.rand(3, 40).softmax(0)
    expected = unary_from_softmax(p.bfloat16().float())
    np.testing.assert_array_equal(unary_from_softmax(p.bfloat16()), expected)
    crf = dcrf.DenseCRF(40, 3)
    crf.setUnaryEnergy(torch.from_numpy(expected).bfloat16())
    features = np.random.default_rng(0).random((2, 40), np.float32)
    features.flags.writeable = False
    crf.addPairwiseEnergy(features, compat=3)
    assert crf.inference(2).shape == (3, 40)


def test_widths_may_be_numbers_of_numpy():
    image = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    results = []
    for width in (13, np.float32(13), np.array(13.0), (13, 13, 13), np.array([13, 13, 13])):
        crf = dcrf.DenseCRF2D(7, 6, 2)
        crf.setUnaryEnergy(np.arange(84, dtype=np.float32).reshape(2, 42) % 5)
        crf.addPairwiseBilateral(sxy=np.int64(3), srgb=width, rgbim=image)
        results.append(crf.inference(2))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
