"""What `deepmrf doctor` reports of this installation: versions, devices, kernels, caches, extras, and a test."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import torch

import deepmrf
from deepmrf import ops
from deepmrf.data.extras import EXTRAS, install_line
from deepmrf.data.files import one_line
from deepmrf.data.progress import Progress, no_progress
from deepmrf.models.names import PRETRAINED, bundled
from deepmrf.ops.jobs import cache_folder, compiled_before
from deepmrf.predict.segmenter import load

CORE_PACKAGES = ("torch", "numpy", "numba", "triton", "pillow", "safetensors", "huggingface-hub", "typer", "rich")
MAX_FILES_COUNTED = 20_000
"""Files of a cache whose sizes are added; a larger cache is reported as at least that large."""
TEST_SIDE = 64
"""Side of the image that the test segments, pixels."""


@dataclass(frozen=True)
class Cache:
    """A folder that programs fill."""

    name: str
    path: str
    """Empty where there is none."""
    writable: bool
    bytes: int
    complete: bool = True
    """False where there are more files than were counted."""


@dataclass(frozen=True)
class ExtraState:
    """An extra of deepmrf: what it is for, and what is missing of it."""

    name: str
    purpose: str
    missing: tuple[str, ...]
    install: str
    """The command that installs it."""


@dataclass(frozen=True)
class Installation:
    """What is there, and what is not."""

    path: str
    """The folder of the package."""
    versions: dict[str, str]
    """Package: version; empty for one that is not installed."""
    devices: dict[str, str]
    """"cpu" and "cuda": a description, or why there is none."""
    kernels: dict[str, str]
    """"cpu" and "cuda": what computes the MRF there, and why if that is plain PyTorch."""
    caches: tuple[Cache, ...]
    extras: tuple[ExtraState, ...]
    models: tuple[str, ...]
    """The bundled models."""
    seconds: float
    """Time of the test: a bundled model is loaded and segments a small image."""
    problem: str
    """Why the core does not work; empty if it does."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"works": not self.problem, **asdict(self)}


def inspect_installation(progress: Progress = no_progress) -> Installation:
    """Look at everything, and let a bundled model segment a small image."""
    steps = 4
    versions = {"deepmrf": deepmrf.__version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in CORE_PACKAGES}
    progress(1, steps)
    devices, kernels = {"cpu": _cpu(), "cuda": _gpus()}, {"cpu": _cpu_kernels(), "cuda": _gpu_kernels()}
    progress(2, steps)
    caches = tuple(_caches())
    extras = tuple(_extra(name) for name in EXTRAS)
    progress(3, steps)
    seconds, problem = _test_core()
    progress(4, steps)
    return Installation(
        str(PRETRAINED.parent), versions, devices, kernels, caches, extras, tuple(bundled()), seconds, problem
    )


def _extra(name: str) -> ExtraState:
    extra = EXTRAS[name]
    missing = tuple(package for module, package in extra.packages.items() if not _found(module))
    return ExtraState(name, extra.purpose, missing, install_line(name))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _found(module: str) -> bool:
    """Is the module installed? Asked without importing it."""
    try:
        return find_spec(module) is not None
    except ValueError:  # what tests leave in sys.modules has no spec
        return False


def _import_problem(module: str) -> str:
    """Why an installed module cannot be imported; empty if it can, or if it is not installed."""
    if not _found(module):
        return ""
    try:
        import_module(module)
    except Exception as error:  # a package that does not fit another one raises what it likes
        return one_line(error)
    return ""


def _cpu() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():  # of Linux
        lines = info.read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {os.cpu_count()} cores, {capability}; PyTorch uses {torch.get_num_threads()} threads"


def _gpus() -> str:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return "; ".join(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in names)
    has_driver = Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None
    if torch.version.cuda is None and torch.version.hip is None:
        return "none: this PyTorch is the CPU build" + (
            ", although there is an NVIDIA driver: install PyTorch with CUDA to use the GPU" if has_driver else ""
        )
    if not has_driver:
        return f"none: PyTorch is built for CUDA {torch.version.cuda} but finds no driver"
    return f"none: PyTorch is built for CUDA {torch.version.cuda} but finds no GPU; is the driver new enough for it?"


def _cpu_kernels() -> str:
    if not _version("numba"):
        return "plain PyTorch, since numba is not installed: pip install numba"
    if problem := _import_problem("numba"):
        return f"numba cannot be imported ({problem}): predictions need it mended or removed"
    if cache_folder() is None:
        return "numba, compiled in every process, since no folder can be written: set NUMBA_CACHE_DIR to one that can"
    if compiled_before():
        return "numba, compiled earlier"
    return "numba, compiled when they are first needed, once: 10 to 30 seconds; plain PyTorch serves single images"


def _gpu_kernels() -> str:
    if not torch.cuda.is_available():
        return "none, since there is no GPU"
    if not _version("triton"):
        return "plain PyTorch, since Triton is not installed: pip install triton"
    return "Triton, compiled when they are first needed"


def _caches() -> Iterator[Cache]:
    triton_folder = os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")
    if not _import_problem("numba"):
        yield _cache("compiled kernels, CPU", cache_folder(), "**/*.nb?")
    if torch.cuda.is_available():
        yield _cache("compiled kernels, GPU", Path(triton_folder).expanduser())
    yield _cache("models of the Hugging Face hub", Path(huggingface_hub.constants.HF_HUB_CACHE))
    yield _cache("bundled models", PRETRAINED)


def _cache(name: str, folder: Path | None, pattern: str = "**/*") -> Cache:
    if folder is None:
        return Cache(name, "", False, 0)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    total = 0
    for number, path in enumerate(folder.glob(pattern)):
        if number == MAX_FILES_COUNTED:
            return Cache(name, str(folder), os.access(existing, os.W_OK), total, False)
        if path.is_file() and not path.is_symlink():
            total += path.stat().st_size
    return Cache(name, str(folder), os.access(existing, os.W_OK), total)


def _test_core() -> tuple[float, str]:
    """The seconds that a bundled model takes to load and to segment a small image, and why it failed if it did."""
    start = time.perf_counter()
    image = np.random.default_rng(0).integers(0, 256, (TEST_SIDE, TEST_SIDE, 3), dtype=np.uint8)
    try:
        with ops.use("torch"):  # compiling kernels would take longer than a look should
            result = load("animals", device="cpu")(image)
        if result.labels.shape != image.shape[:2]:
            return 0.0, f"a bundled model gave a label map of {result.labels.shape} for an image of {image.shape}"
    except Exception as error:  # whatever is wrong, the report says it
        return 0.0, f"a bundled model failed ({type(error).__name__}: {error}); install deepmrf again"
    return time.perf_counter() - start, ""
