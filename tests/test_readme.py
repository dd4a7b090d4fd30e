"""The README's commands and Python blocks run as printed; its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import deepmrf
from deepmrf.cli import app
from deepmrf.data import folder, synthetic

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FOUR = re.search(r"## Four commands\n+```\n(.*?)```", README, re.S)
COMMANDS = [line.split("#")[0].strip() for line in FOUR[1].splitlines()]
STAGES = ("unary", "triple_penalty", "label_contexts", "joint")
SETTINGS = [
    "data.train=folder:scenes",
    "data.workers=0",
    "unary.imagenet=",
    "unary.options.width=8",
    "mean_field={window = 5, contexts = 2, context_size = 3}",
    "augment.crop=[24, 32]",
    "precision=no",
    *(f"stage.{stage}.steps=1" for stage in STAGES),
    *(f"stage.{stage}.batch=2" for stage in STAGES),
]
SMALLER = {
    "train": [word for setting in SETTINGS for word in ("--set", setting)],
    "fit": ["--penalty-steps", "2", "--contexts-steps", "2", "--crop", "24"],
}
"""Options that a command gets besides the printed ones, so that it takes seconds."""
WRITES = {
    "predict": ("segmented/cat.png", "segmented/cat_overlay.jpg"),
    "refine": tuple(f"refined/0000{number}.png" for number in range(4)),
    "fit": ("mrf/config.json", "mrf/model.safetensors"),
    "train": ("run/metrics.json", "run/model/config.json", "run/model/model.safetensors"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder as the README assumes it: docs, predictions P of the images I with true masks M."""
    monkeypatch.chdir(tmp_path)
    Path("docs").symlink_to(ROOT / "docs", target_is_directory=True)
    for split in ("train", "val"):
        synthetic((24, 32), split, 4, to="scenes")
    scenes = folder("scenes", "train")
    for name in "PIM":
        Path(name).mkdir()
    for item in scenes.items:
        mask = scenes.read_mask(item)
        scores = np.random.default_rng(0).random((len(scenes.labels), *mask.shape), dtype=np.float32)
        scores[(mask, *np.indices(mask.shape))] += 1
        np.save(f"P/{item.name}.npy", scores / scores.sum(0))
        Image.fromarray(scenes.read_image(item)).save(f"I/{item.name}.png")
        Image.fromarray(mask).save(f"M/{item.name}.png")
    return tmp_path


def test_there_are_four_commands():
    assert [command.split()[:2] for command in COMMANDS] == [["deepmrf", name] for name in WRITES]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(here, command):
    _, name, *words = shlex.split(command)
    done = CliRunner().invoke(app, [name, *words, *SMALLER.get(name, [])], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    for path in WRITES[name]:
        assert Path(path).is_file(), f"{path} is missing; there are {sorted(map(str, here.rglob('*.*')))}"


def test_python(here, python_blocks):
    """As a reader would: with a network of 21 labels and a batch of images at hand."""
    image = torch.rand(2, 3, 40, 60)
    scope = python_blocks("README.md", network=torch.nn.Conv2d(3, 21, 3, padding=1), image=image)
    assert "cat" in scope["result"]
    assert Path("cat.png").is_file()
    assert scope["log_q"].shape == (2, 21, 40, 60)
    torch.testing.assert_close(scope["log_q"], scope["network"](image).log_softmax(1), atol=2e-3, rtol=0)
    assert isinstance(scope["crf"], deepmrf.MeanField)


def test_the_readme_is_short():
    """One screen and a half: about a hundred lines."""
    assert len(README.splitlines()) <= 110


GALLERY = re.search(r"## Gallery\n(.*?)\n## ", README, re.S)[1]
MAX_PICTURE_BYTES = 80_000


def test_the_gallery_shows_five_small_pictures_each_with_its_command():
    """A row of commands, then the row of their pictures. Commands name files that are there."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in GALLERY.splitlines() if "`" in line]
    commands = [cell for row in rows for cell in row if cell.startswith("`")]
    pictures = re.findall(r"!\[.+?\]\((docs/gallery/\w[\w-]*\.jpg)\)", GALLERY)
    assert len(pictures) == len(commands) == 5
    assert sorted(pictures) == sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs/gallery").iterdir())
    assert all((ROOT / path).stat().st_size < MAX_PICTURE_BYTES for path in pictures)
    for command in commands:
        program, *words = shlex.split(command.strip("`"))
        assert program == "python" or words[0] in {command.name for command in app.registered_commands}, command
        assert all((ROOT / word).is_file() for word in words if "/" in word), command
