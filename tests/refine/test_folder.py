"""What deepmrf fit is given: bad folders, devices, numbers and files are named before the work, and ids are kept."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from deepmrf.models.folder import read_mrf
from PIL import Image
from typer.testing import CliRunner

from deepmrf import MeanField
from deepmrf.cli import app
from deepmrf.data.labels import LabelSet, distinct_colours
from deepmrf.refine import fit as fitting
from deepmrf.refine.apply import open_mrf
from deepmrf.refine.fit import fit
from deepmrf.refine.label_ids import LabelIds
from deepmrf.refine.report import FitReport
from deepmrf.refine.settings import FitSettings

SIZE, COUNT = (20, 26), 4
QUICK = FitSettings(window=3, contexts=0, folds=2, crop=16, penalty_steps=2)
LABELS = LabelSet(("sky", "road", "car"), distinct_colours(3))


def type_in(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", done.output)


@pytest.fixture
def folders(tmp_path):
    """Images of three stripes, with label maps for predictions and for masks."""
    for name in ("predictions", "images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(COUNT):
        mask = np.repeat(np.arange(3).repeat([7, 7, 6])[:, None], SIZE[1], axis=1).astype(np.uint8)
        for name, values in (("predictions", mask), ("masks", mask), ("images", 80 * mask + number)):
            Image.fromarray(values).save(tmp_path / name / f"{number}.png")
    return tmp_path / "predictions", tmp_path / "images", tmp_path / "masks"


def recode(folder, ids):
    """Replace the ids in all maps of a folder."""
    for path in folder.glob("*.png"):
        Image.fromarray(np.array(ids, np.uint8)[np.asarray(Image.open(path))]).save(path)


def typed(folders):
    predictions, images, masks = folders
    return ["--predictions", predictions, "--images", images, "--masks", masks]


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
def test_where_nothing_can_be_written_is_said_before_the_work(folders, tmp_path, idle, out, why):
    (tmp_path / "afile").write_text("precious")
    code, text = type_in("fit", *typed(folders), "-o", tmp_path / out)
    assert code == 2
    assert why in text
    assert len(text.strip().splitlines()) == 1
    assert (tmp_path / "afile").read_text() == "precious"


def test_a_disk_that_fills_up_gives_one_sentence(folders, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepmrf.models.folder.to_bytes", full)
    quick = ("--window", 3, "--contexts", 0, "--folds", 2, "--crop", 16, "--penalty-steps", 2)
    code, text = type_in("fit", *typed(folders), "-o", tmp_path / "mrf", *quick)
    assert code == 2
    assert "mIoU" in text  # the scores are not lost
    assert "No space left" in text.splitlines()[-1]


@pytest.mark.parametrize(
    "held", [{"config.json": '{"unary": {}, "mean_field": {}}'}, {"config.json": "[]"}, {"model.safetensors": "x"}]
)
def test_other_models_are_not_written_over(folders, tmp_path, idle, held):
    out = tmp_path / "network"
    out.mkdir()
    for name, content in held.items():
        (out / name).write_text(content)
    code, text = type_in("fit", *typed(folders), "-o", out)
    assert code == 2
    assert f"holds a {next(iter(held))} that deepmrf fit did not write; choose another folder." in text
    report = FitReport(MeanField(3, window=3, contexts=0), "nothing", LABELS, {}, (), QUICK, "")
    with pytest.raises(ValueError, match="did not write"):
        report.save(out)
    assert {path.name: path.read_text() for path in out.iterdir()} == held
    report.save(tmp_path / "mrf")
    report.save(tmp_path / "mrf")  # its own may be replaced


@pytest.mark.parametrize(("device", "why"), [("banana", "unknown"), ("cuda", "finds no GPU")])
def test_the_device_is_checked_before_the_work(folders, tmp_path, idle, monkeypatch, device, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, text = type_in("fit", *typed(folders), "-o", tmp_path / "mrf", "--device", device)
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
def test_numbers_are_checked_before_the_work(folders, tmp_path, idle, option, value, why):
    code, text = type_in("fit", *typed(folders), "-o", tmp_path / "mrf", f"--{option}", value)
    assert code == 2
    assert f"{option}={value} must be a whole number" in text
    assert why in text
    assert len(text.strip().splitlines()) == 1


def test_a_damaged_mrf_gives_one_sentence(folders, tmp_path):
    def saved(name, window):
        made = MeanField(3, window=window, contexts=1, context_size=window)
        return FitReport(made, "nothing", LABELS, {}, (), QUICK, "").save(tmp_path / name)

    one, other = saved("one", 3), saved("other", 5)
    weights = (one / "model.safetensors").read_bytes()
    for damage in (weights[:100], b"", (other / "model.safetensors").read_bytes()):
        (one / "model.safetensors").write_bytes(damage)
        with pytest.raises(ValueError, match="is damaged, or its") as error:
            read_mrf(one)
        assert "\n" not in str(error.value)
    config = json.loads((one / "config.json").read_text())
    config["mean_field"]["magic"] = 1
    (one / "config.json").write_text(json.dumps(config))
    (one / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="is damaged, or its"):
        read_mrf(one)
    code, text = type_in("refine", one, *typed(folders)[:4], "-o", tmp_path / "out")
    assert code == 2
    assert len(text.strip().splitlines()) == 1


def test_all_kinds_of_predictions_are_told(folders):
    random = np.random.default_rng(0)
    (folders[0] / "1.png").unlink()
    np.save(folders[0] / "1.npy", 9 * random.normal(size=(3, *SIZE)).astype(np.float32))
    report = fit(*folders, QUICK)
    assert report.kind == "label ids; logits"
    assert report.notes == (
        "The predictions were not all read alike: 3 as label ids (0 ...); 1 as logits (1 ...); "
        "save them all alike if that is wrong.",
    )


def test_what_was_left_out_is_said_when_it_stops(folders):
    recode(folders[2], [255] * 3)
    with pytest.raises(ValueError, match=r"0 images .* 2 or more\. 4 of the masks are void throughout: 0"):
        fit(*folders, QUICK)
    for stem in "012":
        (folders[2] / f"{stem}.png").rename(folders[2] / f"other_{stem}.png")
    with pytest.raises(ValueError, match="3 of the predicted images have no mask: 0, 1, 2"):
        fit(*folders, QUICK)


def test_labels_that_are_never_predicted_are_no_fault_of_the_mask(folders):
    recode(folders[2], [0, 1, 3])
    Image.fromarray(np.full(SIZE, 5, np.uint8)).save(folders[2] / "3.png")
    with pytest.raises(ValueError, match=r"0\.png holds ids that no .*\(those use 0 to 2\); give labels=6"):
        fit(*folders, QUICK)
    assert len(fit(*folders, FitSettings(**vars(QUICK) | {"labels": 6})).labels) == 6
    for path in list(folders[0].iterdir()):
        np.save(path.with_suffix(".npy"), np.zeros((3, *SIZE), np.float32))
    with pytest.raises(ValueError, match=r"0\.png holds the id 3, but the ids here are 0 to 2"):
        fit(*folders, QUICK)  # arrays do tell how many there are


def test_label_maps_have_the_ids_of_the_masks(folders, tmp_path):
    (folders[2] / "labels.json").write_text(json.dumps({"names": list(LABELS.names), "ids": [7, 0, 26], "ignore": 9}))
    recode(folders[2], [7, 0, 26])
    with pytest.raises(ValueError, match=r"holds the id 1, but the masks' ids in labels.json are 7, 0, 26"):
        fit(*folders, QUICK)
    recode(folders[0], [7, 0, 26])
    report = fit(*folders, QUICK)
    assert report.before.miou == 1
    assert report.kind == "label ids, those of the masks"
    assert open_mrf(report.save(tmp_path / "mrf"))[2] == report.label_ids == LabelIds((7, 0, 26), (9, 255))
    code, text = type_in("refine", tmp_path / "mrf", *typed(folders)[:4], "-o", tmp_path / "out")
    assert code == 0, text
    assert "the ids of the masks: 7, 0, 26." in text
    for path in (tmp_path / "out").iterdir():
        picture = Image.open(path)
        assert (np.asarray(picture) == np.asarray(Image.open(folders[2] / path.name))).all()
        palette = np.array(picture.getpalette()).reshape(-1, 3)
        assert (palette[[7, 0, 26]] == report.labels.colours).all()


def test_ids_that_are_the_labels_are_not_kept(folders, tmp_path):
    (folders[2] / "labels.json").write_text(json.dumps({"names": list(LABELS.names), "ids": [0, 1, 2]}))
    report = fit(*folders, QUICK)
    assert report.label_ids is None
    assert open_mrf(report.save(tmp_path / "mrf"))[2] is None
    assert "ids" not in json.loads((tmp_path / "mrf" / "config.json").read_text())
