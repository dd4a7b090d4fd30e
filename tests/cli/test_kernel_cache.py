"""`deepmrf predict` where compiled kernels cannot be kept: a read-only package, no home, a full or damaged cache.

Root may write everywhere, so a file lies where a folder should be, and a limit on the size of files is the full disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import deepmrf
from deepmrf.data.labels import LabelSet
from deepmrf.models.parsing_network import DeepParsingNetwork, write_model

pytest.importorskip("numba")
pytest.importorskip("resource")

COMMANDS = """
import os, resource, signal, sys
from pathlib import Path
import numba
import deepmrf.predict.pipeline  # once for all processes below
from deepmrf.cli import app

def predict(out, cache, largest_file=resource.RLIM_INFINITY):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    numba.core.config.CACHE_DIR = cache  # the variable NUMBA_CACHE_DIR
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    assert "deepmrf.ops.distance.cpu_kernels" not in sys.modules  # they are compiled in this process
    app(["predict", "images", "--model", "model", "--device", "cpu", "-o", out])

codes = [predict("nowhere", "/dev/null/x"), predict("full", "cache", 20_000)]
indices = [*Path("cache").rglob("*.nbi")]
assert indices  # the cache was used
for path in indices:
    path.write_bytes(b"damaged")
codes.append(predict("damaged", "cache"))
assert any(path.read_bytes() != b"damaged" for path in indices)  # and written again
print(codes)
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the package in which nothing can be written beside the kernels."""
    copy = tmp_path / "src" / "deepmrf"
    shutil.copytree(Path(deepmrf.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "pretrained"))
    for folder in (copy / "ops", *(copy / "ops").iterdir()):
        if folder.is_dir():
            (folder / "__pycache__").write_text("a file where a folder should be")
    return copy.parent


def test_predict_works_where_kernels_cannot_be_kept(package, tmp_path):
    settings = {"kernel": "distance", "window": 3, "contexts": 0}
    write_model(DeepParsingNetwork.build("fast", LabelSet(("a", "b")), {"width": 8}, settings), tmp_path / "model")
    (tmp_path / "images").mkdir()
    for number in range(2):  # for one, nothing would be compiled
        picture = np.random.default_rng(number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / "images" / f"{number}.png")
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    env |= dict.fromkeys(("HOME", "XDG_CACHE_HOME"), "/dev/null/x")
    env |= {"PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", COMMANDS], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[0, 0, 0]", result.stderr + result.stdout
    for number in range(2):
        maps = [(tmp_path / out / f"{number}.png").read_bytes() for out in ("nowhere", "full", "damaged")]
        assert len(set(maps)) == 1
