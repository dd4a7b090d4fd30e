"""Learn the MRF of a model as `deepmrf fit` does, from training images: the bundled models street and camvid.

    python benchmarks/held_out.py runs/street/model --data cityscapes:PATH --share 0.12 -o street
    python benchmarks/held_out.py runs/camvid-mixed/model --data camvid:PATH --share 0 --kernel gaussian --contexts 5 \\
        --no-label-scaling --temperature 0 --steps 400 --batch 6 --video-of camvid -o camvid
    deepmrf evaluate street --data cityscapes:PATH --stages

The network stays as it is. Stages 2 and 3 learn from random crops of the images that the recipe held out
(`data.held_out`), or of all. Written is the model with the new MRF, its filters in half precision, and with the scores
of every stage on val.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from deepmrf.data import open_data
from deepmrf.data.dataset import Dataset
from deepmrf.evaluation.evaluate import evaluate
from deepmrf.layers import MeanField
from deepmrf.models.names import open_model
from deepmrf.models.parsing_network import Card, DeepParsingNetwork, write_model
from deepmrf.predict.scales import predictor
from deepmrf.refine.examples import Example, Examples
from deepmrf.refine.learn import Learner
from deepmrf.refine.settings import Choice, FitSettings
from deepmrf.training.mean_field import calibrated_temperature
from deepmrf.training.recipe import read_recipe
from deepmrf.training.samples import hold_out


class Outputs(Examples):
    """Examples in memory: the network's output of each image."""

    def __init__(self, model: DeepParsingNetwork, data: Dataset, device: str = "cpu") -> None:
        super().__init__([], data.labels, np.arange(256, dtype=np.int16))
        self.examples = [_example(model, data, index, device) for index in track(range(len(data)), "network's output")]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


@torch.inference_mode()
def _example(model: DeepParsingNetwork, data: Dataset, index: int, device: str) -> Example:
    image, mask = data.read(data[index])
    picture = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
    labels = torch.from_numpy(np.ascontiguousarray(mask))
    return Example(data[index].name, model.log_unary(picture[None].to(device))[0].half().cpu(), picture, labels)


def learn(outputs: Outputs, settings: FitSettings, temperature: float) -> dict[str, MeanField]:
    """Stage 2, and the steps of stage 3; return the MRF after each."""
    choice = Choice(settings.kernel or "distance", False, temperature, bool(settings.label_scaling))
    learner = Learner(outputs, range(len(outputs)), settings, choice)
    if settings.contexts:
        steps = settings.contexts_steps or 0
        with_bar = track(range(steps // 10), "label contexts")
        for _ in with_bar:
            learner.learn_contexts(10)
    return {str(stage): mrf for stage, mrf in learner.models().items()}


def stage_scores(
    model: DeepParsingNetwork, mrfs: dict[str, MeanField], data: Dataset, device: str = "cpu"
) -> dict[str, object]:
    """The scores on val after each stage."""
    scores: dict[str, object] = {"unary": evaluate(predictor(model.log_unary), data, device).to_dict()}
    for stage, mrf in mrfs.items():
        stage_model = DeepParsingNetwork(model.unary, mrf, model.labels)
        scores[stage] = evaluate(predictor(stage_model), data, device).to_dict()
    finished = f"temperature {mrf.temperature:g}"
    return {**scores, finished: scores[stage], f"{finished}, network alone": scores["unary"]}


def main() -> None:
    """Learn, score and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--train-split", default="train")
    parser.add_argument("--share", type=float, default=0.12, help="data.held_out of the recipe; 0: all images")
    parser.add_argument("--recipe", type=Path, default=None, help="the recipe of the network, for config.json")
    parser.add_argument("--kernel", choices=["distance", "gaussian"], default="distance")
    parser.add_argument("--label-scaling", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--contexts", type=int, default=3, help="0: the triple penalty alone")
    parser.add_argument("--context-size", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200, help="of stage 3")
    parser.add_argument("--rate", type=float, default=5e-3, help="of stage 3")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.15, help="0: the best for these images")
    parser.add_argument("--video-of", default=None, help="a model whose part for video this one gets")
    parser.add_argument("--seed", type=int, default=0, help="of crops and starting values")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    model = open_model(given.model).eval().to(given.device)
    data = open_data(given.data, given.train_split)
    outputs = Outputs(model, hold_out(data, given.share)[1] if given.share else data, given.device)
    logs, masks = ([getattr(example, name) for example in outputs.examples] for name in ("log_p", "mask"))
    temperature = given.temperature or calibrated_temperature(logs, masks, data.labels.ignore)
    settings = FitSettings(
        kernel=given.kernel, gate=False, label_scaling=given.label_scaling,
        contexts=given.contexts, context_size=given.context_size,
        contexts_steps=given.steps, contexts_rate=given.rate, batch=given.batch, seed=given.seed,
        device=given.device,
    )  # fmt: skip
    mrfs = learn(outputs, settings, temperature)
    scores = stage_scores(model, mrfs, open_data(given.data, "val"), given.device)
    joined = DeepParsingNetwork(model.unary, list(mrfs.values())[-1], model.labels).eval()
    if given.video_of is not None:
        joined.video = open_model(given.video_of).video
        assert joined.video is not None, f"{given.video_of} has no part for video"
        joined.video.temperature = temperature
    recipe = {} if given.recipe is None else json.loads(json.dumps(asdict(read_recipe(given.recipe))))
    joined.card = Card({"val": scores, "seed": given.seed}, recipe)
    write_model(joined, given.out, half=True)
    for stage, values in scores.items():
        print(f"{stage:32} {100 * values['miou']:.2f}")  # type: ignore[index]


if __name__ == "__main__":
    main()
