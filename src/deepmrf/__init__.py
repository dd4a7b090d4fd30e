"""deepmrf: one mean-field step of a high-order Markov random field as differentiable layers, behind any network.

    mrf = deepmrf.MeanField(labels=21)
    log_q = mrf(log_p, image)          # (B, L, H, W), (B, 3, H, W) -> (B, L, H, W)

The map of the package; imports point downwards only:

cli                 the command `deepmrf`
train               the four stages as one loop; start, stages, samples, clips, recipe: what a run is made of
fit, refine         an MRF on saved predictions of images or volumes; fitted: the result; predictions, decode,
                    examples: reading them; tiles: large volumes; dice: their scores
segment             load: a model by name, for images of every kind; result: what was found
pictures, runner    many image files: finding them, and the line of reading, network and writing
video               frames in, labels and overlays out: files, folders of frames, cameras; bounded memory
evaluate, predict   scores of a model; scales, flips, averages and tiles
models              models by name: bundled, in a folder, on the hub
bench               every layer beside its peers
dpn                 DeepParsingNetwork: a unary network and a mean field, saved and loaded
unary               networks b1 to b11: vgg16, strong, fast, and wrap for yours
layers              the paper's terms with their parameters: TriplePenalty (b12), LabelContexts (b13, b14), MeanField
                    (b12 to b15), and dense_crf, crf_rnn as settings of MeanField
ops                 the maths as pure functions on tensors, its slow references and its fast evaluations

data, metrics, figures and checkpoint stand aside and know none of these.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmrf import ops
    from deepmrf.dpn import DeepParsingNetwork
    from deepmrf.layers import LabelContexts, MeanField, TriplePenalty, crf_rnn, dense_crf
    from deepmrf.result import Segmentation
    from deepmrf.segment import Segmenter, load

__version__ = "0.1.0"
__all__ = [
    "DeepParsingNetwork",
    "LabelContexts",
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
    "dpn": ("DeepParsingNetwork",),
    "layers": ("LabelContexts", "MeanField", "TriplePenalty", "crf_rnn", "dense_crf"),
    "result": ("Segmentation",),
    "segment": ("Segmenter", "load"),
}
_MODULES = ("data", "figures", "flow", "layers", "metrics", "ops", "unary", "video")


def __getattr__(name: str) -> Any:
    """Everything comes when it is asked for: PyTorch takes seconds to import, and `deepmrf --help` needs none of it."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"deepmrf.{home}"), name)
    if name in _MODULES:
        return importlib.import_module(f"deepmrf.{name}")
    raise AttributeError(f"module 'deepmrf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
