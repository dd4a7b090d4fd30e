"""Presets of `refine`: dense CRFs with the settings of a field, and the parameters that can be changed.

Widths of colours are of 255 here, as pydensecrf and the papers have them; dense_crf takes them of 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from deepmrf.layers import MeanField
from deepmrf.layers.crf import PRESETS, preset, preset_settings

ALIASES = {2: {"dense-crf": "voc"}, 3: {"dense-crf": "medical3d"}}
"""Other names of presets, for images and for volumes."""
MAX_COLOUR = 255
PARAMETERS = {
    "smooth_width": "how far a pixel's neighbours pull it to their label, whatever their colour: pixels, of volumes mm",
    "smoothness": "how strongly they pull; 0 leaves this out",
    "position_width": "how far apart two pixels of similar colour pull each other: pixels, of volumes mm",
    "colour_width": "how different their colours may be, of 255: less keeps finer edges",
    "appearance": "how strongly they pull",
    "iterations": "how often all labels are updated",
}
"""The numbers of a preset, by the names of dense_crf's settings, and what they mean."""


def preset_values(name: str) -> dict[str, float]:
    """The value of each of PARAMETERS in the preset of that name."""
    settings = preset_settings(name)
    settings["colour_width"] *= MAX_COLOUR
    return {parameter: settings[parameter] for parameter in PARAMETERS}


def check_preset(name: str, dims: int, images: object) -> str:
    """The preset that a name or alias means for images of 2 or volumes of 3 axes, if it is made for them."""
    name = ALIASES[dims].get(name, name)
    if PRESETS.get(name, {}).get("dims", 2) != dims:
        others = ", ".join(other for other in PRESETS if PRESETS[other].get("dims", 2) == dims)
        kind, given = ("volumes", "images") if dims == 2 else ("images", "volumes")
        raise ValueError(f"The preset {name} is for {kind}, but {images} holds {given}: choose one of {others}.")
    preset_settings(name)  # an unknown name is an error
    return name


def build_preset(name: str, labels: int, changes: Mapping[str, float]) -> MeanField:
    """The dense CRF of that name; `changes` are values of PARAMETERS that replace the preset's."""
    settings = dict(changes)
    for parameter, value in changes.items():
        if parameter not in PARAMETERS:
            raise ValueError(f"A preset has no parameter {parameter!r}: choose from {', '.join(PARAMETERS)}.")
        if not 0 <= value < math.inf:  # NaN fails, too
            raise ValueError(f"{parameter}={value:g} must be at least 0 and finite.")
    if "colour_width" in settings:
        if settings["colour_width"] < 1:
            raise ValueError(f"colour_width={settings['colour_width']:g} is below 1, and it is of 255: 13 is usual.")
        settings["colour_width"] /= MAX_COLOUR
    if "iterations" in settings:
        if settings["iterations"] < 1 or settings["iterations"] != int(settings["iterations"]):
            raise ValueError(f"iterations={settings['iterations']:g} must be a whole number of at least 1.")
        settings["iterations"] = int(settings["iterations"])
    return preset(name, labels, **settings).eval()
