"""Training runs as a user starts them: four stages, killed and resumed, two processes, bad recipes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.evaluation.metrics import SegmentationMetrics
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model
from deepmrf.training import batches, checkpoint
from deepmrf.training import loop as train
from deepmrf.training import run as runs
from deepmrf.training.recipe import RecipeError, read_recipe

RECIPE = """
seed = 0
save_every = 5
clip = 5.0

[data]
train = "synthetic:48x64"
workers = 0

[unary]
network = "fast"
options = { width = 16, dropout = 0.1, norm_momentum = 0.1 }

[mean_field]
kernel = "gaussian"
gate = false
window = 9
contexts = 2
context_size = 7

[augment]
crop = [48, 64]
scale = [0.9, 1.1]
colour = 0.05

[[stage]]
name = "unary"
learn = ["unary"]
steps = 120
rate = 4e-3

[[stage]]
name = "triple penalty"
learn = ["triple_penalty"]
steps = 30
mrf_rate = 0.2

[[stage]]
name = "label contexts"
learn = ["label_contexts"]
steps = 50
mrf_rate = 1e-2

[[stage]]
name = "joint"
learn = ["unary", "triple_penalty", "label_contexts"]
steps = 20
rate = 2e-4
mrf_rate = 1e-3
"""
STAGES = ("unary", "triple_penalty", "label_contexts", "joint")
SHORT = [f"--set=stage.{name}.steps={steps}" for name, steps in zip(STAGES, (12, 6, 6, 4), strict=True)]
SHORT += [f"--set=stage.{name}.batch=2" for name in STAGES]


@pytest.fixture
def recipe(tmp_path: Path, scenes: str) -> Path:
    """RECIPE, on few images."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("synthetic:48x64", scenes))
    return path


def type_in(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_model(folder / "model").state_dict())


def test_four_stages_and_the_mrf_helps(recipe, scenes, tmp_path):
    out = tmp_path / "run"
    recipe.write_text(RECIPE)
    result = type_in("train", recipe, "-o", out)
    assert result.exit_code == 0, result.output
    scores = json.loads((out / "metrics.json").read_text())["val"]
    miou = [scores[name]["miou"] for name in ("unary", "triple penalty", "label contexts", "joint")]
    assert miou[0] > 0.2, miou
    assert miou[2] > miou[0] + 0.01, miou  # the MRF's stages, the network fixed
    assert miou[3] > miou[0] + 0.01, miou
    model = DeepParsingNetwork.from_pretrained(out / "model")
    assert model.card.metrics["val"]["joint"]["miou"] == miou[3]
    evaluated = type_in("evaluate", out / "model", "--data", "synthetic:48x64", "--stages", "-o", tmp_path / "scores")
    assert list((out / "tensorboard").iterdir())
    assert evaluated.exit_code == 0, evaluated.output
    written = json.loads((tmp_path / "scores" / "scores.json").read_text())["scores"]
    assert written["whole model"]["miou"] == pytest.approx(miou[3], abs=1e-6)
    assert written["network alone"]["miou"] < miou[3]
    words = ("evaluate", out / "model", out / "model", "--data", scenes, "--scales", "0.75", "1", "--flip")
    several = type_in(*words, "-o", tmp_path / "several")
    assert several.exit_code == 0, several.output
    facts = json.loads((tmp_path / "several" / "scores.json").read_text())
    assert (facts["scales"], facts["flip"], len(facts["models"])) == ([0.75, 1.0], True, 2)


def test_what_is_fixed_is_computed_once_and_changes_nothing(recipe, tmp_path, monkeypatch):
    """Label contexts learn from b12's cached outputs as from those computed at every step."""
    settings = read_recipe(recipe, dict(word.removeprefix("--set=").split("=") for word in SHORT))
    cached, calls = batches.cached_penalties, []
    monkeypatch.setattr(
        batches, "cached_penalties", lambda run, images: calls.append(len(images)) or cached(run, images)
    )
    train.train(settings, tmp_path / "cached")
    assert len(calls) == 1
    monkeypatch.setattr(batches, "caches_penalty", lambda *_: False)
    monkeypatch.setattr(train, "caches_penalty", lambda *_: False)
    train.train(settings, tmp_path / "anew")
    assert len(calls) == 1
    from_cache, wanted = (
        read_model(tmp_path / name / "model").mean_field.label_contexts for name in ("cached", "anew")
    )
    start = DeepParsingNetwork.from_pretrained(tmp_path / "anew" / "model").mean_field.label_contexts
    torch.nn.init.zeros_(start.weight)
    start.set_compatibility(torch.eye(start.labels))
    moved = (wanted.weight - start.weight).abs().max()
    assert (from_cache.weight - wanted.weight).abs().max() < 0.02 * moved


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_without_a_finite_gradient_is_left_out(recipe, tmp_path, monkeypatch, fused):
    real_loss, real_optimiser, calls = train._loss, train.new_optimiser, []

    def loss(*arguments):
        calls.append(1)
        return real_loss(*arguments) * (math.nan if len(calls) == 5 else 1)

    def optimiser(*arguments):
        groups = [{key: g[key] for key in ("params", "lr")} for g in real_optimiser(*arguments).param_groups]
        return torch.optim.AdamW(groups, fused=fused)

    monkeypatch.setattr(train, "_loss", loss)
    monkeypatch.setattr(train, "new_optimiser", optimiser)
    result = type_in("train", recipe, "-o", tmp_path / "run", *SHORT)
    assert result.exit_code == 0, result.output
    assert "1 of the steps of stage unary had no finite gradient and were left out." in " ".join(result.output.split())
    assert all(torch.isfinite(value.float()).all() for value in weights(tmp_path / "run").values())


def test_nothing_but_nan_ends_a_run(recipe, tmp_path, monkeypatch):
    real = train._loss
    monkeypatch.setattr(train, "_loss", lambda *arguments: real(*arguments) * math.nan)
    result = type_in("train", recipe, "-o", tmp_path / "run", *SHORT)
    assert result.exit_code != 0
    assert "lower its rate" in " ".join(result.output.split()) + str(result.exception)


@pytest.fixture(scope="module")
def uninterrupted_weights(tmp_path_factory, scenes):
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "recipe.toml").write_text(RECIPE.replace("synthetic:48x64", scenes))
    result = type_in("train", folder / "recipe.toml", "-o", folder / "run", "--set", "save_every=1", *SHORT)
    assert result.exit_code == 0, result.output
    return weights(folder / "run")


@pytest.mark.parametrize("step", [0, 3, 14])
def test_killed_and_resumed_it_ends_with_the_same_weights(recipe, tmp_path, uninterrupted_weights, step):
    """SIGKILL after some checkpoint; `step` checkpoints later the run is continued and must not differ in any bit."""
    command = [
        sys.executable,
        "-m",
        "deepmrf",
        "train",
        str(recipe),
        "-o",
        str(tmp_path / "cut"),
        "--set",
        "save_every=1",
    ]
    # As many threads as here: sums of floats depend on how many share them.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([*command, *SHORT], stdout=quiet, stderr=quiet, env=environment)
    state = tmp_path / "cut" / "state.safetensors"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if state.exists() and checkpoints(state) >= step:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state.exists()
    resumed = type_in("train", recipe, "-o", tmp_path / "cut", "--resume", "--set", "save_every=1", *SHORT)
    assert resumed.exit_code == 0, resumed.output
    for name, value in weights(tmp_path / "cut").items():
        assert torch.equal(value, uninterrupted_weights[name]), name


def checkpoints(state: Path) -> int:
    """How far a run is, in steps of all stages."""
    try:
        facts = checkpoint.read_checkpoint(state)[1]
    except RuntimeError:  # replaced by the next one between being opened and being mapped: look again
        return -1
    return sum((12, 6, 6, 4)[: facts["stage"]]) + facts["step"]


def test_two_processes_do_what_one_does(recipe, tmp_path):
    """Same global batch; without batch statistics and dropout, whose values depend on the share of a process."""
    exact = ["--set=unary.options={width=8, dropout=0.0}", "--set=stage.unary.learn=['triple_penalty']", *SHORT]
    exact += ["--set=stage.joint.learn=['triple_penalty', 'label_contexts']"]
    alone = type_in("train", recipe, "-o", tmp_path / "one", *exact)
    assert alone.exit_code == 0, alone.output
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, "-m", "deepmrf", "train", str(recipe), "-o", str(tmp_path / "two"), *exact]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    expected = weights(tmp_path / "one")
    for name, value in weights(tmp_path / "two").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch, call):
    path = tmp_path / "state.safetensors"
    checkpoint.write_checkpoint(path, {"a": torch.ones(3)}, {"step": 1})

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space") as raised:
        checkpoint.write_checkpoint(path, {"a": torch.zeros(3)}, {"step": 2})
    assert raised.value.errno == 28
    assert checkpoint.read_checkpoint(path)[1] == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "stage.unary.stepps=3"], "stage.unary.stepps"),
        (["--set", "stage.nowhere.steps=3"], "no stage 'nowhere'"),
        (["--set", "seed=later"], "seed must be of type int"),
        (["--set", "unary.network=vgg99"], "vgg99"),
        (["--set", "unary.imagenet=nowhere.safetensors"], "unary.imagenet"),
        (["--set", "data.train=camvid:nowhere"], "nowhere"),
        (["--set", "data.train=nothing"], "camvid:PATH"),
        (["--set", "mean_field.windows=3"], "windows"),
        (["--set", "stage.unary.learn=['everything']"], "everything"),
        (["--set", "seed"], "key=value"),
        (["--set", "precision=int8"], "precision='int8'"),
        (["--set", "zoom=9"], "zoom=9.0 must be a number from 1 to 4"),
        (["--set", "temperature=99"], "temperature=99.0 must be a number from 0.1 to 10"),
        (["--set", "zoom=2", "--set", "unary.network=vgg16", "--set", "unary.options={}"], "only the networks fast"),
    ],
)
def test_bad_recipes_say_what_is_wrong(recipe, tmp_path, words, says):
    result = type_in("train", recipe, "-o", tmp_path / "run", *words)
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "state.safetensors").exists()


def test_a_second_run_in_the_same_folder_is_refused(recipe, tmp_path):
    assert type_in("train", recipe, "-o", tmp_path / "run", *SHORT).exit_code == 0
    again = type_in("train", recipe, "-o", tmp_path / "run", *SHORT)
    assert again.exit_code == 2
    assert "resume it" in again.output
    other = type_in("train", recipe, "-o", tmp_path / "run", "--resume", "--set", "seed=1", *SHORT)
    assert other.exit_code == 2
    assert "seed" in other.output


def test_joint_strategy_is_one_stage(recipe, tmp_path):
    result = type_in("train", recipe, "-o", tmp_path / "run", "--set", "strategy=joint", *SHORT)
    assert result.exit_code == 0, result.output
    scores = json.loads((tmp_path / "run" / "metrics.json").read_text())["val"]
    assert list(scores) == ["all at once", "all at once, network alone"]


def test_a_finished_model_may_zoom_and_be_less_sure(recipe, scenes, tmp_path):
    out = tmp_path / "run"
    result = type_in("train", recipe, "-o", out, "--set", "zoom=1.5", "--set", "temperature=1.6", *SHORT)
    assert result.exit_code == 0, result.output
    name = "zoom 1.5, temperature 1.6"
    assert f"{name}, network alone" in " ".join(result.output.split())
    zoomed = DeepParsingNetwork.from_pretrained(out / "model")
    assert (float(zoomed.unary.zoom), zoomed.mean_field.temperature) == (1.5, 1.6)
    learned = checkpoint.read_checkpoint(out / "state.safetensors")[0]  # after the last stage
    assert all(torch.equal(value, learned[f"model.{name}"]) for name, value in zoomed.state_dict().items())
    evaluated = type_in("evaluate", out / "model", "--data", scenes, "-o", tmp_path / "scores")
    assert evaluated.exit_code == 0, evaluated.output
    written = json.loads((tmp_path / "scores" / "scores.json").read_text())["scores"]
    known = json.loads((out / "metrics.json").read_text())["val"]
    assert written["whole model"]["miou"] == pytest.approx(known[name]["miou"], abs=1e-6)


def test_the_bar_shows_no_miou_before_there_is_one(recipe, tmp_path):
    shown = []
    settings = read_recipe(recipe, dict(word.removeprefix("--set=").split("=") for word in SHORT))
    train.train(settings, tmp_path / "run", progress=lambda name, *_: shown.append((name, _[-1])))
    numbers = {stage: [values for name, values in shown if name == stage and values] for stage in ("unary", "joint")}
    assert all({"loss", "steps/s"} == set(values) for values in numbers["unary"])
    assert all(values["mIoU"] > 0 for values in numbers["joint"])


def test_a_network_that_predicts_one_label_alone_is_told(recipe, tmp_path, monkeypatch):
    messages = []
    settings = read_recipe(recipe, dict(word.removeprefix("--set=").split("=") for word in SHORT))
    monkeypatch.setattr(
        runs, "predictor", lambda _: lambda image: torch.eye(4)[1].expand(*image.shape[-2:], 4).permute(2, 0, 1)[None]
    )
    train.train(settings, tmp_path / "run", message=messages.append)
    name = read_model(tmp_path / "run" / "model").labels.names[1]
    says = f"The network predicts {name} alone so far: take more steps, or a higher rate."
    assert messages.count(says) == sum(": mIoU" in message for message in messages) > 1


@pytest.mark.parametrize(
    ("predicted", "says"),
    [
        ([1, 1, 1, 1], "b"),
        ([1, 1, 1, 0], None),
        ([1, 1, 1, 2], None),
        ([1, 2, 1, 1], None),
        ([0, 1, 1, 2], None),  # all right
        ([2, 2, 2, 0], None),
    ],
)
def test_one_label_alone_is_known_by_the_scores(predicted, says):
    metrics = SegmentationMetrics(4, names=["a", "b", "c", "d"])
    metrics.update(torch.tensor([predicted]), torch.tensor([[0, 1, 1, 2]]))
    assert runs.only_prediction(metrics.compute()) == says


def test_every_recipe_of_the_project_is_valid():
    paths = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
    assert paths
    for path in paths:
        read_recipe(path)


@pytest.mark.parametrize("seen_too", [False, True])
def test_the_mrf_alone_learns_from_images_that_the_network_never_saw(recipe, tmp_path, monkeypatch, seen_too):
    values = dict(word.removeprefix("--set=").split("=") for word in SHORT) | {"data.held_out": "0.25"}
    settings = read_recipe(recipe, values | ({"stage.label_contexts.held_out": "false"} if seen_too else {}))
    seen = {"Crops": [], "CachedCrops": []}
    kinds = {name: getattr(batches, name) for name in seen}
    for name in seen:

        def recorded(images, *rest, name=name):
            seen[name].append({*images.data})
            return kinds[name](images, *rest)

        monkeypatch.setattr(batches, name, recorded)
    train.train(settings, tmp_path / "run")
    network_images, (penalty_images, contexts_images) = set.union(*seen["Crops"]), seen["CachedCrops"]
    assert network_images
    assert penalty_images
    assert not network_images & penalty_images
    assert contexts_images == (network_images if seen_too else penalty_images)


def test_the_temperature_of_images_held_out_survives_a_stop(recipe, tmp_path):
    """A run that stops before its last stage goes on with the temperature that an earlier stage found."""
    values = dict(word.removeprefix("--set=").split("=") for word in SHORT) | {"data.held_out": "0.25"}
    settings = read_recipe(recipe, values)
    train.train(settings, tmp_path / "run")
    found = read_model(tmp_path / "run" / "model").mean_field.temperature
    assert found != 1
    train.train(settings, tmp_path / "run", resume=True)  # all stages are done: the model is written again
    assert read_model(tmp_path / "run" / "model").mean_field.temperature == found


def test_the_scaling_of_labels_is_learned_from_images_held_out(recipe, tmp_path):
    values = dict(word.removeprefix("--set=").split("=") for word in SHORT) | {"mean_field.label_scaling": "true"}
    with pytest.raises(RecipeError, match=r"label_scaling learns from images .*: set data\.held_out"):
        train.train(read_recipe(recipe, values), tmp_path / "run")
    messages = []
    settings = read_recipe(recipe, values | {"data.held_out": "0.25"})
    train.train(settings, tmp_path / "run", message=messages.append)
    mean_field = read_model(tmp_path / "run" / "model").mean_field
    assert mean_field.label_scaling.log_scale.abs().max() > 0.01
    assert mean_field.temperature == 1
    assert "The scaling of labels was learned from the images held out." in messages
