"""The edges of kernel="global": Gaussian weights between all pairs of pixels, by the permutohedral lattice.

    sum[v, j] = n_j sum over all z of k(j, z) n_z q[v, z]  +  smooth_weight * the same with k'
    k(j, z)  = exp(-|I_j - I_z|^2 / 2 a^2 - |j - z|^2 / 2 b^2)
    k'(j, z) = exp(-|j - z|^2 / 2 c^2)

n_j = (sum over z of k(j, z))^-1/2 with `normalize`, else 1. Edges from a pixel to itself count, as in pydensecrf.
The lattices depend on the image and the widths alone: they are built once and serve all iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepmrf.ops.lattice import Lattice, build_lattice, gaussian_filter
from deepmrf.ops.lattice.features import position_features, position_lattice
from deepmrf.ops.lattice.mean_field import PairwiseTerm, normalisation
from deepmrf.ops.registry import needs_gradient, unobserved

SMALLEST_SUM = 1e-20


@dataclass(frozen=True)
class Edges:
    """One Gaussian kernel over the pixels of a batch of images."""

    lattice: Lattice
    features: Tensor | None
    """(B, d, N) where a gradient to them is needed."""
    norm: Tensor | None
    """n (B or 1, N), or None for 1."""

    @classmethod
    def of(cls, features: Tensor | None, lattice: Lattice | None, normalize: bool) -> Edges:
        """Edges of features, with gradients to them, or of a lattice that is there already."""
        if lattice is None:
            assert features is not None
            lattice = build_lattice(features)
        edges = cls(lattice, features if features is not None and features.requires_grad else None, None)
        if not normalize:
            return edges
        if edges.features is None and unobserved(lattice.weight):
            return cls(lattice, None, normalisation(lattice, "symmetric")[0])
        images, points, _ = lattice.vertex.shape
        total = edges.filter(lattice.weight.new_ones(images, 1, points))[:, 0]
        return cls(edges.lattice, edges.features, (total + SMALLEST_SUM).rsqrt())

    def filter(self, values: Tensor) -> Tensor:
        """K values, not normalised; (B, C, N) -> (B, C, N)."""
        return gaussian_filter(values, self.features, self.lattice)

    def sums(self, values: Tensor) -> Tensor:
        """n K (n values)."""
        if self.norm is None:
            return self.filter(values)
        return self.norm[:, None] * self.filter(self.norm[:, None] * values)


@dataclass(frozen=True)
class AllPairs:
    """The edges of one batch of images: of colour and position, and of position alone."""

    edges: Edges
    smooth: Edges | None

    @classmethod
    def of(
        cls,
        image: Tensor,
        widths: Tensor,
        smooth_width: Tensor | None,
        spacing: Sequence[float],
        normalize: bool,
        origin: Sequence[int] | None = None,
    ) -> AllPairs:
        """The edges of image (B, F, *S): widths = (a, b), smooth_width = c.

        origin: position of the first pixel, where the image is a tile of a larger one. The lattice then lies where that
        of the larger image lies, and the tile's result is the same.
        """
        dtype = torch.float64 if widths.dtype == torch.float64 else torch.float32
        size, batch = image.shape[2:], image.shape[0]
        a, b = (_six_digits(width) for width in widths)
        common: dict[str, Any] = {"reverse": True, "dtype": dtype, "device": image.device, "origin": origin}
        positions = position_features(size, [1 / step for step in spacing], **common)
        unit = 255 if image.dtype == torch.uint8 else 1
        colour = image.to(dtype).flatten(2) / (a * unit)
        edges = Edges.of(torch.cat([(positions / b).expand(batch, -1, -1), colour], dim=1), None, normalize)
        if smooth_width is None:
            return cls(edges, None)
        c = _six_digits(smooth_width)
        if needs_gradient(c):
            return cls(edges, Edges.of((positions / c).expand(batch, -1, -1), None, normalize))
        scaled = [float(c) / step for step in spacing]
        lattice = position_lattice(size, scaled, **common)
        return cls(edges, Edges.of(None, lattice, normalize))

    def sums(self, q: Tensor, smooth_weight: Tensor | None) -> Tensor:
        """The sums above, of q (B, L, *S)."""
        values = q.flatten(2)
        total = self.edges.sums(values)
        if self.smooth is not None and smooth_weight is not None:
            total = total + smooth_weight * self.smooth.sums(values)
        return total.view(q.shape)

    def terms(self, compatibility: Tensor, smooth_weight: Tensor | None) -> list[PairwiseTerm]:
        """The same as terms of a dense CRF's energy, for inference without gradients."""
        terms = [PairwiseTerm(self.edges.lattice, compatibility, self.edges.norm, self.edges.norm)]
        if self.smooth is not None and smooth_weight is not None:
            norm = self.smooth.norm
            terms.append(PairwiseTerm(self.smooth.lattice, smooth_weight * compatibility, norm, norm))
        return terms


def _six_digits(width: Tensor) -> Tensor:
    """The width to six digits, with the gradient of the width: 80 stored as a logarithm in float32 is 80 again.

    Where points lie on the border of a simplex, as positions over whole widths do, the last digit decides which one
    they belong to.
    """
    value = width.detach()
    return width + (torch.tensor(float(f"{float(value):.6g}")).to(value) - value)
