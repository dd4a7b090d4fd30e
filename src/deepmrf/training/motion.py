"""Clips from single labelled images: the picture moves a little, as before a moving camera, and its flow is known.

Frame t shows the picture through the affine map M[t], from places in the frame to places in the picture, so that

    flow from t to t + 1 at x  =  inverse(M[t + 1]) M[t] x - x

Exposure, sharpness and noise may change from frame to frame: a network then errs anew in each, as it does in a video,
which is what a Markov random field over frames can learn to mend.
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

EXPOSURE, SOFTNESS, NOISE = 0.12, 1.0, 6.0
"""What flicker = 1 changes at most: brightness by this share, a blur of this deviation, noise of this deviation."""

Clip = tuple[Bytes, Bytes, Flow]
"""Frames (T, H, W, 3), masks (T, H, W) and the flow between the frames, of one clip."""


def moved(
    random: np.random.Generator, image: Bytes, mask: Bytes, frames: int, motion: float, flicker: float = 0.0
) -> Clip:
    """A clip of `frames` from an image (H, W, 3) and its mask (H, W), with its exact flow.

    No pixel moves farther than `motion` pixels from one frame to the next. flicker: how much exposure, sharpness and
    noise differ between frames; 1 is a bad camera. What comes from outside the picture is void and linked to nothing.
    """
    if frames < 1 or not motion >= 0 or not 0 <= flicker <= 10:
        raise ValueError(
            f"frames={frames}, motion={motion} and flicker={flicker} must be at least 1, at least 0, and 0 to 10."
        )
    if image.shape != (*mask.shape, 3) or image.dtype != np.uint8:
        raise ValueError(f"image has shape {image.shape}, mask {mask.shape}: pass uint8 (H, W, 3) and (H, W).")
    height, width = mask.shape
    maps = camera(random, (height, width), frames, motion)
    places = torch.stack([_places(one, height, width) for one in maps])  # (T, H, W, 2) in the picture
    size = places.new_tensor([width, height])
    there = ((places >= -0.5) & (places <= size - 0.5)).all(-1)  # (T, H, W)
    grid = ((2 * places + 1) / size - 1).float()
    picture = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None].float().expand(frames, 3, -1, -1)
    # Cubic: what is interpolated linearly looks softer than the picture itself.
    seen = functional.grid_sample(picture, grid, "bicubic", "border", align_corners=False)
    labels = torch.from_numpy(np.ascontiguousarray(mask))[None, None].float().expand(frames, 1, -1, -1)
    ids = functional.grid_sample(labels, grid, "nearest", "border", align_corners=False)[:, 0].round()
    masks = torch.where(there, ids, VOID).to(torch.uint8).numpy()
    shown = torch.stack([_flickering(random, one, flicker) for one in seen])
    clip = shown.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return clip, masks, _flow(maps, there)


def camera(random: np.random.Generator, size: tuple[int, int], frames: int, motion: float) -> NDArray[np.float64]:
    """The maps M (T, 3, 3) of a smooth camera path: shift, zoom and turn, of which no pixel moves over `motion`."""
    centre = np.array([(size[1] - 1) / 2, (size[0] - 1) / 2])
    radius = max(math.hypot(*centre), 1.0)
    angle, speed = random.uniform(0, 2 * np.pi), motion / 2 * math.sqrt(random.random())
    zoom, turn = random.uniform(-0.2, 0.2, 2) * motion / radius  # at the corners as many pixels
    start = random.uniform(-0.5, 0.5, 2)  # so that the middle frame, too, falls between the picture's pixels
    maps = np.zeros((frames, 3, 3))
    for t in range(frames):
        time = t - (frames - 1) / 2
        scale, way = math.exp(zoom * time), turn * time
        linear = scale * np.array([[math.cos(way), -math.sin(way)], [math.sin(way), math.cos(way)]])
        shift = start + speed * time * np.array([math.cos(angle), math.sin(angle)])
        maps[t] = np.vstack([np.column_stack([linear, centre + shift - linear @ centre]), [0, 0, 1]])
    return maps


def _places(one: NDArray[np.float64], height: int, width: int) -> Tensor:
    """Where an affine map (3, 3) brings each pixel: (H, W, 2) of (x, y)."""
    y, x = torch.meshgrid(
        torch.arange(height, dtype=torch.float64), torch.arange(width, dtype=torch.float64), indexing="ij"
    )
    (xx, xy, x0), (yx, yy, y0) = one[:2]
    return torch.stack([xx * x + xy * y + x0, yx * x + yy * y + y0], -1)


def _flow(maps: NDArray[np.float64], there: Tensor) -> Flow:
    """Exact flows both ways; reliable where the frame shows the picture (and the pixel stays in the frame)."""
    frames, height, width = there.shape
    here = _places(np.eye(3), height, width)
    ways = []
    for source, target in ((range(frames - 1), range(1, frames)), (range(1, frames), range(frames - 1))):
        steps = [np.linalg.inv(maps[b]) @ maps[a] for a, b in zip(source, target, strict=True)]
        moves = [(_places(step, height, width) - here).permute(2, 0, 1) for step in steps]
        whole = torch.stack(moves, 1) if moves else torch.zeros(2, 0, height, width)
        ways.append(whole[None].float())
    return Flow(ways[0], ways[1], there[None, None, :-1], there[None, None, 1:])


def _flickering(random: np.random.Generator, frame: Tensor, flicker: float) -> Tensor:
    """A frame (3, H, W) of 0 .. 255 with an exposure, a blur and noise of its own."""
    exposure, softness, noise = random.uniform(-1, 1), random.random(), random.random()
    seed = int(random.integers(2**31))
    if not flicker:
        return frame
    deviation = SOFTNESS * flicker * softness
    if deviation > 0.2:
        far = max(3, math.ceil(2 * deviation))
        taps = torch.exp(-(torch.arange(-far, far + 1) ** 2) / (2 * deviation**2))
        taps = taps / taps.sum()
        padded = functional.pad(frame[:, None], (far,) * 4, mode="replicate")
        frame = functional.conv2d(functional.conv2d(padded, taps.view(1, 1, -1, 1)), taps.view(1, 1, 1, -1))[:, 0]
    grain = torch.randn(frame.shape, generator=torch.Generator().manual_seed(seed))
    return frame * (1 + EXPOSURE * flicker * exposure) + NOISE * flicker * noise * grain
