"""The documents name files that exist, links lead somewhere, and the walk of docs/architecture.md is what runs."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from skimage import data, io
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import deepmrf
from deepmrf.cli import app
from deepmrf.data import synthetic

ROOT = Path(__file__).parents[1]
PACKAGE = Path(deepmrf.__file__).parent
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "benchmarks").glob("*.md"), *ROOT.glob("*.md")]
HEADINGS = ("Looking for", "Paper", "Row")
PAPER = [line for line in (ROOT / "docs" / "paper.md").read_text().splitlines() if line.startswith("| ")]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
SOUGHT = ("b12", "b13", "b14", "b15", "node linking", "four stages", "TA, LA, BA", "checkpoint")


def files_named(text):
    """Files and folders in backticks: `layers/mean_field.py`, `recipes/`."""
    return re.findall(r"`([\w./-]+(?:\.py|\.md|\.toml|/))`", text)


@pytest.mark.parametrize("row", [row for row in PAPER if not row.startswith(tuple(f"| {name} |" for name in HEADINGS))])
def test_every_file_of_the_papers_table_exists(row):
    _, code, test = re.split(r"(?<!\\) \| ", row.strip("| "))
    for cell, folders in ((code, ("src/deepmrf", ".")), (test, ("tests",))):
        for path in files_named(cell):
            assert any((ROOT / folder / path).exists() for folder in folders), path
    for name in re.findall(r"class `(\w+)`", code):
        assert f"class {name}" in (ROOT / "src/deepmrf" / files_named(code)[0]).read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_exists(document):
    folders = [ROOT, PACKAGE, ROOT / "tests", document.parent]
    folders += [PACKAGE / "ops" / name for name in ("distance", "gaussian", "contexts")]
    if document.name == "CHANGELOG.md":
        pytest.skip("it names files that are gone")
    for path in files_named(document.read_text()):
        if "/" in path.rstrip("/"):
            assert any((folder / path).exists() for folder in folders), path


def test_every_script_of_benchmarks_is_described():
    described = (ROOT / "benchmarks" / "README.md").read_text()
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert f"`{path.name}`" in described, path.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize(
    "table", ["\n".join(PAPER[:11]), ARCHITECTURE.split("\n## ")[1]], ids=["paper.md", "architecture.md"]
)
def test_documents_start_with_what_readers_of_the_paper_look_for(table):
    for name in SOUGHT:
        assert name in table


@pytest.mark.parametrize("folder", ["layers", "training", "evaluation", "models"])
def test_the_readmes_map_names_files(folder):
    row = next(line for line in README.splitlines() if f"(src/deepmrf/{folder})" in line)
    for name in re.findall(r"`(\w+\.py)`", row):
        assert (PACKAGE / folder / name).is_file(), name


@pytest.mark.parametrize("name", SOUGHT)
def test_the_readme_leads_to_what_readers_of_the_paper_look_for(name):
    """To the file itself: one click."""
    assert any(name in line and ".py`" in line for line in README.splitlines())


def test_the_walk_of_a_photograph_is_what_runs(tmp_path, monkeypatch):
    """20 files, which all run; the table below them names every other file that runs."""
    section = re.search(r"## `deepmrf predict cat.jpg`\n(.*?)\n## ", ARCHITECTURE, re.S)[1]
    walk, others = section.split("Other files run too")
    rows = re.findall(r"^\| (\d+) \| `([\w/]+\.py)`", walk, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    monkeypatch.chdir(tmp_path)
    io.imsave("cat.jpg", data.chelsea()[::2, ::2])
    CliRunner().invoke(app, ["predict", "cat.jpg", "--model", "camvid", "--device", "cpu"])  # imports what it needs
    ran = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(str(PACKAGE)):
            ran.add(Path(code.co_filename).relative_to(PACKAGE).as_posix())

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        done = CliRunner().invoke(app, ["predict", "cat.jpg", "--model", "camvid", "--overwrite", "--device", "cpu"])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert done.exit_code == 0, done.output
    files = {path for _, path in rows}
    assert files - ran <= {"ops/gaussian/cpu.py", "ops/contexts/cpu.py"}  # plain PyTorch while nothing is compiled
    assert ran - files <= set(files_named(others))
    told = max(int(number) for number in re.findall(r"(\d+) files run", section))
    assert len([path for path in ran if not re.search("cpu_(kernels|tiles|sums)", path)]) <= told


def test_python_of_kernels(python_blocks):
    scope = {"mrf": deepmrf.MeanField(3, window=5), "log_p": torch.randn(1, 3, 8, 9), "image": torch.rand(1, 3, 8, 9)}
    assert python_blocks("docs/kernels.md", deepmrf=deepmrf, **scope)["log_q"].shape == (1, 3, 8, 9)


def test_python_of_volumes(python_blocks):
    assert python_blocks("docs/volumes.md")["log_q"].shape == (1, 3, 40, 48, 32)


def sections(document):
    """{heading: Python blocks of that section} of a document."""
    parts = re.split(r"^## (.*)$", (ROOT / document).read_text(), flags=re.M)
    return {
        name: re.findall(r"```python\n(.*?)```", text, re.S)
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.fixture
def your_network(tmp_path, monkeypatch, plain_torch):
    """Run sections of docs/your-network.md, as few steps on small images: your_network(heading, ...) -> their names."""
    monkeypatch.chdir(tmp_path)
    images = TensorDataset(torch.rand(4, 3, 32, 48), torch.randint(0, 11, (4, 32, 48)))
    train, val = DataLoader(images, batch_size=2), DataLoader(images, batch_size=4)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 11, 1))
    scope = {"network": network, "train": train, "val": val, "names": list("abcdefghijk")}

    def run(*headings):
        for heading in headings:
            for block in sections("docs/your-network.md")[heading]:
                small = re.sub(r"(STEPS = |steps=)\d+", r"\g<1>3", block).replace("window=25", "window=5")
                exec(compile(small, f"docs/your-network.md: {heading}", "exec"), scope)
        return scope

    return run


LOOP = "In thirty lines"


@pytest.mark.filterwarnings("error::deepmrf.InputWarning")
def test_python_of_your_network(your_network, capsys):
    scope = your_network(LOOP)
    before = scope["mrf"].triple_penalty.scale.clone()
    assert scope["mrf"].triple_penalty.scale.grad is not None
    assert scope["network"][0].weight.grad is None
    assert len([line for line in sections("docs/your-network.md")[LOOP][0].splitlines() if line.strip()]) <= 34
    scope = your_network("In stages: better, in fewer steps", "Does it help?", "Save, load, resume")
    assert scope["mrf"].triple_penalty.scale != before
    assert scope["network"][0].weight.grad is not None
    assert scope["result"].labels.shape == (32, 48)
    assert "Segmenter(Sequential + gaussian mean field; 11 labels" in capsys.readouterr().out


def test_lightning_of_your_network(your_network):
    pytest.importorskip("lightning")
    scope = your_network(LOOP, "Lightning")
    assert scope["trainer"].global_step == 3


def test_trainer_of_your_network(your_network):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    scope = your_network(LOOP, "Hugging Face: a Segformer and the Trainer")
    assert torch.equal(
        scope["segment"].model.unary.module.state_dict()["decode_head.classifier.weight"].cpu(),
        scope["segformer"].state_dict()["decode_head.classifier.weight"].cpu(),
    )


def test_libraries_of_your_network(your_network):
    pytest.importorskip("segmentation_models_pytorch", exc_type=(ImportError, RuntimeError))
    scope = your_network(LOOP, "segmentation_models_pytorch and torchvision")
    assert scope["model"](torch.rand(1, 3, 24, 32)).shape == (1, 11, 24, 32)


def test_python_of_photographs(python_blocks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("PIL.Image.Image.show", lambda self: None)
    io.imsave("cat.jpg", data.chelsea())
    scope = python_blocks("docs/predict.md")
    assert scope["mask"].mean() > 0.5
    assert list(scope["clean"]) == ["cat", "background"]
    assert Path("out/overlay.jpg").is_file()
    printed = capsys.readouterr().out
    assert re.match(r"Segmentation of 451 x 300 pixels: cat \d+% \(sure \d+%\), background ", printed)


def test_python_of_videos(python_blocks, tmp_path, monkeypatch, capsys):
    pytest.importorskip("av")
    monkeypatch.chdir(tmp_path)
    writer = deepmrf.video.Writer(Path("drive.mp4"), (64, 96))
    for number in range(3):
        writer.write(np.full((64, 96, 3), 80 * number, np.uint8), Fraction(number, 25))
    writer.close()
    report = python_blocks("docs/video.md")["report"]
    assert report.frames == 3
    assert Path("out.mp4").is_file()
    assert len(list(Path("maps").glob("*.png"))) == 3
    assert re.match(r"0\.00 s: \S+% car\n0\.04 s: ", capsys.readouterr().out)


def test_python_of_the_start_page(python_blocks, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    io.imsave("cat.jpg", data.chelsea()[::2, ::2])
    scope = python_blocks("docs/index.md")
    assert "name='cat'" in capsys.readouterr().out
    assert scope["log_q"].shape == (1, 21, 120, 160)


def test_python_of_how_kernels_work(python_blocks):
    assert python_blocks("docs/how-kernels-work.md")["fast"].shape == (100,)


def test_python_of_weak_labels(python_blocks):
    scribbles = torch.full((2, 24, 32), 255)
    scribbles[:, 10:12] = 1
    network = torch.nn.Conv2d(3, 4, 3, padding=1)
    python_blocks("docs/weak-labels.md", network=network, image=torch.rand(2, 3, 24, 32), scribbles=scribbles)
    assert network.weight.grad.abs().sum() > 0


@pytest.fixture
def scenes(tmp_path, monkeypatch):
    """The current folder holds `mine`, a data set, and its predictions P, images I and masks M."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        synthetic((24, 32), split, 4, to="mine")
    for name in "PIM":
        Path(name).mkdir()
    for item in synthetic((24, 32), "train", 4).items:
        mask = synthetic((24, 32)).read_mask(item)
        io.imsave(f"I/{item.name}.png", synthetic((24, 32)).read_image(item))
        io.imsave(f"M/{item.name}.png", mask, check_contrast=False)
        np.save(f"P/{item.name}.npy", np.eye(6, dtype=np.float32)[mask].transpose(2, 0, 1) + 0.5)


def test_python_of_refine(scenes, capsys):
    (block,) = sections("docs/refine.md")["In Python"]
    settings = "kernel='distance', gate=False, temperature=1.0, crop=24, penalty_steps=2, contexts_steps=2"
    exec(compile(block.replace("minutes=3", settings), "docs/refine.md", "exec"), {})
    assert "4 images, each held out once" in capsys.readouterr().out
    assert len(list(Path("refined").glob("*.png"))) == 4


def test_python_that_saves_what_a_network_says(scenes):
    (block,) = sections("docs/refine.md")["Save what a network says"]
    exec(compile(block, "docs/refine.md", "exec"), {})
    log_p = np.load(next(Path("P").iterdir())).astype(np.float32)
    assert log_p.shape == (11, 24, 32)
    np.testing.assert_allclose(np.exp(log_p).sum(0), 1, atol=0.01)


def test_recipe_and_python_of_train(scenes, capsys):
    text = (ROOT / "docs" / "train.md").read_text()
    (recipe,), (block,) = (re.findall(rf"```{kind}\n(.*?)```", text, re.S) for kind in ("toml", "python"))
    small = re.sub(r"(steps =) \d+", r"\1 1", re.sub(r"(batch =) \d+", r"\1 2", recipe))
    for old, new in (("[320, 320]", "[24, 32]"), ("window = 25", "window = 5"), ('"bf16"', '"no"')):
        assert old in small
        small = small.replace(old, new)
    small = re.sub("imagenet = .*", "options = { width = 8 }", small)
    Path("mine.toml").write_text(small.replace('"folder:mine"', '"folder:mine"\nworkers = 0'))
    exec(compile(block, "docs/train.md", "exec"), {})
    assert Path("run/model/config.json").is_file()
    assert re.search(r"0\.\d+", capsys.readouterr().out)


def test_every_target_that_make_shows_is_phony():
    text = (ROOT / "Makefile").read_text()
    shown = re.findall(r"^([a-z]+):.*##", text, re.MULTILINE)
    assert sorted(shown) == sorted(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())
