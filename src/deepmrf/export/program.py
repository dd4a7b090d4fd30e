"""Write a model as a torch.export program (.pt2) or an ONNX file (.onnx): operators for images of any size.

A program calls the operators of deepmrf, and so runs on their fast kernels: `import deepmrf.ops` before loading it. An
ONNX file is built from it, of standard operators only (functions.py).
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.export import Dim, ExportedProgram

from deepmrf import __version__
from deepmrf.data.extras import optional
from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.ops import gaussian
from deepmrf.predict.segmenter import trained_size

TRACED_SHAPE = (2, 3, 65, 97)
"""The batch to trace. Its sides stay odd when halved again and again, so that the trace contains every crop."""
NOT_EXPORTABLE = {
    "learned": "whose filters fix the size of the image",
    "global": "whose lattice depends on the colours of the image",
}
"""Kernels that no program for images of any size can hold, and why."""
INPUT, OUTPUT = "image", "log_probabilities"
"""The names of the program's input and output."""
LEAST_TORCH = (2, 7)
"""Earlier versions cannot write ONNX files for images of any size."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""What writing and checking ONNX files needs."""
MAX_FOLDED_VALUES = 2**24
"""Constant tensors up to this size are computed while exporting: this folds batch norm into filters."""


def describe(model: DeepParsingNetwork) -> dict[str, str]:
    """The metadata of a file as text, lists as JSON: what another program needs to do as `predict` does."""
    labels = model.labels.to_dict()
    return {
        "deepmrf": __version__,
        "labels": json.dumps(labels["names"]),
        "colours": json.dumps(labels["colours"]),
        "size": str(trained_size([model]) or 0),
        "normalisation": "inside the file: give pixels of 0 to 255",
        "input": f"{INPUT}: uint8 RGB (batch, 3, height, width)",
        "output": f"{OUTPUT}: float32 (batch, {len(model.labels)}, height, width), natural logarithms",
    }


def frozen_copy(model: DeepParsingNetwork) -> DeepParsingNetwork:
    """Copy the model to the CPU in float32, without gradients."""
    return copy.deepcopy(model).cpu().float().eval().requires_grad_(False)


def trace(model: DeepParsingNetwork) -> ExportedProgram:
    """Trace a model into a program for uint8 images of any batch, height and width."""
    _check_exportable(model)
    frozen_model = frozen_copy(model)
    image = torch.randint(0, 256, TRACED_SHAPE, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    # PyTorch blurs long lines by another method than short ones. A program has one method: that of short lines.
    with torch.no_grad(), quiet(), mock.patch.object(gaussian, "MAX_BANDED_LENGTH", sys.maxsize):
        any_size = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
        program = torch.export.export(frozen_model, (image,), dynamic_shapes={INPUT: any_size}, strict=False)
    # The trace has guards on the example's memory layout (which crop was contiguous). They would refuse other sizes,
    # although the operators take any layout. For the same reason it refuses images smaller than those for which a crop
    # is one of the example's kind. check.py measures that other sizes, small ones too, are right.
    if hasattr(program, "_guards_code"):
        program._guards_code = []
    if hasattr(program, "_range_constraints"):
        ranges = program._range_constraints
        program._range_constraints = {side: type(limits)(1, limits.upper) for side, limits in ranges.items()}
    return program


def write_program(model: DeepParsingNetwork, path: Path) -> None:
    """Write a .pt2 file, with labels and colours beside the program."""
    extra_files = {f"{name}.txt": text for name, text in describe(model).items()}
    with quiet():
        torch.export.save(trace(model), path, extra_files=extra_files)


def check_torch() -> None:
    """Raise an ImportError where PyTorch is too old to export."""
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise ImportError(f"Exporting needs PyTorch {least} or newer, and this is {torch.__version__}: upgrade torch.")


def check_packages() -> None:
    """Raise an ImportError that says what to install, where a package is missing."""
    for name in PACKAGES:
        optional(name, "Exporting to ONNX needs", "export")


def write_onnx(model: DeepParsingNetwork, path: Path) -> None:
    """Write an .onnx file, with labels and colours in its metadata."""
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


def _check_exportable(model: DeepParsingNetwork) -> None:
    """Raise a ValueError for models that do not take images of any size."""
    mean_field = model.mean_field
    if model.for_volumes or (mean_field is not None and mean_field.dims != 2):
        raise ValueError(
            "The model is for clips or volumes, and export writes models for images: give one with dims=2, such as "
            "the model that a model of clips was inflated from."
        )
    kernel = "gaussian" if mean_field is None else mean_field.triple_penalty.kernel
    if kernel in NOT_EXPORTABLE:
        raise ValueError(
            f"The model has kernel={kernel!r}, {NOT_EXPORTABLE[kernel]}: export needs a model with "
            "kernel='gaussian' or 'distance', or the network alone (--network-only)."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and logs of the exporters, which are meant for their developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
