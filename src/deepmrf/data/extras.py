"""Optional packages: what they are for, which extra of deepmrf brings them, and the sentence where one is missing.

av = optional("av", "Video files need", "video")
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Extra:
    """The packages of one extra of deepmrf."""

    packages: dict[str, str]
    """Name of the module: name of the package that brings it."""
    purpose: str
    """The commands and inputs that need them."""


_OPENCV = {"cv2": "opencv-python-headless"}
EXTRAS = {
    "train": Extra({"accelerate": "accelerate", "tensorboard": "tensorboard", **_OPENCV}, "deepmrf train"),
    "video": Extra({"av": "av", **_OPENCV}, "videos and cameras in deepmrf predict, optical flow in deepmrf evaluate"),
    "volumes": Extra({"nibabel": "nibabel"}, "NIfTI volumes in deepmrf fit and deepmrf refine"),
    "export": Extra(
        {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"}, "deepmrf export to .onnx"
    ),
    "app": Extra({"gradio": "gradio", "matplotlib": "matplotlib"}, "deepmrf app"),
    "ray": Extra({"ray": "ray"}, "deepmrf predict and deepmrf refine on a cluster, --ray"),
    "coco": Extra({"pycocotools": "pycocotools"}, "data of COCO, coco:PATH"),
    "figures": Extra({"matplotlib": "matplotlib"}, "deepmrf explain"),
    "bench": Extra(
        {"matplotlib": "matplotlib", "pydensecrf": "pydensecrf2", "skimage": "scikit-image"}, "deepmrf bench"
    ),
}
"""The extras of pyproject.toml that commands need; a test holds them equal."""


def install_line(extra: str) -> str:
    """The command that installs an extra. It works in a checkout, too, where deepmrf is installed from there."""
    return f"pip install 'deepmrf[{extra}]'"


def optional(module: str, purpose: str, extra: str) -> Any:
    """Import an optional module; where that fails, raise an ImportError that begins with `purpose`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        package = EXTRAS[extra].packages[top]
        absent = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == top
        reason = "" if absent else f", which cannot be imported ({str(error) or type(error).__name__})"
        raise ImportError(f"{purpose} {package}{reason}: {install_line(extra)}") from None
