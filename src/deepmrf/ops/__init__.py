"""Pure functions on tensors, no parameters: the maths of the mean-field step, and its evaluations.

distance    b12 with d(j, z), a squared distance: exact at a cost that does not depend on the window
gaussian    b12 with s(j, z), a Gaussian similarity: evaluated inside the window
local       b12 with a filter per position
contexts    b13 and b14: label contexts and their minimum
window      windows, box sums and moments
backends    which implementation of an operator runs, and how to force one
"""

from deepmrf.ops.backends import use
from deepmrf.ops.contexts import label_contexts
from deepmrf.ops.distance import distance_penalty, distance_sums
from deepmrf.ops.gaussian import gaussian_blur, gaussian_penalty
from deepmrf.ops.local import local_sum

__all__ = [
    "distance_penalty",
    "distance_sums",
    "gaussian_blur",
    "gaussian_penalty",
    "label_contexts",
    "local_sum",
    "use",
]
