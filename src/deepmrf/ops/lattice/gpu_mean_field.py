"""Mean-field inference on GPUs: the lattices of all terms joined, slice and softmax in one kernel.

The layout is that of gpu.py, with the vertices of all lattices one after the other. A lattice of one image is repeated
for each image of a batch. The weights of slice and splat include the normalisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmrf.ops.lattice.build import slice_scale
from deepmrf.ops.lattice.gpu import Splat, blur, slice_rows, stride_of, tables_of
from deepmrf.ops.launch import interpreted, on_device
from deepmrf.ops.registry import forced, installed

if TYPE_CHECKING:
    from deepmrf.ops.lattice.mean_field import PairwiseTerm

MAX_LABELS = 1024
"""Labels of a pixel that a program has in registers."""


def suits(unary: Tensor, terms: Sequence[PairwiseTerm]) -> bool:
    """Float32 on a GPU, where no other implementation is forced."""
    tensors = [unary, *(t.lattice.weight for t in terms)]
    here = all(t.is_cuda for t in tensors) or (interpreted() and all(t.lattice.splat_tables for t in terms))
    fits = unary.shape[1] <= MAX_LABELS and all(t.dtype == torch.float32 for t in tensors)
    return here and fits and forced() in (None, "triton") and installed("triton")


class _Joined:
    """The lattices of all terms as one, for a batch of images."""

    def __init__(self, terms: Sequence[PairwiseTerm], batch: int) -> None:
        self.batch = batch
        repeats = [batch // t.lattice.vertex.shape[0] for t in terms]
        counts = [t.lattice.vertices * n for t, n in zip(terms, repeats, strict=True)]
        self.bases = [sum(counts[:k]) for k in range(len(counts) + 1)]
        sides = max(t.lattice.axes + 1 for t in terms)
        like = terms[0].lattice.vertex
        self.neighbours = like.new_full((sides, 2, self.bases[-1]), -1)
        vertex, take, tables = [], [], []
        entries = partials = 0
        for term, base, repeat in zip(terms, self.bases, repeats, strict=False):
            lattice = term.lattice
            shift = base + torch.arange(repeat, device=like.device, dtype=torch.int32) * lattice.vertices
            vertex.append((lattice.vertex + shift[:, None, None]).flatten(0, 1))
            weight = lattice.weight * slice_scale(lattice.axes)
            weight = weight if term.compatibility.dim() else weight * -term.compatibility
            weight = weight if term.after is None else weight * term.after[:, :, None]
            take.append(weight.expand(batch, -1, -1).flatten(0, 1))
            end = base + repeat * lattice.vertices
            self.neighbours[: lattice.axes + 1, :, base:end] = _shifted(lattice.neighbours, shift)
            table, added_entries, added_partials = _repeated(
                term, repeat, batch, shift, entries, partials, self.bases[-1]
            )
            tables.append(table)
            entries, partials = entries + added_entries, partials + added_partials
        self.vertex, self.take = torch.cat(vertex, 1).contiguous(), torch.cat(take, 1).contiguous()
        pixel, weight, starts, targets, many, first = (torch.cat(parts) for parts in zip(*tables, strict=True))
        last = first.new_tensor([partials])
        self.splat = Splat(pixel, weight, starts, targets, many, torch.cat([first, last]), self.bases[-1])


def _shifted(links: Tensor, shift: Tensor) -> Tensor:
    """Neighbours (d + 1, 2, M) repeated for each image, its rows shifted: (d + 1, 2, images M)."""
    repeated = links[:, :, None] + shift[:, None]
    return torch.where(links[:, :, None] < 0, -1, repeated).flatten(2)


def _repeated(
    term: PairwiseTerm, repeat: int, batch: int, shift: Tensor, entries: int, partials: int, vertices: int
) -> tuple[tuple[Tensor, ...], int, int]:
    """A lattice's splat tables for each image, behind so many entries and partial sums; and how many it adds."""
    pixel, weight, starts, targets, many, first = tables_of(term.lattice)
    points = term.lattice.vertex.shape[1]
    copy = torch.arange(repeat, device=pixel.device, dtype=torch.int32)[:, None]
    added = int(first[-1])
    pixels = (pixel + copy * points).flatten()
    weights = weight.repeat(repeat)
    if term.before is not None:
        weights = weights * term.before.expand(batch, -1).flatten()[pixels]
    rows = torch.where(targets < 0, vertices + partials + copy * added - 1 - targets, targets + shift[:, None])
    table = (
        pixels,
        weights,
        (starts + entries + copy * len(pixel)).flatten(),
        rows.flatten().int(),
        (many + shift[:, None]).flatten(),
        (first[:-1] + partials + copy * added).flatten(),
    )
    return table, len(pixels), added * repeat


@on_device
def mean_field(unary: Tensor, terms: Sequence[PairwiseTerm], iterations: int) -> Tensor:
    """q (B, L, N); see mean_field.py."""
    batch, labels, points = unary.shape
    if not terms or unary.numel() == 0:
        return torch.softmax(-unary, dim=1)
    lattice = _Joined(terms, batch)
    scores = unary.new_empty(batch, points, stride_of(labels))
    torch.neg(unary.mT, out=scores[:, :, :labels])
    scores = scores.view(batch * points, -1)
    q = torch.empty_like(scores)
    nothing = lattice.vertex[:, :0]
    slice_rows(scores, nothing, lattice.take, scores, q, labels, 1.0, softmax=True)
    rows, spare = (scores.new_empty(lattice.splat.rows, scores.shape[1]) for _ in range(2))
    for _ in range(iterations):
        lattice.splat(q, rows, labels)
        blurred = blur(rows, spare, lattice.neighbours, range(len(lattice.neighbours)), labels)
        for term, first, last in zip(terms, lattice.bases[:-1], lattice.bases[1:], strict=True):
            if term.compatibility.dim():
                part = blurred[first:last, :labels]
                matrix = term.compatibility.to(part)
                part.copy_(-part @ matrix.T if matrix.dim() == 2 else -part * matrix)
        slice_rows(blurred, lattice.vertex, lattice.take, scores, q, labels, 1.0, softmax=True)
    return q.view(batch, points, -1)[:, :, :labels].mT.contiguous()
