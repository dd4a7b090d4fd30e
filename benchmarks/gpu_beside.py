"""Does the Gaussian kernel give the same sums on a GPU that other programs use at the same time?

    python benchmarks/gpu_beside.py                    # 1,000 steps, forward and backward, beside three other programs
    nvidia-cuda-mps-control -d; python benchmarks/gpu_beside.py      # all programs at once, instead of in turns

The sums have a fixed order, so every step must give what the first one gave before the others began, bit for bit. The
other programs do nothing but convolutions on the matrix units. Exits with 1 if a step differs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event

import torch
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from deepmrf.layers import TriplePenalty

LABELS, HEIGHT, WIDTH, WINDOW = 19, 256, 512, 25
CHANNELS = 256
START_SECONDS = 10.0
"""What the other programs get to begin."""


def convolve(device: str, stop: Event) -> None:
    """Keep the matrix units busy."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = 128 if device == "cuda" else 16
    maps = torch.randn(4, CHANNELS, size, size, device=device, dtype=dtype)
    filters = torch.randn(CHANNELS, CHANNELS, 3, 3, device=device, dtype=dtype)
    while not stop.is_set():
        for _ in range(20):
            functional.conv2d(maps, filters, padding=1)
        if device == "cuda":
            torch.cuda.synchronize()


def step(layer: TriplePenalty, q: Tensor, image: Tensor, slope: Tensor) -> list[Tensor]:
    """The penalty, and the gradients to q and to the widths."""
    q = q.detach().requires_grad_()
    t = layer(q, image)
    return [t.detach(), *torch.autograd.grad(t, [q, layer.log_colour_width, layer.log_position_width], slope)]


def differs(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Is any number another one, or NaN?"""
    return not all(torch.equal(result, want) for result, want in zip(results, wanted, strict=True))


def main() -> None:
    """Compute beside the others, and count the steps that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--programs", type=int, default=3, help="other programs on the GPU")
    parser.add_argument("--size", type=int, nargs=2, default=[HEIGHT, WIDTH])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try this script")
    given = parser.parse_args()
    torch.manual_seed(0)
    shape = (1, LABELS, *given.size)
    q, slope = torch.randn(shape).softmax(1).to(given.device), torch.rand(shape).to(given.device)
    image = torch.rand(1, 3, *given.size).to(given.device)
    layer = TriplePenalty(WINDOW, kernel="gaussian", gate=False, normalize=True).to(given.device)
    wanted = step(layer, q, image, slope)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    others = [context.Process(target=convolve, args=(given.device, stop)) for _ in range(given.programs)]
    for other in others:
        other.start()
    time.sleep(START_SECONDS if given.device == "cuda" else 0)
    try:
        results = (step(layer, q, image, slope) for _ in range(given.steps))
        wrong = sum(differs(result, wanted) for result in track(results, "steps", given.steps))
    finally:
        stop.set()
        for other in others:
            other.join()
    print(f"{wrong} of {given.steps} steps differ from the first, beside {given.programs} other programs.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
