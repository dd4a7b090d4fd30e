"""pydensecrf's names, on deepmrf's lattice: change the import line and keep the program.

    import deepmrf.densecrf as dcrf                              # was: import pydensecrf.densecrf as dcrf
    from deepmrf.densecrf.utils import unary_from_softmax        # was: from pydensecrf.utils import ...

    crf = dcrf.DenseCRF2D(width, height, labels)
    crf.setUnaryEnergy(unary_from_softmax(probabilities))
    crf.addPairwiseGaussian(sxy=3, compat=3)
    crf.addPairwiseBilateral(sxy=80, srgb=13, rgbim=image, compat=10)
    q = crf.inference(10)                                        # (labels, height * width)

crf      DenseCRF, DenseCRF2D, kernel types and normalisations
utils    unaries of labels and probabilities, features of images of any number of axes
rloss    bilateralfilter and bilateralfilter_batch, as rloss names its filter

Label maps equal pydensecrf's. What it refuses (other dtypes, arrays out of order, tensors of PyTorch) is taken; what it
takes silently and wrongly (swapped width and height, too few widths) is an error.
"""

from deepmrf.densecrf import utils
from deepmrf.densecrf.crf import (
    CONST_KERNEL,
    DIAG_KERNEL,
    FULL_KERNEL,
    NO_NORMALIZATION,
    NORMALIZE_AFTER,
    NORMALIZE_BEFORE,
    NORMALIZE_SYMMETRIC,
    DenseCRF,
    DenseCRF2D,
    KernelType,
    NormalizationType,
)
from deepmrf.densecrf.rloss import bilateralfilter, bilateralfilter_batch

__all__ = [
    "CONST_KERNEL",
    "DIAG_KERNEL",
    "FULL_KERNEL",
    "NORMALIZE_AFTER",
    "NORMALIZE_BEFORE",
    "NORMALIZE_SYMMETRIC",
    "NO_NORMALIZATION",
    "DenseCRF",
    "DenseCRF2D",
    "KernelType",
    "NormalizationType",
    "bilateralfilter",
    "bilateralfilter_batch",
    "utils",
]
