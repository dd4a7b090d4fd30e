"""`deepmrf fit` as a user types it."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from deepmrf import MeanField
from deepmrf.cli import app
from deepmrf.cli import fit as command
from deepmrf.data.labels import VOC
from deepmrf.refine.report import FitReport
from deepmrf.refine.search import SearchResult, Trial
from deepmrf.refine.settings import Choice, FitSettings

QUICK = ("--window", 3, "--contexts", 1, "--context-size", 3, "--folds", 2, "--crop", 16, "--penalty-steps", 2)
QUICK += ("--contexts-steps", 2)


def type_in(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", done.output)


@pytest.fixture
def options(tmp_path):
    """Four images of three stripes with perfect predictions."""
    mask = np.repeat(np.arange(3).repeat([7, 7, 6])[:, None], 26, axis=1).astype(np.uint8)
    for name in ("predictions", "images", "masks"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.fromarray(80 * mask if name == "images" else mask).save(tmp_path / name / f"{number}.png")
    folders = [tmp_path / name for name in ("predictions", "images", "masks")]
    return ("--predictions", folders[0], "--images", folders[1], "--masks", folders[2])


def test_the_table_has_every_label_and_fold(options, tmp_path):
    code, text = type_in("fit", *options, "-o", tmp_path / "mrf", *QUICK)
    assert code == 0, text
    lines = [line.split() for line in text.splitlines()]
    assert "Predictions were read as label ids." in text
    headings = ["before", "label", "scaling", "triple", "penalty", "label", "contexts"]
    assert ["IoU,", "held-out", "images", *headings] in lines
    for title in ("label 0", "label 1", "label 2", "mIoU", "pixel accuracy", "mIoU of fold 1", "mIoU of fold 2"):
        [row] = [line for line in text.splitlines() if re.match(rf"{title}\s\s", line)]
        assert re.fullmatch(rf"{title}(\s+100\.00){{4}}\s*", row)
    assert "No gain" in text
    assert f"Wrote {tmp_path / 'mrf'} (nothing)." in text
    code, text = type_in("fit", *options, "-o", tmp_path / "mrf", *QUICK)
    assert code == 2
    assert "holds an MRF already: --overwrite replaces it" in text
    again = type_in("fit", *options, "-o", tmp_path / "mrf", *QUICK, "--overwrite")
    assert f"Replaced {tmp_path / 'mrf'} (nothing)." in again[1]
    code, text = type_in("refine", tmp_path / "mrf", *options[:4], "-o", tmp_path / "out")
    assert code == 0, text
    assert "4 refined" in text


def test_two_lines_of_80_columns_suffice_for_a_choice(capsys):
    choice = Choice("distance", False, 1.4, False), Choice("gaussian", False, 1.0, True)
    trials = tuple(Trial(each, 1600, 0.7808, 0.772, 0.7671, (0.7999, 0.8161, -0.8095)) for each in choice)
    search = SearchResult(choice[0], 1600, [], trials, (), "settled")
    report = FitReport(MeanField(3, window=3), "nothing", VOC, {}, (), FitSettings(), "", search=search)
    Console(width=80).print(command._trials_table(report))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split("  ")[0] for line in lines[-4:]] == [
        *("distance, no gate,", "temperature 1.4", "gaussian, no gate,", "label scaling")
    ]
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize(("minutes", "words"), [(1, "1 minute"), (2.5, "2.5 minutes")])
def test_one_minute_is_no_minutes(minutes, words):
    search = SearchResult(Choice(), 100, [], (), (), "budget")
    scores = {"nothing": SimpleNamespace(miou=0.5, images=2)}
    report = FitReport(MeanField(3, window=3), "nothing", VOC, scores, (), FitSettings(minutes=minutes), "")
    assert f"still changing after {words}:" in replace(report, search=search).verdict
    short = replace(search, untried=(Choice("gaussian"),))
    assert replace(report, search=short).verdict.endswith(
        f"The {words} did not suffice to try all: more may gain. Not tried: gaussian, no gate."
    )


def test_missing_masks_give_one_sentence(options, tmp_path):
    code, text = type_in("fit", *options[:5], tmp_path / "nowhere", "-o", tmp_path / "mrf")
    assert code == 2
    assert "nowhere" in text
    assert len(text.strip().splitlines()) == 1


def test_an_unknown_kernel_is_named(options, tmp_path):
    code, text = type_in("fit", *options, "-o", tmp_path / "mrf", "--kernel", "magic")
    assert code == 2
    assert "kernel='magic'" in text


def test_pipes_are_one_sentence(options, tmp_path, pipe):
    for folder, ending, kind in (("masks", "png", "an image"), ("predictions", "npy", "an array")):
        (tmp_path / folder / "3.png").unlink()
        pipe(tmp_path / folder / f"3.{ending}")
        code, text = type_in("fit", *options, "-o", tmp_path / "mrf", *QUICK)
        assert code == 2
        assert f"3.{ending} cannot be read as {kind} (it is no regular file)" in text
        assert len(text.strip().splitlines()) == 1


def test_ctrl_c_is_a_sentence(options, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("deepmrf.refine.fit.fit", interrupted)
    code, text = type_in("fit", *options, "-o", tmp_path / "mrf")
    assert (code, text) == (130, "Interrupted: nothing was written.\n")
    assert not (tmp_path / "mrf").exists()
