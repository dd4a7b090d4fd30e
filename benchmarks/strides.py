"""What an MRF is worth by the stride at which the network's decoder ends: Cityscapes, a network per stride and seed.

    python benchmarks/strides.py network mrf joint --data cityscapes:PATH --imagenet FILE --stride 4 8 --seed 0 1 2
    python benchmarks/strides.py report

    network   the recipe `street` with one stage, without zoom, at this stride
    mrf       MRFs behind that network, which stays as it is, learned on the images that the recipe holds out
    joint     network and MRF together from the start, for as many steps on the same images as the network alone
    report    all rows with their gains over the network, as Markdown

Scores are of val. Gains come with 95 % intervals over its images. A row that is in the JSON file is not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from held_out import Outputs
from torch import Tensor

from deepmrf.data import open_data
from deepmrf.data.writing import write_text
from deepmrf.evaluation.evaluate import evaluate_parts
from deepmrf.evaluation.intervals import ImageConfusions
from deepmrf.layers import MeanField
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model
from deepmrf.predict.scales import Model, predictor
from deepmrf.refine.learn import Learner
from deepmrf.refine.settings import Choice, FitSettings
from deepmrf.training.loop import train
from deepmrf.training.mean_field import calibrated_temperature
from deepmrf.training.recipe import Recipe, read_recipe
from deepmrf.training.samples import hold_out

RECIPE = Path(__file__).parents[1] / "recipes/street.toml"
MRFS: dict[str, dict[str, Any]] = {
    "distance kernel, three contexts of 9 x 9": {"kernel": "distance", "contexts": 3, "context_size": 9},
    "Gaussian kernel, three contexts of 9 x 9": {"kernel": "gaussian", "contexts": 3, "context_size": 9},
}
"""Settings that are tried, each after every number of steps in CONTEXTS_STEPS."""
CONTEXTS_STEPS = (200, 500)
NETWORK = "network alone"
SECONDS_BETWEEN_LINES = 15
Rows = dict[str, dict[str, Any]]


class Run:
    """The networks and rows of one stride and seed."""

    def __init__(self, arguments: argparse.Namespace, stride: int, seed: int) -> None:
        self.arguments, self.stride, self.seed = arguments, stride, seed
        self.folder: Path = arguments.out / f"stride-{stride}-seed-{seed}"
        self.path = self.folder / "rows.json"
        self.rows: Rows = json.loads(self.path.read_text())["rows"] if self.path.is_file() else {}
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def network(self) -> DeepParsingNetwork:
        """The network alone, trained if it is not there."""
        return self._trained("network", replace(self._recipe(), mean_field={}))

    def mrf(self) -> None:
        """MRFs on the images held out."""
        if any(name.startswith(next(iter(MRFS))) for name in self.rows):
            return
        model = self.network().to(self.device).eval()
        recipe = self._recipe()
        outputs = Outputs(
            model, hold_out(open_data(self.arguments.data, "train"), recipe.data.held_out)[1], self.device
        )
        examples = outputs.examples
        temperature = calibrated_temperature([e.log_p for e in examples], [e.mask for e in examples], 255)
        mrfs: dict[str, MeanField] = {}
        for name, settings in MRFS.items():
            fit = FitSettings(**settings, gate=False, contexts_rate=5e-3, batch=8, seed=self.seed, device=self.device)
            learner = Learner(
                outputs, range(len(outputs)), fit, Choice(fit.kernel or "distance", False, temperature, True)
            )
            mrfs.setdefault("label scaling", learner.models()["label scaling"])
            mrfs[f"{name}: b12 alone"] = learner.models()["triple penalty"]
            for steps in CONTEXTS_STEPS:
                learner.learn_contexts(self._steps(steps) - learner.steps)
                mrfs[f"{name}, {steps} steps"] = learner.models()["label contexts"]
        self._measure(model, mrfs, {"temperature": temperature})

    def joint(self) -> None:
        """Network and MRF from the start."""
        if "all at once" in self.rows:
            return
        recipe = self._recipe()
        stage = replace(recipe.stage[0], learn=("unary", "triple_penalty", "label_contexts"), mrf_rate=2e-3)
        joint = self._trained("joint", replace(recipe, stage=(stage,))).to(self.device).eval()
        assert joint.mean_field is not None
        network = self.network().to(self.device).eval()
        parts: dict[str, Model] = {
            NETWORK: network.log_unary,
            "all at once": joint,
            "all at once, its network alone": joint.log_unary,
        }
        self._score({name: predictor(part) for name, part in parts.items()}, {})

    def _shown(self, name: str) -> dict[str, Any]:
        return printed(f"stride {self.stride}  seed {self.seed}  {name}")

    def _recipe(self) -> Recipe:
        recipe = read_recipe(
            RECIPE,
            {
                "data.train": self.arguments.data,
                "data.workers": str(self.arguments.workers),
                "unary.imagenet": self.arguments.imagenet,
                "seed": str(self.seed),
                "compile": "false",
            },
        )
        options = {**recipe.unary.options, "stride": self.stride, "zoom": 1.0}
        stage = recipe.stage[0]
        steps, warmup = self._steps(self.arguments.network_steps), self._steps(stage.warmup)
        return replace(
            recipe,
            unary=replace(recipe.unary, options=options),
            stage=(replace(stage, steps=steps, warmup=warmup),),
            precision=recipe.precision if self.device == "cuda" else "no",
            save_every=10**6,
        )

    def _steps(self, count: int) -> int:
        share: float = self.arguments.steps
        return max(1, round(count * share))

    def _trained(self, name: str, recipe: Recipe) -> DeepParsingNetwork:
        folder = self.folder / name
        if not (folder / "model").is_dir():
            resume = (folder / "recipe.json").is_file()
            train(recipe, folder, resume=resume, **self._shown(name))
        return read_model(folder / "model")

    def _measure(self, model: DeepParsingNetwork, mrfs: Mapping[str, MeanField], facts: dict[str, Any]) -> None:
        """Score the network and each MRF behind it; the network's output is computed once per image."""
        outputs: list[Tensor] = []

        @torch.inference_mode()
        def network(image: Tensor) -> Tensor:
            outputs[:] = [model.log_unary(image)]
            return outputs[0]

        def refined(mrf: MeanField) -> Any:
            return torch.inference_mode()(lambda image: mrf(outputs[0], image))

        self._score({NETWORK: network, **{name: refined(mrf.to(self.device)) for name, mrf in mrfs.items()}}, facts)

    def _score(self, parts: Mapping[str, Any], facts: dict[str, Any]) -> None:
        val, started = open_data(self.arguments.data, "val"), time.time()
        confusions = ImageConfusions(val)
        scores = evaluate_parts(parts, val, self.device, shows=[confusions.add])
        for name, values in scores.items():
            gain = {} if name == NETWORK else {"gain": confusions.gain(NETWORK, name).to_dict()}
            self.rows[name] = {**values.to_dict(), **gain, **facts}
            print(f"stride {self.stride}  seed {self.seed}  {row(name, self.rows[name])}", flush=True)
        facts = {"data": self.arguments.data, "network_steps": self._steps(self.arguments.network_steps)}
        write_text(self.path, json.dumps({**facts, "rows": self.rows}, indent=1) + "\n")
        print(f"scored in {time.time() - started:.0f} s", flush=True)


def printed(title: str) -> dict[str, Any]:
    """What prints the messages and the progress of a training, each line with a title."""
    times = [time.time()]

    def message(sentence: str) -> None:
        print(f"{title}: {sentence}", flush=True)

    def progress(stage: str, done: int, total: int, numbers: Mapping[str, float]) -> None:
        if time.time() - times[0] > SECONDS_BETWEEN_LINES:
            times[0] = time.time()
            message(f"{stage}, {done} of {total}, {numbers.get('steps/s', 0):.2f} steps a second")

    return {"message": message, "progress": progress}


def row(name: str, values: Mapping[str, Any]) -> str:
    """A row as text: mIoU, and the gain with its interval."""
    text = f"{name:60}  {100 * values['miou']:6.2f}"
    if "gain" not in values:
        return text
    gain = values["gain"]
    interval = "" if gain["low"] is None else f" ({100 * gain['low']:.2f} to {100 * gain['high']:.2f})"
    return f"{text}  {100 * gain['miou']:+.2f}{interval}"


def report(folder: Path) -> str:
    """All rows, a table for each stride: mIoU of the network, then gains, a column for each seed."""
    lines: list[str] = []
    runs = {path.parent.name: json.loads(path.read_text())["rows"] for path in sorted(folder.glob("*/rows.json"))}
    for stride in dict.fromkeys(name.split("-")[1] for name in runs):
        seeds = {name.split("-")[3]: rows for name, rows in runs.items() if name.split("-")[1] == stride}
        lines += [f"| stride {stride} | {' | '.join(f'seed {seed}' for seed in seeds)} | mean |"]
        lines.append("|---" * (len(seeds) + 2) + "|")
        for name in dict.fromkeys(name for rows in seeds.values() for name in rows):
            known = [rows[name] for rows in seeds.values() if name in rows]
            cells = [row("", rows[name]).strip() if name in rows else "" for rows in seeds.values()]
            mean = 100 * sum(values["miou"] for values in known) / len(known)
            gains = [100 * values["gain"]["miou"] for values in known if "gain" in values]
            average = f"{mean:.2f}" + (f"  {sum(gains) / len(gains):+.2f}" if gains else "")
            lines.append(f"| {name} | {' | '.join(cells)} | {average} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Train, learn and score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["network", "mrf", "joint", "report"])
    parser.add_argument("--data", help="as for deepmrf train: cityscapes:PATH")
    parser.add_argument("--imagenet", default="", help="ImageNet weights of EfficientNet-Lite2")
    parser.add_argument("--stride", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--network-steps", type=int, default=4000)
    parser.add_argument("--steps", type=float, default=1.0, help="share of all steps, to try things")
    parser.add_argument("--workers", type=int, default=4, help="processes that read images")
    parser.add_argument("--out", type=Path, default=Path("strides"))
    given = parser.parse_args()
    if given.parts == ["report"]:
        print(report(given.out))
        return
    if not given.data:
        parser.error("--data is missing: name the images, as in --data cityscapes:PATH.")
    for stride in given.stride:
        for seed in given.seed:
            run = Run(given, stride, seed)
            for part in given.parts:
                if part != "report":
                    getattr(run, part)()
    if "report" in given.parts:
        print(report(given.out))


if __name__ == "__main__":
    main()
