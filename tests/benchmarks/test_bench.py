"""The benchmark's parts: peers that compute what they claim, inputs, figures and the JSON they end in."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time

import numpy as np
import pytest
import torch

import deepmrf
from benchmarks.bench import Results, Row, Settings, cases, measure, peers, plan, report, suite
from benchmarks.bench.inputs import make_inputs
from deepmrf import ops


def quick(**changes):
    return Settings.of("cpu", quick=True, **changes)


@pytest.mark.parametrize("window", [1, 4, 7, 50])
def test_the_direct_loop_is_the_distance_penalty(window, agree):
    log_p, image = make_inputs(2, 3, 17, seed=1)
    weights = torch.tensor([0.7, 0.02, 0.1])
    for gate in (True, False):
        ours = ops.distance_penalty(log_p.exp(), image, weights, (window, window), gate=gate)
        agree(peers.direct_loop(log_p.exp(), image, weights, window, gate), ours)


def test_a_sample_of_the_direct_loop_visits_that_many_offsets():
    log_p, image = make_inputs(1, 2, 16, seed=0)
    weights = torch.tensor([0.0, 1.0, 0.0])
    all_of_them = peers.direct_loop(log_p.exp(), image, weights, 5, False)
    torch.testing.assert_close(peers.direct_loop(log_p.exp(), image, weights, 5, False, sample=25), all_of_them)
    assert (peers.direct_loop(log_p.exp(), image, weights, 5, False, sample=10) < all_of_them).any()


def brute_force_crf(log_p, image, window, iterations):
    """Mean field of a windowed dense CRF, pair by pair: log_p (L, H, W), image (3, H, W) as numpy."""
    labels, height, width = log_p.shape
    places = [(y, x) for y in range(height) for x in range(width)]
    near = {j: [z for z in places if z != j and max(abs(z[0] - j[0]), abs(z[1] - j[1])) <= window // 2] for j in places}

    def bilateral(j, z):
        colour = ((image[(slice(None), *j)] - image[(slice(None), *z)]) ** 2).sum()
        return math.exp(-colour / (2 * (13 / 255) ** 2) - smooth_exponent(j, z) / (2 * 80.0**2))

    def smooth_exponent(j, z):
        return (j[0] - z[0]) ** 2 + (j[1] - z[1]) ** 2

    def smooth(j, z):
        return math.exp(-smooth_exponent(j, z) / (2 * 3.0**2))

    edge = {}
    for weight, kernel in ((10.0, bilateral), (3.0, smooth)):
        norm = {j: sum(kernel(j, z) for z in near[j]) ** -0.5 for j in places}
        for j in places:
            for z in near[j]:
                edge[j, z] = edge.get((j, z), 0) + weight * norm[j] * kernel(j, z) * norm[z]
    q = np.exp(log_p)
    for _ in range(iterations):
        energy = -log_p.copy()
        for j in places:
            for u in range(labels):
                for v in range(labels):
                    if v != u:
                        energy[(u, *j)] += sum(edge[j, z] * q[(v, *z)] for z in near[j])
        q = np.exp(-energy)
        q /= q.sum(0)
    return np.log(q)


def test_the_unfolded_crf_is_a_windowed_dense_crf(agree):
    log_p, image = (x.double() for x in make_inputs(1, 3, 6, seed=2))
    image = image * 0.2  # near colours, so that the bilateral kernel is not nearly zero
    expected = torch.from_numpy(brute_force_crf(log_p[0].numpy(), image[0].numpy(), 5, 2))[None]
    agree(peers.unfolded_crf(log_p, image, window=5, iterations=2), expected)


def test_the_unfolded_crf_is_our_dense_crf_and_batches(agree):
    log_p, image = (x.double() for x in make_inputs(2, 4, 20, seed=3))
    ours = deepmrf.dense_crf(4, window=7, iterations=3).double()
    agree(peers.unfolded_crf(log_p, image, window=7, iterations=3), ours(log_p, image), tolerance=1e-6)


@pytest.mark.skipif(not peers.pydensecrf_installed(), reason="pydensecrf2 is not installed")
def test_pydensecrf_returns_probabilities():
    log_p, image = make_inputs(1, 3, 16, seed=0)
    photo = (image[0] * 255).byte().movedim(0, -1).contiguous().numpy()
    q = peers.pydensecrf((-log_p[0].flatten(1)).numpy(), photo, 5)
    assert q.shape == (3, 256)
    np.testing.assert_allclose(q.sum(0), 1, rtol=1e-4)


def test_inputs_are_seeded_normalised_and_have_structure():
    log_p, image = make_inputs(2, 5, 64, seed=4)
    again, other = make_inputs(2, 5, 64, seed=4), make_inputs(2, 5, 64, seed=5)
    assert torch.equal(log_p, again[0])
    assert torch.equal(image, again[1])
    assert not torch.equal(log_p, other[0])
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(2, 64, 64))
    assert image.min() >= 0
    assert image.max() <= 1
    steps = (image[..., 1:] - image[..., :-1]).abs()
    assert steps.median() < 0.3 * image.std()  # mostly smooth
    assert steps.max() > image.std()  # with edges


@pytest.mark.parametrize(
    "given, says",
    [
        ({"device": "tpu"}, "choose 'cpu' or 'cuda'"),
        ({"dtype": "int8"}, "choose one of"),
        ({"size": 3}, "at least 16"),
        ({"labels": 1}, "at least 2"),
        ({"threads": 0}, "at least 1"),
    ],
)
def test_settings_say_what_to_pass(given, says):
    with pytest.raises(ValueError, match=says):
        Settings.of(**given)


def test_the_plan_holds_ours_and_the_peers_once_each():
    rows = plan(quick(implementations=True, scaling=False))
    assert len({dataclasses.replace(row.case, name="") for row in rows}) == len(rows)
    assert {row.case.kind for row in rows if row.case.peer} == {
        "distance",
        "direct_loop",
        "unfolded_crf",
        "pydensecrf2",
    }
    assert {row.axis for row in plan(quick(large=True))} == {"table", "pixels", "labels", "window", "large"}


def test_pairs_counts_what_a_window_sum_visits(neighbours, pixels):
    for size, window in ((6, 3), (5, 4), (3, 7)):
        visited = sum(len(neighbours(j, (window, window), (size, size))) for j in pixels((size, size)))
        assert cases.pairs(size, window) == visited


def test_a_loop_too_long_for_the_cpu_is_extrapolated(monkeypatch):
    case = quick(size=96).case("g", "gaussian", window=15, implementation="torch")
    monkeypatch.setattr(cases, "LOOP_WORK", 2e6)
    prepared = cases.prepare(case, cases.Pool())
    assert "extrapolated from 48 x 48" in prepared.note
    assert prepared.factor == pytest.approx(cases.pairs(96, 15) / cases.pairs(48, 15))


def test_memory_is_what_was_live_and_the_same_every_time():
    case = quick(size=256, labels=21).case("b12", "distance", implementation="torch")
    first, again = (measure.in_fresh_process(case, threads=1) for _ in range(2))
    assert first["q_bytes"] == 21 * 256 * 256 * 4
    if first["peak_bytes"] is not None and sys.platform == "linux":
        assert again["peak_bytes"] == pytest.approx(first["peak_bytes"], rel=0.05)
        assert first["peak_bytes"] > first["q_bytes"]  # the result alone is as large as q


def test_every_case_is_repeated_however_long_it_takes(monkeypatch):
    settings = quick(scaling=False, memory=False)
    row = Row(settings.case("b12", "distance"))
    monkeypatch.setattr(measure, "one_time", lambda call, device, calls=1: 100.0)
    measure.time_rows([row], cases.Pool(), measure.Effort(), lambda _: None)
    assert len(row.repeats_s) == measure.Effort().enough


def test_a_repeat_may_be_a_queue_of_calls_and_is_the_time_of_one():
    calls = []
    seconds = measure.one_time(lambda: calls.append(time.sleep(0.01)), "cpu", calls=4)
    assert len(calls) == 4
    assert 0.01 <= seconds < 0.04


def test_queues_are_long_for_quick_calls_and_short_for_slow_ones(monkeypatch):
    row = Row(quick().case("b12", "distance"), first_s=0.5)
    for spent, queued in ((1e-5, measure.LONGEST_QUEUE), (5e-4, 40), (0.3, 1)):
        monkeypatch.setattr(measure, "one_time", lambda call, device, spent=spent: spent)
        measure._queue(row, lambda: None)
        assert (row.alone_s, row.queued) == (spent, queued)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_calls_are_timed_in_queues():
    settings = Settings.of("cuda", quick=True, scaling=False, memory=False)
    row = Row(settings.case("b12", "distance"))
    measure.time_rows([row], cases.Pool(), measure.Effort(rounds=1, enough=1), lambda _: None)
    assert row.queued > 1
    assert 0 < row.seconds <= 1.5 * row.alone_s


def test_repeats_that_differ_are_called_noisy():
    case = quick().case("b12", "distance")
    assert Row(case, repeats_s=[0.37, 3.2, 0.39]).noisy
    assert not Row(case, repeats_s=[0.37, 0.38, 0.39]).noisy


def test_a_large_case_that_does_not_fit_says_so(monkeypatch):
    row = Row(quick(large=True).case("b12", "distance", size=4096))
    figures = {"peak_bytes": 3000, "q_bytes": 1000}
    monkeypatch.setattr(suite, "in_fresh_process", lambda case, threads: figures)
    monkeypatch.setattr(suite, "free_memory", lambda: 1 << 30)
    suite._run_large(row, quick(large=True), lambda _: None)
    assert "GiB are free" in row.skipped


def test_interrupted_or_failing_a_run_keeps_what_was_measured(monkeypatch):
    settings = quick(scaling=False, memory=False)
    results = Results(settings, plan(settings)[:3])
    calls = []

    def stop_late(words):
        calls.append(words)
        if len(calls) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.run(results, stop_late)
    saved = report.as_dict(results)
    assert not saved["finished"]
    assert 0 < len(saved["rows"]) < 3


def test_rows_tell_median_spread_and_ratios():
    settings = quick(scaling=False)
    results = Results(settings, plan(settings))
    forward = next(row for row in results.rows if row.case.name.startswith("b12 distance, 50"))
    backward = next(row for row in results.rows if row.case.kind == "distance" and row.case.backward)
    peer = next(row for row in results.rows if row.case.name == suite.DENSE_CRF)
    forward.repeats_s, backward.repeats_s, peer.repeats_s = [2.0, 1.0, 3.0], [6.0], [10.0]
    assert forward.seconds == 2
    assert forward.spread == pytest.approx(0.25)
    assert backward.spread is None
    assert results.over_forward(backward) == 3
    assert results.times_faster(forward) == 5
    assert results.times_faster(Row(forward.case)) is None


def test_a_slope_is_put_into_words():
    assert report.in_words(report.slope([(1, 2), (10, 20), (100, 200)])).startswith("linear")
    assert report.in_words(report.slope([(1, 2), (10, 2.1), (100, 2)])).startswith("flat")
    assert report.in_words(report.slope([(1, 1), (10, 100)])).startswith("more than linear")
    assert report.in_words(report.slope([(1, 1), (100, 10)])).startswith("less than linear")
    assert report.in_words(report.slope([(1, 10), (10, 1)])).startswith("falls")


def test_the_report_is_json_and_names_the_machine():
    text = json.dumps(report.as_dict(Results(quick())))
    content = json.loads(text)
    assert content["hardware"]["cores"] >= 1
    assert content["versions"]["deepmrf"] == deepmrf.__version__
    assert content["rows"] == []
