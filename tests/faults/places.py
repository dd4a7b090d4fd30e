"""Places that cannot be written or read: full disks, read-only folders, no home, pipes and devices."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from campaign import Part, deepmrf, run
from kills import commands, compare, reference

READ_ONLY = Path("/proc/sys/deepmrf")
"""Nobody can make this folder, not even root."""
FILE_BYTES = (0, 3000)
"""Sizes beyond which no file grows."""


def full_disks(part: Part, work: Path) -> None:
    """No file grows beyond a few bytes. What is there then is right, and the next run completes it."""
    for name, command in commands(work).items():
        expected, _ = reference(name, command, work, part)
        for most in FILE_BYTES:
            out = work / "full" / f"{name}{most}"
            outcome = command.run(out, limits={resource.RLIMIT_FSIZE: most})
            there = command.results(out)
            wrong = [file for file in there if ".part" not in file and there[file] != expected.get(file)]
            problem = outcome.problem(0, 1, 2) or (f"damaged: {wrong[:3]}" if wrong else "")
            if outcome.code == 0:  # all files are small
                problem = compare(expected, there, out)
            part.add(f"{name}, {most} bytes", problem, outcome)
            again = command.run(out)
            problem = again.problem(0) or compare(expected, command.results(out), out)
            part.add(f"{name}, room again after {most} bytes", problem, again)


def read_only_places(part: Part, work: Path) -> None:
    """Results cannot be written: one sentence. Kernels and caches cannot: all works."""
    evaluate = ("evaluate", work / "model", "--data", "synthetic:24x32", "-o")
    for name, command in commands(work).items():
        outcome = command.run(READ_ONLY)
        part.add(f"{name} into {READ_ONLY}", outcome.problem(1, 2), outcome)
    outcome = deepmrf(*evaluate, READ_ONLY)
    part.add(f"evaluate into {READ_ONLY}", outcome.problem(1, 2), outcome)
    command = commands(work)["predict"]
    expected, _ = reference("predict", command, work, part)
    environment = {"HOME": "/nonexistent", "XDG_CACHE_HOME": str(READ_ONLY), "NUMBA_CACHE_DIR": str(READ_ONLY)}
    words = [str(word).replace("OUT", str(work / "homeless")) for word in command.words]
    process = [sys.executable, "-m", "deepmrf", *words]  # a new one: caches are chosen by imports
    outcome = run(lambda: sys.exit(subprocess.run(process, check=False).returncode), environment=environment)
    problem = outcome.problem(0) or compare(expected, command.results(work / "homeless"), work / "homeless")
    part.add("predict without a home or a cache", problem, outcome)


def pipes_and_devices(part: Part, work: Path) -> None:
    """Among the images, and as --json and --coco."""
    folder = work / "special"
    folder.mkdir()
    os.mkfifo(folder / "a.png")
    os.mkfifo(folder / "b_overlay.jpg")
    (folder / "c.jpg").symlink_to("/dev/zero")
    (folder / "d.jpg").symlink_to(work / "photos" / "0.png")
    outcome = deepmrf("predict", folder, "-o", work / "special-out", "-m", work / "model")
    part.add("pipes among images", outcome.problem(1), outcome)
    photo = work / "photos" / "0.png"
    for target, code in (("/dev/null", 0), ("/dev/stdout", 0), ("/dev/full", 2), (folder, 2), (folder / "a" / "b", 0)):
        for option in ("--json", "--coco"):
            outcome = deepmrf("predict", photo, "-o", work / "one", "-m", work / "model", option, target)
            part.add(f"{option} {target}", outcome.problem(code), outcome)
    still = all(Path(name).is_char_device() for name in ("/dev/null", "/dev/full"))
    part.add("devices", "" if still else "/dev/null or /dev/full was replaced")
