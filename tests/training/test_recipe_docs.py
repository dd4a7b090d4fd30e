"""The tables of docs/train.md, "All keys of a recipe", are those of the dataclasses, key by key, with the defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from deepmrf import MeanField
from deepmrf.training import recipe
from deepmrf.training.recipe import AugmentRecipe, ClipsRecipe, DataRecipe, Recipe, Stage, UnaryRecipe

TEXT = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
SECTION = re.search(r"^## All keys of a recipe\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M)[1]
TABLES = {"data": DataRecipe, "unary": UnaryRecipe, "augment": AugmentRecipe, "clips": ClipsRecipe, "stage": Stage}
"""Tables of a recipe whose keys are the fields of a dataclass; those of mean_field are the arguments of MeanField."""


def documented():
    """{table: {key: (default, meaning)}} of the document; the table of the top of the file is ""."""
    tables = {}
    for heading, text in re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", SECTION, re.S | re.M):
        name = re.match(r"`\[+(\w+)\]+`", heading)
        rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| `")]
        assert name is None or (name[0].startswith("`[[") == (name[1] == "stage")), heading
        assert len({row[0] for row in rows}) == len(rows), heading
        tables[name[1] if name else ""] = {key.strip("`"): (default, meaning) for key, default, meaning in rows}
    return tables


def fields(kind):
    """{key: default} of a dataclass; dataclasses.MISSING for those without."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }


def read(text):
    """A default as the document writes it: in TOML, as none, or as required."""
    if text in ("none", "required"):
        return None if text == "none" else dataclasses.MISSING
    assert re.fullmatch("`.*`", text), text
    value = recipe.tomllib.loads(f"value = {text.strip('`')}")["value"]
    return tuple(value) if isinstance(value, list) else value


def test_every_table_is_there():
    parts = {name for name in fields(Recipe) if name in TABLES or name == "mean_field"}
    assert set(documented()) == {"", *parts}
    assert parts == {*TABLES, "mean_field"}


@pytest.mark.parametrize("table", ["", "mean_field", *TABLES])
def test_every_key_has_its_row_and_default(table):
    if table == "mean_field":
        arguments = inspect.signature(MeanField).parameters.values()
        expected = {argument.name: argument.default for argument in arguments if argument.name != "labels"}
    elif table:
        expected = fields(TABLES[table])
    else:
        expected = {key: value for key, value in fields(Recipe).items() if key not in (*TABLES, "mean_field")}
    rows = documented()[table]
    assert list(rows) == list(expected)
    for key, (default, meaning) in rows.items():
        assert read(default) == expected[key], key
        assert type(read(default)) is type(expected[key]), key
        assert len(meaning) > 10, key


def test_the_keys_that_the_text_sets():
    """The examples of --set in the section are read."""
    tree = {
        "data": {"train": "folder:mine"},
        "unary": {},
        "stage": [{"name": "label contexts", "learn": ["label_contexts"]}],
    }
    examples = dict(re.findall(r"`--set ([\w.]+)=([^`]+)`", SECTION))
    assert len(examples) == 3
    for key, value in examples.items():
        recipe._override(tree, key, value)
    read_back = recipe.recipe_from_dict(tree)
    assert (read_back.seed, read_back.data.held_out, read_back.stage[0].steps) == (1, 0.12, 500)
