"""Choose one step of a dense CRF for a model whose network knows all training images: the bundled model animals.

    python benchmarks/choose_crf.py MODEL --data animals:PATH -o animals
    deepmrf evaluate animals --data animals:PATH --stages

Behind a network that knows its training images, an MRF learns too little from them. The few numbers of a dense CRF over
all pairs of pixels can be chosen on the images of val instead, each of which counts for one half. Printed for each
setting: what it gains on all images, with its interval, and on each half. The last line is the honest figure: the
setting that is best on one half, measured on the other. Written is the model with the setting of the best smaller half.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from cached import Cached, cache
from held_out import stage_scores
from rich.progress import track

import deepmrf
from deepmrf.data import open_data
from deepmrf.evaluation.intervals import Gain, measure_gain
from deepmrf.evaluation.metrics import confusion
from deepmrf.layers import MeanField
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import Card, DeepParsingNetwork, write_model

TEMPERATURE = 1.75
"""Of the mean field; with it, confidences are right (`deepmrf calibrate`)."""
POSITION_WIDTHS = (40.0, 60.0)
COLOUR_WIDTHS = (3.75, 5.0)
"""Of 255."""
WEIGHTS = (2.0, 3.0)

Matrices = list[torch.Tensor]
"""The confusion matrix (L, L) of every image."""


def crf(labels: int, position: float, colour: float, weight: float) -> MeanField:
    """One mean-field step of a dense CRF without its position term."""
    settings: dict[str, Any] = {"position_width": position, "colour_width": colour / 255, "appearance": weight}
    mrf = deepmrf.dense_crf(labels, iterations=1, smoothness=0, **settings).eval()
    mrf.temperature = TEMPERATURE
    return mrf


@torch.inference_mode()
def confusions(mrf: MeanField | None, outputs: list[Cached], labels: int, ignore: int) -> Matrices:
    """The confusion matrices behind the cached output of the network; no MRF: of the network alone."""
    matrices = []
    for log_p, image, mask in outputs:
        log_q = log_p[None].float() if mrf is None else mrf(log_p[None].float(), image[None])
        matrices.append(confusion(log_q[0].argmax(0), mask, labels, ignore))
    return matrices


def gain_on_half(before: Matrices, after: Matrices, half: int) -> float:
    """The gain in mIoU on every second image."""
    return measure_gain(before[half::2], after[half::2], draws=1).miou.value


def line(name: str, gain: Gain, halves: list[float]) -> str:
    """A setting and what it gains, in points."""
    low, high = 100 * gain.miou.low, 100 * gain.miou.high
    parts = ", ".join(f"{100 * half:+.2f}" for half in halves)
    return f"{name:36} {100 * gain.miou.value:+.2f} ({low:+.2f} to {high:+.2f})  halves {parts}"


def main() -> None:
    """Measure all settings, choose one, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="val")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    model, data = open_model(given.model).eval(), open_data(given.data, given.split)
    labels, ignore = len(model.labels), data.labels.ignore
    outputs = cache(model, [data.read(item) for item in track(data, "images")], "cpu")
    before = confusions(None, outputs, labels, ignore)
    after = {}
    for setting in itertools.product(POSITION_WIDTHS, COLOUR_WIDTHS, WEIGHTS):
        matrices = after[setting] = confusions(crf(labels, *setting), outputs, labels, ignore)
        name = "position {:g}, colour {:g}, weight {:g}".format(*setting)
        halves = [gain_on_half(before, matrices, half) for half in (0, 1)]
        print(line(name, measure_gain(before, matrices), halves), flush=True)
    crossed: Matrices = [torch.empty(0)] * len(before)
    for half in (0, 1):
        best = max(after, key=lambda setting: gain_on_half(before, after[setting], half))
        crossed[1 - half :: 2] = after[best][1 - half :: 2]
    halves = [gain_on_half(before, crossed, half) for half in (0, 1)]
    print(line("chosen on one half, measured on the other", measure_gain(before, crossed), halves))
    chosen = max(after, key=lambda setting: min(gain_on_half(before, after[setting], half) for half in (0, 1)))
    mrf = crf(labels, *chosen)
    joined = DeepParsingNetwork(model.unary, mrf, model.labels).eval()
    scores = stage_scores(model, {"triple penalty": mrf}, data)
    note = "The step of a dense CRF was chosen on val by benchmarks/choose_crf.py."
    joined.card = Card({"val": scores, "seed": 0, "note": note}, model.card.recipe)
    write_model(joined, given.out, half=True)
    print("Wrote {}: position {:g}, colour {:g}, weight {:g}.".format(given.out, *chosen))


if __name__ == "__main__":
    main()
