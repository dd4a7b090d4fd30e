"""deepmrf: one mean-field step of a high-order Markov random field as differentiable layers, behind any network.

    mrf = deepmrf.MeanField(labels=21)
    log_q = mrf(log_p, image)          # (B, L, H, W), (B, 3, H, W) -> (B, L, H, W)

The map of the package; imports point downwards only:

layers    the paper's terms with their parameters: TriplePenalty (b12), LabelContexts (b13, b14), MeanField (b12 to
          b15), and dense_crf, crf_rnn as settings of MeanField
ops       the maths as pure functions on tensors, its slow references and its fast evaluations
figures   pictures: labels over images, panels side by side
"""

from deepmrf import ops
from deepmrf.layers import LabelContexts, MeanField, TriplePenalty, crf_rnn, dense_crf

__version__ = "0.1.0"
__all__ = ["LabelContexts", "MeanField", "TriplePenalty", "crf_rnn", "dense_crf", "ops"]
