import io
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import camvid, check, synthetic
from deepmrf.data.check import NO_MASKS
from deepmrf.data.dataset import Dataset


def text(report, **options):
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=200)
    console.print(report.table(**options))
    return console.file.getvalue()


def test_a_good_dataset():
    report = check("synthetic:2x16x24", "val")
    assert report.ok
    assert (report.images, report.labelled, report.sequences) == (100, 100, 50)
    assert report.sizes == {(16, 24): 100}
    assert sum(report.frequencies.values()) == pytest.approx(1)
    assert "none" in text(report)
    assert check(synthetic((16, 16), count=1)).images == 1


def test_a_broken_tree_is_reported_in_full(tmp_path, pair, save):
    def frame(name, ids=(0, 1, 1, 11)):
        pair(tmp_path / "train" / f"{name}.png", tmp_path / "trainannot" / f"{name}.png", ids)

    for name in ("s_1", "s_2", "s_3", "s_4", "s_5"):
        frame(name)
    frame("s_6", (0, 77))
    (tmp_path / "trainannot" / "s_1.png").unlink()
    (tmp_path / "train" / "s_2.png").write_bytes(b"broken")
    (tmp_path / "trainannot" / "s_3.png").write_bytes(b"broken")
    save(tmp_path / "trainannot" / "s_4.png", np.zeros((4, 5)))
    save(tmp_path / "trainannot" / "s_9.png", np.zeros((4, 6)))
    seen = []
    report = check(camvid(tmp_path, "train"), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)
    assert [path.name for path in report.missing] == ["s_1.png"]
    assert [path.name for path in report.unpaired] == ["s_9.png"]
    assert [path.parent.name + "/" + path.name for path, _ in report.unreadable] == [
        "train/s_2.png",
        "trainannot/s_3.png",
    ]
    assert [path.name for path, _ in report.wrong_sizes] == ["s_4.png"]
    assert [path.name for path, _ in report.wrong_ids] == ["s_6.png"]
    assert not report.ok
    assert len(report.problems) == 6
    # Two masks of (0, 1, 1, void) and one of 20 zeros can be counted.
    assert report.frequencies["sky"] == pytest.approx((12 + 20) / 56)
    assert report.void == pytest.approx(12 / 68)
    shown = text(report, max_problems=3)
    assert "never occurs" in shown
    assert "and 3 more" in shown


def test_a_dataset_that_cannot_be_opened(tmp_path):
    report = check(f"camvid:{tmp_path}/[bold]nowhere")
    [problem] = report.problems
    assert problem.startswith(f"{tmp_path}/[bold]nowhere does not exist; give the folder of camvid as camvid:PATH, or ")
    assert problem.endswith("deepmrf data get camvid")
    assert "nowhere does not exist" in text(report)
    assert "not known; give one of camvid:PATH" in check("cam").problems[0]


def test_images_without_any_mask_are_a_problem_but_for_a_test_split():
    dataset = synthetic((16, 16), count=2)
    bare = Dataset([replace(item, mask=None) for item in dataset], dataset.labels)
    report = check(bare)
    assert NO_MASKS in report.problems
    assert NO_MASKS in text(report)
    assert NO_MASKS not in check(bare, "test").problems


def test_the_command_checks_train_and_val(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["data", "check", "synthetic", "24x32"])
    assert result.exit_code == 0, result.output
    assert "synthetic:24x32 train" in result.output
    assert "synthetic:24x32 val" in result.output
