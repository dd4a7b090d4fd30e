"""`deepmrf bench`: a door to benchmarks/bench in a checkout, which runs as a plain program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

import deepmrf
from deepmrf.cli.console import fail

BENCH_HELP = "Measure every layer in time and memory, beside its peers; in a checkout."
SUITE = Path("benchmarks") / "bench" / "__main__.py"


def bench_command(context: typer.Context) -> None:
    """Run benchmarks/bench of the checkout that this package, or the working directory, belongs to."""
    candidates = [Path(deepmrf.__file__).resolve().parents[2], Path.cwd()]
    checkout = next((folder for folder in candidates if (folder / SUITE).is_file()), None)
    if checkout is None:
        fail("The benchmarks are not part of the installed package: run deepmrf bench inside a checkout of deepmrf.")
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bench", *context.args], env=environment)
    while True:
        try:
            raise typer.Exit(process.wait())
        except KeyboardInterrupt:  # the benchmark received it too, and prints what it has
            continue
