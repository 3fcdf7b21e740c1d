"""Random sizes, shapes, dtypes and options of cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from random import Random
from typing import Any

#: Dtypes to draw from; repeated entries are drawn more often.
DTYPES = ("float32", "float32", "bfloat16", "bfloat16", "float16", "float64")


class Draw(Random):
    """A random number generator that also draws shapes, dtypes and options of operands."""

    def size(self, low: int, high: int) -> int:
        """Draws a size, uniform in its logarithm; half of the time it is a power of two or a multiple of 8."""
        found = round(exp(self.uniform(log(low), log(high))))
        kind = self.random()
        if kind < 0.3:
            found = 1 << (found.bit_length() - 1)
        elif kind < 0.5:
            found = found // 8 * 8
        return min(max(found, low), high)

    def shape(self, elements: int, dims: int) -> tuple[int, ...]:
        """Draws a shape with about this number of elements, whose dimensions may have any size."""
        sizes = []
        for _ in range(dims - 1):
            sizes.append(self.size(1, elements))
            elements = max(1, elements // sizes[-1])
        sizes.append(elements)
        self.shuffle(sizes)
        return tuple(sizes)

    def pixels(self, elements: int) -> tuple[int, ...]:
        """Draws the dimensions of a signal, a square or a cube with about this number of elements."""
        dims = self.choice((1, 2, 2, 3))
        return (max(1, round(elements ** (1 / dims))),) * dims

    def options(self, cases: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Draws the options of a case or, more often, none."""
        return self.choice(cases) if self.random() < 0.4 else {}

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Draws a shape that broadcasts to this one; on average half of its dimensions become 1."""
        return tuple(1 if self.random() < 0.5 else n for n in shape)

    def dtype(self) -> str:
        """Draws a dtype."""
        return self.choice(DTYPES)
