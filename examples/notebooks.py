"""Run the notebooks of this folder without Jupyter, and write their outputs into them, small.

    python examples/notebooks.py [NAME.ipynb ...]

A code cell is plain Python. Its output is what it prints, then the value of its last line. Pictures are kept as JPEG.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

FOLDER = Path(__file__).parent
MAX_PICTURE_WIDTH = 760
"""Pixels; wider pictures are shrunk."""
JPEG_QUALITY = 82


def read_notebook(path: Path) -> dict[str, Any]:
    """The notebook's JSON, with the source of every cell as one string."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def write_notebook(path: Path, notebook: dict[str, Any]) -> None:
    """Write it as Jupyter does: lines of source as a list, so that changes read well."""
    cells = [{**cell, "source": cell["source"].splitlines(keepends=True)} for cell in notebook["cells"]]
    path.write_text(json.dumps({**notebook, "cells": cells}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run_notebook(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """Execute all code cells in one namespace, in an empty current folder; put their outputs into the notebook.

    Returns the namespace.
    """
    scope: dict[str, Any] = {"__name__": "__main__"}
    before, code_cells = Path.cwd(), [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for number, cell in enumerate(code_cells, 1):
                cell["outputs"] = _run_cell(cell["source"], scope, f"{name}, cell {number}")
                cell["execution_count"] = number
        finally:
            os.chdir(before)
    return scope


def _run_cell(source: str, scope: dict[str, Any], title: str) -> list[dict[str, Any]]:
    """Execute one cell; returns its outputs in the notebook's format."""
    tree, last = ast.parse(source), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, title, "exec"), scope)
        value = None if last is None else eval(compile(last, title, "eval"), scope)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        outputs.append({"data": _data(value), "metadata": {}, "output_type": "display_data"})
    return outputs


def _data(value: Any) -> dict[str, Any]:
    """A value by kind of content: text, and HTML or a picture where it has one."""
    if isinstance(value, Image.Image):
        return {"image/jpeg": _jpeg(value)}
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return data


def _jpeg(picture: Image.Image) -> str:
    """The picture as a small JPEG, in base64."""
    if picture.width > MAX_PICTURE_WIDTH:
        picture = picture.resize((MAX_PICTURE_WIDTH, round(picture.height * MAX_PICTURE_WIDTH / picture.width)))
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def find_notebook(name: str) -> Path:
    """The notebook of that name here, or else beside this script."""
    for path in (Path(name), FOLDER / name):
        if path.is_file():
            return path
    raise SystemExit(f"There is no notebook {name} here or in {FOLDER}.")


def main(*names: str) -> None:
    for path in [find_notebook(name) for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook, start = read_notebook(path), time.process_time()
        run_notebook(notebook, path.name)
        write_notebook(path, notebook)
        print(f"{path.name}: {time.process_time() - start:.1f} s of CPU, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
