"""How a program with deepmrf fares beside another one: images per second of one alone, and of two at once.

    python benchmarks/beside.py                # `animals` on 512 x 512 pixels, 30 images each
    python benchmarks/beside.py --images 60

Each program is a plain one: it loads the model and calls it, with no settings in its environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

PROGRAM = """
import sys, time
import numpy as np
import deepmrf
from skimage import data
segment, image = deepmrf.load("animals", device="cpu"), np.ascontiguousarray(data.astronaut())
for _ in range(3):
    segment(image)
start = time.perf_counter()
for _ in range(int(sys.argv[1])):
    segment(image)
print(int(sys.argv[1]) / (time.perf_counter() - start))
"""


def run(programs: int, images: int) -> float:
    """Images per second of so many programs at once, together."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "MALLOC_"))}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(images)]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(programs)]
    return sum(float(process.communicate()[0]) for process in started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=30, help="images of each program")
    images = parser.parse_args().images
    alone, together = run(1, images), run(2, images)
    print(f"one program {alone:.1f} images/s, two at once {together:.1f} together: {together / alone:.0%}")


if __name__ == "__main__":
    main()
