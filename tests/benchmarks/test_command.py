"""The benchmark as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks.bench import __main__ as command
from benchmarks.bench import peers, suite

ROW = {
    "name": str,
    "kind": str,
    "size": int,
    "labels": int,
    "batch": int,
    "window": int,
    "peer": bool,
    "device": str,
    "dtype": str,
    "seed": int,
    "axis": str,
    "repeats_s": list,
    "extrapolated_by": float,
}


def type_in(*words):
    return CliRunner().invoke(command.app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def check_results(path):
    """results.json has what it takes to judge and repeat a run."""
    content = json.loads(path.read_text())
    assert {"schema", "date", "finished", "command", "commit", "hardware", "versions", "settings"} <= set(content)
    assert {"python", "torch", "numpy", "numba", "triton", "deepmrf", "pydensecrf2"} <= set(content["versions"])
    assert {"cpu", "cores", "memory_bytes", "gpu"} <= set(content["hardware"])
    assert content["finished"] is True
    assert content["settings"]["seed"] == 0
    for row in content["rows"]:
        for key, kind in ROW.items():
            assert isinstance(row[key], kind), (key, row[key])
        assert row["skipped"] or (row["seconds"] > 0 and len(row["repeats_s"]) >= 1)
    assert {"table", "pixels", "labels", "window"} <= {row["axis"] for row in content["rows"]}
    return content


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return type_in("--quick", "--threads", "1", "--out", str(folder)), folder


def test_bench_prints_ours_beside_the_peers(quick_run):
    result, _ = quick_run
    assert result.exit_code == 0, result.output
    text = plain(result.stdout)
    for name in (
        "b12 distance",
        "b12-b15",
        "dense_crf",
        "all pairs",
        suite.DIRECT_LOOP,
        "windowed CRF",
        "box sums",
        "pydensecrf2",
    ):
        assert name in text
    assert "x its forward pass" in text
    assert "extrapolated from" in text


def test_bench_writes_json_and_plot(quick_run):
    _, folder = quick_run
    content = check_results(folder / "results.json")
    measured = [row for row in content["rows"] if row["memory_over_q"] is not None]
    assert sys.platform != "linux" or measured
    if peers.pydensecrf_installed():
        assert content["baseline"] == suite.DENSE_CRF
    pytest.importorskip("matplotlib")
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bench_runs_as_a_module(tmp_path):
    words = ["bench", "--quick", "--threads", "1", "--no-memory", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "deepmrf", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "box sums in plain PyTorch" in done.stdout
    check_results(tmp_path / "results.json")


@pytest.mark.parametrize(
    "words, says",
    [
        (("--device", "tpu"), "device='tpu' is unknown: choose 'cpu' or 'cuda'."),
        (("--dtype", "int8"), "dtype='int8' is unknown"),
        (("--labels", "1"), "labels=1 is too small"),
    ],
)
def test_a_wrong_option_gets_one_sentence(words, says):
    result = type_in(*words)
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_without_pydensecrf_the_table_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "pydensecrf_installed", lambda: False)
    monkeypatch.setattr(suite, "_ours", lambda settings: [])
    result = type_in("--quick", "--no-scaling", "--no-memory", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "pip install pydensecrf2" in plain(result.stdout)


def test_interrupted_it_prints_and_writes_what_is_there(tmp_path, monkeypatch):
    def interrupted(results, notify):
        results.rows[0].repeats_s.append(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    result = type_in("--quick", "--out", str(tmp_path))
    assert result.exit_code == 130
    assert "Interrupted" in result.output
    content = json.loads((tmp_path / "results.json").read_text())
    assert (content["finished"], len(content["rows"])) == (False, 1)
