"""What all parts of the campaign share: running commands, judging how they end, and the table."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

SECONDS_PER_PROCESS = 600
"""A process that runs longer counts as one that hangs."""
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    code: int | None
    """Its exit code, negative after a signal; None if it was stopped for its time."""
    text: str
    megabytes: float
    """The most memory that it had."""
    seconds: float

    def problem(self, *codes: int) -> str:
        """Why this is a failure, where these exit codes are right; "" if it is none."""
        if self.code is None:
            return f"hangs: more than {SECONDS_PER_PROCESS} s"
        if "Traceback (most recent call last)" in self.text:
            return f"traceback: {self.text.strip().splitlines()[-1]}"
        return "" if self.code in codes else f"exit code {self.code}: {self.text.strip()[-200:]}"


def run(
    words: Sequence[object],
    kill_after: float | None = None,
    limits: Mapping[int, int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a process; send SIGKILL after so many seconds; limits: of resources, by their numbers."""

    def restrict() -> None:
        for number, most in (limits or {}).items():
            resource.setrlimit(number, (most, most))

    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=restrict,
            env={**os.environ, "COLUMNS": "300", "TERM": "dumb", "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        timed_out = False
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            elapsed = time.monotonic() - start
            timed_out = elapsed > SECONDS_PER_PROCESS
            if timed_out or (kill_after is not None and elapsed > kill_after):
                process.kill()
                ended = os.wait4(process.pid, 0)
                break
            time.sleep(0.005)
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        output.seek(0)
        text = output.read().decode(errors="replace")
    code = None if timed_out else process.returncode
    return Outcome(code, text, ended[2].ru_maxrss / 1024, time.monotonic() - start)


def deepmrf(*words: object, **options: Any) -> Outcome:
    """Run a command as a user types it."""
    return run([sys.executable, "-m", "deepmrf", *words], **options)


def call(module: str, function: str, *arguments: object, **options: Any) -> tuple[Any, Outcome]:
    """Call a function of a module of this folder in a process of its own; its result is None if that died."""
    code = (
        f"import json, sys; sys.path.insert(0, {str(FOLDER)!r}); import {module}; "
        f"print('\\n' + json.dumps({module}.{function}(*json.loads(sys.argv[1]))))"
    )
    outcome = run([sys.executable, "-c", code, json.dumps(arguments, default=str)], **options)
    return (json.loads(outcome.text.splitlines()[-1]) if outcome.code == 0 else None), outcome


def contents(folder: Path, *patterns: str) -> dict[str, str]:
    """Digests of the files below a folder whose names match one of the patterns."""
    paths = {path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


@dataclass
class Part:
    """One row of the table."""

    cases: int = 0
    failures: list[str] = field(default_factory=list)
    megabytes: float = 0.0
    seconds: float = 0.0

    def add(self, name: str, problem: str, outcome: Outcome | None = None, cases: int = 1) -> None:
        """Count cases, which failed if there is a problem."""
        self.cases += cases
        if problem:
            self.failures.append(f"{name}: {problem}")
            print(f"  {self.failures[-1]}", file=sys.stderr, flush=True)
        if outcome is not None:
            self.megabytes = max(self.megabytes, outcome.megabytes)


def measure(parts: Mapping[str, Callable[[Part], None]]) -> bool:
    """Run all parts, print the table as Markdown and the failures below it; return whether there are none."""
    rows = {}
    for name, function in parts.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows[name], start = Part(), time.monotonic()
        try:
            function(rows[name])
        except Exception as error:
            rows[name].add("the campaign itself", f"{type(error).__name__}: {error}")
        rows[name].seconds = time.monotonic() - start
    print("| part | cases | failures | largest memory, MB | seconds |\n|---|---|---|---|---|")
    for name, part in rows.items():
        print(f"| {name} | {part.cases:,} | {len(part.failures)} | {part.megabytes:,.0f} | {part.seconds:.0f} |")
    cases, failures = sum(part.cases for part in rows.values()), [f for part in rows.values() for f in part.failures]
    print(f"| all | {cases:,} | {len(failures)} | {max(part.megabytes for part in rows.values()):,.0f} | |\n")
    print("\n".join(f"- {failure}" for failure in failures) or "No failures.")
    return not failures
