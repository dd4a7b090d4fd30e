"""Kinds of errors and oracles of benchmarks/errors.py: equal to loops over pixels, and to scenes that one can count."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import errors

from deepmrf.data.synthetic import LABELS
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model

VOID = 255


def blocks(seed, height=23, width=30, labels=4, cell=6):
    """A map of rectangles of random labels."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(labels, (-(-height // cell), -(-width // cell)), generator=generator)
    return cells.repeat_interleave(cell, 0).repeat_interleave(cell, 1)[:height, :width].contiguous()


def test_distances_to_borders_are_those_of_a_loop():
    truth = blocks(0)
    near = errors.label_borders(truth, VOID)
    height, width = truth.shape
    edge = np.zeros(truth.shape, bool)
    for y in range(height):
        for x in range(width):
            sides = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
            edge[y, x] = any(truth[y, x] != truth[b, a] for b, a in sides if 0 <= b < height and 0 <= a < width)
    rows, columns = np.nonzero(edge)
    for y in range(height):
        for x in range(width):
            distance = np.hypot(rows - y, columns - x).min() + 1
            assert near[:, y, x].tolist() == [distance <= limit for limit in errors.BORDERS]


def test_a_border_runs_through_the_middle_of_void_and_void_alone_is_none():
    truth = torch.zeros(9, 30, dtype=torch.int64)
    truth[:, 10:14] = VOID
    truth[:, 14:] = 1
    truth[2:7, 20:30] = VOID  # a hole in label 1
    near = errors.label_borders(truth, VOID)
    row = near[:, 0]
    assert row[1].nonzero()[:, 0].tolist() == [10, 11, 12, 13]
    assert row[2].nonzero()[:, 0].tolist() == [*range(8, 16)]
    assert not near[3, :, 20:].any()


def test_thin_parts_are_narrower_than_five_pixels():
    truth = torch.zeros(30, 40, dtype=torch.int64)
    truth[5:25, 10:14] = 1  # 4 wide
    truth[5:25, 20:25] = 1  # 5 wide
    truth[:, 37:] = 2  # 3 wide at the frame, beyond which it goes on
    thin = errors.thin_parts(truth)
    assert thin[5:25, 10:14].all()
    assert int(thin.sum()) == 80


def test_thin_parts_are_those_of_an_opening_by_a_loop():
    truth = blocks(2, cell=3)
    height, width = truth.shape
    opened = torch.zeros_like(truth, dtype=torch.bool)
    for y, x in np.ndindex(height, width):
        square = (slice(max(y - 2, 0), y + 3), slice(max(x - 2, 0), x + 3))
        if len(truth[square].unique()) == 1:
            opened[square] = True
    thin = errors.thin_parts(truth)
    assert torch.equal(thin, ~opened)
    assert 0 < int(thin.sum()) < truth.numel()


def test_masks_that_were_resized_by_interpolation_are_known_by_their_borders():
    large = torch.zeros(80, 120, dtype=torch.int64)
    large[:, 50:] = 9
    large[:, 90:] = 4
    large[51:, :] = 7
    plain = large[2::4, 2::4]
    smeared = torch.nn.functional.avg_pool2d(large[None].float(), 4)[0].round().long()
    assert torch.equal(errors.sharpened(plain, VOID), plain)
    changed = smeared != plain
    assert changed.any()
    sharp = errors.sharpened(smeared, VOID)
    real = torch.tensor([0, 4, 7, 9])
    assert int((~torch.isin(smeared, real)).sum()) > 20
    assert int((~torch.isin(sharp, real)).sum()) <= 2  # where three labels meet
    kinds = errors.pixel_kinds(smeared, smeared, errors.label_borders(smeared, VOID), VOID)
    assert torch.equal(kinds == errors.KINDS.index("smeared"), sharp != smeared)
    assert not (errors.sharpened(torch.where(smeared == 9, VOID, smeared), VOID) == 9).any()


def test_every_pixel_has_the_first_kind_that_fits():
    truth = torch.zeros(60, 60, dtype=torch.int64)
    truth[10:40, 5:8] = 1  # thin
    truth[10:40, 20:23] = 2  # thin
    truth[30:46, 40:56] = 3  # a square
    truth[5:9, 50:54] = 1  # small and thin
    truth[50:56, 50:56] = 1  # not small: 36 of 3,600 pixels
    truth[55:, :20] = VOID
    before = truth.clone()
    before[10:40, 5:8] = 0
    before[35:40, 20:23] = 0
    before[30:46, 40:50] = 0
    before[5:9, 50:54] = 0
    before[10:20, 28:38] = 3  # there is nothing
    kinds = errors.pixel_kinds(truth, before, errors.label_borders(truth, VOID), VOID)

    def kind(y, x):
        return errors.KINDS[kinds[y, x]]

    assert [kind(10, 5), kind(10, 20), kind(38, 21), kind(6, 51)] == [
        "thin, lost",
        "thin, found",
        "thin, found",
        "thin, lost",
    ]
    assert kind(31, 55) == kind(38, 48) == "lost"  # the right ones, too
    assert [kind(50, 50), kind(51, 51), kind(53, 53)] == ["border 1", "border 2", "border 3-4"]
    assert kind(52, 5) == "inside"
    assert kind(10, 28) == "invented"
    before[50:56, 50:56] = 0
    kinds = errors.pixel_kinds(truth, before, errors.label_borders(truth, VOID), VOID)
    assert kind(53, 53) == "lost"
    large = torch.zeros(200, 200, dtype=torch.int64)
    large[50:56, 50:56] = 1  # now it is small
    kinds = errors.pixel_kinds(large, torch.zeros_like(large), errors.label_borders(large, VOID), VOID)
    assert kind(53, 53) == "small, lost"


def test_windows_are_those_of_a_loop():
    truth, labels = blocks(0), blocks(1, cell=5)
    wrong = truth != labels
    results = errors.within_windows(labels, truth, wrong, 4)
    for window, result in zip(errors.WINDOWS, results, strict=True):
        reach = window // 2
        for y, x in np.ndindex(*truth.shape):
            around = labels[max(y - reach, 0) : y + reach + 1, max(x - reach, 0) : x + reach + 1]
            assert bool(result[y, x]) == bool(wrong[y, x] and (around == truth[y, x]).any())


def test_regions_take_their_most_frequent_truth():
    labels = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 1, 0]])
    truth = torch.tensor([[2, 2, 1, VOID, VOID], [2, 0, 0, 1, VOID]])
    best = errors.best_of_regions(labels, truth, truth != VOID, 3)
    assert best.tolist() == [[2, 2, 1, 1, 0], [2, 2, 1, 1, 0]]


def test_truth_at_a_stride_loses_what_is_narrow():
    truth = torch.zeros(17, 33, dtype=torch.int64)
    truth[:, 16:] = 1
    truth[:, 3] = 2
    truth[0] = VOID
    assert torch.equal(errors.truth_at_stride(truth, 1, 3, VOID)[1:], truth[1:])
    coarse = errors.truth_at_stride(truth, 8, 3, VOID)
    assert not (coarse == 2).any()
    assert (coarse[:, 24:] == 1).all()


def test_counts_and_oracles_of_a_scene_add_up():
    """The network misses two columns at a border and a thin bar; the MRF mends one column and breaks a pixel."""
    truth = torch.zeros(40, 60, dtype=torch.int64)
    truth[:, 30:] = 1
    truth[10:30, 50:52] = 2
    truth[:, :3] = VOID
    before = truth.clamp_max(2)
    before[:, 30:32] = 0
    before[10:30, 50:52] = 1
    after = before.clone()
    after[:, 31] = 1
    after[20, 10] = 2
    log_p = torch.where(torch.nn.functional.one_hot(before, 3).bool(), 0.8, 0.1).movedim(-1, 0)
    log_p[1][:, 30] = 0.15  # second-best where it is right
    log_p[2][:, 30] = 0.05
    tally = errors.Errors(3, VOID)
    tally.add(log_p.log(), after, truth)
    result = tally.to_dict(LABELS.names[:3])
    kinds = {kind: {name: sum(values) for name, values in counts.items()} for kind, counts in result["kinds"].items()}
    assert sum(counts["pixels"] for counts in kinds.values()) == 40 * 57
    assert kinds["thin, lost"] | {"second": 0} == {"pixels": 40, "wrong": 40, "second": 0, "mended": 0, "broken": 0}
    assert [kinds[name]["wrong"] for name in ("border 1", "border 2")] == [40, 40]
    assert [kinds[name]["mended"] for name in ("border 1", "border 2", "inside")] == [0, 40, 0]
    assert kinds["border 1"]["second"] == 40
    assert sum(counts["broken"] for counts in kinds.values()) == kinds["inside"]["broken"] == 1
    mended = {name: score["mended"] for name, score in result["scores"].items()}
    assert mended["network"] == 0
    assert mended["MRF"] == pytest.approx(100 * 39 / 120, abs=0.01)
    assert mended["kept"] == mended["border 2 right"] == mended["border 1 right"] == pytest.approx(100 / 3, abs=0.01)
    assert mended["window 5"] == mended["window 51"] == pytest.approx(200 / 3, abs=0.01)  # the bar is nowhere
    assert mended["second 0.2"] == 0
    assert 33.3 < mended["both"] <= mended["second 0.05"]
    assert mended["border 4"] == result["scores"]["border 4"]["miou"] == 100
    assert result["scores"]["network"]["iou"][LABELS.names[2]] == 0


def test_the_command_writes_json_and_its_tables_can_be_printed_again(tmp_path, monkeypatch, capsys):
    settings = {"window": 3, "contexts": 2, "context_size": 3}
    torch.manual_seed(0)
    write_model(DeepParsingNetwork.build("fast", LABELS, {"width": 8}, settings).eval(), tmp_path / "trial" / "model")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["errors.py", *map(str, words)])
        errors.main()
        return capsys.readouterr().out

    words = ("--data", "synthetic:24x32", "--most", 3, "--device", "cpu", "--out", tmp_path)
    output = run(tmp_path / "trial" / "model", *words)
    assert "`trial`: synthetic, val, 3 images; the MRF adds " in output
    assert "| window 51 | " in output
    result = json.loads((tmp_path / "trial.json").read_text())
    assert result["scores"]["border 8"]["miou"] > result["scores"]["border 1"]["miou"] > 0
    assert run("--tables", tmp_path / "trial.json") == output
    two = run("--tables", tmp_path / "trial.json", tmp_path / "trial.json")
    assert "| | trial | trial |" in two
