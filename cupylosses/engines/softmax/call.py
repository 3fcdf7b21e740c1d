"""Static settings of a softmax loss's call, its results, and its arrays by name."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from cupylosses.call import Call
from cupylosses.engines.softmax.definition import SoftmaxLoss


class RowResult(NamedTuple):
    """Result of a call with auxiliary outputs; None for those that the call does not request.

    ``lse`` is the log-sum-exp of each row's logits, 0 for ignored or masked rows; it is outside of the graph.
    ``accuracy`` is the share of rows in which no logit is larger than the label's; ignored and masked rows do not
    count.
    """

    loss: Any
    lse: Any = None
    accuracy: Any = None


class Static(NamedTuple):
    """Settings of a call that plans of softmax losses specialise on.

    Attributes:
        kind: Kind of the target, one of :data:`.definition.TARGETS`.
        weighted, masked: True if class weights, or a mask, are among the arrays.
        class_dim: Dimension of the classes, counted from 0.
        ignore_index: Label of ignored rows.
        reduction, out_dtype, flags: Arguments of the call; flags as positions of their choices.
        smoothed, capped: True if labels are smoothed, or logits capped. Kernels are compiled for it.
        plain: True if all parameters that the plain expression leaves out are 0.
        limit: Position of the term's limit that applies, as returned by ``SoftmaxLoss.limit``.
        lse, accuracy: True if the call also returns them.
        inplace: True if backward may overwrite the first operand with its gradient.
        check: Moment at which a label out of range raises, one of :data:`.definition.CHECKS`.
        normalized: True if the call has a normalizer, which replaces the divisor of a mean.
        has_tangent: One entry per operand, True if it has a tangent: the call is a derivative along these. Empty
            otherwise.
    """

    kind: str
    weighted: bool
    masked: bool
    class_dim: int
    ignore_index: int
    reduction: str
    out_dtype: str | None
    flags: tuple[int, ...]
    smoothed: bool
    capped: bool
    plain: bool
    limit: int
    lse: bool
    accuracy: bool
    inplace: bool
    check: str
    normalized: bool = False
    has_tangent: tuple[bool, ...] = ()


class Rows:
    """Arrays of a softmax loss's call by name, as checks and formulas use them."""

    def __init__(self, call: Call) -> None:
        loss, static = call.loss, call.static
        assert isinstance(loss, SoftmaxLoss) and isinstance(static, Static)
        self.loss, self.static, self.normalizer = loss, static, call.normalizer
        first, second, *others = call.arrays
        remaining = iter(others)
        self.operands: tuple[Any, Any] = first, second
        self.weight: Any = next(remaining) if static.weighted else None
        self.mask: Any = next(remaining) if static.masked else None
        self.tangents: tuple[Any, ...] = tuple(remaining)
        self.kind, self.class_dim, self.reduction = static.kind, static.class_dim, static.reduction
        self.ignore_index, self.out_dtype = static.ignore_index, static.out_dtype
        *parameters, self.scale, self.softcap = call.scalars or (*[x.default for x in loss.parameters], 1.0, 0.0)
        self.parameters = tuple(parameters)

    @property
    def values(self) -> dict[str, Any]:
        """Parameters and flags by name, as arguments of formulas."""
        return self.loss.bind(self.parameters, self.static.flags)

    @property
    def names(self) -> list[str]:
        """Names of the arrays."""
        names = [x.name for x in self.loss.operands]
        names += [str(self.loss.weights)] if self.static.weighted else []
        return names + ["mask"] if self.static.masked else names

    @property
    def arrays(self) -> dict[str, Any]:
        """Arrays by name."""
        return dict(
            zip(self.names, [x for x in (*self.operands, self.weight, self.mask) if x is not None], strict=True)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rows: that of the first operand without its class dimension."""
        shape = tuple(self.operands[0].shape)
        return shape[: self.class_dim] + shape[self.class_dim + 1 :]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.operands[0].shape[self.class_dim])

    @property
    def weighs_mean(self) -> bool:
        """True if a mean divides by the sum of the weights of the labels."""
        return self.kind == "indices" and self.loss.mean_of_weights and self.weight is not None

    @property
    def divisor(self) -> float | None:
        """Divisor of the sum over rows; None if it depends on labels, weights or mask."""
        return constant_divisor(self.static, self.shape)


def constant_divisor(static: Static, rows: tuple[int, ...]) -> float | None:
    """Divisor of the sum over rows of this shape; None if it depends on labels, weights or mask."""
    if static.reduction in ("none", "sum") or static.normalized:
        return 1.0
    if static.reduction == "batchmean":
        return float(rows[0]) if rows else 1.0
    return None if static.kind == "indices" or static.masked else float(prod(rows))
