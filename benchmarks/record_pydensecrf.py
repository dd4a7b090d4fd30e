"""Record what pydensecrf2 answers on small images, for tests/densecrf: python benchmarks/record_pydensecrf.py

The tests compare deepmrf.densecrf with these answers, so that they need no compiler. Needs: pip install '.[bench]'.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

SETTINGS = {
    "voc": ((3, 3), (80, 13, 10), 10),
    "irn": ((3, 3), (50, 5, 10), 10),
    "deeplab": ((1, 3), (67, 3, 4), 10),
    "maskcut": ((3, 7), (50, 5, 10), 10),
    "saliency": ((3, 3), (60, 5, 5), 1),
}
"""Name: (smooth width, weight), (position width, colour width, weight), iterations."""
HEIGHT, WIDTH, LABELS = 33, 46, 4


def problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(unary energy (L, H * W), image (H, W, 3)): a piece of a photograph, and noisy probabilities with patches."""
    from skimage import data

    random = np.random.default_rng(seed)
    photograph = data.chelsea() if seed % 2 else data.astronaut()
    top, left = random.integers(40, 150, 2)
    image = np.ascontiguousarray(photograph[top : top + 2 * HEIGHT : 2, left : left + 2 * WIDTH : 2])
    coarse = random.normal(size=(LABELS, HEIGHT // 8 + 2, WIDTH // 8 + 2)).repeat(8, 1).repeat(8, 2)
    scores = 2 * coarse[:, :HEIGHT, :WIDTH] + random.normal(size=(LABELS, HEIGHT, WIDTH))
    shares = np.exp(scores - scores.max(0))
    return -np.log(shares / shares.sum(0)).reshape(LABELS, -1).astype(np.float32), image


def record(path: Path) -> None:
    """Write images, unary energies and pydensecrf2's Q for every setting, normalisation and form of compatibility."""
    import pydensecrf.densecrf as dcrf  # here: the tests import the settings above without it

    answers: dict[str, np.ndarray] = {}
    random = np.random.default_rng(0)
    matrix = random.normal(size=(LABELS, LABELS)).astype(np.float32) - 3 * np.eye(LABELS, dtype=np.float32)
    answers["matrix"] = matrix
    for number, (name, (smooth, bilateral, iterations)) in enumerate(SETTINGS.items()):
        unary, image = problem(number)
        answers[f"{name} unary"], answers[f"{name} image"] = unary.astype(np.float16), image
        unary = unary.astype(np.float16).astype(np.float32)
        for normalisation in range(4):
            crf = dcrf.DenseCRF2D(WIDTH, HEIGHT, LABELS)
            crf.setUnaryEnergy(unary)
            kind = {"kernel": dcrf.DIAG_KERNEL, "normalization": normalisation}
            crf.addPairwiseGaussian(sxy=smooth[0], compat=smooth[1], **kind)
            crf.addPairwiseBilateral(sxy=bilateral[0], srgb=bilateral[1], rgbim=image, compat=bilateral[2], **kind)
            answers[f"{name} {normalisation}"] = np.array(crf.inference(iterations)).astype(np.float16)
        crf = dcrf.DenseCRF2D(WIDTH, HEIGHT, LABELS)
        crf.setUnaryEnergy(unary)
        crf.addPairwiseBilateral(sxy=(20, 30), srgb=(9, 11, 13), rgbim=image, compat=matrix)
        q, work_1, work_2 = crf.startInference()
        divergences = [crf.klDivergence(q)]
        for _ in range(3):
            crf.stepInference(q, work_1, work_2)
            divergences.append(crf.klDivergence(q))
        answers[f"{name} matrix"] = np.array(q).astype(np.float16)
        answers[f"{name} divergences"] = np.array(divergences)
    np.savez_compressed(path, **answers)


if __name__ == "__main__":
    record(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/densecrf/pydensecrf2.npz"))
