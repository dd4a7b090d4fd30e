"""The paper's tables and curves, computed anew: a command each, resumable, a JSON file per seed.

    python benchmarks/tables.py stages --data camvid:PATH --imagenet vgg16_imagenet_features.safetensors --out tables
    python benchmarks/tables.py 3a 3b 3c iterations additions --data camvid:PATH --imagenet FILE --out tables --seed 1
    python benchmarks/tables.py report --out tables

    network      the network of the first stage, behind which the other tables learn; they train it if it is not there
    stages       Tables 4 and 5(a), Figure 10: scores after each of the four stages of recipes/paper
    3a           b12 alone by its window, beside a dense CRF whose parameters were tuned on the same images
    3b           label contexts by their size and number
    3c           the pairwise terms of DSN, CRF-RNN, dense CRF and DPN
    iterations   Figure 9(b): 1 to 10 mean-field steps of DPN and of the dense CRF
    additions    what this project adds to the paper's MRF, one at a time
    video        Table 4: b12 and b13 over three frames, linked along optical flow, on the frames of val as a video
    joint        Figure 9(a): all parts from the start, for as many steps as the four stages together
    baselines    other networks by the recipes in recipes/baselines
    report       means and spreads over the seeds that are there, as Markdown, and curves.png of Figure 9(a)

Tables 3(a) to 3(c), iterations and additions learn behind the network of the first stage, which stays as it is: its
output on all images is computed once, and every row takes as many steps on the same images. A row that is in the JSON
file is not computed again. `--steps 0.01` takes a hundredth of all steps, to try the command.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from cached import Cached, Phase, Training, all_at_once, cache, contexts_phase, learn, measure, penalty_phase

import deepmrf
from deepmrf.data import open_data
from deepmrf.data.writing import write_text
from deepmrf.layers import MeanField
from deepmrf.models.parsing_network import read_model
from deepmrf.training.loop import train
from deepmrf.training.recipe import Recipe, read_recipe

RECIPES = Path(__file__).parents[1] / "recipes"
PAPER: dict[str, Any] = {"kernel": "distance", "gate": True, "window": 50, "contexts": 5, "context_size": 9}
"""The paper's MRF."""
BASELINES = ("fcn8s", "segnet", "dilation8", "deeplab")
WINDOWS = (10, 50, 100)
VIDEO_RECIPES = {"2-D": "paper/camvid-2d-clips", "3-D": "paper/camvid-3d"}
TUNING_IMAGES = 24
"""Training images on which the parameters of the dense CRF are tuned."""
TUNING_TRIALS = 16
"""Sets of parameters that are tried."""

Scores = dict[str, Any]
Outputs = tuple[list[Cached], list[Cached], Training]
"""A network's output on the training and the validation images, and what all training behind it has in common."""


class Seed:
    """One seed's networks, cached outputs and rows."""

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        self.arguments, self.seed = arguments, seed
        self.folder: Path = arguments.out
        self.path = self.folder / f"seed-{seed}.json"
        self.rows: dict[str, dict[str, Scores]] = {}
        if self.path.is_file():
            self.rows = json.loads(self.path.read_text())["tables"]
        self.mean_fields: dict[str, MeanField] = {}
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def row(self, table: str, name: str, compute: Callable[[], Scores]) -> None:
        """Compute a row, unless it is there, and keep it."""
        rows = self.rows.setdefault(table, {})
        if name in rows:
            return
        started = time.time()
        scores = compute()
        rows[name] = {**scores, "seconds": round(time.time() - started, 1)}
        facts = {"data": self.arguments.data, "seed": self.seed, "steps": self.arguments.steps, "tables": self.rows}
        write_text(self.path, json.dumps(facts, indent=1) + "\n")
        print(
            f"seed {self.seed}  {table:10}  {name:32}  {scores['miou']:6.2f}  {time.time() - started:7.1f} s",
            flush=True,
        )

    def steps(self, count: int) -> int:
        """That many steps, or the share of them that was asked for."""
        return max(1, round(count * self.arguments.steps))

    def recipe(self, name: str) -> Recipe:
        """A recipe of the project with this seed, data and weights."""
        recipe = read_recipe(RECIPES / f"{name}.toml")
        data = replace(recipe.data, train=self.arguments.data, workers=self.arguments.workers)
        unary = replace(recipe.unary, imagenet=self.arguments.imagenet)
        stages = tuple(
            replace(stage, steps=self.steps(stage.steps), warmup=self.steps(stage.warmup)) for stage in recipe.stage
        )
        precision = recipe.precision if self.device == "cuda" else "no"
        return replace(
            recipe,
            evaluate_every=self.steps(self.arguments.curve_steps),
            seed=self.seed,
            data=data,
            unary=unary,
            stage=stages,
            precision=precision,
            save_every=10**6,
        )

    def train(self, recipe: Recipe, name: str) -> dict[str, Scores]:
        """The scores of all stages of a run, which is resumed; evaluations on the way are kept in its curve.json."""
        folder = self.folder / "runs" / f"{name}-{self.seed}"

        def message(sentence: str) -> None:
            print(f"seed {self.seed}  {name}: {sentence}", flush=True)
            if match := re.match(r"(.*): mIoU ([\d.]+) on", sentence):
                points = [*self.curve(name), [match[1], float(match[2])]]
                write_text(folder / "curve.json", json.dumps(points))

        scores = train(recipe, folder, resume=(folder / "recipe.json").is_file(), message=message)
        gc.collect()
        torch.cuda.empty_cache()
        return scores

    def curve(self, name: str) -> list[Any]:
        """(stage and step, mIoU) of each evaluation of a run so far."""
        path = self.folder / "runs" / f"{name}-{self.seed}" / "curve.json"
        return json.loads(path.read_text()) if path.is_file() else []

    def network_folder(self) -> Path:
        """The paper's network after the first stage, trained if it is not there."""
        folder = self.folder / "runs" / f"unary-{self.seed}"
        if not (folder / "model").is_dir():
            recipe = self.recipe(self.arguments.recipe)
            self.train(replace(recipe, stage=recipe.stage[:1]), "unary")
        return folder

    @cached_property
    def outputs(self) -> Outputs:
        """Training and validation images with the output of the paper's network."""
        return self.outputs_of(self.network_folder())

    def outputs_of(self, folder: Path) -> Outputs:
        """Training and validation images with the output of the network that was trained in this folder."""
        model = read_model(folder / "model").to(self.device).eval()
        splits = [
            open_data(self.arguments.data, split)
            for split in (self.recipe(self.arguments.recipe).data.train_split, "val")
        ]
        train_outputs, val_outputs = (
            cache(model, [split.read(item) for item in split], self.device) for split in splits
        )
        labels = splits[0].labels
        return train_outputs, val_outputs, Training(len(labels), labels.ignore, self.seed)

    def measure(self, mrf: MeanField | None) -> Scores:
        """The scores of an MRF, or of the network alone, on the validation images."""
        _, val, training = self.outputs
        return measure(mrf, val, training.labels, training.ignore)

    def learned(self, settings: dict[str, Any], *, lovasz: float = 0.0, at_once: bool = False) -> MeanField:
        """A mean field with these settings, learned by stages 2 and 3, or by all at once; each is learned once."""
        key = str((settings, lovasz, at_once))
        if key not in self.mean_fields:
            data, _, training = self.outputs
            torch.manual_seed(self.seed)
            mrf = MeanField(training.labels, **settings)
            if at_once:
                phases = [all_at_once(mrf, self.seed, self.steps(1400))]
            else:
                phases = [penalty_phase(mrf, self.steps(200))]
                if mrf.label_contexts is not None:
                    phases.append(contexts_phase(mrf, self.seed, self.steps(1200)))
            self.mean_fields[key] = learn(mrf, phases, data, replace(training, lovasz=lovasz))
        return deepcopy(self.mean_fields[key])

    @cached_property
    def tuned(self) -> dict[str, float]:
        """The dense CRF's parameters behind the paper's network."""
        return self.tuned_on(self.outputs)

    def tuned_on(self, outputs: Outputs) -> dict[str, float]:
        """The dense CRF's parameters with the best mIoU on training images, of presets and random ones."""
        data, _, training = outputs
        images = data[:: max(1, len(data) // TUNING_IMAGES)]
        random = np.random.default_rng(self.seed)
        trials = itertools.islice(dense_crf_settings(random), self.steps(TUNING_TRIALS))
        crfs = [(self.dense_crf(settings, labels=training.labels), settings) for settings in trials]
        scored = [(measure(crf, images, training.labels, training.ignore)["miou"], settings) for crf, settings in crfs]
        return max(scored, key=lambda pair: pair[0])[1]

    def dense_crf(self, settings: dict[str, float], iterations: int = 10, labels: int | None = None) -> MeanField:
        """A dense CRF over all pairs of pixels."""
        labels = labels or self.outputs[2].labels
        crf = deepmrf.dense_crf(labels, iterations=iterations, **settings)  # type: ignore[arg-type]
        return crf.to(self.device).eval()


def dense_crf_settings(random: np.random.Generator) -> Iterator[dict[str, float]]:
    """Parameters in use, then random ones, spread evenly over orders of magnitude."""
    for pairs, smooth in (((80, 13, 10), (3, 3)), ((50, 5, 10), (3, 3)), ((67, 3, 4), (3, 1))):
        yield _settings(*pairs, *smooth)
    while True:
        low, high = np.log([5, 2, 0.1, 1, 0.05]), np.log([100, 30, 10, 5, 5])
        yield _settings(*np.exp(random.uniform(low, high)).tolist())


def _settings(position: float, colour: float, appearance: float, smooth: float, smoothness: float) -> dict[str, float]:
    return {
        "position_width": position,
        "colour_width": colour / 255,
        "appearance": appearance,
        "smooth_width": smooth,
        "smoothness": smoothness,
    }


def stages(seed: Seed) -> None:
    """The paper's model, stage by stage: the first one is the network of the other tables."""
    if "joint, network alone" in seed.rows.get("stages", {}):
        return
    recipe = seed.recipe(seed.arguments.recipe)
    first, run = seed.network_folder(), seed.folder / "runs" / f"paper-{seed.seed}"
    if not run.is_dir():  # go on from the end of the first stage, as one run of all stages would
        run.mkdir(parents=True)
        shutil.copy(first / "state.safetensors", run)
        write_text(run / "recipe.json", json.dumps(asdict(recipe)))
    scores = seed.train(recipe, "paper")
    for name, value in scores.items():
        value = {**value, "curve": seed.curve("unary") + seed.curve("paper")} if name == "joint" else value
        seed.row("stages", name, lambda value=value: percent(value))  # type: ignore[misc]


def percent(scores: Scores) -> Scores:
    """Scores of a training run with mIoU in per cent, as in the other tables."""
    return {**scores, "miou": round(100 * scores["miou"], 3)}


def table_3a(seed: Seed) -> None:
    """b12 alone."""
    seed.row("3a", "network alone", lambda: seed.measure(None))
    seed.row(
        "3a",
        "dense CRF, preset voc",
        lambda: seed.measure(seed.dense_crf(next(dense_crf_settings(np.random.default_rng(0))))),
    )
    seed.row("3a", "dense CRF, tuned", lambda: {**seed.measure(seed.dense_crf(seed.tuned)), "settings": seed.tuned})
    for window in WINDOWS:
        settings = PAPER | {"window": window, "contexts": 0}
        seed.row("3a", f"{window} x {window}", lambda s=settings: seed.measure(seed.learned(s)))  # type: ignore[misc]


def table_3b(seed: Seed) -> None:
    """Label contexts behind b12 of 50 x 50."""
    for size, count in ((1, 1), (5, 1), (9, 1), (9, 5)):
        settings = PAPER | {"context_size": size, "contexts": count}
        name = f"{size} x {size}" + (f", mixture of {count}" if count > 1 else "")
        seed.row("3b", name, lambda s=settings: seed.measure(seed.learned(s)))  # type: ignore[misc]


def table_3c(seed: Seed) -> None:
    """Pairwise terms: each starts where its authors do, and takes 1,400 steps on the same batches."""
    seed.row("3c", "network alone", lambda: seed.measure(None))
    seed.row("3c", "dense CRF, tuned", lambda: {**seed.measure(seed.dense_crf(seed.tuned)), "settings": seed.tuned})
    seed.row("3c", "DSN", lambda: seed.measure(_learned_crf(seed, compatibility=False)))
    seed.row("3c", "CRF-RNN", lambda: seed.measure(_learned_crf(seed, compatibility=True)))
    seed.row("3c", "DPN", lambda: seed.measure(seed.learned(PAPER)))


def _learned_crf(seed: Seed, compatibility: bool) -> MeanField:
    """A dense CRF from the preset voc at a tenth of its weight; weights and, if asked, the compatibility learn."""
    data, _, training = seed.outputs
    settings = next(dense_crf_settings(np.random.default_rng(0)))
    weak = settings | {"appearance": settings["appearance"] / 10, "smoothness": settings["smoothness"] / 10}
    crf = seed.dense_crf(weak, iterations=5)
    penalty, contexts = crf.triple_penalty, crf.label_contexts
    assert contexts is not None
    learned = [penalty.scale, penalty.smooth_weight, *([contexts.weight] if compatibility else [])]
    phase = Phase(lambda: learned, seed.steps(seed.arguments.crf_steps), 5e-3)
    return learn(crf, [phase], data, training)


def iterations(seed: Seed) -> None:
    """More mean-field steps than the one that was trained."""
    names = {f"DPN, {count}": count for count in (1, 2, 3, 5, 10)}
    if not set(names) <= seed.rows.get("iterations", {}).keys():
        mrf = seed.learned(PAPER)
        for name, count in names.items():
            mrf.iterations = count
            seed.row("iterations", name, lambda: seed.measure(mrf))
    for count in (1, 2, 3, 5, 10):
        seed.row(
            "iterations", f"dense CRF, tuned, {count}", lambda n=count: seed.measure(seed.dense_crf(seed.tuned, n))
        )  # type: ignore[misc]


def additions(seed: Seed) -> None:
    """The paper's MRF with one thing changed, and with all of them."""
    seed.row("additions", "the paper's MRF", lambda: seed.measure(seed.learned(PAPER)))
    changes: dict[str, dict[str, Any]] = {
        "no gate": {"gate": False},
        "Gaussian kernel": {"kernel": "gaussian", "window": 51},
        "Gaussian kernel, no gate": {"kernel": "gaussian", "window": 51, "gate": False},
        "contexts of 15 x 15": {"context_size": 15},
    }
    for name, change in changes.items():
        seed.row("additions", name, lambda c=change: seed.measure(seed.learned(PAPER | c)))  # type: ignore[misc]
    seed.row("additions", "Lovász loss", lambda: seed.measure(seed.learned(PAPER, lovasz=0.5)))
    seed.row("additions", "temperature 1.5", lambda: seed.measure(_warmer(seed.learned(PAPER), 1.5)))
    every = PAPER | changes["Gaussian kernel, no gate"] | changes["contexts of 15 x 15"]
    seed.row("additions", "all of them, temperature 1", lambda: seed.measure(seed.learned(every, lovasz=0.5)))
    seed.row("additions", "all of them", lambda: seed.measure(_warmer(seed.learned(every, lovasz=0.5), 1.5)))
    seed.row("additions", "all terms at once", lambda: seed.measure(seed.learned(PAPER, at_once=True)))


def _warmer(mrf: MeanField, temperature: float) -> MeanField:
    mrf.temperature = temperature
    return mrf


def video(seed: Seed) -> None:
    """2-D and 3-D terms behind the same network, stage by stage."""
    for name in seed.arguments.terms:
        recipe = seed.recipe(VIDEO_RECIPES[name])
        recipe = replace(recipe, unary=replace(recipe.unary, imagenet="", start=str(seed.network_folder() / "model")))
        stages = [f"{name}, {stage.name}" for stage in recipe.stage]
        if set(stages) <= seed.rows.get("video", {}).keys():
            continue
        scores = seed.train(recipe, name)
        for row, value in zip(stages, scores.values(), strict=True):
            seed.row("video", row, lambda value=value: percent(value))  # type: ignore[misc]


def joint(seed: Seed) -> None:
    """The network and both terms together from the start."""

    def compute() -> Scores:
        scores = seed.train(replace(seed.recipe(seed.arguments.recipe), strategy="joint"), "joint")
        model, network = scores.values()
        return {**percent(model), "network alone": percent(network)["miou"], "curve": seed.curve("joint")}

    seed.row("joint", "all at once", compute)


def baselines(seed: Seed) -> None:
    """Other networks, for as many steps as the paper's network learns in all."""
    for name in seed.arguments.baselines:

        def compute(name: str = name) -> Scores:
            scores = seed.train(seed.recipe(f"baselines/{name}"), name)
            return percent(list(scores.values())[-1])

        seed.row("baselines", name, compute)
        if name == "deeplab":
            seed.row("baselines", "deeplab, tuned dense CRF", lambda: _deeplab_crf(seed))


def _deeplab_crf(seed: Seed) -> Scores:
    """DeepLab with a dense CRF behind it that was tuned on its own output of the same training images."""
    folder = seed.folder / "runs" / f"deeplab-{seed.seed}"
    if not (folder / "model").is_dir():
        seed.train(seed.recipe("baselines/deeplab"), "deeplab")
    outputs = seed.outputs_of(folder)
    settings = seed.tuned_on(outputs)
    _, val, training = outputs
    crf = seed.dense_crf(settings, labels=training.labels)
    network = measure(None, val, training.labels, training.ignore)["miou"]
    return {**measure(crf, val, training.labels, training.ignore), "network alone": network, "settings": settings}


def network(seed: Seed) -> None:
    """The first stage alone."""
    seed.network_folder()


TABLES: dict[str, Callable[[Seed], None]] = {
    "network": network,
    "stages": stages,
    "3a": table_3a,
    "3b": table_3b,
    "3c": table_3c,
    "iterations": iterations,
    "additions": additions,
    "video": video,
    "joint": joint,
    "baselines": baselines,
}


def report(folder: Path) -> str:
    """All rows of all seeds as Markdown tables: each seed's mIoU, their mean, and half the range."""
    seeds = {
        path.stem.removeprefix("seed-"): json.loads(path.read_text())["tables"]
        for path in sorted(folder.glob("seed-*.json"))
    }
    lines = []
    for table in TABLES:
        names = list(dict.fromkeys(name for rows in seeds.values() for name in rows.get(table, {})))
        if not names:
            continue
        lines += [f"### {table}", "", f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | half the range |"]
        lines.append("|---" * (len(seeds) + 3) + "|")
        for name in names:
            values = [rows.get(table, {}).get(name, {}).get("miou") for rows in seeds.values()]
            known = [value for value in values if value is not None]
            cells = ["" if value is None else f"{value:.2f}" for value in values]
            spread = f"{(max(known) - min(known)) / 2:.2f}" if len(known) > 1 else ""
            lines.append(f"| {name} | {' | '.join(cells)} | {mean(known):.2f} | {spread} |")
        lines.append("")
    return "\n".join(lines)


def draw_curves(folder: Path) -> None:
    """curves.png: mIoU by steps of the four stages and of all at once, a line for each seed that has both."""
    from matplotlib import pyplot

    seeds = [json.loads(path.read_text())["tables"] for path in sorted(folder.glob("seed-*.json"))]
    seeds = [rows for rows in seeds if "joint" in rows and "stages" in rows]
    if not seeds:
        return
    steps = [stage.steps for stage in read_recipe(RECIPES / "paper/camvid.toml").stage]
    ends = dict(zip(seeds[0]["stages"], itertools.accumulate(steps), strict=False))
    figure, axes = pyplot.subplots(figsize=(5.2, 3.2), layout="constrained")
    for number, rows in enumerate(seeds):
        for row, label, style, colour in (
            (rows["stages"]["joint"], "one stage after the other", "o-", "tab:blue"),
            (rows["joint"]["all at once"], "all at once", "s--", "tab:orange"),
        ):
            points = [curve_point(name, miou, ends, steps) for name, miou in row["curve"] if "alone" not in name]
            label = label if number == 0 else "_"  # one entry of the legend for all seeds
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=3, linewidth=1)
    for end in list(ends.values())[:-1]:
        axes.axvline(end, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlabel="optimiser steps", ylabel="mIoU, CamVid val", xlim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(folder / "curves.png", dpi=130)
    pyplot.close(figure)


def curve_point(name: str, miou: float, ends: dict[str, int], steps: list[int]) -> tuple[int, float]:
    """Steps of all stages until an evaluation called "STAGE, step N", or "STAGE" at its end, and its mIoU."""
    stage, _, step = name.partition(", step ")
    if stage not in ends:
        return int(step or sum(steps)), miou
    before = ends[stage] - dict(zip(ends, steps, strict=True))[stage]
    return before + int(step) if step else ends[stage], miou


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "tables", nargs="+", choices=[*TABLES, "report"], metavar="TABLE", help=", ".join([*TABLES, "report"])
    )
    parser.add_argument("--data", help="as for deepmrf train: camvid:PATH")
    parser.add_argument(
        "--imagenet", default="", help="ImageNet weights of VGG-16; without them the network starts at random"
    )
    parser.add_argument("--recipe", default="paper/camvid", help="the recipe of the paper's model")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=float, default=1.0, help="share of all steps, to try things")
    parser.add_argument("--crf-steps", type=int, default=1400, help="steps of DSN and CRF-RNN in table 3c")
    parser.add_argument("--curve-steps", type=int, default=500, help="steps between evaluations while training")
    parser.add_argument("--baselines", nargs="+", default=BASELINES, choices=BASELINES, help="those of table baselines")
    parser.add_argument("--terms", nargs="+", default=VIDEO_RECIPES, choices=VIDEO_RECIPES, help="those of table video")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images")
    parser.add_argument("--out", type=Path, default=Path("tables"))
    arguments = parser.parse_args()
    if arguments.tables == ["report"]:
        print(report(arguments.out))
        draw_curves(arguments.out)
        return
    if not arguments.data:
        parser.error("--data is missing: name the images, as in --data camvid:PATH.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number in arguments.seed:
        seed = Seed(arguments, number)
        for name in arguments.tables:
            if name != "report":
                TABLES[name](seed)
    if "report" in arguments.tables:
        print(report(arguments.out))


if __name__ == "__main__":
    main()
