"""What the pixels on a trajectory add to b12, on the CPU: other frames of q, sampled along the flow.

    t[v, j] += g * sum over dt of w_dt * r_dt(j) * q_dt[v, j + f_dt(j)],     g = q[v, j] with the gate, else 1

q_dt is the frame dt frames away, f_dt the flow to it and r_dt its reliability, 1 or 0. Between pixels q is interpolated
bilinearly. The maps of other frames are read where they lie: no stack of warped maps is written.

Where gradients are needed or numba is missing, layers/linking.py computes the same in PyTorch.
Shapes: B batch, L labels, T frames, N frames whose t is computed, H, W.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from deepmrf.ops.jobs import run_jobs
from deepmrf.ops.registry import forced, installed, unobserved

ROWS_PER_JOB = 32


class Way(NamedTuple):
    """The links from N frames to those dt frames away."""

    weight: Tensor
    """w_dt, a number."""
    flow: Tensor
    """(B, 2, N, H, W): x and y in pixels."""
    reliable: Tensor
    """(B, 1, N, H, W) of bool."""


def add_linked_reference(t: Tensor, q: Tensor, ways: Mapping[int, Way], first: int, gate: bool) -> Tensor:
    """The equation above, pixel by pixel. For readers and tests only; arguments as those of `add_linked`."""
    result = t.clone()
    batch, _, frames, height, width = q.shape
    for (dt, way), b, n in itertools.product(ways.items(), range(batch), range(len(t) // batch)):
        if not 0 <= first + n + dt < frames:
            continue
        for y, x in itertools.product(range(height), range(width)):
            if not way.reliable[b, 0, n, y, x]:
                continue
            at_x, at_y = ((z + float(way.flow[b, k, n, y, x])) for k, z in ((0, x), (1, y)))
            at_x, at_y = min(max(at_x, 0), width - 1), min(max(at_y, 0), height - 1)
            left, top = int(at_x), int(at_y)
            right, bottom = min(left + 1, width - 1), min(top + 1, height - 1)
            there = q[b, :, first + n + dt]
            upper = (1 - at_x + left) * there[:, top, left] + (at_x - left) * there[:, top, right]
            lower = (1 - at_x + left) * there[:, bottom, left] + (at_x - left) * there[:, bottom, right]
            added = way.weight * ((1 - at_y + top) * upper + (at_y - top) * lower)
            result[b * (len(t) // batch) + n, :, y, x] += added * q[b, :, first + n, y, x] if gate else added
    return result


def suits(t: Tensor, q: Tensor, ways: Mapping[int, Way]) -> bool:
    """Can `add_linked` compute this? Real maps of one precision on the CPU, no gradients, and numba."""
    weights = [way.weight for way in ways.values()]
    return (
        installed("numba")
        and forced() in (None, "numba")
        and t.dtype == q.dtype
        and q.dtype in (torch.float32, torch.float64)
        and unobserved(t, q, *weights)
    )


def add_linked(t: Tensor, q: Tensor, ways: Mapping[int, Way], first: int, gate: bool) -> Tensor:
    """Add the sum above to t (B * N, L, H, W) of the frames `first` and after, in place. q (B, L, T, H, W)."""
    from deepmrf.ops.cpu_linked import add_rows

    batch, _, frames, height, _ = q.shape
    count = len(t) // batch
    maps, out = q.contiguous().numpy(), t.numpy()
    steps = [
        (dt, float(way.weight), way.flow.to(q.dtype).contiguous().numpy(), way.reliable.contiguous().numpy())
        for dt, way in ways.items()
    ]
    parts = list(itertools.product(range(batch), range(count), range(0, height, ROWS_PER_JOB)))

    def job(index: int) -> None:
        b, n, top = parts[index]
        frame = first + n
        for dt, weight, flow, reliable in steps:
            if 0 <= frame + dt < frames:
                bottom = min(top + ROWS_PER_JOB, height)
                add_rows(
                    out[b * count + n], maps[b], flow[b], reliable[b], weight, gate, n, frame, frame + dt, top, bottom
                )

    run_jobs(job, len(parts))
    return t
