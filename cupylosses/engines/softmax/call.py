"""What calls of softmax losses have besides arrays and numbers, and what they return."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from cupylosses.call import Call
from cupylosses.engines.softmax.definition import SoftmaxLoss


class RowResult(NamedTuple):
    """The result of a loss that was asked for more than the loss; None for what was not asked for.

    ``lse`` is the log-sum-exp of each row's logits, 0 for rows that are ignored or masked, outside of the graph.
    ``accuracy`` is the share of the rows that count in which no logit is larger than the label's.
    """

    loss: Any
    lse: Any = None
    accuracy: Any = None


class Static(NamedTuple):
    """The settings that plans of softmax losses specialise on.

    Attributes:
        kind: What the target holds, one of :data:`.definition.TARGETS`.
        weighted, masked: True if class weights, a mask are among the arrays.
        class_dim: The dimension of the classes, counted from 0.
        ignore_index: The label of rows that do not count.
        reduction, out_dtype, flags: As the call has them; flags by the positions of their choices.
        smoothed, capped: True if labels are smoothed, if logits are capped: kernels are compiled for it.
        plain: True if all parameters are 0 that the plain expression leaves out.
        lse, accuracy: True if these are returned too.
        inplace: True if backward may write the gradient over the first operand.
        check: When a label that is no class raises, one of :data:`.definition.CHECKS`.
        normalized: True if a normalizer is given, which replaces whatever else a mean divides by.
        has_tangent: Of the two operands, those that have a tangent: the call is a derivative along these.
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
    lse: bool
    accuracy: bool
    inplace: bool
    check: str
    normalized: bool = False
    has_tangent: tuple[bool, ...] = ()


class Rows:
    """A call of a softmax loss with its arrays by name: how checks and formulas see it."""

    def __init__(self, call: Call) -> None:
        loss, static = call.loss, call.static
        assert isinstance(loss, SoftmaxLoss) and isinstance(static, Static)
        self.loss, self.static, self.normalizer = loss, static, call.normalizer
        first, second, *others = call.arrays
        rest = iter(others)
        self.operands: tuple[Any, Any] = first, second
        self.weight: Any = next(rest) if static.weighted else None
        self.mask: Any = next(rest) if static.masked else None
        self.tangents: tuple[Any, ...] = tuple(rest)
        self.kind, self.class_dim, self.reduction = static.kind, static.class_dim, static.reduction
        self.ignore_index, self.out_dtype = static.ignore_index, static.out_dtype
        *parameters, self.scale, self.softcap = call.scalars or (*[x.default for x in loss.parameters], 1.0, 0.0)
        self.parameters = tuple(parameters)

    @property
    def values(self) -> dict[str, Any]:
        """Parameters and flags by name, as formulas take them."""
        return self.loss.bind(self.parameters, self.static.flags)

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        found = [x.name for x in self.loss.operands]
        found += [str(self.loss.weights)] if self.static.weighted else []
        return found + ["mask"] if self.static.masked else found

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays by name."""
        return dict(
            zip(self.names, [x for x in (*self.operands, self.weight, self.mask) if x is not None], strict=True)
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows: that of the first operand without its class dimension."""
        shape = tuple(self.operands[0].shape)
        return shape[: self.class_dim] + shape[self.class_dim + 1 :]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.operands[0].shape[self.class_dim])

    @property
    def weighs_mean(self) -> bool:
        """True if a mean divides by the sum of the weights of the labels."""
        return self.kind == "indices" and self.loss.mean_of_weights and self.weight is not None

    @property
    def divisor(self) -> float | None:
        """The divisor of the sum of the rows; None if it depends on labels, weights or mask."""
        return constant_divisor(self.static, self.shape)


def constant_divisor(static: Static, rows: tuple[int, ...]) -> float | None:
    """The divisor of the sum of rows of this shape; None if it depends on labels, weights or mask."""
    if static.reduction in ("none", "sum") or static.normalized:
        return 1.0
    if static.reduction == "batchmean":
        return float(rows[0]) if rows else 1.0
    return None if static.kind == "indices" or static.masked else float(prod(rows))
