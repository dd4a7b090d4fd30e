"""Colours for labels: by VOC's rule, or chosen so that people can tell them apart.

The chosen ones begin with the seven of Okabe and Ito, which were made for readers of every colour vision. Each further
one is the colour of a grid that lies farthest from all before it, by the least of four distances in OKLab: as most
people see both, and as people without one of the three kinds of cones see them. The first n colours are the same
for every number of labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]

VOID_COLOUR: Colour = (224, 224, 192)
"""The colour of void pixels: VOC's cream."""
BACKGROUND = "background"
"""The label that is black in label maps, and that overlays leave unpainted."""
BLACK: Colour = (0, 0, 0)
OKABE_ITO: tuple[Colour, ...] = (
    *((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66)),
    *((0, 114, 178), (213, 94, 0), (204, 121, 167)),
)
"""Orange, sky blue, bluish green, yellow, blue, vermilion, reddish purple."""
AVOIDED: tuple[Colour, ...] = (BLACK, (255, 255, 255), (128, 128, 128), VOID_COLOUR)
"""What overlays and label maps use otherwise, and grey, which looks unpainted."""
GRID_STEP = 15
"""Distance of the candidates in each channel."""
LEAST_LIGHTNESS, MOST_LIGHTNESS, LEAST_CHROMA = 0.35, 0.93, 0.05
"""The candidates in OKLab: darker, paler and greyer ones are hard to see in an overlay."""
VISIONS: tuple[tuple[float, NDArray[np.float64]], ...] = (
    (1.0, np.eye(3)),
    (1.6, np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]])),
    (1.6, np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]])),
    (3.0, np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.147], [0.005, 0.691, 0.304]])),
)
"""(weight of a distance, linear RGB as it is seen) of usual vision, protanopia, deuteranopia, and tritanopia, which is
rare; the matrices are those of Machado, Oliveira and Fernandes (2009). Weights above 1 let usual vision count more."""
CONES = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
"""OKLab: cone responses of linear RGB."""
OPPONENTS = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
"""OKLab: lightness and two opponent colours of the cube roots of the responses."""


def voc_colours(count: int) -> tuple[Colour, ...]:
    """Return colours by VOC's rule: the bits of each id go to red, green and blue in turn, highest first."""
    colours = []
    for index in range(count):
        channels = [0, 0, 0]
        for bit in range(8):
            for channel in range(3):
                channels[channel] |= (index >> (3 * bit + channel) & 1) << (7 - bit)
        colours.append((channels[0], channels[1], channels[2]))
    return tuple(colours)


def choose_colours(names: Sequence[str]) -> tuple[Colour, ...]:
    """Return a colour for each label: black for "background", `distinct_colours` for the others in their order."""
    colours = iter(distinct_colours(len(names)))
    return tuple(BLACK if name == BACKGROUND else next(colours) for name in names)


@cache
def distinct_colours(count: int) -> tuple[Colour, ...]:
    """Return `count` colours that can be told apart, also by colour-blind readers as far as so many can."""
    axis = np.arange(0, 256, GRID_STEP)
    candidates = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    lightness, *opponents = oklab(candidates).T
    visible = (lightness > LEAST_LIGHTNESS) & (lightness < MOST_LIGHTNESS) & (np.hypot(*opponents) > LEAST_CHROMA)
    candidates = candidates[visible]
    seen = _as_seen(candidates)
    nearest = np.full(len(candidates), np.inf)

    def move_away(colour: Any) -> None:
        distances = np.linalg.norm(seen - _as_seen(np.asarray(colour)[None]), axis=-1).min(0)
        np.minimum(nearest, distances, out=nearest)

    colours = list(OKABE_ITO[:count])
    for colour in (*AVOIDED, *colours):
        move_away(colour)
    while len(colours) < count:
        red, green, blue = candidates[nearest.argmax()].tolist()
        colours.append((red, green, blue))
        move_away(colours[-1])
    return tuple(colours)


def oklab(colours: NDArray[Any]) -> NDArray[np.float64]:
    """Convert colours (N, 3) of 0 .. 255 to OKLab (N, 3), where distances are as large as they look."""
    return _oklab(_linear(colours))


def _as_seen(colours: NDArray[Any]) -> NDArray[np.float64]:
    """Colours (N, 3) in OKLab by each kind of vision, times its weight: (4, N, 3)."""
    linear = _linear(colours)
    return np.stack([weight * _oklab((linear @ matrix.T).clip(0, 1)) for weight, matrix in VISIONS])


def _linear(colours: NDArray[Any]) -> NDArray[np.float64]:
    """Undo the gamma of sRGB."""
    values = np.asarray(colours, np.float64) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _oklab(linear: NDArray[np.float64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = np.cbrt(linear @ CONES.T) @ OPPONENTS.T
    return result
