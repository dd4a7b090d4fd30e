"""Confidence against brute force, and `deepmrf calibrate` as a user types it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from deepmrf import MeanField
from deepmrf.cli import app
from deepmrf.data import open_data
from deepmrf.data.synthetic import LABELS
from deepmrf.evaluation.calibration import BINS, Confidence, best, calibrate
from deepmrf.evaluation.evaluate import evaluate
from deepmrf.models.folder import is_half
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model, write_model
from deepmrf.models.video_part import VideoPart
from deepmrf.predict.scales import predictor

DATA = "synthetic:24x32"


class Knows(torch.nn.Module):
    """Guesses each image's labels by its colours, far too surely."""

    def __init__(self, sure: float) -> None:
        super().__init__()
        self.sure = torch.nn.Parameter(torch.tensor(sure))
        self.palette = torch.nn.Parameter(torch.tensor(LABELS.colours, dtype=torch.float32) / 255)

    def forward(self, image):
        colours = image.float() / 255
        return -self.sure * (colours[:, None] - self.palette[None, :, :, None, None]).square().sum(2)


def guesses() -> DeepParsingNetwork:
    return DeepParsingNetwork(Knows(60.0), MeanField(len(LABELS), window=3, contexts=0), LABELS).eval()


@pytest.fixture
def folder(tmp_path):
    """A saved model whose network is the real thing, untrained, and so no surer than it should be."""
    torch.manual_seed(0)
    model = DeepParsingNetwork.build("fast", LABELS, {"width": 8}, {"window": 3, "contexts": 2, "context_size": 3})
    write_model(model.eval(), tmp_path / "model")
    return tmp_path / "model"


def type_in(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_confidence_equals_its_definition():
    random = np.random.default_rng(0)
    confidence, pixels = Confidence(ignore=255), []
    for size in ((3, 5), (1, 1), (4, 7)):
        log_q = torch.from_numpy(random.normal(0, 3, (2, 4, *size))).log_softmax(1)
        target = torch.from_numpy(random.choice([0, 1, 2, 3, 255], (2, *size)))
        confidence.update(log_q, target)
        for b, y, x in np.ndindex(*target.shape):
            if int(target[b, y, x]) != 255:
                q = log_q[b, :, y, x].exp().tolist()
                pixels.append((max(q), q.index(max(q)) == int(target[b, y, x]), q[int(target[b, y, x])]))
    error = 0.0
    for low in range(BINS):
        members = [p for p in pixels if low == min(int(p[0] * BINS), BINS - 1)]
        error += abs(sum(p[0] for p in members) - sum(p[1] for p in members)) / len(pixels)
    expected = (np.mean([p[0] for p in pixels]), error, -np.mean([math.log(p[2]) for p in pixels]))
    assert confidence.compute() == pytest.approx(expected, abs=1e-9)


def test_confidence_of_nothing_and_of_certainty():
    nothing = Confidence(ignore=255)
    nothing.update(torch.zeros(1, 2, 3, 3).log_softmax(1), torch.full((1, 3, 3), 255))
    assert all(math.isnan(value) for value in nothing.compute())
    certain = Confidence(ignore=255)
    certain.update(torch.tensor([0.0, -torch.inf]).view(1, 2, 1, 1), torch.zeros(1, 1, 1, dtype=torch.long))
    assert certain.compute() == (1.0, 0.0, 0.0)


def test_a_model_that_is_too_sure_is_cooled_down():
    model, data = guesses(), open_data(DATA, "val")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps: list[tuple[int, int]] = []
    rows = calibrate(model, data, [1, 2, 4, 8], progress=lambda *n: steps.append(n))
    assert [row.temperature for row in rows] == [1, 2, 4, 8]
    assert rows[0].confidence > rows[0].accuracy + 0.05, rows
    chosen = best(rows)
    assert chosen.temperature > 1
    assert chosen.nll < 0.9 * rows[0].nll
    assert chosen.error < rows[0].error
    assert steps[-1] == (len(data), len(data))
    assert model.mean_field.temperature == 1  # as it was
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.mean_field.temperature = 4
    assert evaluate(predictor(model), data).miou == pytest.approx(rows[2].miou, abs=1e-9)
    again = calibrate(model, data, [1, 4])  # from whatever it has, the same
    assert again == [rows[0], rows[2]]
    assert model.mean_field.temperature == 4


def test_what_cannot_be_calibrated():
    data, model = open_data(DATA, "val"), guesses()
    with pytest.raises(ValueError, match="at least one"):
        calibrate(model, data, [])
    with pytest.raises(ValueError, match=r"temperature=0 must be"):
        calibrate(model, data, [1, 0])
    with pytest.raises(ValueError, match="No pixel of these images has a label"):
        calibrate(model, data.subset([]))
    model.mean_field = None
    with pytest.raises(ValueError, match="no mean field"):
        calibrate(model, data)


def test_the_command_shows_and_writes(folder, tmp_path):
    shown = type_in("calibrate", folder, "--data", DATA)
    assert shown.exit_code == 0, shown.output
    for word in ("mIoU", "nll", "2.5", "smallest nll"):
        assert word in shown.output
    out = tmp_path / "calibrated"
    result = type_in("calibrate", folder, "--data", DATA, "-t", 2, "-o", out)
    assert result.exit_code == 0, result.output
    calibrated, old = read_model(out), read_model(folder)
    assert (calibrated.mean_field.temperature, old.mean_field.temperature) == (2.0, 1.0)
    assert all(torch.equal(value, calibrated.state_dict()[name]) for name, value in old.state_dict().items())
    config = json.loads((out / "config.json").read_text())
    assert config["mean_field"]["temperature"] == 2.0
    assert config["metrics"]["calibration"]["temperature"] == 2.0
    image = torch.randint(0, 256, (1, 3, 24, 32), dtype=torch.uint8)
    assert (calibrated(image) - old(image)).abs().max() > 1e-3
    torch.testing.assert_close(calibrated.log_unary(image), old.log_unary(image))  # the network says what it said


@pytest.mark.parametrize("of_video", [1.0, 3.0])
def test_a_model_for_videos_in_half_precision_stays_one(folder, tmp_path, of_video):
    model = read_model(folder)
    model.video = VideoPart(frames=3, temperature=of_video)
    write_model(model, tmp_path / "half", half=True)
    result = type_in("calibrate", tmp_path / "half", "--data", DATA, "-t", 2, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert is_half(tmp_path / "out")
    assert not is_half(folder)
    assert read_model(tmp_path / "out").video.temperature == (2.0 if of_video == 1 else of_video)


def test_results_that_are_linked_are_divided_by_one_temperature(folder, tmp_path):
    """A mean field over all pairs labels each frame first: its temperature is not that of what links the frames."""
    model = read_model(folder)
    pairs = MeanField(len(model.labels), kernel="global", gate=False, contexts=0)
    model = DeepParsingNetwork(model.unary, pairs, model.labels)
    model.video = VideoPart(frames=3)
    write_model(model, tmp_path / "pairs")
    result = type_in("calibrate", tmp_path / "pairs", "--data", DATA, "-t", 2, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert read_model(tmp_path / "out").mean_field.temperature == 2
    assert read_model(tmp_path / "out").video.temperature == 1


def test_a_folder_with_the_name_of_a_bundled_model_keeps_its_precision(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(read_model(folder), tmp_path / "camvid")
    result = type_in("calibrate", "camvid", "--data", DATA, "-t", 2, "-o", "out")
    assert result.exit_code == 0, result.output
    assert not is_half(tmp_path / "out")


def test_the_command_says_when_more_should_be_tried(folder):
    result = type_in("calibrate", folder, "--data", DATA, "-t", 0.5, "-t", 0.2)
    assert result.exit_code == 0, result.output
    assert "None beyond it was tried" in result.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--data", DATA, "-t", "0"], "must be a number from 0.1 to 10"),
        (["--data", "camvid:/nowhere"], "/nowhere"),
        (["--data", DATA, "--split", "tset"], "tset"),
        (["--data", DATA, "-o", __file__], "is a file: give a folder"),
        (["--data", DATA, "-o", f"{__file__}/new"], "is a file: give a folder"),
        (["--data", DATA, "--device", "foo"], "device='foo' is unknown"),
        (["--data", DATA, "--device", "cuda"], "finds no GPU here"),
    ],
)
def test_bad_input_is_one_line(folder, words, reason):
    result = type_in("calibrate", folder, *words)
    assert result.exit_code == 2
    assert reason in result.output.splitlines()[-1], result.output
    assert "Traceback" not in result.output


def test_other_labels_are_refused(folder):
    result = type_in("calibrate", "animals", "--data", DATA)
    assert result.exit_code == 2
    assert "other labels" in result.output
    assert len(result.output.splitlines()) == 1, result.output
