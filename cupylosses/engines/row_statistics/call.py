"""A call of a loss of row statistics: its static part, its arrays by name, its rows and its divisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from cupylosses.call import Call
from cupylosses.engines.row_statistics.definition import StatisticsLoss


class Static(NamedTuple):
    """The settings that plans specialise on.

    Attributes:
        reduction, out_dtype, flags: As the call has them; flags by the positions of their choices.
        feature_dim: The dimension of the features, counted from the end, so that a batch in front leaves it as it is.
        weight: "array", "number", or "" without weights. A number is the last scalar.
        masked: True if a mask is among the arrays.
        normalized: True if a normalizer is given, which replaces whatever else a mean divides by.
        norm: The degree of the norms, as `StatisticsLoss.norm_of` names it.
        keepdim: True if each result has a dimension of its own.
        has_tangent: Of the arrays, those that have a tangent: the call is a derivative along these.
    """

    reduction: str
    feature_dim: int = -1
    weight: str = ""
    masked: bool = False
    out_dtype: str | None = None
    normalized: bool = False
    flags: tuple[int, ...] = ()
    norm: str = ""
    keepdim: bool = False
    has_tangent: tuple[bool, ...] = ()

    @property
    def weighs_mean(self) -> bool:
        """True if a mean divides by the weights."""
        return self.reduction == "weighted_mean" and self.weight != "" and not self.normalized

    @property
    def counted(self) -> bool:
        """True if the divisor is found on the device: the sum of weights, or the number of rows that a mask keeps."""
        mean = self.reduction in ("mean", "weighted_mean") and not self.normalized
        return mean and (self.masked or (self.weighs_mean and self.weight == "array"))


def names(loss: StatisticsLoss, static: Static) -> tuple[str, ...]:
    """The names of a call's arrays, without those of tangents."""
    own = tuple(x.name for x in loss.operands)
    return (*own, *["weight"] * (static.weight == "array"), *["mask"] * static.masked)


def has_features(loss: StatisticsLoss, static: Static) -> tuple[bool, ...]:
    """For each array of a call, True if it has the dimension of the features."""
    operands = {x.name for x in loss.operands} - set(loss.row_operands)
    return tuple(x in operands for x in names(loss, static))


def arrays_by_name(call: Call) -> Mapping[str, Any]:
    """The arrays of a call by name, without tangents."""
    loss: Any = call.loss
    return dict(zip(names(loss, call.static), call.arrays, strict=False))


def constant_divisor(static: Static, rows: Sequence[int]) -> float:
    """The part of the divisor that follows from the shape of the rows."""
    if static.normalized or static.counted or static.reduction in ("none", "sum"):
        return 1
    if static.reduction == "batchmean":
        return rows[0] if rows else 1
    return prod(rows)
