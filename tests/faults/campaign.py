"""What all parts of the campaign share: running commands, judging how they end, and the table."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

SECONDS_PER_PROCESS = 600
"""A process that runs longer counts as one that hangs."""


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
    work: Callable[[], object],
    kill_after: float | None = None,
    limits: Mapping[int, int] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Do work in a forked process, which has PyTorch imported; send SIGKILL after so many seconds.

    limits: of resources, by their numbers.
    """
    start, timed_out, text = time.monotonic(), False, b""
    source, sink = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if not process:
        _work(work, sink, limits or {}, environment or {})
    os.close(sink)
    os.set_blocking(source, False)
    while not (ended := os.wait4(process, os.WNOHANG))[0]:
        with suppress(BlockingIOError):
            text += os.read(source, 1 << 16)
        elapsed = time.monotonic() - start
        timed_out = elapsed > SECONDS_PER_PROCESS
        if timed_out or (kill_after is not None and elapsed > kill_after):
            os.kill(process, signal.SIGKILL)
            ended = os.wait4(process, 0)
            break
        time.sleep(0.005)
    with suppress(BlockingIOError), os.fdopen(source, "rb", buffering=0) as rest:
        text += rest.read() or b""
    code = None if timed_out else os.waitstatus_to_exitcode(ended[1])
    return Outcome(code, text.decode(errors="replace"), ended[2].ru_maxrss / 1024, time.monotonic() - start)


def _work(work: Callable[[], object], output: int, limits: Mapping[int, int], environment: Mapping[str, str]) -> None:
    """Do work as a process of its own, and end it."""
    code = 3
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.environ.update({"COLUMNS": "300", "TERM": "dumb", **environment})
        for number, most in limits.items():
            resource.setrlimit(number, (most, most))
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # whatever happens: this process must not go on with the campaign


def deepmrf(*words: object, **options: Any) -> Outcome:
    """Run a command as a user types it."""
    from deepmrf.cli import app

    return run(lambda: app([str(word) for word in words]), **options)


def call(function: Callable[..., Any], *arguments: object, **options: Any) -> tuple[Any, Outcome]:
    """Call a function in a process of its own; its result is None if that died."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result"
        outcome = run(lambda: path.write_text(json.dumps(function(*arguments))), **options)
        return (json.loads(path.read_text()) if outcome.code == 0 else None), outcome


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

    def add_all(self, failures: list[str] | None, outcome: Outcome, cases: int) -> None:
        """Count cases that one process went through, with a sentence for each that failed."""
        self.add("the process", outcome.problem(0), outcome, cases)
        for failure in failures or []:
            self.add("case", failure, cases=0)


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
