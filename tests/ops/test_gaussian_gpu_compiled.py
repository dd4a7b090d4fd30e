"""The Gaussian kernel's programs for a GPU never go on while their products still read registers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def test_every_product_is_finished_before_its_registers_are_written_again(tmp_path: Path) -> None:
    # Where nothing uses the sum of a product before the next row, Triton lets it run on, though that row goes into the
    # registers which the product reads. Products are late where other programs keep the matrix units busy.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.compile_for_hopper"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if "ptxas" in done.stderr:
        pytest.skip("this Triton brings no assembler")
    assert done.returncode == 0, done.stderr
    waits = {line.split()[0]: [int(number) for number in line.split()[1:]] for line in done.stdout.splitlines()}
    assert set(waits) == {"forward", "backward", "feature_pull"}
    for name, numbers in waits.items():
        assert numbers, f"{name} has no product on the matrix units"
        assert set(numbers) == {0}, f"{name}: products that may still run behind each wait: {numbers}"
