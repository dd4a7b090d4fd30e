"""Optical flow: where each pixel of a frame is found in the next one, and back.

A flow (2, H, W) holds (x, y) in pixels: pixel j of one frame is found at j + flow(j) in the other.

    flow = estimate(frames)                            # uint8 (T, H, W, 3)
    ahead, reliable = flow.trajectories(0, 1)[1]       # from every frame to the next
    aligned = warp(next_frame, ahead[:, :, 0])         # the next frame, seen where its pixels are in this one

warping       tensors seen along a flow; which flows are reliable; flows one after the other
clip          Flow: the flows of a clip, both ways, and trajectories over several frames
estimation    by OpenCV's DIS, or any function of two frames; cached on disk
files         .flo
"""

from deepmrf.flow.clip import Flow, join
from deepmrf.flow.estimation import between, cached, estimate
from deepmrf.flow.files import read_flo, write_flo
from deepmrf.flow.warping import compose, consistent, inside, warp

__all__ = [
    "Flow",
    "between",
    "cached",
    "compose",
    "consistent",
    "estimate",
    "inside",
    "join",
    "read_flo",
    "warp",
    "write_flo",
]
