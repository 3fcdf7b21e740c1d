"""Static part, arrays by name, and constant divisor of a call of a row-statistics loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from cupylosses.call import Call
from cupylosses.engines.row_statistics.definition import StatisticsLoss


class Static(NamedTuple):
    """Settings on which plans are specialised.

    Attributes:
        reduction, out_dtype: Those of the call.
        flags: For each flag, the position of the chosen value among its choices.
        feature_dim: Feature dimension, counted from the end, so that a leading batch dimension does not change it.
        weight: "array", "number", or "" without weights. A number is the last scalar of the call.
        masked: True if a mask is among the arrays.
        normalized: True if a normalizer is given, which replaces whatever else a mean divides by.
        norm: Degree of the norms, as `StatisticsLoss.norm_of` names it.
        keepdim: True if the result has an additional last dimension of size 1.
        has_tangent: For each array, True if it has a tangent: the call is then a derivative along these tangents. Empty
            if the call is not a derivative.
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
        """True if the divisor is computed on the device: the sum of weights, or the number of rows a mask keeps."""
        mean = self.reduction in ("mean", "weighted_mean") and not self.normalized
        return mean and (self.masked or (self.weighs_mean and self.weight == "array"))


def names(loss: StatisticsLoss, static: Static) -> tuple[str, ...]:
    """Returns the names of a call's arrays, without the tangents."""
    operands = tuple(x.name for x in loss.operands)
    return (*operands, *["weight"] * (static.weight == "array"), *["mask"] * static.masked)


def has_features(loss: StatisticsLoss, static: Static) -> tuple[bool, ...]:
    """For each array of a call without the tangents, True if it has the feature dimension."""
    operands = {x.name for x in loss.operands} - set(loss.row_operands)
    return tuple(x in operands for x in names(loss, static))


def arrays_by_name(call: Call) -> Mapping[str, Any]:
    """Returns the arrays of a call by name, without the tangents."""
    loss: Any = call.loss
    return dict(zip(names(loss, call.static), call.arrays, strict=False))


def constant_divisor(static: Static, rows: Sequence[int]) -> float:
    """Returns the factor of the divisor that follows from the shape of the rows alone."""
    if static.normalized or static.counted or static.reduction in ("none", "sum"):
        return 1
    if static.reduction == "batchmean":
        return rows[0] if rows else 1
    return prod(rows)
