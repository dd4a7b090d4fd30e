"""What made the bundled models: the MRF from images held out, the mean of weights, the MRF's worth by stride."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import average
import held_out
import strides

from deepmrf.data import synthetic
from deepmrf.data.synthetic import LABELS
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.refine.settings import FitSettings


def network(seed: int) -> DeepParsingNetwork:
    """An untrained one for the labels of made-up scenes."""
    torch.manual_seed(seed)
    return DeepParsingNetwork.build("fast", LABELS, {"width": 8}, None).eval()


def test_an_mrf_learns_from_images_held_out():
    data, model = synthetic((48, 64), count=3), network(0)
    outputs = held_out.Outputs(model, data)
    assert len(outputs) == len(data)
    expected = model.log_unary(outputs[1].image[None])[0].half()
    torch.testing.assert_close(outputs[1].log_p, expected)
    settings = FitSettings(kernel="distance", window=9, gate=False, contexts=2, context_size=3, crop=32,
                           penalty_steps=2, contexts_steps=10)  # fmt: skip
    mrfs = held_out.learn(outputs, settings, 1.5)
    assert list(mrfs) == ["triple penalty", "label contexts"]
    assert {mrf.temperature for mrf in mrfs.values()} == {1.5}


def test_the_mean_of_weights_has_the_shares_and_keeps_what_does_not_fit():
    first, second = network(0), network(1)
    second.unary.classify[1] = torch.nn.Conv2d(first.unary.classify[1].in_channels, 2, 1)
    name = "encoder.stem.convolution.weight"
    a, b = first.unary.state_dict()[name].clone(), second.unary.state_dict()[name]
    kept = first.unary.classify[1].weight.clone()
    average.average([first, second], [0.75, 0.25])
    torch.testing.assert_close(first.unary.state_dict()[name], (0.75 * a + 0.25 * b).half().float())
    assert torch.equal(first.unary.classify[1].weight, kept)


def test_the_report_by_stride_has_gains_with_intervals_and_their_mean(tmp_path):
    for seed, gain in ((0, 0.01), (1, 0.02)):
        rows = {
            strides.NETWORK: {"miou": 0.5},
            "an MRF": {"miou": 0.5 + gain, "gain": {"miou": gain, "low": gain - 0.005, "high": gain + 0.005}},
        }
        folder = tmp_path / f"stride-8-seed-{seed}"
        folder.mkdir()
        (folder / "rows.json").write_text(json.dumps({"rows": rows}))
    report = strides.report(tmp_path)
    assert "| stride 8 | seed 0 | seed 1 | mean |" in report
    assert "| network alone | 50.00 | 50.00 | 50.00 |" in report
    assert "| an MRF | 51.00  +1.00 (0.50 to 1.50) | 52.00  +2.00 (1.50 to 2.50) | 51.50  +1.50 |" in report


def test_a_gain_without_an_interval_is_shown_alone():
    row = strides.row("an MRF", {"miou": 0.5, "gain": {"miou": -0.01, "low": None, "high": None}})
    assert row.split() == ["an", "MRF", "50.00", "-1.00"]
