"""The sums over offsets of the Gaussian kernel: similarities, window sums and sums over pairs, in vectors of pixels.

The lanes of a vector are pixels j side by side. Every operation is for a group of ROWS rows of pixels j, one vector
each, whose neighbours z lie in one row: z is read once for the group. Numbers that belong to the offsets dx of a row of
neighbours, the similarities s and the squared colour distances `colours`, are (dx, ROWS, lanes).

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from typing import Any

from deepmrf.ops.vectors import INDEX, Vectors, cgutils, cpu_target, operation

ROWS = 3
"""Rows of pixels that share their neighbours."""
_processor: str = cpu_target.target_context.codegen().magic_tuple()[2]
WIDE = "+avx512vl" in _processor
"""Does numba compile for 32 registers of 64 bytes? Else they are taken to be 16 of 32 bytes."""
VECTOR_BYTES = 64 if WIDE else 32
MAX_LABELS = 8 if WIDE else 4
"""Labels summed at once: ROWS x MAX_LABELS sums and what they need fit the registers."""
OFFSETS_AT_ONCE = 4
"""Offsets whose pairs are summed at once, for the same reason."""


def _vectors(builder: Any, data: Any) -> Vectors:
    """Vectors of the numbers of an array."""
    return Vectors(builder, data.type.pointee, VECTOR_BYTES)


def _similarity(features: int | None, keep: bool) -> Any:
    """The operation for so many features, or for a number known when it runs; `keep` stores the colours."""

    @operation
    def similarity(
        b: Any, s: Any, colours: Any, image: Any, distances: Any, to: Any, here: Any, there: Any, line: Any, plane: Any,
        count: Any, distance: Any, distances_row: Any, size: Any,
    ) -> None:  # fmt: skip
        """s = 2^-(colours + distances), for `size` offsets in a row.

        colours = sum over features of (image[j] - image[z])^2. j is at `here` and in the next lines of image, the first
        z at `there`. For j one line further down, the same neighbours are one row of distances further up.
        """
        v, rows = _vectors(b, s), range(ROWS)

        def centre(f: Any) -> list[Any]:
            return [v.load(image, here, (f, plane), (r, line)) for r in rows]

        def add(totals: list[Any], f: Any, dx: Any, own: list[Any]) -> None:
            other = v.load(image, there, (f, plane), dx)
            for total, value in zip(totals, own, strict=True):
                step = b.fsub(value, other)
                v.accumulate(total, step, step)

        centres = [centre(f) for f in range(features or 0)]
        with cgutils.for_range(b, size) as offset:
            dx = offset.index
            apart = [v.spread_from(distances, distance, dx, (-r, distances_row)) for r in rows]
            totals = [v.variable(v.constant(0.0) if keep else apart[r]) for r in rows]
            if features is None:
                with cgutils.for_range(b, count) as loop:
                    add(totals, loop.index, dx, centre(loop.index))
            for f, own in enumerate(centres):
                add(totals, f, dx, own)
            exponents = [b.load(total) for total in totals]
            if keep:
                for r in rows:
                    v.store(exponents[r], colours, to, (dx, ROWS * v.lanes), r * v.lanes)
                exponents = [b.fadd(exponents[r], apart[r]) for r in rows]
            for r, weight in enumerate(v.exp2_of_negative(exponents)):
                v.store(weight, s, to, (dx, ROWS * v.lanes), r * v.lanes)

    return similarity


similarity_3, similarity_any = _similarity(3, keep=False), _similarity(None, keep=False)
similarity_3_kept, similarity_any_kept = _similarity(3, keep=True), _similarity(None, keep=True)


@operation
def add_products(
    b: Any, total: Any, s: Any, x: Any, to: Any, to_row: Any, pitch: Any, at: Any, line: Any, row: Any, s_row: Any,
    rows: Any, size: Any, labels: Any,
) -> None:  # fmt: skip
    """total[r, label] += sum of s[r] * x[label], for up to MAX_LABELS labels, over rows of x with `size` offsets."""
    v = _vectors(b, s)
    end = b.append_basic_block("end")
    choice = b.switch(labels, end)
    for count in range(1, MAX_LABELS + 1):
        block = b.append_basic_block(f"labels_{count}")
        choice.add_case(labels.type(count), block)
        b.position_at_end(block)
        indices = {(r, k): (to, (r, to_row), (k, pitch)) for r in range(ROWS) for k in range(count)}
        sums = {key: v.variable(v.load(total, *index)) for key, index in indices.items()}
        with cgutils.for_range(b, rows) as outer:
            first, weight = v.index(at, (outer.index, row)), v.index((outer.index, s_row))
            with cgutils.for_range(b, size) as offset:
                dx = offset.index
                factors = [v.load(s, weight, (dx, ROWS * v.lanes), r * v.lanes) for r in range(ROWS)]
                for k in range(count):
                    other = v.load(x, first, (k, line), dx)
                    for r in range(ROWS):
                        v.accumulate(sums[r, k], factors[r], other)
        for key, index in indices.items():
            v.store(b.load(sums[key]), total, *index)
        b.branch(end)
    b.position_at_end(end)


@operation
def weigh_pairs(
    b: Any, s: Any, colours: Any, centres: Any, x: Any, distances: Any, sums: Any, to: Any, centre_at: Any, pitch: Any,
    at: Any, line: Any, labels: Any, distance: Any, distances_row: Any, size: Any,
) -> None:  # fmt: skip
    """s *= centres . x, over labels; sums (2, lanes) += (s * colours, s * distances). `size` offsets in a row."""
    v, rows = _vectors(b, s), range(ROWS)
    totals = [v.variable(v.load(sums, k * v.lanes)) for k in range(2)]
    with cgutils.for_range_slice(b, INDEX(0), size, INDEX(OFFSETS_AT_ONCE)) as (dx, _):
        pairs = {(r, k): v.variable(v.constant(0.0)) for k in range(OFFSETS_AT_ONCE) for r in rows}
        with cgutils.for_range(b, labels) as label:
            own = [v.load(centres, centre_at, (label.index, pitch), (r, labels, pitch)) for r in rows]
            for k in range(OFFSETS_AT_ONCE):
                other = v.load(x, at, (label.index, line), dx, k)
                for r in rows:
                    v.accumulate(pairs[r, k], own[r], other)
        for (r, k), product in pairs.items():
            index = (to, (dx, ROWS * v.lanes), (k * ROWS + r) * v.lanes)
            pair = b.fmul(b.load(product), v.load(s, *index))
            v.store(pair, s, *index)
            v.accumulate(totals[0], pair, v.load(colours, *index))
            v.accumulate(totals[1], pair, v.spread_from(distances, distance, dx, k, (-r, distances_row)))
    for k in range(2):
        v.store(b.load(totals[k]), sums, k * v.lanes)


@operation
def pull(
    b: Any, total: Any, pairs: Any, image: Any, to: Any, here: Any, there: Any, line: Any, at: Any, size: Any
) -> None:
    """total[r] += sum of pairs[r] * (image[j] - image[z]), over `size` offsets in a row, for one feature."""
    v, rows = _vectors(b, pairs), range(ROWS)
    sums = [v.variable(v.constant(0.0)) for _ in rows]  # from 0 on: terms of either sign, summed row by row
    centres = [v.load(image, here, (r, line)) for r in rows]
    with cgutils.for_range(b, size) as offset:
        other = v.load(image, there, offset.index)
        for r in rows:
            pair = v.load(pairs, at, (offset.index, ROWS * v.lanes), r * v.lanes)
            v.accumulate(sums[r], pair, b.fsub(centres[r], other))
    for r in rows:
        v.store(b.fadd(v.load(total, to, r * v.lanes), b.load(sums[r])), total, to, r * v.lanes)
