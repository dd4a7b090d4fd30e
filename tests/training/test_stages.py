"""The paper's four stages: each learns its own parameters, and leaves the others as they are to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepmrf.models.parsing_network import read_model
from deepmrf.training import loop
from deepmrf.training.recipe import recipe_from_dict
from deepmrf.training.run import Run
from deepmrf.training.stages import learns_from_the_start

STAGES = {
    "unary": ["unary"],
    "triple penalty": ["triple_penalty"],
    "label contexts": ["label_contexts"],
    "joint": ["unary", "triple_penalty", "label_contexts"],
}
PENALTY, CONTEXTS = "mean_field.triple_penalty.", "mean_field.label_contexts."


def recipe(data: str, kernel: str, cached: bool):
    return recipe_from_dict(
        {
            "data": {"train": data, "workers": 0},
            "unary": {"network": "fast", "options": {"width": 8, "norm_momentum": 0.1}},
            "mean_field": {"kernel": kernel, "window": 5, "contexts": 2, "context_size": 3},
            "augment": {"crop": [24, 32]},
            "stage": [
                {"name": name, "learn": parts, "steps": 4, "batch": 4, "mrf_rate": 1e-2, "cached": cached}
                for name, parts in STAGES.items()
            ],
        }
    )


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, value in after.items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "computed"])
@pytest.mark.parametrize("kernel", ["distance", "gaussian"])
def test_each_of_the_four_stages_moves_its_own_parameters_alone(tmp_path, monkeypatch, scenes, kernel, cached):
    states = []  # before the first stage, then for each stage: after its preparation, and after its steps
    parameters = set()

    def record(model):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        parameters.update(name for name, _ in model.named_parameters())

    real_prepare, real_save = loop.prepare_stage, Run.save_state

    def prepare(model, *arguments, **options):
        if not states:
            record(model)
        real_prepare(model, *arguments, **options)
        record(model)

    def save(run, stage, step, optimiser):
        real_save(run, stage, step, optimiser)
        if optimiser is None:  # the stage is done
            record(run.model)

    monkeypatch.setattr(loop, "prepare_stage", prepare)
    monkeypatch.setattr(Run, "save_state", save)
    loop.train(recipe(scenes, kernel, cached), tmp_path)
    prepared = [changed(*pair) for pair in zip(states[0::2], states[1::2], strict=False)]
    moved = [changed(*pair) for pair in zip(states[1::2], states[2::2], strict=True)]

    network = {name for name in states[0] if name.startswith("unary.")}  # with the statistics of its norms
    penalty = {name for name in parameters if name.startswith(PENALTY)}
    contexts = {name for name in parameters if name.startswith(CONTEXTS)}
    assert network | penalty | contexts == set(states[0])
    assert moved[0] <= network
    assert moved[0] & parameters == network & parameters
    assert moved[1] == penalty - {f"{PENALTY}shift"}  # a number added to every label changes nothing before softmax
    assert moved[2] == contexts
    assert parameters <= moved[3]
    # Before stage 2, o14 = t and t = 0; before stage 3, noise tells the K patterns apart; else nothing starts anew.
    assert prepared[0] == prepared[3] == set()
    assert prepared[1] <= {f"{CONTEXTS}weight", f"{CONTEXTS}bias", f"{PENALTY}scale"}
    assert prepared[2] == {f"{CONTEXTS}weight"}


def test_a_card_tells_how_a_network_that_was_trained_before_was_trained(tmp_path, scenes):
    """Images are shrunk to the crops of the network, not to those that an MRF learned from."""
    whole = recipe(scenes, "gaussian", cached=True)
    first = replace(whole, stage=whole.stage[:1])
    loop.train(first, tmp_path / "first")
    start = tmp_path / "first" / "model"
    later = replace(whole, unary=replace(whole.unary, start=str(start)), augment=replace(whole.augment, crop=(8, 8)))
    models = {}
    for name, stages in {"mrf": whole.stage[1:2], "joint": whole.stage[3:]}.items():
        loop.train(replace(later, stage=stages), tmp_path / name)
        models[name] = read_model(tmp_path / name / "model")
    assert models["mrf"].card.recipe["network"] == read_model(start).card.recipe
    assert "network" not in models["joint"].card.recipe


def test_a_network_learns_from_the_start_in_one_stage_at_most():
    plain = recipe("synthetic:scenes", "distance", True)
    assert [learns_from_the_start(plain, index) for index in range(4)] == [True, False, False, False]
    later = replace(plain, stage=plain.stage[1:])
    assert [learns_from_the_start(later, index) for index in range(3)] == [False, False, True]
    assert learns_from_the_start(replace(plain, strategy="joint"), 0)
    for taught in (replace(plain, compile=True), replace(plain, unary=replace(plain.unary, start="runs/a/model"))):
        assert not any(learns_from_the_start(taught, index) for index in range(4))
