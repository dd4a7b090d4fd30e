"""Choose a dense CRF for a model on training images that its network never saw: the bundled model animals.

    python benchmarks/choose_crf.py MODEL --data animals:PATH --train-split trainaug --share 0.08 -o animals
    deepmrf evaluate animals --data animals:PATH --stages

Label contexts gain nothing on photographs of few large animals; pixels far apart that look alike do. What is chosen are
a few numbers, on the images that the recipe held out (data.held_out), each of which counts for one half. Printed for
each setting: its gain on these images, with the interval, and on each half. The setting of the best smaller half is
measured on val, which chose nothing, and written with the part for video of --video-of.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cached import Cached, cache
from held_out import stage_scores
from rich.progress import track

import deepmrf
from deepmrf.data import open_data
from deepmrf.data.dataset import Dataset
from deepmrf.evaluation.intervals import Gain, measure_gain
from deepmrf.evaluation.metrics import confusion
from deepmrf.layers import MeanField
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import Card, DeepParsingNetwork, write_model
from deepmrf.training.mean_field import calibrated_temperature, learn_scaling
from deepmrf.training.recipe import read_recipe
from deepmrf.training.samples import hold_out

ITERATIONS = (1, 3)
POSITION_WIDTHS = (40.0, 60.0)
COLOUR_WIDTHS = (3.75, 5.0)
"""Of 255."""
WEIGHTS = (1.0, 2.0, 3.0)

Matrices = list[torch.Tensor]
"""The confusion matrix (L, L) of every image."""


def crf(iterations: int, position: float, colour: float, weight: float, scaling: MeanField) -> MeanField:
    """A dense CRF without its position term, behind the temperature and the label scaling of `scaling`."""
    plain = deepmrf.dense_crf(
        scaling.labels,
        iterations=iterations,
        smoothness=0,
        position_width=position,
        colour_width=colour / 255,
        appearance=weight,
    )
    mrf = MeanField(**plain.settings | {"label_scaling": scaling.label_scaling is not None})
    mrf.load_state_dict(plain.state_dict(), strict=False)
    mrf.temperature = scaling.temperature
    if mrf.label_scaling is not None and scaling.label_scaling is not None:
        mrf.label_scaling.load_state_dict(scaling.label_scaling.state_dict())
    return mrf.eval().requires_grad_(False)


def scalings(outputs: list[Cached], labels: int, ignore: int) -> dict[str, MeanField]:
    """What stands before the CRF: a temperature, or a factor and a summand per label."""
    settings: dict[str, Any] = {"labels": labels, "contexts": 0, "window": 1}
    log_ps, masks = [output[0] for output in outputs], [output[2] for output in outputs]
    tempered = MeanField(**settings, temperature=calibrated_temperature(log_ps, masks, ignore))
    scaled = MeanField(**settings, label_scaling=True)
    learn_scaling(scaled, zip(log_ps, masks, strict=True), len(outputs), ignore)
    return {f"temperature {tempered.temperature:g}": tempered.eval(), "label scaling": scaled.eval()}


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
    return f"{name:70} {100 * gain.miou.value:+.2f} ({low:+.2f} to {high:+.2f})  halves {parts}"


def cached(model: DeepParsingNetwork, data: Dataset) -> list[Cached]:
    """The network's output of all images."""
    return cache(model, [data.read(item) for item in track(data, "images")], "cpu")


def main() -> None:
    """Measure all settings on images held out, choose one, measure it on val, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--train-split", default="train")
    parser.add_argument("--share", type=float, default=0.08, help="data.held_out of the recipe")
    parser.add_argument("--recipe", type=Path, default=None, help="the recipe of the network, for config.json")
    parser.add_argument("--video-of", default=None, help="a model whose part for video this one gets")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    model, data = open_model(given.model).eval(), open_data(given.data, given.train_split)
    labels, ignore = len(model.labels), data.labels.ignore
    outputs = cached(model, hold_out(data, given.share)[1])
    before = confusions(None, outputs, labels, ignore)
    after, mrfs = {}, {}
    for scaling, *setting in itertools.product(
        scalings(outputs, labels, ignore).items(), ITERATIONS, POSITION_WIDTHS, COLOUR_WIDTHS, WEIGHTS
    ):
        name = "{}, {} iterations, position {:g}, colour {:g}, weight {:g}".format(scaling[0], *setting)
        mrf = mrfs[name] = crf(*setting, scaling[1])  # type: ignore[arg-type]
        after[name] = confusions(mrf, outputs, labels, ignore)
        halves = [gain_on_half(before, after[name], half) for half in (0, 1)]
        print(line(name, measure_gain(before, after[name]), halves), flush=True)
    chosen = max(after, key=lambda name: min(gain_on_half(before, after[name], half) for half in (0, 1)))
    val = open_data(given.data, "val")
    seen = cached(model, val)
    before, matrices = (confusions(mrf, seen, labels, ignore) for mrf in (None, mrfs[chosen]))
    halves = [gain_on_half(before, matrices, half) for half in (0, 1)]
    print(line(f"val: {chosen}", measure_gain(before, matrices), halves))
    joined = DeepParsingNetwork(model.unary, mrfs[chosen], model.labels).eval()
    if given.video_of is not None:
        joined.video = open_model(given.video_of).video
    scores = stage_scores(model, {"triple penalty": mrfs[chosen]}, val)
    recipe = {} if given.recipe is None else json.loads(json.dumps(asdict(read_recipe(given.recipe))))
    note = f"The dense CRF was chosen by benchmarks/choose_crf.py on {len(outputs)} images held out: {chosen}."
    joined.card = Card({"val": scores, "seed": 0, "note": note}, recipe or model.card.recipe)
    write_model(joined, given.out, half=True)
    print(f"Wrote {given.out}.")


if __name__ == "__main__":
    main()
