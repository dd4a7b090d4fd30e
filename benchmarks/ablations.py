"""The paper's ablations on a trained network whose output is computed once: each variant takes seconds on a GPU.

    python benchmarks/ablations.py runs/camvid-strong/model --data camvid:PATH --out ablations.json
    python benchmarks/ablations.py MODEL --data animals:PATH --train-split trainaug --only base "contexts 9x9, K=1"

Every variant learns the triple penalty, then the label contexts, from the same crops of the training split, and is
measured on the validation split: mIoU, pixel accuracy, seconds. The network stays as it is. For "augmented views",
`--views` of each training image are changed before the network sees them: a network is surer of the images it was
trained on than of new ones, and an MRF that learned from those could learn to trust it.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cached import Cached, Training, all_at_once, cache, contexts_phase, learn, measure, penalty_phase
from safetensors.torch import save_file
from torch import nn

import deepmrf
from deepmrf.data import open_data
from deepmrf.data.transforms import Augment
from deepmrf.layers import MeanField
from deepmrf.models.parsing_network import read_model

BASE: dict[str, Any] = {"kernel": "gaussian", "gate": False, "window": 51, "contexts": 5, "context_size": 9}


@dataclass(frozen=True)
class Variant:
    """An MRF and how it learns."""

    name: str
    settings: dict[str, Any]
    views: str = "plain"
    """"plain", "augmented" or "dropout"."""
    penalty_steps: int = 200
    contexts_steps: int = 1200
    penalty_rate: float = 5e-2
    contexts_rate: float = 2e-3
    lovasz: float = 0.5
    balance: float = 0.3
    """As class_balance of a recipe."""
    joint: bool = False
    """Everything from the start, instead of one term after the other."""


def variants(changes: dict[str, Any]) -> list[Variant]:
    """The ablations, each against the one called "base"; `changes` are made to all of them."""
    base = Variant("base", {**BASE, **changes})

    def change(name: str, **settings: Any) -> Variant:
        return replace(base, name=name, settings={**base.settings, **settings})

    return [
        base,
        # b12 alone, by kernel and window
        change("b12 distance, window 10", kernel="distance", gate=True, window=10, contexts=0),
        change("b12 distance, window 50", kernel="distance", gate=True, window=50, contexts=0),
        change("b12 distance, window 100", kernel="distance", gate=True, window=100, contexts=0),
        change("b12 distance, window 50, no gate", kernel="distance", gate=False, window=50, contexts=0),
        change("b12 gaussian, window 11", contexts=0, window=11),
        change("b12 gaussian, window 51", contexts=0, window=51),
        change("b12 gaussian, window 101", contexts=0, window=101),
        change("b12 gaussian, window 51, gate", contexts=0, window=51, gate=True),
        # b13 and b14 behind it
        change("contexts 1x1, K=1", context_size=1, contexts=1),
        change("contexts 5x5, K=1", context_size=5, contexts=1),
        change("contexts 9x9, K=1", context_size=9, contexts=1),
        # the two other ways to have both
        change("distance, gate", kernel="distance", gate=True, window=50),
        change("distance, no gate", kernel="distance", gate=False, window=50),
        change("gate", gate=True),
        # how it learns
        replace(base, name="all at once", joint=True),
        replace(base, name="no lovasz", lovasz=0.0),
        replace(base, name="augmented views", views="augmented"),
        change("trained with 2 iterations", iterations=2),
        change("normalize", normalize=True),
        change("window 21", window=21),
        change("contexts 15x15", context_size=15),
        replace(base, name="half rate", contexts_rate=1e-3),
        replace(base, name="longer", contexts_steps=3000),
        replace(base, name="dropout views", views="dropout"),
    ]


TIMES = (2, 3, 5, 10)
"""How often the base's mean-field step is repeated besides once, as it was trained."""


def views(pairs: list[tuple[np.ndarray, np.ndarray]], count: int, colour: float, seed: int) -> list[Any]:
    """`count` augmented views of each image."""
    pairs_seen = []
    for index, (image, mask) in enumerate(pairs):
        for number in range(count):
            random = np.random.default_rng([seed, index, number])
            size = (image.shape[0], image.shape[1])
            look = Augment(size, (0.6, 1.7), 0.5, colour, colour, colour, colour / 10)
            seen, labels = look(random, image[None], mask[None])
            pairs_seen.append((seen[0], labels[0]))
    return pairs_seen


def learn_variant(variant: Variant, data: list[Cached], labels: int, ignore: int, seed: int, batch: int) -> MeanField:
    """The variant's MRF, trained on the cached outputs."""
    torch.manual_seed(seed)
    mrf = MeanField(labels, **variant.settings)
    if variant.joint:
        phases = [all_at_once(mrf, seed, variant.penalty_steps + variant.contexts_steps, variant.contexts_rate)]
    else:
        phases = [penalty_phase(mrf, variant.penalty_steps, variant.penalty_rate)]
        if mrf.label_contexts is not None:
            phases.append(contexts_phase(mrf, seed, variant.contexts_steps, variant.contexts_rate))
    training = Training(labels, ignore, seed, batch, variant.lovasz, variant.balance)
    return learn(mrf, phases, data, training)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model whose network is trained")
    parser.add_argument("--data", required=True, help="as for deepmrf train: camvid:PATH, animals:PATH, ...")
    parser.add_argument("--train-split", default="train")
    parser.add_argument("--val-split", default="val")
    parser.add_argument("--views", type=int, default=4, help="augmented views of each training image")
    parser.add_argument("--most", type=int, default=2000, help="most views kept in memory")
    parser.add_argument("--colour", type=float, default=0.4, help="strength of the views' change of colour")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no variant after this long")
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--balance", type=float, default=0.3, help="as class_balance of a recipe")
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the steps, to try things")
    parser.add_argument("--settings", default="{}", help="JSON: settings of MeanField for all, such as a window")
    parser.add_argument("--save", type=Path, help="folder to keep each variant's MRF in")
    parser.add_argument("--out", type=Path, default=Path("ablations.json"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.time()
    model = read_model(arguments.model).to(device)
    train, val = open_data(arguments.data, arguments.train_split), open_data(arguments.data, arguments.val_split)
    labels, ignore = len(train.labels), train.labels.ignore
    pairs = [train.read(item) for item in train]
    val_outputs = cache(model, [val.read(item) for item in val], device)
    largest = max(image.shape[0] for image, _ in pairs), max(image.shape[1] for image, _ in pairs)
    sets: dict[str, list[Cached]] = {}
    results: list[dict[str, Any]] = []

    def note(name: str, scores: dict[str, Any]) -> None:
        results.append({"name": name, **scores})
        print(f"{time.time() - started:6.0f} s  {name:34} {scores['miou']:6.2f}  {scores['pixels']:6.2f}", flush=True)
        facts = {"model": str(arguments.model), "data": arguments.data, "seed": arguments.seed}
        arguments.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")

    def views_of(kind: str) -> list[Cached]:
        if kind not in sets:
            count = max(1, min(arguments.views, arguments.most // len(pairs)))
            colour = 0.0 if kind == "plain" else arguments.colour
            chosen = pairs[:: max(1, len(pairs) // arguments.most)]
            if kind == "plain":
                seen = [(padded(image, largest, 0), padded(mask, largest, ignore)) for image, mask in chosen]
            else:
                seen = [
                    (padded(image, largest, 0), padded(mask, largest, ignore))
                    for image, mask in views(chosen, count, colour, arguments.seed)
                ]
            if kind == "dropout":
                for module in model.unary.modules():
                    if isinstance(module, nn.Dropout | nn.Dropout2d):
                        module.p = max(module.p, 0.3)
                        module.train()
            sets[kind] = cache(model, seen, device)
            model.eval()
            note(f"network alone on {kind} views", measure(None, sets[kind][:400], labels, ignore))
        return sets[kind]

    note("network alone", measure(None, val_outputs, labels, ignore))
    if not arguments.only or "dense CRF" in arguments.only:
        crf = deepmrf.dense_crf(labels, iterations=10).to(device)
        note("dense CRF, customary", measure(crf, val_outputs, labels, ignore))
    for variant in variants(json.loads(arguments.settings)):
        if (arguments.only and variant.name not in arguments.only) or time.time() - started > arguments.seconds:
            continue
        data = views_of(variant.views)
        steps = {
            key: max(1, int(getattr(variant, key) * arguments.fraction)) for key in ("penalty_steps", "contexts_steps")
        }
        before = time.time()
        tried = replace(variant, balance=min(variant.balance, arguments.balance), **steps)
        mrf = learn_variant(tried, data, labels, ignore, arguments.seed, arguments.batch)
        taken = time.time() - before
        scores = measure(mrf, val_outputs, labels, ignore)
        numbers = {n: round(float(p.detach()), 4) for n, p in mrf.triple_penalty.named_parameters() if p.numel() == 1}
        note(variant.name, {**scores, "seconds": taken, "triple_penalty": numbers})
        for times in TIMES if variant.name == "base" else ():
            mrf.iterations = times
            note(f"base, repeated {times} times", measure(mrf, val_outputs, labels, ignore))
        mrf.iterations = variant.settings.get("iterations", 1)
        if arguments.save is not None:
            arguments.save.mkdir(parents=True, exist_ok=True)
            save_file(mrf.state_dict(), arguments.save / f"{variant.name}.safetensors")


def padded(array: np.ndarray, size: tuple[int, int], value: int) -> np.ndarray:
    """The array with rows and columns added up to a size, so that images of several sizes make one batch."""
    room = [(0, n - m) for n, m in zip(size, array.shape, strict=False)]
    return np.pad(array, [*room, *[(0, 0)] * (array.ndim - 2)], constant_values=value)


if __name__ == "__main__":
    main()
