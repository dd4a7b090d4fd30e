"""Mean-field inference on the CPU: the lattices of all terms joined, and a whole iteration in two passes.

pixels    slice, softmax and splat at once (cpu_kernels.step), a range of pixels per thread
vertices  add private rows, blur, mix labels where C is a matrix, return private rows

rows of the two arrays:   | lattice 1 | lattice 2 | .. | private rows of range 2 | of range 3 | .. |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepmrf.ops.jobs import run_in_parts, run_jobs
from deepmrf.ops.lattice.build import slice_scale
from deepmrf.ops.lattice.cpu import blur_rows, part_count, parts_of, width_of, zero_rows
from deepmrf.ops.registry import forced, installed

if TYPE_CHECKING:
    from deepmrf.ops.lattice.mean_field import PairwiseTerm


def suits(unary: Tensor, terms: Sequence[PairwiseTerm]) -> bool:
    """Float32 on the CPU, where numba is installed and no other implementation is forced."""
    tensors = [unary, *(t.lattice.weight for t in terms)]
    ours = forced() in (None, "numba") and all(t.lattice.links.dim() == 1 for t in terms)
    return ours and installed("numba") and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


def mean_field(unary: Tensor, terms: Sequence[PairwiseTerm], iterations: int) -> Tensor:
    """q (B, L, N); see mean_field.py."""
    q = torch.empty_like(unary, memory_format=torch.contiguous_format)
    for b, energies in enumerate(unary.contiguous()):
        _Inference(energies.numpy(), terms, b).run(iterations, q[b].numpy())
    return q


def _of_image(per_pixel: Tensor | None, image: int, points: int) -> Any:
    """A term's scale of one image's pixels."""
    if per_pixel is None:
        return np.ones(points, np.float32)
    return per_pixel[image if len(per_pixel) > 1 else 0].float().contiguous().numpy()


def _factor(term: PairwiseTerm) -> float:
    """What all sums of a term are multiplied by, before a matrix mixes the labels."""
    sign = -term.compatibility.item() if term.compatibility.dim() == 0 else 1.0
    return sign * slice_scale(term.lattice.axes)


def _clear(rows: Any, start: int, stop: int) -> None:
    rows[start:stop] = 0


class _Inference:
    """Everything that the iterations of one image need."""

    def __init__(self, unary: Any, terms: Sequence[PairwiseTerm], image: int) -> None:
        from deepmrf.ops.lattice import cpu_kernels as kernels

        self.kernels = kernels
        self.unary, (self.labels, points) = unary, unary.shape
        self.width, self.parts = width_of(self.labels), parts_of(points)
        self.corners = sum(t.lattice.axes + 1 for t in terms)
        self.lattices: list[tuple[int, int, Any, Any, Any, int]] = []
        self.vertex = np.empty((points, self.corners), np.int32)
        self.take = np.empty((points, self.corners), np.float32)
        # Where both weights are the same up to a positive factor, they share a table: less to read.
        self.symmetric = all(t.before is t.after and _factor(t) > 0 for t in terms)
        self.give = self.take if self.symmetric else np.empty_like(self.take)
        homes: list[list[Any]] = [[] for _ in self.parts]
        base = column = 0
        for term in terms:
            base, column = self._add(term, image, base, column, homes)
        self.home = [np.concatenate(h) if h else np.empty(0, np.int32) for h in homes]
        self.private = [base + sum(len(h) for h in self.home[:k]) for k in range(len(self.parts))]
        self.vertices, self.rows = base, base + sum(len(h) for h in self.home)
        run_jobs(lambda k: kernels.number_private_rows(self.vertex, *self.parts[k], self.private[k]), len(self.parts))

    def _add(self, term: PairwiseTerm, image: int, base: int, column: int, homes: list[list[Any]]) -> tuple[int, int]:
        """Join a term's lattice to those before it; returns the next free row and column."""
        lattice, points = term.lattice, self.unary.shape[1]
        index = image if lattice.vertex.shape[0] > 1 else 0
        first, last = lattice.first_vertex[index : index + 2]
        vertex, weight = lattice.vertex[index].numpy(), lattice.weight[index].numpy()
        runs, ends = lattice.links.numpy(), [(int(axis[index]), int(axis[index + 1])) for axis in lattice.run_ends]
        compatibility = term.compatibility.detach().float()
        matrix = None
        if compatibility.dim() > 0:
            full = torch.diag(compatibility) if compatibility.dim() == 1 else compatibility
            matrix = (-full).T.contiguous().numpy()
        factor = _factor(term)
        factors = (np.float32(factor**0.5),) * 2 if self.symmetric else (np.float32(factor), np.float32(1))
        before = _of_image(term.before, image, points)
        after = _of_image(term.after, image, points)

        def join(part: int) -> None:
            start, stop = self.parts[part]
            shared = int(vertex[:start].max()) + 1 if start else 0
            used = sum(len(h) for h in homes[part])
            home = np.empty(min(shared, (stop - start) * vertex.shape[1]), np.int32)
            count = self.kernels.join(
                vertex, weight, before, after, *factors, start, stop, shared, base - first, column,
                self.vertex, self.take, self.give, np.zeros(shared, np.int32), home, used,
            )  # fmt: skip
            homes[part].append(home[:count])

        run_jobs(join, len(self.parts))
        self.lattices.append((base, last - first, runs, ends, matrix, base - first))
        return base + last - first, column + lattice.axes + 1

    def run(self, iterations: int, q: Any) -> None:
        """Write q (L, N) after some iterations."""
        kernels, width, parts = self.kernels, self.width, self.parts
        scores = zero_rows(self.unary.shape[1], width)
        run_in_parts(partial(kernels.scores_of, self.unary, width, scores), self.unary.shape[1], len(parts))
        rows, new_rows = (zero_rows(self.rows, width) for _ in range(2))
        tables = (self.vertex.reshape(-1), self.take.reshape(-1), self.give.reshape(-1))
        for iteration in range(iterations + 1):
            flags = (iteration == 0, iteration == iterations)
            step = partial(kernels.step, scores, rows, *tables, self.corners, width, *flags, new_rows, q)
            run_in_parts(step, len(scores) // width, len(parts))
            if iteration < iterations:
                rows, new_rows = new_rows, rows
                self._blur(rows)
                run_in_parts(partial(_clear, new_rows), len(new_rows), part_count(len(new_rows)))

    def _blur(self, rows: Any) -> None:
        kernels, width = self.kernels, self.width
        for home, base in zip(self.home, self.private, strict=True):
            kernels.exchange_private(rows, home, base, width, True)
        for base, vertices, runs, ends, matrix, shift in self.lattices:
            blur_rows(rows, runs, ends, shift, width)
            if matrix is not None:
                part = rows[base * width : (base + vertices) * width]
                run_in_parts(partial(kernels.mix_rows, part, matrix, width), vertices, part_count(vertices))
        private = [(rows, home, base, width, False) for home, base in zip(self.home, self.private, strict=True)]
        run_jobs(lambda k: kernels.exchange_private(*private[k]), len(private))
