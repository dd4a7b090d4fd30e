"""The notebooks of examples/ run, and what they say of their own results is true; their files are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from examples.notebooks import find_notebook, read_notebook, run_notebook

FOLDER = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 300_000


def run(name):
    """Execute the notebook whose name starts so; returns the names that it has at its end."""
    (path,) = FOLDER.glob(f"{name}-*.ipynb")
    with torch.random.fork_rng():
        return run_notebook(read_notebook(path), path.name)


def test_refine_your_network():
    scope = run(1)
    assert scope["refined"].miou > scope["alone"].miou + 0.05
    assert scope["result"].labels.shape == (64, 96)


def test_from_pydensecrf():
    results = run(2)["results"]
    assert results["network"] < results["dense CRF, deeplab"] < results["CRF-RNN"] < results["deepmrf fit"]
    assert results["dense CRF, voc"] < results["network"]


def test_train_on_your_folder():
    scores = run(3)["scores"]
    assert list(scores) == ["unary", "triple penalty", "label contexts"]
    assert scores["label contexts"]["miou"] > scores["unary"]["miou"] + 0.02


def test_video():
    pytest.importorskip("av")
    scope = run(4)
    assert scope["report"].frames == 5
    miou, consistency = zip(*scope["results"].values(), strict=True)
    assert list(miou) == sorted(miou)
    assert consistency[3] > consistency[1]


def test_volumes():
    pytest.importorskip("nibabel")
    results = run(5)["results"]
    assert results["deepmrf fit"].mean() > results["dense CRF"].mean() > results["network"].mean() + 0.05


def test_weak_labels():
    scores = run(6)["scores"]
    assert scores["+ 0.05 gated"] > scores["scribbles alone"] + 0.03
    assert scores["+ 0.002 dense"] > scores["scribbles alone"]
    assert scores["+ 0.5 gated: too much"] < scores["scribbles alone"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_files(path):
    """Small, executed without an error, and with links that lead somewhere."""
    assert path.stat().st_size < MAX_BYTES
    code = [cell for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any("image/jpeg" in output.get("data", {}) for cell in code for output in cell["outputs"])
    for cell in read_notebook(path)["cells"]:
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\(([^)]+)\)", cell["source"]):
                assert (FOLDER / target.split("#")[0]).exists(), target


def test_a_run_keeps_what_is_printed_and_shown():
    html = "class Shown:\n    def _repr_html_(self):\n        return '<b>bold</b>'\nShown()"
    cells = [html, "print('one')\n2 + 3", "from PIL import Image\nImage.new('RGB', (2000, 100))", "value = 1"]
    notebook = {"cells": [{"cell_type": "code", "source": source} for source in cells]}
    scope = run_notebook(notebook, "test")
    shown, first, second, third = (cell["outputs"] for cell in notebook["cells"])
    assert shown[0]["data"]["text/html"] == ["<b>bold</b>"]
    assert [output.get("text") or output["data"] for output in first] == [["one\n"], {"text/plain": ["5"]}]
    assert list(second[0]["data"]) == ["image/jpeg"]
    assert third == []
    assert scope["value"] == 1


def test_a_notebook_is_found_here_or_beside_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_notebook(NOTEBOOKS[0].name) == NOTEBOOKS[0]
    (tmp_path / NOTEBOOKS[0].name).touch()
    assert find_notebook(NOTEBOOKS[0].name) == Path(NOTEBOOKS[0].name)
    with pytest.raises(SystemExit, match=r"There is no notebook 9\.ipynb here or in "):
        find_notebook("9.ipynb")


def test_an_error_in_a_cell_is_an_error():
    with pytest.raises(ZeroDivisionError):
        run_notebook({"cells": [{"cell_type": "code", "source": "1 / 0"}]}, "test")
