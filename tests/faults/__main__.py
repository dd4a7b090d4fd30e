"""A campaign of faults, and its table: `make faults`, or python tests/faults --help. It takes some minutes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from campaign import call, measure
from inputs import damaged_images, damaged_models, damaged_recipes
from kills import commands, killed_commands
from load import make_inputs, memory, threads_and_forks
from places import full_disks, pipes_and_devices, read_only_places


def main() -> int:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    counts = {"inputs": 300, "kills": 2, "threads": 4, "images": 300, "frames": 600}
    for name, count in counts.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"how many; {count} by default")
    parser.add_argument("--seed", type=int, default=0, help="of damage and of the moments of kills")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _, outcome = call(make_inputs, work, given.frames)
        if outcome.code:
            sys.exit(outcome.text)
        commands(work)  # writes the recipe
        parts = {
            "damaged images": partial(damaged_images, work=work, count=given.inputs, seed=given.seed),
            "damaged model folders": partial(damaged_models, work=work, count=given.inputs, seed=given.seed),
            "damaged recipes": partial(damaged_recipes, work=work, count=given.inputs, seed=given.seed),
            "SIGKILL": partial(killed_commands, work=work, count=given.kills, seed=given.seed),
            "full disk": partial(full_disks, work=work),
            "read-only places": partial(read_only_places, work=work),
            "pipes and devices": partial(pipes_and_devices, work=work),
            "threads and forks": partial(threads_and_forks, work=work, count=given.threads),
            "memory, images": partial(memory, work=work, kind="images", count=given.images),
            "memory, frames": partial(memory, work=work, kind="frames", count=given.frames),
        }
        return 0 if measure(parts) else 1


if __name__ == "__main__":
    sys.exit(main())
