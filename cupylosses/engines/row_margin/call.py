"""A call of a loss of rows of scores: its static part, its arrays by name, its rows and its divisor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from cupylosses.call import Call


class Static(NamedTuple):
    """The settings that plans specialise on.

    Attributes:
        weighted, masked: True if class weights, a mask are among the arrays.
        class_dim: The dimension of the classes, counted from 0.
        ignore_index: The label of rows that do not count.
        reduction, out_dtype, flags: As the call has them; flags by the positions of their choices.
        check: When a label that is no class raises.
        normalized: True if a normalizer is given, which replaces whatever else a mean divides by.
        has_tangent: Of the arrays, those that have a tangent: the call is a derivative along these.
    """

    weighted: bool
    masked: bool
    class_dim: int
    ignore_index: int
    reduction: str
    out_dtype: str | None
    flags: tuple[int, ...]
    check: str
    normalized: bool = False
    has_tangent: tuple[bool, ...] = ()


class Rows:
    """A call with its arrays by name: how checks and formulas see it."""

    def __init__(self, call: Call) -> None:
        loss: Any = call.loss
        static: Static = call.static
        self.loss, self.static, self.normalizer = loss, static, call.normalizer
        self.input, self.target, *others = call.arrays
        rest = iter(others)
        self.weight: Any = next(rest) if static.weighted else None
        self.mask: Any = next(rest) if static.masked else None
        self.parameters = tuple(call.scalars) or tuple([x.default for x in loss.parameters])

    @property
    def values(self) -> dict[str, Any]:
        """Parameters and flags by name, as formulas take them."""
        return self.loss.bind(self.parameters, self.static.flags)

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        own = [x.name for x in self.loss.operands]
        return [*own, *["weight"] * self.static.weighted, *["mask"] * self.static.masked]

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays by name."""
        given = [x for x in (self.input, self.target, self.weight, self.mask) if x is not None]
        return dict(zip(self.names, given, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows: that of the scores without their class dimension."""
        return without(tuple(self.input.shape), self.static.class_dim)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.input.shape[self.static.class_dim])


def constant_divisor(several: bool, static: Static, rows: Sequence[int]) -> float | None:
    """The divisor of the sum of rows of this shape; None if it depends on labels or mask."""
    if static.reduction in ("none", "sum") or static.normalized:
        return 1.0
    if static.reduction == "batchmean":
        return float(rows[0]) if rows else 1.0
    return float(prod(rows)) if several and not static.masked else None


def without(x: Sequence[Any], dim: int) -> tuple[Any, ...]:
    """A sequence without one of its entries, counted from 0."""
    return (*x[:dim], *x[dim + 1 :])
