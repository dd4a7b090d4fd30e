"""deepmrf: one mean-field step of a high-order Markov random field as differentiable layers, behind any network.

    mrf = deepmrf.MeanField(labels=21)
    log_q = mrf(log_p, image)          # (B, L, H, W), (B, 3, H, W) -> (B, L, H, W)

The rooms of the package. A room imports from rooms below it only:

cli           the command `deepmrf`, and the page of `deepmrf app`
export        a model as an ONNX file or a torch.export program
refine        an MRF on predictions that any network has saved: fit it, apply it
training      the paper's four stages, from a recipe to a saved model
video         frames in, label maps and overlays out: files, folders of frames, cameras
evaluation    mIoU, TA, LA, BA, Dice, temporal consistency, calibration
predict       `deepmrf.load`: images of every kind, whole folders, scales and tiles
models        DeepParsingNetwork (network + MRF), model folders, models by name
unary         networks b1 to b11: vgg16, strong, fast, volume, four baselines, and wrap for yours
layers        the paper's terms with their parameters: TriplePenalty (b12), LabelContexts (b13, b14), MeanField (b15)
flow          optical flow, and warping along it
losses        DenseCRFLoss and GatedCRFLoss, for networks taught by few labels
densecrf      pydensecrf's names on the same maths: DenseCRF2D, unary_from_softmax, ...
ops           the maths as pure functions on tensors, with slow references and fast kernels
figures       overlays, and what an MRF has learned, drawn from numbers
data          data sets, labels, augmentation, reading and writing of files

pretrained    the weights of the bundled models
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmrf import ops
    from deepmrf.data.labels import LabelSet
    from deepmrf.layers import InputWarning, LabelContexts, MeanField, TriplePenalty, crf_rnn, dense_crf
    from deepmrf.models.parsing_network import DeepParsingNetwork
    from deepmrf.predict.result import Segmentation
    from deepmrf.predict.segmenter import Segmenter, load

__version__ = "0.1.0"
__all__ = [
    "DeepParsingNetwork",
    "InputWarning",
    "LabelContexts",
    "LabelSet",
    "MeanField",
    "Segmentation",
    "Segmenter",
    "TriplePenalty",
    "crf_rnn",
    "dense_crf",
    "load",
    "ops",
]
_HOMES = {
    "data.labels": ("LabelSet",),
    "layers": ("InputWarning", "LabelContexts", "MeanField", "TriplePenalty", "crf_rnn", "dense_crf"),
    "models.parsing_network": ("DeepParsingNetwork",),
    "predict.result": ("Segmentation",),
    "predict.segmenter": ("Segmenter", "load"),
}
_ROOMS = ("data", "densecrf", "evaluation", "export", "figures", "flow", "layers", "losses", "ops", "unary", "video")
_MODULES = {"cluster": "refine.cluster", **{room: room for room in _ROOMS}}


def __getattr__(name: str) -> Any:
    """Everything comes when it is asked for: PyTorch takes seconds to import, and `deepmrf --help` needs none of it."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"deepmrf.{home}"), name)
    if name in _MODULES:
        return importlib.import_module(f"deepmrf.{_MODULES[name]}")
    raise AttributeError(f"module 'deepmrf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
