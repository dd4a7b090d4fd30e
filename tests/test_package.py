"""The package as a whole: which way imports point, what an import costs, and that everything public is described."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepmrf

ROOT = Path(deepmrf.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
ORDER = [
    "cli",
    "export",
    "refine",
    "training",
    "video",
    "evaluation",
    "predict",
    "models",
    "unary",
    "layers",
    "flow",
    "losses",
    "densecrf",
]
ORDER += ["ops", "figures", "data"]
"""The rooms from top to bottom: a room imports from rooms below it only."""


def part(path):
    """The first name after deepmrf: "ops" for deepmrf/ops/window.py."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; write deepmrf.x"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("deepmrf."))


@pytest.mark.parametrize(
    "room", [p.parent for p in MODULES if p.name == "__init__.py" and p.parent.parent == ROOT], ids=str
)
def test_a_room_says_what_each_of_its_files_is_for(room):
    described = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    missing = [p.stem for p in room.glob("*.py") if p.stem != "__init__" and not re.search(rf"\b{p.stem}\b", described)]
    assert not missing, f"The docstring of {room.name}/__init__.py does not name {missing}."


def may_import(importer, imported):
    return importer == imported or ORDER.index(importer) < ORDER.index(imported)


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.parent != ROOT or p.stem not in ("__init__", "__main__")], ids=str
)
def test_imports_point_one_way(path):
    allowed_everywhere = {"__version__"}
    wrong = [
        name for name in imported_parts(path) if name not in allowed_everywhere and not may_import(part(path), name)
    ]
    assert not wrong, f"{path.relative_to(ROOT)} must not import {wrong}"


def test_the_order_of_imports_is_told_apart():
    assert may_import("layers", "ops")
    assert may_import("ops", "ops")
    assert not may_import("ops", "layers")
    assert not may_import("layers", "unary")
    assert not may_import("figures", "ops")


def test_the_test_of_imports_knows_every_room():
    rooms = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert rooms - {"__init__", "__main__", "__pycache__", "pretrained"} == set(ORDER)
    assert len(ORDER) + len(["pretrained"]) <= 17  # a house in which a reader finds the way


def test_the_map_in_the_docstring_names_the_rooms_in_order():
    rooms = re.findall(r"^([a-z]+) {2,}\S", deepmrf.__doc__, flags=re.MULTILINE)
    assert rooms == [*ORDER, "pretrained"]


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=120)


def test_importing_is_quick_and_brings_no_heavy_company():
    """Counted in modules: seconds depend on what else the machine does."""
    heavy = "{'numba', 'triton', 'PIL', 'skimage', 'cv2', 'av', 'onnx'}"
    code = "import torch, sys; before = len(sys.modules); import deepmrf.layers; print(len(sys.modules) - before)"
    count, *company = python("-c", f"{code}; print(*{heavy} & {{*sys.modules}})").stdout.split()
    assert int(count) < 60
    assert not company


def test_names_come_when_they_are_asked_for():
    for module in ("deepmrf", "deepmrf.cli"):  # deepmrf --help needs none of it
        assert python("-c", f"import {module}, sys; print('torch' in sys.modules)").stdout.split() == ["False"]
    for name in deepmrf.__all__:
        assert getattr(deepmrf, name) is not None
        assert name in dir(deepmrf)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        deepmrf.nothing  # noqa: B018


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", deepmrf.__version__)


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_modules_and_their_public_names_are_described(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} says nothing about itself"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name} says nothing about itself"


@pytest.mark.parametrize("name", [*deepmrf.__all__, *(f"ops.{name}" for name in deepmrf.ops.__all__)])
def test_help_describes_every_public_name(name):
    """help() shows __doc__: an object must not show its class's instead."""
    value = deepmrf
    for step in name.split("."):
        value = getattr(value, step)
    assert inspect.getdoc(value)
    if not inspect.isclass(value):
        assert value.__doc__ != type(value).__doc__, f"help(deepmrf.{name}) describes {type(value).__name__}"


def test_no_file_is_named_after_nothing():
    nothing = {"utils", "util", "core", "common", "base", "helpers", "misc"}
    allowed = {ROOT / "densecrf" / "utils.py"}  # pydensecrf's own name, so that one import line changes
    assert not [path for path in ROOT.rglob("*") if path.stem in nothing and path not in allowed]


def test_the_docstrings_example_runs():
    mrf = deepmrf.MeanField(labels=21)
    assert mrf(torch.randn(1, 21, 8, 9).log_softmax(1), torch.rand(1, 3, 8, 9)).shape == (1, 21, 8, 9)
