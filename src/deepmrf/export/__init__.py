"""A whole model, network and mean field, as a file for other programs: ONNX, or PyTorch's own export format.

    deepmrf.export.export(model, "model.onnx")      # or "model.pt2"

onnx        .onnx files; functions: deepmrf's operators in ONNX's
program     .pt2 files, and the traced program behind both
check       the file beside the model, on images of other sizes than the traced one
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from deepmrf.data.files import Bytes
from deepmrf.export.check import TOLERANCE, Comparison, compare, cut, pictures
from deepmrf.export.onnx import check_packages, write_onnx
from deepmrf.export.program import write_program
from deepmrf.models.parsing_network import DeepParsingNetwork

ENDINGS: dict[str, Callable[[DeepParsingNetwork, Path], None]] = {".onnx": write_onnx, ".pt2": write_program}
"""Which ending makes which file."""


def check_ending(path: Path) -> None:
    """The ending of an exported file is a known one, its packages are installed, and its name is free."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} ends neither in .onnx (ONNX) nor in .pt2 (torch.export): name it by one of them.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file.")
    if path.suffix.lower() == ".onnx":
        check_packages()


def export(
    model: DeepParsingNetwork,
    path: str | os.PathLike[str],
    images: Sequence[Bytes] | None = None,
    tolerance: float = TOLERANCE,
) -> list[Comparison]:
    """Write the model to `path`, .onnx or .pt2, and say how far the file is from the model on each image.

    images: RGB (H, W, 3) of uint8 to compare on, made-up ones unless given. A file that differs by more than
    `tolerance` in any log-probability is an error, and is not left behind.
    """
    target = Path(path)
    check_ending(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
        draft = Path(folder) / f"model{target.suffix.lower()}"
        ENDINGS[target.suffix.lower()](model, draft)
        found = compare(model, draft, pictures() if images is None else images)
        worst = max(found, key=lambda one: one.difference)
        if not worst.difference <= tolerance:
            raise ArithmeticError(
                f"The exported file differs from the model by {worst.difference:.3g} on an image of {worst.height} x "
                f"{worst.width}, more than {tolerance:g}: nothing was written. About 1e-4 where labels are all but "
                "impossible is float32's, and a higher tolerance accepts it; report a larger difference."
            )
        draft.replace(target)
    return found


__all__ = ["TOLERANCE", "Comparison", "check_ending", "compare", "cut", "export", "pictures"]
