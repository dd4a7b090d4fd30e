"""What an MRF is worth that learns together with a network, by the stride where its decoder ends: Cityscapes, a CPU.

    python benchmarks/coarser.py --data cityscapes:PATH --stride 8 4 --seed 0 1 2
    python benchmarks/strides.py report --out coarser

For each stride and seed, two models start from the network of `street` and learn by the losses and rates of its recipe,
from the same number of crops: the network alone, and the network with an MRF behind it from the first step. What
`street` does not have starts at random: at stride 8, the last layer; with --last-layer-at-random, at stride 4, too.
Images are not enlarged first (zoom 1). Then a label scaling is learned behind the network, and through the MRF, from
images that neither has learned from here (`street` has seen them, in part).

Scores are of val. Gains come with 95 % intervals over its images. A row that is in the JSON file is not computed again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from held_out import Outputs
from strides import NETWORK, RECIPE, Rows, printed, row, scaled_through

from deepmrf.data import open_data
from deepmrf.data.writing import write_text
from deepmrf.evaluation.evaluate import evaluate_parts
from deepmrf.evaluation.intervals import ImageConfusions
from deepmrf.layers import MeanField
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model, write_model
from deepmrf.predict.scales import predictor
from deepmrf.training.loop import train
from deepmrf.training.recipe import Recipe, UnaryRecipe, read_recipe
from deepmrf.training.samples import hold_out

MRF: dict[str, Any] = {
    "kernel": "gaussian",
    "normalize": True,
    "gate": False,
    "contexts": 3,
    "context_size": 9,
}
MRF_PARTS = ("triple_penalty", "label_contexts")
HELD_OUT = 0.12
EVERY = 3
"""Of the images held out, every so many-th is used."""
SCALING_STEPS, IMAGES = 40, 4
"""Of the label scaling."""


def random_last_layer(start: str, folder: Path) -> str:
    """Write the model `start` with a last layer at random, unless it is there; return the folder."""
    if not folder.is_dir():
        model = open_model(start)
        torch.manual_seed(0)
        model.unary.classify[-1].reset_parameters()
        write_model(DeepParsingNetwork(model.unary, None, model.labels), folder)
    return str(folder)


def recipe_for(given: argparse.Namespace, stride: int, seed: int, with_mrf: bool) -> Recipe:
    """The recipe `street` from the network of `street`, with one short stage."""
    recipe = read_recipe(RECIPE, {"data.train": given.data, "seed": str(seed)})
    options = {**recipe.unary.options, "stride": stride, "zoom": 1.0}
    stage = replace(
        recipe.stage[0],
        learn=("unary", *(MRF_PARTS if with_mrf else ())),
        steps=given.steps,
        batch=given.batch,
        rate=given.rate,
        mrf_rate=given.mrf_rate,
        lovasz=given.lovasz,
        warmup=20,
    )
    return replace(
        recipe,
        data=replace(recipe.data, workers=0, held_out=HELD_OUT),
        unary=UnaryRecipe(network="fast", start=given.start, options=options),
        mean_field={**MRF, "iterations": given.iterations, "window": given.window} if with_mrf else {},
        stage=(stage,),
        augment=replace(recipe.augment, crop=tuple(given.crop)),
        precision="no",
        compile=False,
        ema=0.98,
        save_every=10**6,
    )


def trained(given: argparse.Namespace, stride: int, seed: int, with_mrf: bool) -> DeepParsingNetwork:
    """The network, alone or with its MRF, trained if it is not there."""
    folder = given.out / f"stride-{stride}-seed-{seed}" / ("joint" if with_mrf else "alone")
    if not (folder / "model").is_dir():
        train(recipe_for(given, stride, seed, with_mrf), folder, **printed(str(folder)))
    return read_model(folder / "model")


def main() -> None:
    """Train and score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="as for deepmrf train: cityscapes:PATH")
    parser.add_argument("--start", default="street", help="the model whose network is the start of all")
    parser.add_argument("--last-layer-at-random", action="store_true")
    parser.add_argument("--stride", type=int, nargs="+", default=[8])
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--mrf-rate", type=float, default=1e-2)
    parser.add_argument("--lovasz", type=float, default=0.5)
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--window", type=int, default=25)
    parser.add_argument("--crop", type=int, nargs=2, default=[192, 320])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("coarser"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    val = open_data(given.data, "val")
    if given.last_layer_at_random:
        given.start = random_last_layer(given.start, given.out / "start")
    for stride, seed in ((stride, seed) for stride in given.stride for seed in given.seed):
        path = given.out / f"stride-{stride}-seed-{seed}/rows.json"
        if path.is_file():
            continue
        alone, joint = (trained(given, stride, seed, with_mrf) for with_mrf in (False, True))
        assert joint.mean_field is not None
        held_out = hold_out(open_data(given.data, "train"), HELD_OUT)[1][::EVERY]
        nothing = MeanField(len(alone.labels), contexts=0, window=1)
        scaled_alone, scaled_joint = (
            DeepParsingNetwork(
                model.unary,
                scaled_through(mrf, Outputs(model, held_out), "cpu", seed, SCALING_STEPS, IMAGES),
                model.labels,
            ).eval()
            for model, mrf in ((alone, nothing), (joint, joint.mean_field))
        )
        models = {
            NETWORK: alone.log_unary,
            "network and label scaling": scaled_alone,
            "with an MRF": joint,
            "with an MRF, its network alone": joint.log_unary,
            "with an MRF, and label scaling": scaled_joint,
        }
        confusions = ImageConfusions(val)
        scores = evaluate_parts(
            {name: predictor(model) for name, model in models.items()}, val, "cpu", shows=[confusions.add]
        )
        rows: Rows = {}
        for name, values in scores.items():
            gain = {} if name == NETWORK else {"gain": confusions.gain(NETWORK, name).to_dict()}
            rows[name] = {**values.to_dict(), **gain}
            print(f"stride {stride}  seed {seed}  {row(name, rows[name])}", flush=True)
        facts = {key: str(value) for key, value in vars(given).items()}
        write_text(path, json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
