"""Stage 2 of a fit for kernel="global": the widths and the weight of one step of a dense CRF, chosen by the score.

A few numbers that crops cannot teach, as pixels far apart count. So they are not learned but tried, on whole images: of
the widths first that of positions, then that of colours, each with all weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepmrf.data.progress import Progress, no_progress
from deepmrf.layers import MeanField
from deepmrf.predict.tiles import spaced
from deepmrf.refine.examples import Examples
from deepmrf.refine.tally import Tally
from deepmrf.training.mean_field import penalty_map

POSITION_WIDTHS = (40.0, 20.0, 80.0)
"""Pixels, of volumes millimetres; the first is tried with all widths of colours."""
COLOUR_WIDTHS = (4 / 255, 3 / 255, 8 / 255)
"""The first is tried with all widths of positions."""
WEIGHTS = (0.5, 1.0, 2.0, 3.0, 5.0)
"""What pixels that look alike and lie close say of a label, in all."""
MAX_PIXELS = 3_000_000
"""Pixels on which the numbers are chosen."""


def choose_all_pairs(
    mrf: MeanField, examples: Examples, indices: Sequence[int], progress: Progress = no_progress
) -> None:
    """Give an MRF without label contexts the widths and the weight that score best on these examples.

    Where no weight scores better than none, it is 0.
    """
    indices = _some(examples, indices)
    tried: dict[tuple[float, float], tuple[float, float]] = {}  # (score, weight) by widths

    def best(position: float, colour: float) -> tuple[float, float]:
        if (position, colour) not in tried:
            done = len(tried) * len(indices)
            tried[position, colour] = _best_weight(
                mrf, examples, indices, (position, colour), lambda count, _: progress(done + count, total)
            )
        return tried[position, colour]

    total = (len(POSITION_WIDTHS) + len(COLOUR_WIDTHS) - 1) * len(indices)
    position = max(POSITION_WIDTHS, key=lambda width: best(width, COLOUR_WIDTHS[0])[0])
    colour = max(COLOUR_WIDTHS, key=lambda width: best(position, width)[0])
    set_all_pairs(mrf, position, colour, best(position, colour)[1])


@torch.no_grad()
def set_all_pairs(mrf: MeanField, position: float, colour: float, weight: float) -> None:
    """Set the widths, in pixels and in colours from 0 to 1, and the weight of b12's all-pairs edges."""
    penalty = mrf.triple_penalty
    penalty.log_position_width.fill_(math.log(position))
    penalty.log_colour_width.fill_(math.log(colour))
    penalty.scale.fill_(-weight)  # labels of pixels that look alike cost less
    penalty.shift.zero_()


@torch.no_grad()
def _best_weight(
    mrf: MeanField, examples: Examples, indices: Sequence[int], widths: tuple[float, float], progress: Progress
) -> tuple[float, float]:
    """The best score with these widths, and its weight: of equal ones the smallest."""
    set_all_pairs(mrf, *widths, weight=1.0)  # b12 is linear in the weight
    weights = (0.0, *WEIGHTS)
    tallies = [Tally(examples) for _ in weights]
    for done, index in enumerate(indices, start=1):
        example = examples[index]
        with spaced(mrf, example.spacing):
            t = penalty_map(mrf, example.log_p, example.image).to(mrf.triple_penalty.scale)
        unary: Tensor = mrf.tempered(example.log_p[None].to(t))[0]
        for weight, tally in zip(weights, tallies, strict=True):
            tally.add(example, (unary - weight * t).argmax(0).cpu())
        progress(done, len(indices))
    scores = [tally.value() for tally in tallies]
    return max(scores), weights[scores.index(max(scores))]


def _some(examples: Examples, indices: Sequence[int]) -> list[int]:
    """All these examples, or some, spread over them, that have about MAX_PIXELS."""
    pixels = sum(math.prod(examples[index].mask.shape) for index in indices)
    return [int(index) for index in indices][:: max(1, round(pixels / MAX_PIXELS))]
