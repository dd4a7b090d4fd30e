"""Training on clips as a user starts it: from a model of images, of videos and of moved stills, resumed, and wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deepmrf.cli import app
from deepmrf.data import synthetic
from deepmrf.data.folder import write_folder
from deepmrf.models.parsing_network import DeepParsingNetwork, read_model, write_model
from deepmrf.training.loop import train
from deepmrf.training.recipe import read_recipe

RECIPE = """
seed = 0
start = "START"
save_every = 2

[data]
train = "folder:DATA"
workers = 0

[augment]
crop = [24, 32]
scale = [0.9, 1.1]

[clips]
frames = 3
motion = 3.0
flicker = 0.5
flow = "exact"
labelled = "all"
count = 4

[[stage]]
name = "mrf"
learn = ["triple_penalty", "label_contexts"]
steps = 6
batch = 2
mrf_rate = 2e-2
lovasz = 0.5
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    top = tmp_path_factory.mktemp("video")
    for split, count in (("train", 3), ("val", 1)):
        write_folder(synthetic((32, 40), split, count=count, frames=5), top, split)
    return top


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    torch.manual_seed(0)
    model = DeepParsingNetwork.build(
        "fast",
        synthetic().labels,
        {"width": 8, "dropout": 0.1},
        {"window": 5, "kernel": "gaussian", "gate": False, "contexts": 2, "context_size": 3},
    )
    with torch.no_grad():
        for parameter in model.mean_field.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp("start")
    write_model(model, folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    """Pictures this small are computed sooner by one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipe(tmp_path: Path, data: Path, start: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("START", str(start)).replace("DATA", str(data)))
    return path


def type_in(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_links_alone_leave_the_rest_as_it_was(recipe, tmp_path, start):
    out = tmp_path / "run"
    result = type_in("train", recipe, "-o", out, "--set", 'stage.mrf.learn=["links"]')
    assert result.exit_code == 0, result.output
    trained, before = read_model(out / "model"), read_model(start).inflate()
    moved = {name for name, value in trained.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    assert moved == {"mean_field.triple_penalty.frame_weights", "mean_field.trajectory_weights"}
    single = type_in(
        "train", recipe, "-o", tmp_path / "b", "--set", 'stage.mrf.learn=["links"]', "--set", "clips.frames=1"
    )
    assert single.exit_code == 2
    assert "set clips.frames" in single.output


ATTACH = [
    word
    for setting in ('stage.mrf.learn=["trajectories"]', "clips.attach=true", "clips.contexts=1", "temperature=1.5")
    for word in ("--set", setting)
]


def test_links_become_the_part_for_video_of_the_start(recipe, tmp_path, start, data):
    out = tmp_path / "run"
    result = type_in("train", recipe, "-o", out, *ATTACH)
    assert result.exit_code == 0, result.output
    trained, before = read_model(out / "model"), read_model(start)
    states = [model.state_dict() for model in (trained, before)]
    assert set(states[0]) - set(states[1]) == {"video.frame_weights", "video.trajectory_weights"}
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert trained.video.settings == {"frames": 3, "temperature": 1.5}
    assert (trained.video.trajectory_weights != 0).all()
    assert not trained.video.frame_weights.any()
    assert trained.card.recipe["video"]["clips"]["attach"]
    scores = json.loads((out / "metrics.json").read_text())["val"]["temperature 1.5"]
    shown = type_in("evaluate", out / "model", "--data", f"folder:{data}", "--video", "-o", tmp_path / "scores")
    assert shown.exit_code == 0, shown.output
    written = json.loads((tmp_path / "scores" / "scores.json").read_text())["scores"]
    assert list(written) == ["network alone", "run, frame by frame", "run, linked"]
    assert written["run, linked"]["miou"] == pytest.approx(scores["miou"], abs=1e-6)
    assert written["run, linked"]["temporal_consistency"] == pytest.approx(scores["temporal_consistency"], abs=1e-6)


def test_half_precision_stays(recipe, tmp_path, start):
    write_model(read_model(start), tmp_path / "half", half=True)
    result = type_in("train", recipe, "-o", tmp_path / "run", *ATTACH, "--set", f"start={tmp_path / 'half'}")
    assert result.exit_code == 0, result.output
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "run/model")]
    assert sizes[1] < sizes[0] + 1000


def test_a_model_of_images_learns_from_moved_stills(recipe, tmp_path, start, data):
    out = tmp_path / "run"
    result = type_in("train", recipe, "-o", out)
    assert result.exit_code == 0, result.output
    scores = json.loads((out / "metrics.json").read_text())["val"]["mrf"]
    assert 0 < scores["temporal_consistency"] <= 1
    assert scores["images"] == 5
    trained, before = read_model(out / "model"), read_model(start)
    assert trained.mean_field.dims == 3
    assert all(torch.equal(v, trained.unary.state_dict()[n]) for n, v in before.unary.state_dict().items())
    assert (trained.mean_field.triple_penalty.frame_weights != 0).all()
    patterns = trained.mean_field.label_contexts.weight.detach()
    assert (patterns[:, :, [0, 2]] != 0).float().mean() > 0.3  # those that were ever the cheapest
    # the centre began where the start was, not at random
    assert (patterns[:, :, 1] - before.mean_field.label_contexts.weight).abs().max() < 0.2
    shown = type_in("evaluate", start, out / "model", "--data", f"folder:{data}", "--video", "-o", tmp_path / "scores")
    assert shown.exit_code == 0, shown.output
    assert "consistency" in shown.output
    written = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert written["video"]
    assert [name.split(", ")[-1] for name in written["scores"]] == [
        "network alone",
        "frame by frame",
        "3-D rigid",
        "3-D linked",
    ]
    linked = written["scores"]["run, 3-D linked"]
    assert linked["miou"] == pytest.approx(scores["miou"], abs=1e-6)
    assert linked["temporal_consistency"] == pytest.approx(scores["temporal_consistency"], abs=1e-6)
    refused = type_in("evaluate", out / "model", "--data", f"folder:{data}", "--flip")
    assert refused.exit_code == 2
    assert "--flip" in refused.output


@pytest.mark.parametrize("settings", [(), ("clips.motion=0", "clips.flow=dis", "clips.labelled=centre")])
def test_stopped_and_resumed_it_ends_with_the_same_weights(recipe, tmp_path, settings):
    loaded = read_recipe(recipe, dict(setting.split("=") for setting in settings))
    train(loaded, tmp_path / "whole")

    def stop(name, done, total, numbers):
        if name == "mrf" and done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(loaded, tmp_path / "cut", progress=stop)
    train(loaded, tmp_path / "cut", resume=True)
    expected = read_model(tmp_path / "whole" / "model").state_dict()
    for name, value in read_model(tmp_path / "cut" / "model").state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert (tmp_path / "cut" / "flow").exists() == bool(settings)


def test_all_four_stages_over_clips_of_videos(recipe, tmp_path):
    """From nothing: the network learns from images, the MRF and then all of it from clips."""
    text = recipe.read_text().split("[[stage]]")[0].replace("motion = 3.0", "").replace("count = 4", "")
    text = text.replace("flicker = 0.5", "").replace('flow = "exact"', 'flow = "dis"')
    text = "\n".join(line for line in text.splitlines() if not line.startswith("start"))
    text += '[unary]\nnetwork = "fast"\noptions = { width = 8 }\n'
    text += '[mean_field]\nkernel = "gaussian"\nwindow = 5\ncontexts = 2\ncontext_size = 3\n'
    stages = {
        "unary": ["unary"],
        "triple penalty": ["triple_penalty"],
        "label contexts": ["label_contexts"],
        "joint": ["unary", "triple_penalty", "label_contexts"],
    }
    for name, parts in stages.items():
        text += f'[[stage]]\nname = "{name}"\nlearn = {json.dumps(parts)}\nsteps = 2\nbatch = 2\nmrf_rate = 1e-2\n'
    recipe.write_text(text)
    result = type_in("train", recipe, "-o", tmp_path / "run")
    assert result.exit_code == 0, result.output
    scores = json.loads((tmp_path / "run" / "metrics.json").read_text())["val"]
    assert list(scores) == [*stages, "joint, network alone"]
    assert read_model(tmp_path / "run" / "model").mean_field.triple_penalty.frame_weights.item() != 0


def test_a_stage_of_one_part_keeps_what_the_start_had_learned(recipe, tmp_path, start):
    words = ("--set=stage.mrf.learn=['triple_penalty']", "--set=stage.mrf.steps=1")
    result = type_in("train", recipe, "-o", tmp_path / "run", *words)
    assert result.exit_code == 0, result.output
    patterns = read_model(tmp_path / "run" / "model").mean_field.label_contexts.weight
    assert torch.equal(patterns[:, :, 1], read_model(start).mean_field.label_contexts.weight)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "clips.frames=0"], "clips.frames=0"),
        (["--set", "clips.flow=farneback"], "clips.flow='farneback'"),
        (["--set", "clips.motion=0"], "clips.motion"),
        (["--set", "clips.labelled=some"], "centre"),
        (["--set", "clips.flicker=20"], "flicker"),
        (["--set", "clips.stride=2"], "clips.stride=2"),
        (["--set", "clips.speed=2"], "clips.speed"),
        (["--set", "mean_field.window=3"], "leave unary and mean_field out"),
        (["--set", "start=nowhere"], "nowhere"),
        (["--set", "start="], "lacks unary"),
        (["--set", "start=street"], "other labels"),
        (["--set", "clips.attach=true"], "clips.attach gives a trained model links alone"),
        ([*ATTACH, "--set", "zoom=1.5"], "leave zoom out"),
        ([*ATTACH, "--set", "clips.frames=1"], "clips.attach needs clips"),
    ],
)
def test_bad_recipes_say_what_is_wrong(recipe, tmp_path, words, says):
    result = type_in("train", recipe, "-o", tmp_path / "run", *words)
    assert result.exit_code == 2, result.output
    assert says in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "state.safetensors").exists()
