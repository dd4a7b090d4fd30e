"""The running sums of the distance kernel: column sums and window sums of eight labels, one label per lane.

A pass goes along some pixels of a row. At each pixel, one more column enters the window: its column sums are brought up
to date (a row of pixels enters, an old row leaves) and added to the window sums. The column that the window leaves
behind is subtracted, and the results follow. Each column sum is touched once; the window sums stay in registers.

Two tuples say which maps are summed, so that a pass is compiled for their number: `norms` has one entry per squared
length (forward their weighted sum alone; backward colour and position; none for the gradient to the features), and
`channels` has one entry per feature. x is the map that is summed over windows. Arrays, with C columns, which are a
border of zeros that stands for the outside of the image and then the W pixels of a row:

    columns (C, maps, LANES)                sums over the window's rows of x, y x, norms times x, features times x
    positions (2, C)                        where a column lies along the row; the same times the factor of the position
    pixels (2, BLOCK, LANES)                x of the pixels that enter the columns, and of those that leave
    factors (3, norms + features, BLOCK)    of the pixels that enter, of those that leave, of those with results
    heights (7,)                            y of the row that enters, y of the row that leaves; the factor of y x; ..
    sums (maps, LANES)                      the window sums of x, position times x, the norms and the features times x
    results (R, BLOCK, LANES)               R = 1 forward; colour and position backward; without norms, one per feature

Without norms, y x and position times x are not summed.

A volume's windows reach over planes. `planes` is a tuple with an entry if the rows that enter and leave are sums over
the planes of the window: pixels (rows, W, maps, LANES) then holds the sums of x, t x, norms times x and features times
x, with norms of colour and t alone, and heights (7,) has three more factors of x and one of t x.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from typing import Any

from deepmrf.ops.vectors import Vectors, cgutils, operation

LANES = 8
"""Labels in a vector of float64 numbers."""
BLOCK = 32
"""Pixels that a pass takes at once: what it reads and writes stays in the first cache."""

Values = list[Any]


class _Pass:
    """What a pass computes at one pixel, as vectors of the function being built."""

    def __init__(
        self, vectors: Vectors, norms: int, channels: int, columns: Any, positions: Any, pixels: Any, factors: Any,
        heights: Any, rows: tuple[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        """rows: where the rows that enter and leave begin in pixels that are sums over planes."""
        self.v, self.norms, self.channels, self.rows = vectors, norms, channels, rows
        self.columns, self.positions, self.pixels, self.factors = columns, positions, pixels, factors
        self.factor_count = norms + channels
        self.plain = 2 if norms else 1  # maps without a factor of the pixel
        self.maps = self.plain + self.factor_count
        self.heights = [vectors.spread_from(heights, k) for k in range(3 if rows is None else 7)]

    def factor(self, which: int, k: int, i: Any) -> Any:
        return self.v.spread_from(self.factors, i, (which * self.factor_count + k) * BLOCK)

    def load(self, column: Any) -> Values:
        return [self.v.load(self.columns, (column, self.maps * LANES), m * LANES) for m in range(self.maps)]

    def exchange(self, column: Any, i: Any) -> Values:
        """The column sums with pixel i of the new row and without that of the old row, stored and returned."""
        v = self.v
        sums = self.load(column)
        if self.rows is None:
            new, old = (v.load(self.pixels, (i, LANES), which * BLOCK * LANES) for which in range(2))
            sums[0] = v.add(sums[0], v.subtract(new, old))
            pairs = [(self.heights[0], self.heights[1])] * (self.plain - 1)
            pairs += [(self.factor(0, k, i), self.factor(1, k, i)) for k in range(self.factor_count)]
            for m, (enters, leaves) in enumerate(pairs, 1):
                sums[m] = v.subtract(v.multiply_add(enters, new, sums[m]), v.multiply(leaves, old))
        else:
            gained, lost = (self.of_planes(column, which, i) for which in range(2))
            sums = [v.add(a, v.subtract(b, c)) for a, b, c in zip(sums, gained, lost, strict=True)]
        for m, value in enumerate(sums):
            v.store(value, self.columns, (column, self.maps * LANES), m * LANES)
        return sums

    def of_planes(self, column: Any, which: int, i: Any) -> Values:
        """What pixel i of a row that enters (0) or leaves (1) adds to the column sums, from the sums over planes.

        Their norms count t from the middle of the volume: (t - t_j)^2 is opened here, and x and y join in.
        """
        v = self.v
        assert self.rows is not None
        pixel = v.index(self.rows[which], i)
        values = [v.load(self.pixels, (pixel, self.maps * LANES), m * LANES) for m in range(self.maps)]
        if self.norms:
            along = v.spread_from(self.positions, column)
            factor = v.multiply_add(v.multiply(along, along), self.heights[6], self.heights[3 + which])
            last = v.multiply_add(factor, values[0], values[1 + self.norms])
            values[1 + self.norms] = v.multiply_add(self.heights[5], values[1], last)
            values[1] = v.multiply(self.heights[which], values[0])
        return values

    def change(self, column: Any, sums: Values) -> Values:
        """What a column adds to the window sums. (y - y_j)^2 is opened: its middle term joins the last norm."""
        if not self.norms:
            return sums
        v = self.v
        moment = v.multiply(v.spread_from(self.positions, column), sums[0])
        values = [sums[0], moment, *sums[2:]]
        last = 1 + self.norms
        values[last] = v.multiply_add(self.heights[2], sums[1], values[last])
        return values

    def results(self, column: Any, column_count: Any, i: Any, sums: Values) -> Values:
        """What the window sums give at pixel i."""
        v = self.v
        box, products = sums[0], sums[len(sums) - self.channels :]
        factors = [self.factor(2, k, i) for k in range(self.factor_count)]
        if not self.norms:
            return [
                v.subtract(v.multiply(factor, box), product) for factor, product in zip(factors, products, strict=True)
            ]
        values = [v.multiply_add(factors[k], box, sums[2 + k]) for k in range(self.norms)]
        values[-1] = v.multiply_add(v.spread_from(self.positions, column_count, column), sums[1], values[-1])
        for factor, product in zip(factors[self.norms :], products, strict=True):
            values[0] = v.multiply_add(factor, product, values[0])
        return values


def _pass(enter: bool, leave: bool) -> Any:
    """The operation for pixels whose window gains a column, or leaves one behind and has results, or both."""

    @operation
    def run(
        builder: Any, norms: int, channels: int, planes: int, columns: Any, entering: Any, leaving: Any, here: Any,
        column_count: Any, positions: Any, pixels: Any, new_row: Any, old_row: Any, factors: Any, heights: Any,
        sums: Any, results: Any, begin: Any, end: Any,
    ) -> None:  # fmt: skip
        """Pixels begin .. end - 1 of a block, of which the first has the columns entering, leaving and here."""
        v = Vectors(builder)
        rows = (new_row, old_row) if planes else None
        step = _Pass(v, norms, channels, columns, positions, pixels, factors, heights, rows)
        variables = [v.variable(v.load(sums, m * LANES)) for m in range(step.maps)]
        with cgutils.for_range(builder, end, start=begin) as loop:
            i = loop.index
            values = [builder.load(variable) for variable in variables]
            if leave:
                column = v.index(leaving, i)
                lost = step.change(column, step.load(column))
                values = [v.subtract(a, b) for a, b in zip(values, lost, strict=True)]
            if enter:
                column = v.index(entering, i)
                gained = step.change(column, step.exchange(column, i))
                values = [v.add(a, b) for a, b in zip(values, gained, strict=True)]
            for value, variable in zip(values, variables, strict=True):
                builder.store(value, variable)
            if leave:
                for k, value in enumerate(step.results(v.index(here, i), column_count, i, values)):
                    v.store(value, results, (i, LANES), k * BLOCK * LANES)
        for m, variable in enumerate(variables):
            v.store(builder.load(variable), sums, m * LANES)

    return run


gain, move, lose = _pass(True, False), _pass(True, True), _pass(False, True)


@operation
def exchange(
    builder: Any, norms: int, channels: int, columns: Any, column: Any, pixels: Any, factors: Any, heights: Any,
    size: Any,
) -> None:  # fmt: skip
    """`size` pixels enter and leave the sums from a column on; nothing is summed over columns."""
    step = _Pass(Vectors(builder), norms, channels, columns, columns, pixels, factors, heights)
    with cgutils.for_range(builder, size) as loop:
        step.exchange(builder.add(column, loop.index), loop.index)
