"""A model as a torch.export program: a graph of operators for images of any size, without the Python that made it.

The operators of deepmrf stay what they are, so that the program runs on their fast kernels; whoever loads it must
`import deepmrf.ops` first.
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

from deepmrf.models.parsing_network import DeepParsingNetwork
from deepmrf.ops import gaussian

EXAMPLE = (2, 3, 65, 97)
"""The batch that is traced: sizes that stay odd however often they are halved, so that no crop is left out as idle."""
INPUT, OUTPUT = "image", "log_probabilities"
"""What goes in and what comes out."""


def describe(model: DeepParsingNetwork) -> dict[str, str]:
    """What a file says of itself: version, labels, colours, input and output, as text; lists as JSON."""
    from deepmrf import __version__

    labels = model.labels.to_dict()
    return {
        "deepmrf": __version__,
        "labels": json.dumps(labels["names"]),
        "colours": json.dumps(labels["colours"]),
        "input": f"{INPUT}: uint8 RGB (batch, 3, height, width)",
        "output": f"{OUTPUT}: float32 (batch, {len(model.labels)}, height, width), natural logarithms",
    }


def frozen(model: DeepParsingNetwork) -> DeepParsingNetwork:
    """A copy on the CPU in float32 that no longer learns."""
    return copy.deepcopy(model).cpu().float().eval().requires_grad_(False)


def trace(model: DeepParsingNetwork) -> ExportedProgram:
    """The program of a model, for uint8 images of any batch, height and width."""
    _refuse(model)
    still = frozen(model)
    image = torch.randint(0, 256, EXAMPLE, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    # Long lines are blurred another way than short ones; a program has one way, and the short lines' holds for all.
    with torch.no_grad(), quiet(), mock.patch.object(gaussian, "BANDED", sys.maxsize):
        anything = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
        program = torch.export.export(still, (image,), dynamic_shapes={INPUT: anything})
    # What tracing noted of the example's memory layout (which crop was contiguous) would refuse other sizes, though
    # the operators do not care. That other sizes come out right is measured: see check.py.
    if hasattr(program, "_guards_code"):
        program._guards_code = []
    return program


def write_program(model: DeepParsingNetwork, path: Path) -> None:
    """Write a .pt2 file, with labels and colours beside the program."""
    facts = {f"{name}.txt": text for name, text in describe(model).items()}
    with quiet():
        torch.export.save(trace(model), path, extra_files=facts)


def _refuse(model: DeepParsingNetwork) -> None:
    """Only what takes images of any size can be exported."""
    mean_field = model.mean_field
    if model.for_volumes or (mean_field is not None and mean_field.dims != 2):
        raise ValueError(
            "The model is for clips or volumes, and export writes models for images: give one with dims=2, such as "
            "the model that a clips' one was inflated from."
        )
    if mean_field is not None and mean_field.triple_penalty.kernel == "learned":
        raise ValueError(
            "The model has kernel='learned', whose filters fix the size of the image: export needs a model with "
            "kernel='gaussian' or 'distance'."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters talk to their developers: keep that from the user."""
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
