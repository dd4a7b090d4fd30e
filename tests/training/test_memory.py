"""Steps that cannot fit into memory are refused before the first one."""

from __future__ import annotations

import pytest
import torch

from deepmrf.data import synthetic
from deepmrf.training import loop, memory
from deepmrf.training.recipe import RecipeError, recipe_from_dict
from deepmrf.training.stages import StageModel

STAGES = [
    {"name": "unary", "learn": ["unary"], "steps": 1, "batch": 2},
    {"name": "penalty", "learn": ["triple_penalty"], "steps": 1, "batch": 2},
    {"name": "contexts", "learn": ["label_contexts"], "steps": 1, "batch": 2, "lovasz": 1.0},
    {"name": "joint", "learn": ["unary", "triple_penalty", "label_contexts"], "steps": 1, "batch": 2},
]


@pytest.fixture
def recipe(tmp_path):
    for split in ("train", "val"):
        synthetic((24, 32), split, count=2, to=tmp_path / "data")

    def with_values(**changes):
        return recipe_from_dict(
            {
                "data": {"train": f"folder:{tmp_path / 'data'}", "workers": 0},
                "unary": {"network": "fast", "options": {"width": 8}},
                "mean_field": {"window": 3, "contexts": 2, "context_size": 3},
                "augment": {"crop": [24, 32]},
                "stage": STAGES,
                **changes,
            }
        )

    return with_values


def test_crops_beyond_memory_are_refused(recipe, tmp_path):
    for crop in ([10**6, 10**6], [10**12, 10**12]):
        with pytest.raises(RecipeError, match=r"^stage.unary.batch=2 with augment.crop=.* takes at least .* GiB, and"):
            loop.train(recipe(augment={"crop": crop}), tmp_path / "run")
    stages = [{**stage, "batch": 2 if stage["name"] != "joint" else 10**9} for stage in STAGES]
    with pytest.raises(RecipeError, match=r"^stage.joint.batch=1000000000 with"):
        loop.train(recipe(stage=stages), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_stage_is_rehearsed(recipe, tmp_path, monkeypatch):
    """On a GPU each stage takes a step on zeros. Here the CPU does, and the third stage finds no memory."""
    steps, forward = [], StageModel.forward

    def counted(model, *inputs):
        steps.append([tuple(part.shape) for part in inputs])
        if len(steps) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much")
        return forward(model, *inputs)

    monkeypatch.setattr(StageModel, "forward", counted)
    with loop._accelerator("no") as accelerator:
        run = loop._new_run(recipe(), tmp_path / "run", None, accelerator, print, lambda *_: None)
        loss = lambda stage, log_q, target: loop._loss(run, stage, log_q, target, None)  # noqa: E731
        before, random = {n: v.clone() for n, v in run.model.state_dict().items()}, torch.get_rng_state()
        stages = run.recipe.stage
        memory.rehearse(run, stages, loss)
        image, log_p, both = (2, 3, 24, 32), (2, 6, 24, 32), (2, 12, 24, 32)
        assert steps == [[image], [log_p, image], [both, image], [image]]
        with pytest.raises(RecipeError, match=r"^stage.contexts.batch=2 with .* takes more memory"):
            memory.rehearse(run, stages, loss)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


def test_trainings_of_different_precision_in_one_process(recipe, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state()  # another test may be a program with one of its own
    for precision in ("bf16", "no"):
        loop.train(recipe(precision=precision, stage=STAGES[:1], mean_field={}), tmp_path / precision)
    assert accelerate.Accelerator(mixed_precision="bf16").mixed_precision == "bf16"  # of the program around it
    with loop._accelerator("bf16") as accelerator:
        assert accelerator.mixed_precision == "bf16"
    assert accelerate.state.AcceleratorState().mixed_precision == "bf16"  # that one is not touched
    accelerate.state.AcceleratorState._reset_state()


def test_memory_that_ends_in_a_step_is_one_sentence(recipe, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from deepmrf.cli import app

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much")

    monkeypatch.setattr(StageModel, "forward", full)
    (tmp_path / "recipe.toml").write_text(
        f'[data]\ntrain = "folder:{tmp_path / "data"}"\nworkers = 0\n[unary]\noptions = {{ width = 8 }}\n'
        '[augment]\ncrop = [24, 32]\n[[stage]]\nname = "unary"\nlearn = ["unary"]\nsteps = 1\nbatch = 2\n'
    )
    result = CliRunner().invoke(app, ["train", str(tmp_path / "recipe.toml"), "-o", str(tmp_path / "run")])
    assert result.exit_code == 2, result.output
    assert result.output.strip().splitlines()[-1].startswith("Stopped, the memory is full: make batch or crop smaller")


def test_a_container_has_the_memory_that_it_is_given(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "CGROUP_LIMIT", tmp_path / "memory.max")
    total = memory.memory_bytes(cpu)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.memory_bytes(cpu) == total
    (tmp_path / "memory.max").write_text("1000000\n")
    assert memory.memory_bytes(cpu) == 1_000_000
