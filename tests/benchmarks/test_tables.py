"""The paper's tables: an MRF learns behind cached outputs, rows are kept, seeds are summed up."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import cached
import tables

from deepmrf.layers import MeanField


def two_halves(seed: int) -> cached.Cached:
    """Label 0 on the left, 1 on the right, in two colours; a fifth of the pixels are predicted wrong."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(24, 32, dtype=torch.uint8)
    mask[:, 16:] = 1
    wrong = torch.rand(mask.shape, generator=generator) < 0.2
    predicted = torch.where(wrong, 1 - mask, mask).long()
    log_p = torch.where(torch.nn.functional.one_hot(predicted, 2).bool(), 0.7, 0.3).log().movedim(-1, 0).half()
    return log_p, (mask * 200)[None].expand(3, -1, -1).contiguous(), mask


def test_learning_behind_cached_outputs_mends_planted_errors():
    train, val = [two_halves(seed) for seed in range(4)], [two_halves(9)]
    training = cached.Training(labels=2, ignore=255, batch=2)
    mrf = MeanField(2, kernel="gaussian", gate=False, window=9, contexts=1, context_size=3)
    phases = [cached.penalty_phase(mrf, 60, 0.2), cached.contexts_phase(mrf, 0, 40, 3e-2)]
    before = cached.measure(None, val, 2, 255)
    cached.learn(mrf, phases, train, training)
    after = cached.measure(mrf, val, 2, 255)
    assert before["pixels"] < 85
    assert after["pixels"] > 97
    right = (val[0][0].argmax(0) == val[0][2]).float().mean()
    assert before["pixels"] == pytest.approx(100 * float(right), abs=1e-2)


def test_a_row_is_computed_once(tmp_path):
    arguments = argparse.Namespace(out=tmp_path, data="camvid:here", steps=1.0)
    tables.Seed(arguments, 3).row("3a", "10 x 10", lambda: {"miou": 50.0})
    again = tables.Seed(arguments, 3)
    again.row("3a", "10 x 10", lambda: pytest.fail("computed again"))
    again.row("3a", "50 x 50", lambda: {"miou": 60.0})
    rows = json.loads((tmp_path / "seed-3.json").read_text())["tables"]["3a"]
    assert [rows[name]["miou"] for name in ("10 x 10", "50 x 50")] == [50.0, 60.0]


def test_report_has_the_mean_and_half_the_range(tmp_path):
    for seed, miou in enumerate((70.0, 71.0, 73.0)):
        rows = {"3b": {"9 x 9": {"miou": miou}} | ({"5 x 5": {"miou": 69.5}} if seed == 1 else {})}
        (tmp_path / f"seed-{seed}.json").write_text(json.dumps({"tables": rows}))
    report = tables.report(tmp_path)
    assert "| 9 x 9 | 70.00 | 71.00 | 73.00 | 71.33 | 1.50 |" in report
    assert "| 5 x 5 |  | 69.50 |  | 69.50 |  |" in report


def test_points_of_a_curve_count_the_steps_of_earlier_stages():
    ends, steps = {"unary": 1500, "triple penalty": 1700}, [1500, 200]
    assert tables.curve_point("unary, step 500", 68.0, ends, steps) == (500, 68.0)
    assert tables.curve_point("triple penalty, step 100", 70.0, ends, steps) == (1600, 70.0)
    assert tables.curve_point("triple penalty", 71.0, ends, steps) == (1700, 71.0)
    assert tables.curve_point("all at once, step 900", 72.0, ends, steps) == (900, 72.0)
    assert tables.curve_point("all at once", 73.0, ends, steps) == (1700, 73.0)
