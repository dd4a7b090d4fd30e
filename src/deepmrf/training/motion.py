"""Clips from single labelled images: the image moves a little, as before a moving camera, with known flow.

Frame t shows the image through the affine map M[t], from points in the frame to points in the image, so that

    flow from t to t + 1 at x  =  inverse(M[t + 1]) M[t] x - x

Exposure, sharpness and noise may change from frame to frame. A network then makes other errors in each frame, as in a
real video, and an MRF over frames learns to correct them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from deepmrf.data.files import VOID, Bytes
from deepmrf.flow import Flow
from deepmrf.training.samples import image_tensor, mask_tensor

MAX_EXPOSURE_CHANGE = 0.12
"""Largest change of brightness at flicker = 1, as a share."""
MAX_BLUR_PIXELS = 1.0
"""Largest standard deviation of the blur at flicker = 1."""
MAX_NOISE = 6.0
"""Largest standard deviation of the noise at flicker = 1, of values 0 .. 255."""


def moving_clip(
    random: np.random.Generator, image: Bytes, mask: Bytes, frames: int, motion: float, flicker: float = 0.0
) -> tuple[Bytes, Bytes, Flow]:
    """Return frames (T, H, W, 3), masks (T, H, W) and exact flow of an image (H, W, 3) with mask (H, W) that moves.

    No pixel moves farther than `motion` pixels from one frame to the next. flicker: how much exposure, sharpness and
    noise differ between frames; 1 is a bad camera. What lies outside the image is void and linked to nothing.
    """
    if frames < 1 or not motion >= 0 or not 0 <= flicker <= 10:
        raise ValueError(
            f"frames={frames}, motion={motion} and flicker={flicker} must be at least 1, at least 0, and 0 to 10."
        )
    if image.shape != (*mask.shape, 3) or image.dtype != np.uint8:
        raise ValueError(f"image has shape {image.shape}, mask {mask.shape}: pass uint8 (H, W, 3) and (H, W).")
    height, width = mask.shape
    maps = camera_path(random, (height, width), frames, motion)
    # grid_sample has the image's edges at -1 and 1: (2 x + 1) / width - 1
    normalise = np.array([[2 / width, 0, 1 / width - 1], [0, 2 / height, 1 / height - 1], [0, 0, 1]])
    points = torch.stack([_transformed_pixels(normalise @ matrix, height, width) for matrix in maps])  # (T, H, W, 2)
    inside = (points.abs() <= 1).all(-1)  # (T, H, W)
    grid = points.float()
    picture = image_tensor(image)[None].float().expand(frames, 3, -1, -1)
    # Cubic, because linear interpolation would make frames softer than the image.
    sampled = functional.grid_sample(picture, grid, "bicubic", "border", align_corners=False)
    labels = mask_tensor(mask)[None, None].float().expand(frames, 1, -1, -1)
    ids = functional.grid_sample(labels, grid, "nearest", "border", align_corners=False)[:, 0].round()
    masks = torch.where(inside, ids, VOID).to(torch.uint8).numpy()
    flickering = torch.stack([_flickering(random, frame, flicker) for frame in sampled])
    clip = flickering.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return clip, masks, _exact_flow(maps, inside)


def camera_path(random: np.random.Generator, size: tuple[int, int], frames: int, motion: float) -> NDArray[np.float64]:
    """Return maps M (T, 3, 3) that shift, zoom and turn smoothly; no pixel moves farther than `motion` per frame."""
    centre = np.array([(size[1] - 1) / 2, (size[0] - 1) / 2])
    radius = max(math.hypot(*centre), 1.0)
    direction, speed = random.uniform(0, 2 * np.pi), motion / 2 * math.sqrt(random.random())
    zoom, turn = random.uniform(-0.2, 0.2, 2) * motion / radius  # 0.2 * motion pixels at the corners
    start = random.uniform(-0.5, 0.5, 2)  # so that the middle frame, too, falls between the image's pixels
    maps = np.zeros((frames, 3, 3))
    for t in range(frames):
        time = t - (frames - 1) / 2
        scale, angle = math.exp(zoom * time), turn * time
        linear = scale * np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        shift = start + speed * time * np.array([math.cos(direction), math.sin(direction)])
        maps[t] = np.vstack([np.column_stack([linear, centre + shift - linear @ centre]), [0, 0, 1]])
    return maps


def _transformed_pixels(matrix: NDArray[np.float64], height: int, width: int) -> Tensor:
    """Return where an affine map (3, 3) brings each pixel: (H, W, 2) of (x, y)."""
    y, x = torch.arange(height, dtype=torch.float64)[:, None], torch.arange(width, dtype=torch.float64)
    points = torch.empty(height, width, 2, dtype=torch.float64)
    for axis, (of_x, of_y, shift) in enumerate(matrix[:2]):
        torch.add(of_x * x, of_y * y + shift, out=points[..., axis])
    return points


def _exact_flow(maps: NDArray[np.float64], inside: Tensor) -> Flow:
    """Return the flow both ways; it is reliable where the frame shows the image and the pixel stays in the frame."""
    frames, height, width = inside.shape
    directions = []
    for source, target in ((range(frames - 1), range(1, frames)), (range(1, frames), range(frames - 1))):
        steps = [np.linalg.inv(maps[b]) @ maps[a] for a, b in zip(source, target, strict=True)]
        moves = [_transformed_pixels(step - np.eye(3), height, width).float().permute(2, 0, 1) for step in steps]
        flow = torch.stack(moves, 1) if moves else torch.zeros(2, 0, height, width)
        directions.append(flow[None])
    return Flow(directions[0], directions[1], inside[None, None, :-1], inside[None, None, 1:])


def _flickering(random: np.random.Generator, frame: Tensor, flicker: float) -> Tensor:
    """Change exposure, sharpness and noise of a frame (3, H, W) of 0 .. 255 at random."""
    exposure, softness, noise = random.uniform(-1, 1), random.random(), random.random()
    seed = int(random.integers(2**31))
    if not flicker:
        return frame
    deviation = MAX_BLUR_PIXELS * flicker * softness
    if deviation > 0.2:
        radius = max(3, math.ceil(2 * deviation))
        taps = torch.exp(-(torch.arange(-radius, radius + 1) ** 2) / (2 * deviation**2))
        taps = taps / taps.sum()
        padded = functional.pad(frame[:, None], (radius,) * 4, mode="replicate")
        frame = functional.conv2d(functional.conv2d(padded, taps.view(1, 1, -1, 1)), taps.view(1, 1, 1, -1))[:, 0]
    grain = torch.randn(frame.shape, generator=torch.Generator().manual_seed(seed))
    return frame * (1 + MAX_EXPOSURE_CHANGE * flicker * exposure) + MAX_NOISE * flicker * noise * grain
