"""The command as a user types it."""

from __future__ import annotations

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
from deepmrf import __main__ as program
from deepmrf.cli import app


def type_in(*words):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _commands(group, path=()):
    for name, command in group.commands.items():
        yield from _commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


def test_no_word_of_the_help_is_taken_for_markup():
    for path, command in _commands(typer.main.get_command(app)):
        for option in command.params:
            text = getattr(option, "help", None) or ""
            assert Text.from_markup(text).plain == text, (path, option.name)


def test_the_terminal_breaks_the_lines_of_the_help_and_no_colons_become_pictures():
    """:B: is a picture for rich, and Typer keeps line breaks of the source."""
    for path, command in _commands(typer.main.get_command(app)):
        text = command.help or ""
        assert all("\n" not in paragraph for paragraph in text.split("\n\n")), path
        assert Text.from_markup(text, emoji=True).plain == Text.from_markup(text, emoji=False).plain, path


def test_help_teaches_with_examples():
    assert "deepmrf predict" in plain(type_in("--help").output)
    for name in ("predict", "fit", "refine", "train", "evaluate", "calibrate", "export"):
        text = plain(type_in(name, "--help").output)
        assert "Example" in text
        assert f"deepmrf {name} " in text


def test_importing_the_command_changes_nothing_in_the_process():
    code = "import os, sys; before = dict(os.environ); import deepmrf.cli; "
    code += "print(dict(os.environ) == before, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_bench_is_a_door_to_the_benchmarks_of_a_checkout(monkeypatch, tmp_path):
    done = subprocess.run([sys.executable, "-m", "deepmrf", "bench", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "deepmrf bench --device cuda" in plain(done.stdout)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deepmrf, "__file__", str(tmp_path / "src" / "deepmrf" / "__init__.py"))
    result = type_in("bench", "--quick")
    assert result.exit_code == 2
    assert "run deepmrf bench inside a checkout" in result.output


def test_version():
    assert type_in("--version").output.strip() == f"deepmrf {deepmrf.__version__}"


def test_importing_the_library_does_not_import_the_command():
    code = "import sys, deepmrf; print([m for m in ('typer', 'rich', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


FAULTS = """
import resource
from deepmrf.cli import process
process.prepare()
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
    with_setting, without = faults
    if without > 20_000:  # a C library that heeds such settings
        assert with_setting < without / 10


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_while_pytorch_is_loading(tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(30)\n")
    started = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored in background jobs
    words = [sys.executable, "-c", f"{started}; from deepmrf.cli import process; process.prepare()"]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    options = {"env": {**os.environ, "PYTHONPATH": paths}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **options) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert not errors


def test_ctrl_c_before_and_after_a_command(monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    handlers = []

    def interrupted(**_):
        handlers.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    monkeypatch.setattr("deepmrf.cli.app", interrupted)
    try:
        with pytest.raises(SystemExit) as ended:
            program.main()
        handlers.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended.value.code == 130
    assert handlers == [handler, signal.SIG_IGN]  # while PyTorch ends, Ctrl-C changes nothing
