"""Colours for labels: by VOC's rule, or chosen so that people can tell them apart.

The chosen ones begin with the seven of Okabe and Ito, which were made for readers of every colour vision. Each further
one is the colour of a grid that lies farthest from all before it, by the least of four distances in OKLab: as most
people see both, and as people without one of the three kinds of cones see them (tests/data/test_colours.py has the
rule). The first n colours are the same for every number of labels.
"""

from __future__ import annotations

from collections.abc import Sequence

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
_FURTHER = bytes.fromhex(
    "78002d3c0f967800ff8778ff874b00004b6987c387ffc3ffd200b42d694b0000d2964b87ff78d2d2004bffa5b44be169693c96960078"
    "87ff87ff2d78f01ef0ff694b5a5ad2e1c32d5ae1e15a2d4b5a0078c396964b87d2b4e1966900b4872d1e2d960f5affe15a785aa5964b"
    "00a5b43c3cd2d24bd287c3ff3cd2b4966996b4003c78a5ff691e00a55a00b4b45af0c3d2784b693c69875a969687e1ffc3f0ff4b5aa5"
    "96a5d2782d5affc3784b4b1eb4a578a5785ac3b4e1ff69ff6978e11e00f0b40fe1ff5ab4b4ffa54b2d96782db4875a6969ff5a875ac3"
    "2d4b871e5a3c78a5005a3c78960f3ca54b2df05a96c3d2a569005ac300ff5a78b4f0a587ff964bb4e14b69c300d23ca5f0a5ff966969"
    "b41ea5e178691e3c69b487e1784b96ff3cc3c31e78c35aff1e2dc31ef0e169c3a5d296e1f0b45a782d872d5ac3e15a3c3c96b4f096a5"
    "a52d5ae1d200691e3c8778c32d2d8778b4c32d1ea51ef069ff5a004ba578872d4bc3ff00a5f096d2c3875ae1c3780f5a0f3ca58796ff"
    "87f0b4b45a5a782d00f02d963c692d7887e1962dc3ff005ac378c3695a784b00e1e11e4b2d87f0964bb48700692d69e1785a9600e196"
    "1ea5d296692dd20087c3f0d2e14ba52d78d2a5ffc3ff00b4c30fd2e17887ffa53c87694b0087a569963c6996c3870fe1c3b478f0a5d2"
    "3cd2f0698769691e783c787878965a0096f0d2f069b40f00876987004bf0c3009678d25ae196c3f087f04b78f01e0fc3c3965affb4c3"
    "692d1ed278d296f0f096005affb49678693c87b4a57869e1871e2d78d2a5b4d2f0878700f08769ff873cffc3e1a55ac34bb4b4c34b3c"
    "87e1d2e1783ca5e1b4d21ee1d2b4f02d5a78a53c2dc36987e15a694b784bf0d287781e3cf0e1a500ff2d4bffff96c3d200c3d21e2df0"
    "2d4bb487ffb4b4c3002d3cc32d00b47878a5e1964be1a5965a5a1ec3d24ba5e1f02d69ffa5d296c30f00e11e6987fff02d5a4b4bc396"
    "ff00d2c3692dff4b785a69a569d2c38787f069a5872d2dd2e1872dd287a5e1f096b4a5f0b4ff78e19696"
)
"""Red, green and blue of the colours behind those seven: as many as a label set may need."""


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


def distinct_colours(count: int) -> tuple[Colour, ...]:
    """Return up to 255 colours that can be told apart, also by colour-blind readers as far as so many can."""
    further = ((_FURTHER[i], _FURTHER[i + 1], _FURTHER[i + 2]) for i in range(0, len(_FURTHER), 3))
    return (*OKABE_ITO, *further)[:count]
