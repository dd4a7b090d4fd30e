"""Augment: random views of clips for training.

Clips are (T, H, W, 3) of uint8 with masks (T, H, W); a single image is a clip of one frame. All frames of a clip
and their masks get the same geometry and the same change of colour, so that the motion stays the same.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deepmrf.data.files import VOID, Bytes

PADDING = (124, 116, 104)
"""What lies outside the image, in RGB: ImageNet's mean, so that normalised input is near zero there."""

_GREY = np.array([0.299, 0.587, 0.114])
_TO_YIQ = np.array([_GREY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])


@dataclass(frozen=True)
class Augment:
    """A random view of a clip: `augment(rng, images, masks)` scales, flips, crops or pads, and shifts colours."""

    crop: tuple[int, int] | None = None
    """Height and width of the result; None keeps the size of the input."""
    scale: tuple[float, float] = (0.5, 2.0)
    """The range of the enlargement; halving is as likely as doubling."""
    flip: float = 0.5
    """The probability of a mirror image."""
    brightness: float = 0.2
    """Brightness is multiplied by 1 - this to 1 + this."""
    contrast: float = 0.2
    """The distance of each value from the clip's mean grey is multiplied by 1 - this to 1 + this."""
    saturation: float = 0.2
    """The distance of each colour from its own grey is multiplied by 1 - this to 1 + this."""
    hue: float = 0.03
    """Hues turn by up to this share of the colour circle either way."""

    def __post_init__(self) -> None:
        if self.crop is not None and (len(self.crop) != 2 or min(self.crop) < 1):
            raise ValueError(f"crop is {self.crop}; give a height and a width of 1 or more, or None.")
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale is {self.scale}; give the smallest and the largest enlargement, both above 0.")
        for name, largest in (("flip", 1.0), ("brightness", 1.0), ("contrast", 1.0), ("saturation", 1.0), ("hue", 0.5)):
            if not 0 <= getattr(self, name) <= largest:
                raise ValueError(f"{name} is {getattr(self, name)}; give a value of 0 to {largest:g}.")

    def __call__(self, rng: np.random.Generator, images: Bytes, masks: Bytes) -> tuple[Bytes, Bytes]:
        """Return a view of `images` (T, H, W, 3) and `masks` (T, H, W); pixels outside the image are void."""
        if images.ndim != 4 or images.shape[3] != 3 or masks.shape != images.shape[:3]:
            shapes = f"images {images.shape} and masks {masks.shape}"
            raise ValueError(f"A clip has {shapes}; give (T, H, W, 3) and (T, H, W), with T = 1 for one image.")
        if images.dtype != np.uint8 or masks.dtype != np.uint8:
            raise ValueError(f"A clip is of {images.dtype} and {masks.dtype}; give uint8 images and masks.")
        size = self.crop or (images.shape[1], images.shape[2])
        window, flipped = self._window(rng, images.shape[1:3], size), rng.random() < self.flip
        images, masks = _view(images, masks, size, *window, self._colours(rng, images))
        if flipped:
            images, masks = np.ascontiguousarray(images[:, :, ::-1]), np.ascontiguousarray(masks[:, :, ::-1])
        return images, masks

    def _window(
        self, rng: np.random.Generator, input_size: tuple[int, ...], size: tuple[int, int]
    ) -> tuple[float, int, int]:
        """Draw the enlargement, and the result's top left corner in the enlarged image."""
        scale = float(np.exp(rng.uniform(*np.log(self.scale))))
        room = [max(1, round(n * scale)) - m for n, m in zip(input_size, size, strict=True)]
        # A negative room means that the image is smaller: then it lies anywhere in the padding.
        top, left = (int(rng.integers(min(r, 0), max(r, 0) + 1)) for r in room)
        return scale, top, left

    def _colours(self, rng: np.random.Generator, images: Bytes) -> NDArray[np.float64] | None:
        """Draw brightness, contrast, saturation and hue as a matrix (3, 4) for (r, g, b, 1): all are linear."""
        draws = rng.uniform(-1, 1, 4)  # always drawn, so that a setting does not change the effect of others
        if not any((self.brightness, self.contrast, self.saturation, self.hue)):
            return None
        brightness, contrast, saturation = 1 + draws[:3] * (self.brightness, self.contrast, self.saturation)
        angle = 2 * np.pi * self.hue * draws[3]
        turn = np.array([(1, 0, 0), (0, np.cos(angle), -np.sin(angle)), (0, np.sin(angle), np.cos(angle))])
        colour = np.linalg.inv(_TO_YIQ) @ turn @ _TO_YIQ
        colour = (saturation * np.eye(3) + (1 - saturation) * np.outer(np.ones(3), _GREY)) @ colour
        mean = float(images[:, ::4, ::4].reshape(-1, 3).mean(0) @ _GREY)  # every 16th pixel is enough
        offset = brightness * (1 - contrast) * mean
        return np.column_stack([brightness * contrast * colour, [offset] * 3])


def _view(
    images: Bytes,
    masks: Bytes,
    size: tuple[int, int],
    scale: float,
    top: int,
    left: int,
    colours: NDArray[np.float64] | None,
) -> tuple[Bytes, Bytes]:
    """Return the window at (top, left) of the enlarged clip, recoloured. Only the visible part is enlarged."""
    frames, *input_size = masks.shape
    spans = []
    for n, m, start in zip(input_size, size, (top, left), strict=True):
        enlarged = max(1, round(n * scale))
        first, last = max(start, 0), min(start + m, enlarged)
        spans.append((first, last, first - start, n / enlarged))
    (y0, y1, y_to, y_step), (x0, x1, x_to, x_step) = spans
    view = np.full((frames, *size, 3), PADDING, dtype=np.uint8)
    view_masks = np.full((frames, *size), VOID, dtype=np.uint8)
    inside = (slice(None), slice(y_to, y_to + y1 - y0), slice(x_to, x_to + x1 - x0))
    rows = ((np.arange(y0, y1) + 0.5) * y_step).astype(np.intp)  # the pixel under the centre of each new pixel
    columns = ((np.arange(x0, x1) + 0.5) * x_step).astype(np.intp)
    view_masks[inside] = masks[:, rows[:, None], columns]
    box = (x0 * x_step, y0 * y_step, x1 * x_step, y1 * y_step)
    for frame in range(frames):
        part = _resize(images[frame], box, (y1 - y0, x1 - x0))
        view[frame][inside[1:]] = part if colours is None else _recolour(part, colours)
    return view, view_masks


def _cv2() -> Any:
    """OpenCV, which is faster than Pillow, if it is installed."""
    try:
        return importlib.import_module("cv2")
    except ImportError:
        return None


def _resize(image: Bytes, box: tuple[float, float, float, float], size: tuple[int, int]) -> Bytes:
    """Resize the part of the image inside box (left, top, right, bottom), without aliasing."""
    cv2 = _cv2()
    left, top, right, bottom = box
    if cv2 is None:
        cropped = (max(left, 0.0), max(top, 0.0), min(right, image.shape[1]), min(bottom, image.shape[0]))
        return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR, cropped))
    y_step, x_step = (bottom - top) / size[0], (right - left) / size[1]
    if x_step == y_step == 1:
        return image[int(top) : int(bottom), int(left) : int(right)]
    if max(x_step, y_step) > 1:
        # warpAffine skips pixels when it shrinks: blur first, by the width of a new pixel less that of an old one.
        sigma = (0.5 * np.sqrt(max(x_step**2 - 1, 1e-6)), 0.5 * np.sqrt(max(y_step**2 - 1, 1e-6)))
        y0, x0 = max(int(top) - 4, 0), max(int(left) - 4, 0)
        image = cv2.GaussianBlur(image[y0 : int(bottom) + 5, x0 : int(right) + 5], (0, 0), *sigma)
        top, left = top - y0, left - x0
    # From the centres of new pixels to the centres of old ones.
    back = np.array([[x_step, 0, left + 0.5 * x_step - 0.5], [0, y_step, top + 0.5 * y_step - 0.5]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    resized: Bytes = cv2.warpAffine(image, back, size[::-1], flags=flags, borderMode=cv2.BORDER_REPLICATE)
    return resized


def _recolour(image: Bytes, colours: NDArray[np.float64]) -> Bytes:
    """Return colours @ (r, g, b, 1) for every pixel, rounded and clipped to 0 .. 255."""
    cv2 = _cv2()
    if cv2 is not None:
        changed: Bytes = cv2.transform(image, colours)
        return changed
    return np.asarray(Image.fromarray(image).convert("RGB", tuple(colours.ravel().tolist())))
