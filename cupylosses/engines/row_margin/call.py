"""Static part, arrays by name, shape of the rows, and constant divisor of a call of a margin loss."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from cupylosses.call import Call


class Static(NamedTuple):
    """Settings on which plans are specialised.

    Attributes:
        weighted, masked: True if class weights, or a mask, are among the arrays.
        class_dim: Class dimension, counted from 0.
        ignore_index: Label of rows that do not count.
        reduction, out_dtype: Those of the call.
        flags: For each flag, the position of the chosen value among its choices.
        check: When an invalid label raises: "sync", "lazy" or "off".
        normalized: True if a normalizer is given, which replaces whatever else a mean divides by.
        has_tangent: For each array, True if it has a tangent: the call is then a derivative along these tangents. Empty
            if the call is not a derivative.
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
    """A call with its arrays by name, for checks and formulas."""

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
        """Parameters and flags by name, which are the keyword arguments of formulas."""
        return self.loss.bind(self.parameters, self.static.flags)

    @property
    def names(self) -> list[str]:
        """Names of the arrays."""
        operands = [x.name for x in self.loss.operands]
        return [*operands, *["weight"] * self.static.weighted, *["mask"] * self.static.masked]

    @property
    def arrays(self) -> dict[str, Any]:
        """Arrays by name."""
        arrays = [x for x in (self.input, self.target, self.weight, self.mask) if x is not None]
        return dict(zip(self.names, arrays, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows: that of the scores without the class dimension."""
        return without(tuple(self.input.shape), self.static.class_dim)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.input.shape[self.static.class_dim])


def constant_divisor(several: bool, static: Static, rows: Sequence[int]) -> float | None:
    """Returns the divisor of the sum over rows of this shape, or None if it depends on labels or mask. ``several`` is
    True if rows have lists of labels.
    """
    if static.reduction in ("none", "sum") or static.normalized:
        return 1.0
    if static.reduction == "batchmean":
        return float(rows[0]) if rows else 1.0
    return float(prod(rows)) if several and not static.masked else None


def without(x: Sequence[Any], dim: int) -> tuple[Any, ...]:
    """Returns a sequence without its entry ``dim``, counted from 0."""
    return (*x[:dim], *x[dim + 1 :])
