"""What an MRF is worth by the stride at which the network's decoder ends: Cityscapes, a network per stride and seed.

    python benchmarks/strides.py network mrf joint --data cityscapes:PATH --imagenet FILE --stride 4 8 --seed 0 1 2
    python benchmarks/strides.py report

    network   the recipe `street` with one stage, without zoom, at this stride
    mrf       MRFs behind that network, which stays as it is, learned on the images that the recipe holds out
    joint     network and MRF together from the start, for as many steps on the same images as the network alone;
              then a label scaling, and a label scaling and the contexts, learned on the images held out
    report    all rows with their gains over the network, as Markdown

Scores are of val. Gains come with 95 % intervals over its images. A row that is in the JSON file is not computed again.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from held_out import Outputs
from torch import Tensor
from torch.nn import functional

from deepmrf.data import open_data
from deepmrf.data.files import VOID
from deepmrf.data.writing import write_text
from deepmrf.evaluation.dice import soft_iou
from deepmrf.evaluation.evaluate import evaluate_parts
from deepmrf.evaluation.intervals import ImageConfusions
from deepmrf.layers import MeanField
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model
from deepmrf.predict.scales import predictor
from deepmrf.refine.learn import Learner
from deepmrf.refine.settings import Choice, FitSettings
from deepmrf.training.loop import train
from deepmrf.training.mean_field import SCALING_DECAY, calibrated_temperature, minimise
from deepmrf.training.recipe import Recipe, read_recipe
from deepmrf.training.samples import hold_out

RECIPE = Path(__file__).parents[1] / "recipes/street.toml"
MRFS: dict[str, dict[str, Any]] = {
    "distance kernel, three contexts of 9 x 9": {"kernel": "distance", "contexts": 3, "context_size": 9},
    "Gaussian kernel, three contexts of 9 x 9": {"kernel": "gaussian", "contexts": 3, "context_size": 9},
}
"""Settings that are tried, each after every number of steps in CONTEXTS_STEPS."""
CONTEXTS_STEPS = (200, 500)
JOINT_MRF: dict[str, Any] = {
    "kernel": "gaussian",
    "normalize": True,
    "gate": False,
    "window": 25,
    "contexts": 3,
    "context_size": 9,
}
"""The MRF that learns together with a network, as in coarser.py."""
JOINT_RATE = 5e-3
SCALING_STEPS, SCALING_RATE = 100, 2e-2
"""Of a label scaling that learns through the MRF."""
FINISHING_STEPS, FINISHING_RATE = 200, 2e-3
"""Of contexts that learned with the network and go on with images held out."""
NETWORK = "network alone"
TOGETHER = "together from the start"
IMAGES = 8
"""Images in a batch of those held out."""
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
        outputs = self._held_out(model)
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
        if TOGETHER in self.rows:
            return
        recipe = self._recipe()
        stage = replace(
            recipe.stage[0], learn=("unary", "triple_penalty", "label_contexts"), mrf_rate=self.arguments.mrf_rate
        )
        mrf = {**JOINT_MRF, "iterations": self.arguments.iterations}
        joint = self._trained("joint", replace(recipe, mean_field=mrf, stage=(stage,))).to(self.device).eval()
        network = self.network().to(self.device).eval()
        assert joint.mean_field is not None
        alone, together = self._held_out(network), self._held_out(joint)
        nothing = MeanField(len(network.labels), contexts=0, window=1)
        steps = self._steps(SCALING_STEPS)
        scaling, scaled = (
            scaled_through(mrf, outputs, self.device, self.seed, steps)
            for mrf, outputs in ((nothing, alone), (joint.mean_field, together))
        )
        finished = copy.deepcopy(scaled)
        loss = held_out_loss(finished, together, self.device, self.seed)
        parts = [finished.label_scaling, finished.label_contexts]
        minimise(parts, loss, self._steps(FINISHING_STEPS), FINISHING_RATE)
        self._score(
            {
                NETWORK: predictor(network.log_unary),
                "network and label scaling": predictor(DeepParsingNetwork(network.unary, scaling, network.labels)),
                TOGETHER: predictor(joint),
                f"{TOGETHER}, its network alone": predictor(joint.log_unary),
                f"{TOGETHER}, and label scaling": predictor(DeepParsingNetwork(joint.unary, scaled, joint.labels)),
                f"{TOGETHER}, finished on images held out": predictor(
                    DeepParsingNetwork(joint.unary, finished, joint.labels)
                ),
            },
            {},
        )

    def _held_out(self, model: DeepParsingNetwork) -> Outputs:
        """The network's output of the images that no training saw."""
        data = hold_out(open_data(self.arguments.data, "train"), self._recipe().data.held_out)[1]
        return Outputs(model, data, self.device)

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
                "compile": str(self.arguments.compile).lower(),
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


def scaled_through(
    mrf: MeanField, outputs: Outputs, device: str, seed: int, steps: int, images: int = IMAGES
) -> MeanField:
    """The same MRF with a label scaling in front, learned through it from images held out."""
    scaled = MeanField(**{**mrf.settings, "label_scaling": True})
    scaled.load_state_dict(mrf.state_dict(), strict=False)
    loss = held_out_loss(scaled, outputs, device, seed, images)
    minimise([scaled.label_scaling], loss, steps, SCALING_RATE)
    return scaled.eval()


def held_out_loss(
    mrf: MeanField, outputs: Outputs, device: str, seed: int, images: int = IMAGES
) -> Callable[[], Tensor]:
    """Cross-entropy and soft IoU of whole images, drawn anew at each call; scalings stay near 1 and 0."""
    mrf.to(device).requires_grad_(False)
    random = np.random.default_rng(seed)

    def loss() -> Tensor:
        batch = [outputs.examples[i] for i in random.choice(len(outputs), min(images, len(outputs)), False)]
        log_p, image, mask = (
            torch.stack([getattr(example, name) for example in batch]).to(device) for name in ("log_p", "image", "mask")
        )
        log_q = mrf(log_p.float(), image)
        assert mrf.label_scaling is not None
        size = torch.stack([values.square().sum() for values in mrf.label_scaling.parameters()]).sum()
        entropy = functional.cross_entropy(log_q, mask.long(), ignore_index=VOID)
        return entropy + 1 - soft_iou(log_q.exp(), mask) + SCALING_DECAY * size

    return loss


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
    parser.add_argument("--network-steps", type=int, default=3000)
    parser.add_argument("--mrf-rate", type=float, default=JOINT_RATE, help="of an MRF that learns with its network")
    parser.add_argument("--iterations", type=int, default=1, help="of that MRF")
    parser.add_argument("--compile", action="store_true", help="as in a recipe")
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
