"""Write a model as a torch.export program: a graph of operators for images of any size, without Python code.

The program calls the operators of deepmrf, and so runs on their fast kernels: `import deepmrf.ops` before loading it.
"""

from __future__ import annotations

import copy
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
        program = torch.export.export(frozen_model, (image,), dynamic_shapes={INPUT: any_size})
    # The trace has guards on the example's memory layout (which crop was contiguous). They would refuse other sizes,
    # although the operators take any layout. check.py measures that other sizes are right.
    if hasattr(program, "_guards_code"):
        program._guards_code = []
    return program


def write_program(model: DeepParsingNetwork, path: Path) -> None:
    """Write a .pt2 file, with labels and colours beside the program."""
    extra_files = {f"{name}.txt": text for name, text in describe(model).items()}
    with quiet():
        torch.export.save(trace(model), path, extra_files=extra_files)


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
            "kernel='gaussian' or 'distance'."
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
