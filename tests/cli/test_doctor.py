"""`deepmrf doctor`: it says what is there, what is missing and how to get it, and whether the core works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import deepmrf
from deepmrf.cli import app
from deepmrf.data.extras import EXTRAS
from deepmrf.ops import jobs
from deepmrf.predict import installation


def doctor(*options):
    return CliRunner().invoke(app, ["doctor", *options], env={"COLUMNS": "200"})


def test_it_says_what_is_there():
    result = doctor()
    assert result.exit_code == 0, result.output
    for text in (deepmrf.__version__, torch.__version__, "The core works", "compiled kernels, CPU", "bundled models"):
        assert text in result.output


def test_json_holds_the_same():
    values = json.loads(doctor("--json").stdout)
    assert values["works"] is True
    assert values["versions"]["torch"] == torch.__version__
    assert {*values["kernels"]} == {*values["devices"]} == {"cpu", "cuda"}
    assert {extra["name"] for extra in values["extras"]} == {*EXTRAS}
    assert {"animals", "camvid", "street"} <= {*values["models"]}


def test_a_missing_extra_comes_with_its_command_and_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    text = doctor().output
    line = next(line for line in text.splitlines() if "volumes lacks" in line)
    assert line.endswith("nibabel, for NIfTI volumes in deepmrf fit and deepmrf refine: pip install 'deepmrf[volumes]'")
    assert doctor().exit_code == 0  # the core works


def test_a_core_that_fails_is_exit_code_1(monkeypatch):
    def broken(*_, **__):
        raise OSError("the weights are gone")

    monkeypatch.setattr(installation, "load", broken)
    result = doctor()
    assert result.exit_code == 1
    assert "The core does not work: a bundled model failed (OSError: the weights are gone)" in result.output


def test_without_numba_the_kernels_are_plain_and_it_says_why(monkeypatch):
    monkeypatch.setattr(installation, "_version", lambda name: "")
    monkeypatch.setattr(jobs, "installed", lambda name: False)
    assert "plain PyTorch, since numba is not installed" in doctor().output


def test_a_numba_that_cannot_be_imported_is_reported(tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs NumPy 2.0 or less. Got 2.4.')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "deepmrf", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    says = "numba cannot be imported (Numba needs NumPy 2.0 or less. Got 2.4): predictions need it mended or removed"
    assert values["works"] is True
    assert values["kernels"]["cpu"] == says or not values["versions"]["numba"]
    assert "compiled kernels, CPU" not in [cache["name"] for cache in values["caches"]]


def test_the_look_compiles_nothing(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "deepmrf", "doctor"]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.skipif(not jobs.installed("numba"), reason="numba is not installed")
def test_the_cache_is_where_numba_is_told_to_write(tmp_path):
    code = "from deepmrf.ops.jobs import cache_folder; print(cache_folder())"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path)


def test_large_caches_are_not_counted_to_the_end(monkeypatch, tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.nbi").write_bytes(b"1234")
    monkeypatch.setattr(installation, "MAX_FILES_COUNTED", 3)
    cache = installation._cache("kernels", tmp_path)
    assert (cache.bytes, cache.complete, cache.writable) == (12, False, True)


def test_a_gpu_is_described(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=139 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert installation._gpus() == "NVIDIA H200, 139 GiB; NVIDIA H200, 139 GiB"
    monkeypatch.setattr(installation, "_version", lambda name: "3.2")
    assert installation._gpu_kernels().startswith("Triton")
    assert "compiled kernels, GPU" in [cache.name for cache in installation._caches()]
    monkeypatch.setattr(installation, "_version", lambda name: "")
    assert installation._gpu_kernels() == "plain PyTorch, since Triton is not installed: pip install triton"


def test_a_missing_gpu_comes_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(installation.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert "CPU build, although there is an NVIDIA driver" in installation._gpus()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "built for CUDA 12.8 but finds no GPU" in installation._gpus()
