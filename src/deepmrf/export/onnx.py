"""Write a model as an ONNX file: standard operators only, for images of any size."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from deepmrf.data.extras import optional
from deepmrf.export.program import INPUT, OUTPUT, describe, quiet, trace
from deepmrf.models.parsing_network import DeepParsingNetwork

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""What writing and checking ONNX files needs."""
MAX_FOLDED_VALUES = 2**24
"""Constant tensors up to this size are computed while exporting: this folds batch norm into filters."""


def check_packages() -> None:
    """Raise an ImportError that says what to install, where a package is missing."""
    for name in PACKAGES:
        optional(name, "Exporting to ONNX needs", "export")


def write_onnx(model: DeepParsingNetwork, path: Path) -> None:
    """Write an .onnx file, with labels and colours in its metadata."""
    check_packages()
    functions = importlib.import_module("deepmrf.export.functions")
    program = trace(model)
    with torch.no_grad(), quiet():
        exported = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes={INPUT: {0: "batch", 2: "height", 3: "width"}},
            opset_version=functions.OPSET,
            custom_translation_table=functions.TRANSLATIONS,
            dynamo=True,
            verbose=False,
        )
        assert exported is not None  # with dynamo=True it returns the program
        optimizer = importlib.import_module("onnxscript.optimizer")
        optimizer.optimize_ir(exported.model, input_size_limit=MAX_FOLDED_VALUES, output_size_limit=MAX_FOLDED_VALUES)
        metadata = describe(model)
        exported.model.producer_name = "deepmrf"
        exported.model.producer_version = metadata["deepmrf"]
        exported.model.metadata_props.update(metadata)
        exported.save(path, external_data=False)
