"""docs/formats.md is true: its labels.json is read, its Python runs, its tables are what happens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import deepmrf
from deepmrf.data import folder
from deepmrf.data.folder import KEYS
from deepmrf.models.folder import FORMAT, FORMAT_OF_IMAGES
from deepmrf.refine.decode import ARRAY_NAMES
from deepmrf.refine.predictions import PredictionFolder, open_prediction

TEXT = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()


def write_folder(top, ids, labels_json):
    for name in ("images", "masks"):
        (top / name).mkdir()
    mask = np.array([ids], np.uint8)
    Image.fromarray(mask).save(top / "masks" / "a.png")
    Image.fromarray(np.zeros((*mask.shape, 3), np.uint8)).save(top / "images" / "a.png")
    (top / "labels.json").write_text(labels_json)
    dataset = folder(top)
    return dataset.labels, dataset.read_mask(dataset[0])[0].tolist()


def test_the_example_of_labels_json(tmp_path):
    example = re.search(r"```json\n(.*?)```", TEXT, re.S)[1]
    labels, mask = write_folder(tmp_path, [0, 1, 7, 26, 255], example)
    assert labels.names == ("sky", "road", "car")
    assert mask == [255, 0, 1, 2, 255]
    assert set(json.loads(example)) == set(KEYS)
    rows = re.findall(r"^\| `(\w+)` \| (?:yes|no) \|", TEXT, re.MULTILINE)
    assert tuple(rows) == KEYS


def test_black_and_white_masks(tmp_path):
    example = re.search(r"black and white \| `(.*?)`", TEXT)[1]
    assert write_folder(tmp_path, [0, 255], example)[1] == [0, 1]


@pytest.mark.parametrize(("ignore", "void"), [("11", {11, 255}), ("[0, 11]", {0, 11, 255})])
def test_void_ids(tmp_path, ignore, void):
    assert f'`"ignore": {ignore}`' in TEXT
    names = json.dumps({"names": ["a", "b"], "ids": [1, 2]})[:-1]
    _, mask = write_folder(tmp_path, [1, 2, *void], f'{names}, "ignore": {ignore}}}')
    assert mask == [0, 1, *[255] * len(void)]


P = np.random.default_rng(0).dirichlet((1, 1, 1), (4, 5)).transpose(2, 0, 1)


@pytest.mark.parametrize(
    ("values", "kind", "p"),
    [
        (P, "probabilities", P),
        (P.astype(np.float16), "probabilities", P),
        (0.5 * P, "scores of 0 to 1, divided by their sum", P),
        (np.log(P), "log-probabilities", P),
        (np.log(P) + 3, "logits", P),
        (np.round(255 * P).astype(np.uint8), "8-bit probabilities", P),
        (np.round(65535 * P).astype(np.uint16), "16-bit probabilities", P),
        (P.argmax(0)[None] == np.arange(3)[:, None, None], "probabilities", None),
    ],
)
def test_the_table_of_numbers(tmp_path, values, kind, p):
    np.save(tmp_path / "a.npy", values)
    log_p, read_as = open_prediction(PredictionFolder(tmp_path).find("a"), 3)
    assert read_as == kind
    if p is None:
        assert np.array_equal(log_p.tensor().argmax(0), P.argmax(0))
    else:
        np.testing.assert_allclose(log_p.tensor().exp().numpy(), p, atol=0.01)


def test_names_and_numbers_of_the_text():
    assert all(f"`{name}`" in TEXT for name in ARRAY_NAMES)
    assert f"| `format` | {FORMAT}; {FORMAT_OF_IMAGES} of" in TEXT


def test_python(tmp_path, monkeypatch, python_blocks, model_folder):
    monkeypatch.chdir(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    result = deepmrf.load(model_folder)(image)
    Path("segmented").mkdir()
    result.save("segmented/x.png")
    result.save("segmented/x.npz")
    assert np.array_equal(python_blocks("docs/formats.md")["labels"], result.labels)
