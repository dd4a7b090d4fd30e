"""Dense CRF, CRF-RNN and DSN as settings of MeanField.

With one context of a single pixel and without the gate, the step of mean_field.py is

    q[u, i] ~ exp( ln p[u, i] - sum over v of mu(u, v) sum over z in N(i), z != i, of k(i, z) q[v, z] ),

the classic mean-field update of a CRF with Gaussian edges k and label compatibility mu:

    dense CRF (Kraehenbuehl and Koltun, 2011)   Potts: mu is 0 for the same label, 1 for any other
    CRF-RNN (Zheng et al., 2015)                mu learned through the iterations
    DSN (Schwing and Urtasun, 2015)             everything learned, together with the network
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from deepmrf.layers.mean_field import MeanField
from deepmrf.layers.triple_penalty import default_window


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

    window: how far edges reach, in pixels along each axis. None: 51 for images, 9 for volumes.
    appearance, colour_width, position_width: weight and bandwidths of exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2),
    colours in the image's own unit (RGB in [0, 1], hence 13 / 255). smoothness, smooth_width: weight and bandwidth of
    exp(-|j - z|^2 / 2 c^2); smoothness=0 leaves it out. normalize: divide each edge by the root of the sums of all
    edges at its two ends, as the usual implementations do. learn: let every parameter be trained.
    """
    for name, value in (
        ("colour_width", colour_width),
        ("position_width", position_width),
        ("smooth_width", smooth_width),
    ):
        if not value > 0:
            raise ValueError(f"{name}={value!r} must be positive: it is a standard deviation.")
    if not appearance > 0:
        raise ValueError(f"appearance={appearance!r} must be positive: it is the weight of the colour-dependent edges.")
    crf = MeanField(
        labels,
        dims=dims,
        window=window if window is not None else 51 if dims in (1, 2) else default_window(dims),
        contexts=1,
        context_size=1,
        iterations=iterations,
        kernel="gaussian",
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
    """Build a dense CRF whose compatibility, weights and bandwidths are learned through its iterations.

    It takes the settings of dense_crf and starts from Potts compatibility.
    """
    return dense_crf(labels, iterations=iterations, learn=learn, **settings)  # type: ignore[arg-type]
