"""The command as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

import deepmrf
from deepmrf.bench import peers, suite
from deepmrf.cli import app

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
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def check_results(path):
    """results.json has what it takes to judge and repeat a run."""
    found = json.loads(path.read_text())
    assert {"schema", "date", "finished", "command", "commit", "hardware", "versions", "settings"} <= set(found)
    assert {"python", "torch", "numpy", "numba", "triton", "deepmrf", "pydensecrf2"} <= set(found["versions"])
    assert {"cpu", "cores", "memory_bytes", "gpu"} <= set(found["hardware"])
    assert found["finished"] is True
    assert found["settings"]["seed"] == 0
    for row in found["rows"]:
        for key, kind in ROW.items():
            assert isinstance(row[key], kind), (key, row[key])
        assert row["skipped"] or (row["seconds"] > 0 and len(row["repeats_s"]) >= 1)
    assert {"table", "pixels", "labels", "window"} <= {row["axis"] for row in found["rows"]}
    return found


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return type_in("bench", "--quick", "--threads", "1", "--out", str(folder)), folder


def test_bench_prints_ours_beside_the_peers(quick_run):
    result, _ = quick_run
    assert result.exit_code == 0, result.output
    text = plain(result.stdout)
    for name in ("b12 distance", "b12-b15", "dense_crf", suite.DIRECT_LOOP, "windowed CRF", "box sums", "pydensecrf2"):
        assert name in text
    assert "x its forward pass" in text
    assert "extrapolated from" in text


def test_bench_writes_json_and_plot(quick_run):
    _, folder = quick_run
    found = check_results(folder / "results.json")
    measured = [row for row in found["rows"] if row["memory_over_q"] is not None]
    assert sys.platform != "linux" or measured
    if peers.pydensecrf_installed():
        assert found["baseline"] == suite.DENSE_CRF
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
    result = type_in("bench", *words)
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_without_pydensecrf_the_table_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "pydensecrf_installed", lambda: False)
    monkeypatch.setattr(suite, "_ours", lambda settings: [])
    result = type_in("bench", "--quick", "--no-scaling", "--no-memory", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "pip install pydensecrf2" in plain(result.stdout)


def test_interrupted_it_prints_and_writes_what_is_there(tmp_path, monkeypatch):
    def interrupted(results, notify):
        results.rows[0].repeats_s.append(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr("deepmrf.bench.run", interrupted)
    result = type_in("bench", "--quick", "--out", str(tmp_path))
    assert result.exit_code == 130
    assert "Interrupted" in result.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["finished"], len(found["rows"])) == (False, 1)


def _commands(group, path=()):
    for name, command in group.commands.items():
        yield from _commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


def test_no_word_of_the_help_is_taken_for_markup():
    for path, command in _commands(typer.main.get_command(app)):
        for option in command.params:
            text = getattr(option, "help", None) or ""
            assert Text.from_markup(text).plain == text, (path, option.name)


def test_help_teaches_with_examples():
    assert "deepmrf predict" in plain(type_in("--help").output)
    text = plain(type_in("bench", "--help").output)
    assert "Examples" in text
    assert "deepmrf bench --device cuda" in text


def test_version():
    assert type_in("--version").output.strip() == f"deepmrf {deepmrf.__version__}"


def test_importing_the_library_does_not_import_the_command():
    code = (
        "import sys, deepmrf; print([m for m in ('typer', 'rich', 'matplotlib', 'deepmrf.bench') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FAULTS = """
import resource
import deepmrf.cli.process
import torch
def use():
    torch.empty(22 << 20, dtype=torch.uint8).fill_(1)
for _ in range(10): use()  # glibc reuses an aligned block only once neighbours have joined it
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux's malloc")
def test_the_command_keeps_freed_memory_unless_told_otherwise():
    """Ten tensors of 22 MB, one after the other, are 56,000 pages if each is a new one."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    faults = []
    for chosen in ({}, {"MALLOC_MMAP_THRESHOLD_": "65536"}):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS], env={**plain, **chosen}, capture_output=True, text=True, check=True
        )
        faults.append(int(done.stdout))
    kept, returned = faults
    if returned > 20_000:  # a C library that heeds such settings
        assert kept < returned / 10


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_while_pytorch_is_loading(tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(30)\n")
    words = [sys.executable, "-c", "from deepmrf.cli import process; process.load_torch()"]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    told = {"env": {**os.environ, "PYTHONPATH": paths}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **told) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert not errors
