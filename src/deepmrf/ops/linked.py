"""Trajectories on the CPU: what the pixels on them add, where a flow is reliable, and where it leads next.

    out[v, j] += sum over dt of w_dt * r_dt(j) * q_dt[v, j + f_dt(j)]

q_dt is the frame dt frames away, f_dt the flow to it and r_dt its reliability, 1 or 0. Between pixels q is interpolated
bilinearly. The maps of other frames are read where they lie: no warped maps are written.

Where gradients are needed or numba is missing, PyTorch computes the same, in layers/linking.py and in flow.
Shapes: B frames whose maps are computed, L labels, H, W.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmrf.ops.jobs import run_jobs
from deepmrf.ops.registry import forced, installed, unobserved

ROWS_PER_JOB = 16


class Way(NamedTuple):
    """The links from B frames to those dt frames away."""

    weight: Tensor
    """w_dt, a number."""
    maps: Tensor
    """q_dt (B, L, H, W); torch.channels_last saves a copy."""
    flow: Tensor
    """f_dt (B, 2, H, W): x and y in pixels."""
    reliable: Tensor
    """r_dt (B, 1, H, W) of bool."""


def add_linked_reference(out: Tensor, ways: Sequence[Way]) -> Tensor:
    """The equation above, pixel by pixel. For readers and tests only; arguments as those of `add_linked`."""
    result = out.clone()
    images, _, height, width = out.shape
    for way, b, y, x in itertools.product(ways, range(images), range(height), range(width)):
        if not way.reliable[b, 0, y, x]:
            continue
        at_x, at_y = ((z + float(way.flow[b, k, y, x])) for k, z in ((0, x), (1, y)))
        at_x, at_y = min(max(at_x, 0), width - 1), min(max(at_y, 0), height - 1)
        left, top = int(at_x), int(at_y)
        right, bottom = min(left + 1, width - 1), min(top + 1, height - 1)
        upper = (1 - at_x + left) * way.maps[b, :, top, left] + (at_x - left) * way.maps[b, :, top, right]
        lower = (1 - at_x + left) * way.maps[b, :, bottom, left] + (at_x - left) * way.maps[b, :, bottom, right]
        result[b, :, y, x] += way.weight * ((1 - at_y + top) * upper + (at_y - top) * lower)
    return result


def suits(out: Tensor, ways: Sequence[Way]) -> bool:
    """Can `add_linked` compute this? Real maps of one precision on the CPU, no gradients, and numba."""
    return (
        installed("numba")
        and forced() in (None, "numba")
        and out.dtype in (torch.float32, torch.float64)
        and all(way.maps.dtype == out.dtype for way in ways)
        and unobserved(out, *[tensor for way in ways for tensor in (way.weight, way.maps)])
    )


def add_linked(out: Tensor, ways: Sequence[Way]) -> Tensor:
    """Add the sum above to out (B, L, H, W), in place."""
    from deepmrf.ops.cpu_linked import add_rows, sample_rows

    images, labels, height, width = out.shape
    added_to = out.numpy()
    arrays = [
        (
            float(way.weight),
            way.maps.permute(0, 2, 3, 1).contiguous().numpy(),
            way.flow.to(out.dtype).contiguous().numpy(),
            way.reliable.contiguous().numpy(),
        )
        for way in ways
    ]
    parts = list(itertools.product(range(images), range(0, height, ROWS_PER_JOB)))

    def job(index: int) -> None:
        b, top = parts[index]
        bottom = min(top + ROWS_PER_JOB, height)
        sampled = np.zeros((bottom - top, width, labels), added_to.dtype)
        for weight, maps, flow, known in arrays:
            sample_rows(sampled, maps[b], flow[b], known[b], weight, top, bottom)
        add_rows(added_to[b], sampled, top, bottom)

    run_jobs(job, len(parts))
    return out


def suits_flow(*flows: Tensor) -> bool:
    """Can `reliable` and `follow` compute on these flows (B, 2, H, W)? Nobody needs their gradients."""
    with torch.no_grad():
        return (
            installed("numba")
            and forced() in (None, "numba")
            and all(flow.dtype == torch.float32 and not flow.requires_grad for flow in flows)
            and unobserved(*flows)
        )


def reliable(forward: Tensor, backward: Tensor, share: float, slack: float) -> Tensor:
    """`flow.warping.consistent` of flows (B, 2, H, W): (B, 1, H, W) of bool."""
    from deepmrf.ops.cpu_linked import check_rows

    out = torch.empty(len(forward), 1, *forward.shape[2:], dtype=torch.bool)
    arrays = [x.detach().contiguous().numpy() for x in (forward, backward)]
    return _over_rows(lambda *rows: check_rows(*rows[:-3], share, slack, *rows[-3:]), arrays, [out])[0]


def follow(flow: Tensor, known: Tensor, next_flow: Tensor, next_known: Tensor) -> tuple[Tensor, Tensor]:
    """Extend links by the links from where they lead: flows (B, 2, H, W), and where they are reliable (B, 1, H, W).

    Flow is interpolated between four pixels, and all four must be reliable. Elsewhere the flow is 0.
    """
    from deepmrf.ops.cpu_linked import follow_rows

    arrays = [x.detach().contiguous().numpy() for x in (flow, known, next_flow, next_known)]
    outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (flow, known)]
    extended, reliable = _over_rows(follow_rows, arrays, outs)
    return extended, reliable


def _over_rows(kernel: Callable[..., None], arrays: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Tensor]:
    """kernel(*arrays, *outs, top, bottom) for the rows of each image of arrays and outs (B, C, H, W)."""
    results = [out.numpy() for out in outs]
    height = outs[0].shape[2]
    parts = list(itertools.product(range(len(outs[0])), range(0, height, ROWS_PER_JOB)))

    def job(index: int) -> None:
        b, top = parts[index]
        kernel(*[x[b] for x in (*arrays, *results)], top, min(top + ROWS_PER_JOB, height))

    run_jobs(job, len(parts))
    return outs
