"""Dense CRF, CRF-RNN and DSN as settings of MeanField.

With one context of a single pixel and without the gate, the step of mean_field.py is

    q[u, i] ~ exp( ln p[u, i] - sum over v of mu(u, v) sum over z of k(i, z) q[v, z] ),

the classic mean-field update of a CRF with Gaussian edges k and label compatibility mu:

    dense CRF (Kraehenbuehl and Koltun, 2011)   Potts: mu is 0 for the same label, 1 for any other
    CRF-RNN (Zheng et al., 2015)                mu learned through the iterations
    DSN (Schwing and Urtasun, 2015)             everything learned, together with the network
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from deepmrf.layers.mean_field import MeanField

PRESETS: dict[str, dict[str, Any]] = {
    "voc": {"smooth": (3, 3), "pairs": (80, 13, 10), "iterations": 10},
    "irn": {"smooth": (3, 3), "pairs": (50, 5, 10), "iterations": 10},
    "deeplab": {"smooth": (1, 3), "pairs": (67, 3, 4), "iterations": 10},
    "maskcut": {"smooth": (3, 7), "pairs": (50, 5, 10), "iterations": 10},
    "saliency": {"smooth": (3, 3), "pairs": (60, 5, 5), "iterations": 1},
    "medical3d": {"smooth": (1, 3), "pairs": (5, 25, 5), "iterations": 5, "dims": 3, "features": 1},
}
"""Settings that programs in use have. smooth: (width, weight) of the position term; pairs: (position width, colour
width of 255, weight). Widths are in pixels, or in the unit of `spacing`: millimetres for volumes."""


def preset(name: str, labels: int, **changes: Any) -> MeanField:
    """Build the dense CRF of that name, with these settings of dense_crf changed."""
    return dense_crf(labels, **(preset_settings(name) | changes))


def preset_settings(name: str) -> dict[str, Any]:
    """The settings of dense_crf that make up the preset of that name."""
    if name not in PRESETS:
        raise ValueError(f"There is no preset {name!r}: choose one of {', '.join(PRESETS)}.")
    settings = dict(PRESETS[name])
    smooth_width, smoothness = settings.pop("smooth")
    position_width, colour_width, appearance = settings.pop("pairs")
    settings |= {"smooth_width": smooth_width, "smoothness": smoothness, "position_width": position_width}
    return settings | {"colour_width": colour_width / 255, "appearance": appearance}


def dense_crf(
    labels: int,
    *,
    dims: int = 2,
    window: int | Sequence[int] | None = None,
    iterations: int = 5,
    appearance: float = 10.0,
    colour_width: float = 13 / 255,
    position_width: float = 80.0,
    smoothness: float = 3.0,
    smooth_width: float = 3.0,
    normalize: bool = True,
    features: int = 3,
    spacing: Sequence[float] | None = None,
    learn: bool = False,
) -> MeanField:
    """Build a dense CRF with Potts compatibility.

    window: None joins all pairs of pixels of the image, as dense CRFs do, by the permutohedral lattice: on images of
    uint8, label maps equal pydensecrf's. A number of pixels, or one per axis, keeps edges inside that window, exactly.
    appearance, colour_width, position_width: weight and bandwidths of exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2),
    colours in the image's own unit (RGB in [0, 1], hence 13 / 255). smoothness, smooth_width: weight and bandwidth of
    exp(-|j - z|^2 / 2 c^2); smoothness=0 leaves it out. normalize: divide each edge by the root of the sums of all
    edges at its two ends, as the usual implementations do. learn: let every parameter be trained.
    """
    widths = {"colour_width": colour_width, "position_width": position_width, "smooth_width": smooth_width}
    for name, value in widths.items():
        if not value > 0:
            raise ValueError(f"{name}={value!r} must be positive: it is a standard deviation.")
    if not appearance > 0:
        raise ValueError(f"appearance={appearance!r} must be positive: it is the weight of the colour-dependent edges.")
    crf = MeanField(
        labels,
        dims=dims,
        window=window,
        contexts=1,
        context_size=1,
        iterations=iterations,
        kernel="global" if window is None else "gaussian",
        gate=False,
        features=features,
        spacing=spacing,
        average=False,
        smoothness=smoothness != 0,
        normalize=normalize,
    )
    assert crf.label_contexts is not None  # contexts=1
    crf.label_contexts.set_compatibility(1 - torch.eye(labels))
    penalty = crf.triple_penalty
    with torch.no_grad():
        penalty.scale.fill_(appearance)
        penalty.log_colour_width.fill_(math.log(colour_width))
        penalty.log_position_width.fill_(math.log(position_width))
        if smoothness != 0:
            penalty.smooth_weight.fill_(smoothness / appearance)
            penalty.log_smooth_width.fill_(math.log(smooth_width))
    return crf.requires_grad_(learn)


def crf_rnn(labels: int, *, iterations: int = 5, learn: bool = True, **settings: object) -> MeanField:
    """Build a dense CRF (see dense_crf) whose compatibility, weights and bandwidths are learned; it starts as Potts."""
    return dense_crf(labels, iterations=iterations, learn=learn, **settings)  # type: ignore[arg-type]
