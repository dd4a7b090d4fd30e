"""Pure functions on tensors, without parameters: the maths of the mean-field step, and its evaluations.

distance    b12 with d(j, z), a squared distance: exact at a cost that does not depend on the window
gaussian    b12 with s(j, z), a Gaussian similarity: evaluated inside the window
lattice     a Gaussian filter over all pairs of points, and dense CRF inference on it
learned     b12 with a filter per position
contexts    b13 and b14: label contexts and their minimum; low_rank.py has the same for less work
linked      b12: what the pixels on a trajectory add, from other frames of a clip; cpu_linked has the kernel
softmax     b15: softmax over labels between kernels, without PyTorch's threads
window      windows, box sums and moments
registry    operators: how they are registered with PyTorch, and which implementation of one runs
jobs        CPU kernels: how they are compiled, and how threads share their work; PyTorch's idle threads sleep
vectors     CPU kernels: vector instructions
notice      CPU kernels: a line that says that they are being compiled
launch      GPU kernels: can Triton run them, and on which device; launch_kernels has what they share
"""

from deepmrf.ops.contexts import label_contexts
from deepmrf.ops.contexts.low_rank import low_rank_contexts, separate, strided_contexts
from deepmrf.ops.distance import distance_penalty
from deepmrf.ops.gaussian import gaussian_blur, gaussian_penalty
from deepmrf.ops.learned import local_sum
from deepmrf.ops.registry import use

__all__ = [
    "distance_penalty",
    "gaussian_blur",
    "gaussian_penalty",
    "label_contexts",
    "local_sum",
    "low_rank_contexts",
    "separate",
    "strided_contexts",
    "use",
]
