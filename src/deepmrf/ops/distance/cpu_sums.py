"""The distance kernel's running sums with labels in lanes: every number below is a vector of eight labels' numbers.

A pass goes along some pixels of a row. At each of them the column sums of one more column are brought up to date
(a row of pixels enters, an old one leaves) and enter the running sums, those of the column that the window leaves
behind leave them, and the results follow. Column sums are touched once, running sums stay in registers.

Maps are told apart by the types of two tuples, so that a pass is compiled for its own number of them: `norms` has one
per squared length (forward their weighted sum alone, backward colour and place, none for the features' gradient) and
`channels` one per feature. Arrays, X being W and a border of zeros before it that stands for the outside of the image:

    columns (X, maps, LANES)                sums over the window's rows of x, y x, the norms times x, features times x
    places (2, X)                           where a column lies along the row; the same times the factor of position
    near (2, BLOCK, LANES)                  x of the pixels that enter the columns and of those that leave them
    factors (3, norms + features, BLOCK)    of the pixels that enter, of those that leave, of those with results
    numbers (3,)                            y of the row that enters and of that which leaves; the factor of y x
    state (maps, LANES)                     the running sums of x, place times x, norms and features
    total (results, BLOCK, LANES)           one forward; colour and place backward; without norms, one per feature

Without norms there is no y x and no place either.

This module imports numba: import it on first use only.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba.core import cgutils, types
from numba.extending import intrinsic

from deepmrf.ops.vectors import LANES, Vectors

BLOCK = 32
"""Pixels that a pass takes at once: what it reads and writes stays in the first cache."""

Values = list[Any]


class _Pass:
    """One pixel of a pass: what it computes, as vectors of the function being built."""

    def __init__(self, vectors: Vectors, norms: int, channels: int, arrays: dict[str, Any]) -> None:
        self.v, self.norms, self.channels = vectors, norms, channels
        self.factors = norms + channels
        self.first = 2 if norms else 1  # of the maps with factors
        self.maps = self.first + self.factors
        self.arrays = arrays
        self.numbers = [vectors.spread_from(arrays["numbers"], ir.IntType(64)(k)) for k in range(3)]

    def factor(self, which: int, k: int, i: Any) -> Any:
        return self.v.spread_from(self.arrays["factors"], self.v.plus(i, (which * self.factors + k) * BLOCK))

    def place(self, column: Any) -> Any:
        return self.v.spread_from(self.arrays["places"], column)

    def load(self, column: Any) -> Values:
        at = self.v.times(column, self.maps * LANES)
        return [self.v.load(self.arrays["columns"], self.v.plus(at, m * LANES)) for m in range(self.maps)]

    def exchange(self, column: Any, i: Any) -> Values:
        """The column sums with pixel i of the new row and without that of the old one, stored and returned."""
        v, near = self.v, self.arrays["near"]
        at = v.times(i, LANES)
        new, old = v.load(near, at), v.load(near, v.plus(at, BLOCK * LANES))
        sums = self.load(column)
        sums[0] = v.add(sums[0], v.subtract(new, old))
        pairs = [(self.factor(0, k, i), self.factor(1, k, i)) for k in range(self.factors)]
        for m, (enters, leaves) in enumerate([tuple(self.numbers[:2])] * (self.first - 1) + pairs, 1):
            sums[m] = v.subtract(v.multiply_add(enters, new, sums[m]), v.multiply(leaves, old))
        at = v.times(column, self.maps * LANES)
        for m, value in enumerate(sums):
            v.store(value, self.arrays["columns"], v.plus(at, m * LANES))
        return sums

    def change(self, column: Any, sums: Values) -> Values:
        """By how much a column changes the running sums. (y - y_j)^2 is opened: its middle term joins the last norm."""
        if not self.norms:
            return sums
        v = self.v
        place = v.multiply(self.place(column), sums[0])
        values = [sums[0], place, *sums[2:]]
        last = 1 + self.norms
        values[last] = v.multiply_add(self.numbers[2], sums[1], values[last])
        return values

    def results(self, column: Any, width: Any, i: Any, state: Values) -> Values:
        """What the running sums give at pixel i; width is the number of columns."""
        v = self.v
        box = state[0]
        factors = [self.factor(2, k, i) for k in range(self.factors)]
        inner = state[len(state) - self.channels :]
        if not self.norms:
            return [v.subtract(v.multiply(factor, box), one) for factor, one in zip(factors, inner, strict=True)]
        values = [v.multiply_add(factors[k], box, state[2 + k]) for k in range(self.norms)]
        values[-1] = v.multiply_add(self.place(v.plus(width, column)), state[1], values[-1])
        for factor, one in zip(factors[self.norms :], inner, strict=True):
            values[0] = v.multiply_add(factor, one, values[0])
        return values


def _pass(enter: bool, leave: bool) -> Any:
    """An intrinsic for pixels whose window gains a column, or leaves one behind and has results, or both."""

    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def run(
        typing: Any, norms: Any, channels: Any, columns: Any, entering: Any, leaving: Any, here: Any, width: Any,
        places: Any, near: Any, factors: Any, numbers: Any, state: Any, total: Any, begin: Any, end: Any,
    ) -> Any:  # fmt: skip
        """Pixels begin .. end - 1 of a block, whose first has the given columns; width is the number of columns."""
        i = types.intp
        signature = types.void(
            norms, channels, columns, i, i, i, i, places, near, factors, numbers, state, total, i, i
        )  # fmt: skip

        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            v = Vectors(context, builder)
            names = {2: "columns", 7: "places", 8: "near", 9: "factors", 10: "numbers", 11: "state", 12: "total"}
            arrays = {name: v.data(signature.args[n], arguments[n]) for n, name in names.items()}
            entering, leaving, here, width, begin, end = (arguments[n] for n in (3, 4, 5, 6, 13, 14))
            one = _Pass(v, len(signature.args[0]), len(signature.args[1]), arrays)
            count = one.maps
            kept = [cgutils.alloca_once(builder, v.vector) for _ in range(count)]
            place = [ir.Constant(width.type, m * LANES) for m in range(count)]
            for to, at in zip(kept, place, strict=True):
                builder.store(v.load(arrays["state"], at), to)
            with cgutils.for_range(builder, end, start=begin) as loop:
                i = loop.index
                state = [builder.load(one_sum) for one_sum in kept]
                if leave:
                    column = v.plus(leaving, i)
                    lost = one.change(column, one.load(column))
                    state = [v.subtract(a, b) for a, b in zip(state, lost, strict=True)]
                if enter:
                    column = v.plus(entering, i)
                    won = one.change(column, one.exchange(column, i))
                    state = [v.add(a, b) for a, b in zip(state, won, strict=True)]
                for to, value in zip(kept, state, strict=True):
                    builder.store(value, to)
                if leave:
                    at = v.times(i, LANES)
                    for k, value in enumerate(one.results(v.plus(here, i), width, i, state)):
                        v.store(value, arrays["total"], v.plus(at, k * BLOCK * LANES))
            for one_sum, at in zip(kept, place, strict=True):
                v.store(builder.load(one_sum), arrays["state"], at)
            return context.get_dummy_value()

        return signature, build

    return run


gain, move, lose = _pass(True, False), _pass(True, True), _pass(False, True)
