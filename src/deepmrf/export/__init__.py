"""Write a model, network and mean field, to one file for other programs: ONNX, or PyTorch's own export format.

    deepmrf.export.export(model, "model.onnx")      # or "model.pt2"

program     .pt2 files, .onnx files, and the traced program behind both
functions   the operators of deepmrf.ops, built from ONNX's operators
check       runs a file beside the model, on images of other sizes than the traced one
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from deepmrf.data.files import Bytes
from deepmrf.export.check import TOLERANCE, Comparison, centre_crops, compare, synthetic_images
from deepmrf.export.program import check_packages, check_torch, write_onnx, write_program
from deepmrf.models.parsing_network import DeepParsingNetwork

WRITERS: dict[str, Callable[[DeepParsingNetwork, Path], None]] = {".onnx": write_onnx, ".pt2": write_program}
"""The function that writes files of each suffix."""


def check_path(path: Path) -> None:
    """Raise an error where `path` has an unknown suffix or is a folder, or where packages are missing or too old."""
    if path.suffix.lower() not in WRITERS:
        raise ValueError(f"{path} ends neither in .onnx (ONNX) nor in .pt2 (torch.export): name it by one of them.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file.")
    check_torch()
    if path.suffix.lower() == ".onnx":
        check_packages()


def export(
    model: DeepParsingNetwork,
    path: str | os.PathLike[str],
    images: Sequence[Bytes] | None = None,
    tolerance: float = TOLERANCE,
) -> list[Comparison]:
    """Write the model to `path`, .onnx or .pt2, and compare the file with the model on each image.

    images: uint8 RGB (H, W, 3); synthetic ones by default. If any log-probability above 1e-6 differs by more than
    `tolerance`, an ArithmeticError is raised, and `path` is as before.
    """
    target = Path(path)
    check_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
        draft = Path(folder) / f"model{target.suffix.lower()}"
        WRITERS[target.suffix.lower()](model, draft)
        comparisons = compare(model, draft, synthetic_images() if images is None else images)
        worst = max(comparisons, key=lambda comparison: comparison.difference)
        if not worst.difference <= tolerance:
            raise ArithmeticError(
                f"The exported file differs from the model by {worst.difference:.3g} on an image of {worst.height} x "
                f"{worst.width}, more than {tolerance:g}: nothing was written. Differences below 1e-3 are rounding "
                "errors of float32: accept them by a higher tolerance, such as 1e-3; report larger ones."
            )
        draft.replace(target)
    return comparisons


__all__ = ["TOLERANCE", "Comparison", "centre_crops", "check_path", "compare", "export", "synthetic_images"]
