"""The kernels of linked.py, compiled by numba, for some rows of one image. Import this module on first use only."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from deepmrf.ops.jobs import compiled

Array = NDArray[Any]
MIN_SHARE_KNOWN = 0.999
"""Share of the four pixels, by their weights, that must be known: all of them, but for rounding."""


@compiled
def corners_of(x: float, y: float, height: int, width: int) -> tuple[int, int, int, int, float, float]:
    """(top, left, bottom, right, share of the lower pixels, share of the right ones) of a position in the image."""
    x, y = min(max(x, 0.0), width - 1.0), min(max(y, 0.0), height - 1.0)
    left, top = int(x), int(y)
    return top, left, min(top + 1, height - 1), min(left + 1, width - 1), y - top, x - left


@compiled
def is_inside(x: float, y: float, height: int, width: int) -> bool:
    """Is a position in the image, at most half a pixel from a pixel's centre? NaN is not."""
    return -0.5 <= x <= width - 0.5 and -0.5 <= y <= height - 0.5


@compiled
def check_rows(
    forward: Array, backward: Array, share: float, slack: float, out: Array, top: int, bottom: int
) -> None:  # fmt: skip
    """out (1, H, W): does forward (2, H, W), and then backward, lead back to where it began?"""
    _, height, width = forward.shape
    for y in range(top, bottom):
        for x in range(width):
            u, v = forward[0, y, x], forward[1, y, x]
            out[0, y, x] = False
            if is_inside(x + u, y + v, height, width):
                above, left, below, right, down, across = corners_of(x + u, y + v, height, width)
                back_u = (1 - down) * ((1 - across) * backward[0, above, left] + across * backward[0, above, right])
                back_u += down * ((1 - across) * backward[0, below, left] + across * backward[0, below, right])
                back_v = (1 - down) * ((1 - across) * backward[1, above, left] + across * backward[1, above, right])
                back_v += down * ((1 - across) * backward[1, below, left] + across * backward[1, below, right])
                gap = (u + back_u) ** 2 + (v + back_v) ** 2
                out[0, y, x] = gap <= slack + share * (u * u + v * v + back_u * back_u + back_v * back_v)


@compiled
def follow_rows(
    flow: Array, known: Array, next_flow: Array, next_known: Array, out: Array, out_known: Array, top: int, bottom: int
) -> None:  # fmt: skip
    """out (2, H, W) = flow, then next_flow from where it leads; out_known (1, H, W): where both are known."""
    _, height, width = flow.shape
    for y in range(top, bottom):
        for x in range(width):
            out[0, y, x] = out[1, y, x] = 0
            out_known[0, y, x] = False
            if not known[0, y, x]:
                continue
            u, v = flow[0, y, x], flow[1, y, x]
            above, left, below, right, down, across = corners_of(x + u, y + v, height, width)
            share_known = (1 - down) * (
                (1 - across) * next_known[0, above, left] + across * next_known[0, above, right]
            )
            share_known += down * ((1 - across) * next_known[0, below, left] + across * next_known[0, below, right])
            if not share_known > MIN_SHARE_KNOWN:
                continue
            for k in range(2):
                there = (1 - down) * ((1 - across) * next_flow[k, above, left] + across * next_flow[k, above, right])
                there += down * ((1 - across) * next_flow[k, below, left] + across * next_flow[k, below, right])
                if k == 0:
                    u += there
                else:
                    v += there
            if is_inside(x + u, y + v, height, width):
                out[0, y, x], out[1, y, x], out_known[0, y, x] = u, v, True


@compiled
def sample_rows(
    out: Array, maps: Array, flow: Array, known: Array, weight: float, top: int, bottom: int
) -> None:  # fmt: skip
    """out (bottom - top, W, L) += weight * maps (H, W, L) sampled along flow (2, H, W) from rows top .. bottom - 1.

    Where the flow is not known (1, H, W), nothing is added. Labels are the last axis, so that the four pixels around a
    position are four reads.
    """
    height, width, labels = maps.shape
    for y in range(top, bottom):
        for x in range(width):
            if not known[0, y, x]:
                continue
            above, left, below, right, down, across = corners_of(x + flow[0, y, x], y + flow[1, y, x], height, width)
            a, b = out.dtype.type(weight * (1 - down) * (1 - across)), out.dtype.type(weight * (1 - down) * across)
            c, d = out.dtype.type(weight * down * (1 - across)), out.dtype.type(weight * down * across)
            p, q, r, s, to = (
                maps[above, left],
                maps[above, right],
                maps[below, left],
                maps[below, right],
                out[y - top, x],
            )
            for label in range(labels):
                to[label] += a * p[label] + b * q[label] + c * r[label] + d * s[label]


@compiled
def add_rows(out: Array, sampled: Array, top: int, bottom: int) -> None:
    """Rows top .. bottom - 1 of out (L, H, W) += sampled (bottom - top, W, L)."""
    labels, _, width = out.shape
    for y in range(top, bottom):
        for label in range(labels):
            row, added = out[label, y], sampled[y - top, :, label]
            for x in range(width):
                row[x] += added[x]
