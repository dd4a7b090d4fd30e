"""DenseCRF and DenseCRF2D: mean-field inference of a CRF whose edges join all pairs of pixels.

    Q[u, i] ~ exp( -U[u, i] - sum over terms of sum over v of C(u, v) sum over j of k(i, j) Q[v, j] )

U is the unary energy (L, N), k a Gaussian of the term's features, divided by its sums as the normalisation says, and C
the term's compatibility. compat=w means C = -w I: equal labels are rewarded by w. A vector v means C = diag(v), so that
w is a vector of -w. A matrix M means C = (M + M^T) / 2. Edges from a pixel to itself count.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmrf.ops.lattice import Lattice, build_lattice
from deepmrf.ops.lattice.features import bilateral_features, position_lattice
from deepmrf.ops.lattice.mean_field import PairwiseTerm, mean_field, messages, normalisation

SMALLEST_PROBABILITY = 1e-20
"""Below it, ln Q counts as ln of this."""

Floats = NDArray[np.float32]


class KernelType(IntEnum):
    """Which parameters of a kernel could be learned; they start as the identity, so all give the same result."""

    CONST_KERNEL = 0
    DIAG_KERNEL = 1
    FULL_KERNEL = 2


class NormalizationType(IntEnum):
    """Where edges are divided by the sum of each pixel's edges, n = 1 / (K 1)."""

    NO_NORMALIZATION = 0
    NORMALIZE_BEFORE = 1
    NORMALIZE_AFTER = 2
    NORMALIZE_SYMMETRIC = 3


CONST_KERNEL, DIAG_KERNEL, FULL_KERNEL = KernelType
NO_NORMALIZATION, NORMALIZE_BEFORE, NORMALIZE_AFTER, NORMALIZE_SYMMETRIC = NormalizationType
_NORMALISATIONS = ("none", "before", "after", "symmetric")


def as_floats(values: Any, name: str) -> Floats:
    """Numbers of any kind (arrays, lists, tensors) as a float32 array without NaN."""
    if isinstance(values, Tensor):
        values = values.detach().float().cpu().numpy()  # NumPy has no bfloat16
    try:
        array = np.require(values, np.float32, ["C", "W"])  # PyTorch warns of arrays that cannot be written
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of numbers: {error}.") from error
    if np.isnan(array).any():
        raise ValueError(f"{name} holds NaN: look at what computed it.")
    return array


def _require_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")


class DenseCRF:
    """A CRF over `npoints` points of any kind, with `nlabels` labels; features come with addPairwiseEnergy."""

    def __init__(self, npoints: int, nlabels: int, *, device: torch.device | str = "cpu") -> None:
        _require_counts(npoints=npoints, nlabels=nlabels)
        self.npoints, self.nlabels, self.device = int(npoints), int(nlabels), torch.device(device)
        self.terms: list[PairwiseTerm] = []
        self.unary: Tensor | None = None

    def setUnaryEnergy(self, u: Any) -> None:
        """Set the unary energy (nlabels, N): -ln p of each label."""
        unary = as_floats(u, "The unary energy")
        if unary.size != self.nlabels * self.npoints or unary.shape[0] != self.nlabels:
            raise ValueError(
                f"The unary energy has shape {unary.shape}, but this CRF has {self.nlabels} labels and {self.npoints} "
                f"points: give ({self.nlabels}, {self.npoints})."
            )
        unary = unary.reshape(self.nlabels, self.npoints)
        if (unary == -np.inf).any() or (unary == np.inf).all(0).any():
            raise ValueError("The unary energy is infinite for every label of a point, or -inf: clip it first.")
        self.unary = torch.from_numpy(unary.copy()).to(self.device)

    def addPairwiseEnergy(
        self,
        features: Any,
        compat: Any = 3,
        kernel: int = DIAG_KERNEL,
        normalization: int = NORMALIZE_SYMMETRIC,
    ) -> None:
        """Add a Gaussian kernel of features (axes, N), each axis divided by the width of its Gaussian."""
        values = as_floats(features, "The features")
        if values.ndim != 2 or values.shape[1] != self.npoints or values.shape[0] < 1:
            raise ValueError(f"The features have shape {values.shape}: give (axes, {self.npoints}).")
        self._add(torch.from_numpy(values)[None].to(self.device), compat, kernel, normalization)

    def _add(self, features: Tensor | Lattice, compat: Any, kernel: int, normalization: int) -> None:
        if kernel not in set(KernelType):
            raise ValueError(f"kernel={kernel!r} is unknown: choose {', '.join(k.name for k in KernelType)}.")
        if normalization not in set(NormalizationType):
            names = ", ".join(n.name for n in NormalizationType)
            raise ValueError(f"normalization={normalization!r} is unknown: choose {names}.")
        compatibility = self._compatibility(compat)
        lattice = build_lattice(features) if isinstance(features, Tensor) else features
        before, after = normalisation(lattice, _NORMALISATIONS[normalization])
        self.terms.append(PairwiseTerm(lattice, compatibility, before, after))

    def _compatibility(self, compat: Any) -> Tensor:
        """C as a number, a diagonal or a symmetric matrix."""
        given = as_floats(compat, "compat")
        labels = self.nlabels
        if given.ndim == 0:
            return torch.tensor(-float(given), device=self.device)
        if given.shape == (labels,) or (given.size == 1 and labels == 1):
            return torch.from_numpy(given.reshape(labels).copy()).to(self.device)
        if given.shape == (labels, labels):
            return torch.from_numpy((given + given.T) / 2).to(self.device)
        raise ValueError(f"compat has shape {given.shape}: give a number, ({labels},) or ({labels}, {labels}).")

    def inference(self, niter: int) -> Floats:
        """Q (nlabels, N) after `niter` iterations."""
        if int(niter) != niter or niter < 0:
            raise ValueError(f"{niter!r} iterations: give a whole number of at least 0.")
        with torch.inference_mode():
            q: Floats = mean_field(self._energy()[None], self.terms, int(niter))[0].cpu().numpy()
        return q

    def startInference(self) -> tuple[Floats, Floats, Floats]:
        """Return (Q, work, work) for stepInference, with Q of the unary energy alone."""
        q = self.inference(0)
        return q, np.empty_like(q), np.empty_like(q)

    def stepInference(self, Q: Floats, tmp1: Any = None, tmp2: Any = None) -> None:
        """One iteration: Q is changed in place. The arrays for work are not used."""
        with torch.inference_mode():
            q = torch.from_numpy(self._checked(Q))[None].to(self.device)
            energy = sum(messages(q, self.terms), start=self._energy()[None])
            np.copyto(Q, torch.softmax(-energy[0], dim=0).cpu().numpy())

    def klDivergence(self, Q: Any) -> float:
        """KL(Q || P) up to the constant ln Z: what the iterations lower."""
        with torch.inference_mode():
            q = torch.from_numpy(self._checked(Q))[None].to(self.device)
            total = (q * q.clamp_min(SMALLEST_PROBABILITY).log()).double().sum()
            if self.unary is not None:
                total += torch.where(q > 0, q * self.unary, 0).double().sum()
            for message in messages(q, self.terms):
                total += (q * message).double().sum()
            return float(total)

    def _energy(self) -> Tensor:
        if self.unary is None:
            return torch.zeros(self.nlabels, self.npoints, device=self.device)
        return self.unary

    def _checked(self, q: Any) -> Floats:
        array = as_floats(q, "Q")
        if array.shape != (self.nlabels, self.npoints):
            raise ValueError(f"Q has shape {array.shape}: give ({self.nlabels}, {self.npoints}), like startInference.")
        return array


class DenseCRF2D(DenseCRF):
    """A CRF over the pixels of an image of `w` x `h` pixels: the width comes first."""

    def __init__(self, w: int, h: int, nlabels: int, *, device: torch.device | str = "cpu") -> None:
        _require_counts(w=w, h=h)
        super().__init__(int(w) * int(h), nlabels, device=device)
        self.width, self.height = int(w), int(h)

    def setUnaryEnergy(self, u: Any) -> None:
        """Set the unary energy (nlabels, h * w) or (nlabels, h, w): -ln p of each label."""
        shape = tuple(np.shape(u))
        swapped = (self.nlabels, self.width, self.height)
        if len(shape) == 3 and shape == swapped and self.width != self.height:
            raise ValueError(self._swapped("The unary energy", shape[1:]))
        super().setUnaryEnergy(u)

    def addPairwiseGaussian(
        self,
        sxy: float | Sequence[float],
        compat: Any = 3,
        kernel: int = DIAG_KERNEL,
        normalization: int = NORMALIZE_SYMMETRIC,
    ) -> None:
        """Add a kernel of positions: sxy is its width in pixels, one number or (x, y)."""
        lattice = position_lattice((self.height, self.width), self._yx(sxy), reverse=True, device=self.device)
        self._add(lattice, compat, kernel, normalization)

    def addPairwiseBilateral(
        self,
        sxy: float | Sequence[float],
        srgb: float | Sequence[float],
        rgbim: Any,
        compat: Any = 10,
        kernel: int = DIAG_KERNEL,
        normalization: int = NORMALIZE_SYMMETRIC,
    ) -> None:
        """Add a kernel of positions and colours of the image rgbim (h, w, channels); srgb in its unit, 0 to 255."""
        image = as_floats(rgbim, "rgbim")
        image = image[..., None] if image.ndim == 2 else image
        if image.ndim == 3 and image.shape[:2] == (self.width, self.height) and self.width != self.height:
            raise ValueError(self._swapped("rgbim", image.shape[:2]))
        if image.ndim != 3 or image.shape[:2] != (self.height, self.width) or not np.isfinite(image).all():
            raise ValueError(f"rgbim has shape {image.shape}: give finite ({self.height}, {self.width}, channels).")
        planes = torch.from_numpy(image.transpose(2, 0, 1).copy())[None].to(self.device)
        self._add(bilateral_features(planes, self._yx(sxy), srgb, reverse=True), compat, kernel, normalization)

    def _yx(self, sxy: float | Sequence[float]) -> list[float]:
        """Widths along (rows, columns) of widths along (x, y)."""
        widths = [float(value) for value in np.ravel(np.asarray(sxy, dtype=np.float64))]
        if len(widths) not in (1, 2):
            raise ValueError(f"sxy={sxy!r} has {len(widths)} values: give one number, or (x, y).")
        return [widths[-1], widths[0]]

    def _swapped(self, name: str, shape: Sequence[int]) -> str:
        return (
            f"{name} is {shape[0]} rows by {shape[1]} columns, but this CRF was made for w={self.width}, "
            f"h={self.height}: DenseCRF2D takes the width first, DenseCRF2D({shape[1]}, {shape[0]}, labels)."
        )
