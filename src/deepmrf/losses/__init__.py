"""CRF losses: teach a network with few labels that pixels which look alike and lie close should agree.

    loss = cross_entropy(scores, scribbles, ignore_index=255) + 0.1 * GatedCRFLoss()(scores.softmax(1), image)

dense_crf    DenseCRFLoss: edges between all pairs of pixels, on the lattice (rloss)
gated_crf    GatedCRFLoss: edges inside a window, exact, in memory that does not grow with it
pairs        what both share: masks, labels left out, the energy of all pairs
"""

from deepmrf.losses.dense_crf import DenseCRFLoss
from deepmrf.losses.gated_crf import GatedCRFLoss

__all__ = ["DenseCRFLoss", "GatedCRFLoss"]
