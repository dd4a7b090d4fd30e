"""The paper's MRF as layers, one file per term.

triple_penalty   b12: what a label costs, given the pixels around
label_contexts   b13, b14: what labels cost each other, and the cheapest pattern
label_scaling    b11 before the MRF hears it: a factor and a summand per label
mean_field       b15, and the full step b12 to b15
linking          dynamic node linking: neighbours in time along the optical flow
crf              dense CRF, CRF-RNN and DSN as settings of the same step
all_pairs        edges between all pixels of an image, kernel="global"
inflate          a layer for images as one for clips
energy           E(y) of a labelling and F(Q) of label probabilities
inputs           checks of the arguments; InputWarning: arguments that seem to be in another unit
"""

from deepmrf.layers.crf import crf_rnn, dense_crf
from deepmrf.layers.inputs import InputWarning
from deepmrf.layers.label_contexts import LabelContexts
from deepmrf.layers.label_scaling import LabelScaling
from deepmrf.layers.mean_field import MeanField
from deepmrf.layers.triple_penalty import TriplePenalty

__all__ = ["InputWarning", "LabelContexts", "LabelScaling", "MeanField", "TriplePenalty", "crf_rnn", "dense_crf"]
