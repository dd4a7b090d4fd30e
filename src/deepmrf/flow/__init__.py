"""Optical flow: how far each pixel moves from one frame to another.

A flow (2, H, W) holds (x, y) in pixels: pixel j of one frame is at j + flow(j) in the other.

    flow = estimate(frames)                            # uint8 (T, H, W, 3)
    ahead, reliable = flow.trajectories(0, 1)[1]       # from every frame to the next
    aligned = warp(next_frame, ahead[:, :, 0])         # the next frame, aligned with this one

warping       warp a tensor along a flow; test which flows are reliable; compose two flows
clip          Flow: the flows of a clip in both directions, and trajectories over several frames
estimation    estimate flow by OpenCV's DIS or any function of two frames; cache it on disk; read .flo files
"""

from deepmrf.flow.clip import Flow, join
from deepmrf.flow.estimation import between, cached, estimate, read_flo
from deepmrf.flow.warping import compose, consistent, inside, warp

__all__ = ["Flow", "between", "cached", "compose", "consistent", "estimate", "inside", "join", "read_flo", "warp"]
