"""Saving a fit: bad folders, devices and numbers are named before the work, and a damaged MRF gives one sentence."""

from __future__ import annotations

import json

import pytest

from deepmrf import MeanField
from deepmrf.data.colours import distinct_colours
from deepmrf.data.labels import LabelSet
from deepmrf.models.folder import read_mrf
from deepmrf.refine import fit as fitting
from deepmrf.refine.fit import fit
from deepmrf.refine.report import FitReport
from deepmrf.refine.settings import FitSettings

QUICK = FitSettings(window=3, contexts=0, folds=2, crop=16, penalty_steps=2)
LABELS = LabelSet(("sky", "road", "car"), distinct_colours(3))


@pytest.fixture
def idle(monkeypatch):
    """Any work is a mistake."""

    def work(*_):
        raise AssertionError("the files were read")

    monkeypatch.setattr(fitting, "match_files", work)


@pytest.mark.parametrize(
    ("out", "why"),
    [("afile", "give a folder for the MRF"), ("afile/below", "is a file"), ("/proc/nope", "cannot be written into")],
)
def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path, idle, out, why, options, type_in):
    (tmp_path / "afile").write_text("precious")
    code, text = type_in("fit", *options, "-o", tmp_path / out)
    assert code == 2
    assert why in text
    assert len(text.strip().splitlines()) == 1
    assert (tmp_path / "afile").read_text() == "precious"


def test_a_disk_that_fills_up_gives_one_sentence(tmp_path, monkeypatch, options, type_in):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepmrf.models.folder.to_bytes", full)
    quick = ("--window", 3, "--contexts", 0, "--folds", 2, "--crop", 16, "--penalty-steps", 2)
    code, text = type_in("fit", *options, "-o", tmp_path / "mrf", *quick)
    assert code == 2
    assert "mIoU" in text  # the scores are not lost
    assert "No space left" in text.splitlines()[-1]


@pytest.mark.parametrize(
    "files", [{"config.json": '{"unary": {}, "mean_field": {}}'}, {"config.json": "[]"}, {"model.safetensors": "x"}]
)
def test_other_models_are_not_written_over(tmp_path, idle, files, options, type_in):
    out = tmp_path / "network"
    out.mkdir()
    for name, content in files.items():
        (out / name).write_text(content)
    code, text = type_in("fit", *options, "-o", out)
    assert code == 2
    assert f"holds a {next(iter(files))} that deepmrf fit did not write; choose another folder." in text
    report = FitReport(MeanField(3, window=3, contexts=0), "nothing", LABELS, {}, (), QUICK, "")
    with pytest.raises(ValueError, match="did not write"):
        report.save(out)
    assert {path.name: path.read_text() for path in out.iterdir()} == files
    report.save(tmp_path / "mrf")
    report.save(tmp_path / "mrf")  # its own may be replaced


@pytest.mark.parametrize(("device", "why"), [("banana", "unknown"), ("cuda", "finds no GPU")])
def test_the_device_is_checked_before_the_work(folders, tmp_path, idle, device, why, options, type_in):
    code, text = type_in("fit", *options, "-o", tmp_path / "mrf", "--device", device)
    assert code == 2
    assert why in text
    assert len(text.strip().splitlines()) == 1
    assert not (tmp_path / "mrf").exists()
    with pytest.raises(ValueError, match=why):
        fit(*folders, FitSettings(device=device))


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [("labels", 0, "2 to 255"), ("labels", -3, "2 to 255"), ("labels", 256, "2 to 255"), ("seed", -1, "at least 0")],
)
def test_numbers_are_checked_before_the_work(tmp_path, idle, option, value, why, options, type_in):
    code, text = type_in("fit", *options, "-o", tmp_path / "mrf", f"--{option}", value)
    assert code == 2
    assert f"{option}={value} must be a whole number" in text
    assert why in text
    assert len(text.strip().splitlines()) == 1


def test_a_damaged_mrf_gives_one_sentence(tmp_path, options, type_in):
    def saved(name, window):
        mrf = MeanField(3, window=window, contexts=1, context_size=window)
        return FitReport(mrf, "nothing", LABELS, {}, (), QUICK, "").save(tmp_path / name)

    folder, other = saved("first", 3), saved("other", 5)
    weights = (folder / "model.safetensors").read_bytes()
    for damage in (weights[:100], b"", (other / "model.safetensors").read_bytes()):
        (folder / "model.safetensors").write_bytes(damage)
        with pytest.raises(ValueError, match="is damaged, or its") as error:
            read_mrf(folder)
        assert "\n" not in str(error.value)
    config = json.loads((folder / "config.json").read_text())
    config["mean_field"]["magic"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="is damaged, or its"):
        read_mrf(folder)
    code, text = type_in("refine", folder, *options[:4], "-o", tmp_path / "out")
    assert code == 2
    assert len(text.strip().splitlines()) == 1
