"""A model as an ONNX file: standard operators only, for images of any size."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

import torch

from deepmrf.export.program import INPUT, OUTPUT, describe, quiet, trace
from deepmrf.models.parsing_network import DeepParsingNetwork

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""What writing and checking ONNX takes."""

LARGE = 2**24
"""Tensors up to this many values are computed while exporting where they can be: batch norm folds into filters."""


def check_packages() -> None:
    """Say what to install where a package is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ImportError(f"Exporting to ONNX needs {' and '.join(missing)}: pip install {' '.join(missing)}.")


def write_onnx(model: DeepParsingNetwork, path: Path) -> None:
    """Write an .onnx file, with labels and colours in its metadata."""
    check_packages()
    functions = importlib.import_module("deepmrf.export.functions")
    program = trace(model)
    names = {0: "batch", 2: "height", 3: "width"}
    with torch.no_grad(), quiet():
        made = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes={INPUT: names},
            opset_version=functions.OPSET,
            custom_translation_table=functions.TRANSLATIONS,
            dynamo=True,
            verbose=False,
        )
        assert made is not None  # with dynamo=True it returns the program
        optimizer = importlib.import_module("onnxscript.optimizer")
        optimizer.optimize_ir(made.model, input_size_limit=LARGE, output_size_limit=LARGE)
        made.model.producer_name = "deepmrf"
        made.model.producer_version = describe(model)["deepmrf"]
        made.model.metadata_props.update(describe(model))
        made.save(path, external_data=False)
