"""Pure functions on tensors, no parameters: the maths of the mean-field step, and its evaluations.

distance    b12 with d(j, z), a squared distance: exact at a cost that does not depend on the window
gaussian    b12 with s(j, z), a Gaussian similarity: evaluated inside the window
lattice     a Gaussian filter over all pairs of points, and dense CRF inference on it
local       b12 with a filter per position
contexts    b13 and b14: label contexts and their minimum
low_rank    the same for less: separable patterns, a coarser grid
window      windows, box sums and moments
backends    which implementation of an operator runs, and how to force one
"""

from deepmrf.ops import contexts, distance, gaussian
from deepmrf.ops.contexts import cpu as contexts_fft
from deepmrf.ops.contexts import gpu as contexts_triton
from deepmrf.ops.contexts import label_contexts
from deepmrf.ops.contexts.low_rank import low_rank_contexts, separate, strided_contexts
from deepmrf.ops.distance import cpu as distance_numba
from deepmrf.ops.distance import distance_penalty, distance_sums
from deepmrf.ops.distance import gpu as distance_triton
from deepmrf.ops.gaussian import cpu as gaussian_numba
from deepmrf.ops.gaussian import gaussian_blur, gaussian_penalty
from deepmrf.ops.gaussian import gpu as gaussian_triton
from deepmrf.ops.learned import local_sum
from deepmrf.ops.registry import use

# Compiled kernels come before plain PyTorch; each answers for itself whether it suits the tensors at hand.
distance.IMPLEMENTATIONS[:0] = [distance_triton.IMPLEMENTATION, distance_numba.IMPLEMENTATION]
gaussian.IMPLEMENTATIONS[:0] = [gaussian_triton.IMPLEMENTATION, gaussian_numba.IMPLEMENTATION]
contexts.IMPLEMENTATIONS[:0] = [contexts_triton.IMPLEMENTATION, contexts_fft.IMPLEMENTATION]

__all__ = [
    "distance_penalty",
    "distance_sums",
    "gaussian_blur",
    "gaussian_penalty",
    "label_contexts",
    "local_sum",
    "low_rank_contexts",
    "separate",
    "strided_contexts",
    "use",
]
