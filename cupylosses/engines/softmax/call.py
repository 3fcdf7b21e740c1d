"""A call of a loss of rows whose arguments have been checked, as it goes from the functions to the backends."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from cupylosses.engines.softmax.definition import RowLoss


class RowResult(NamedTuple):
    """What a loss returns that was asked for more; None for what was not.

    ``lse`` is the log-partition function of each row, 0 for rows that are ignored or masked, outside of the graph.
    ``accuracy`` is the share of rows that count in which no logit is larger than the label's.
    """

    loss: Any
    lse: Any = None
    accuracy: Any = None


class RowCall(NamedTuple):
    """The arrays, the loss, and everything else.

    ``kind`` is what the target is, one of :data:`.definition.TARGETS`. ``operands`` are the first
    operand and the target; ``weight`` the class weights and ``mask`` an array that broadcasts to the shape of the rows,
    or None. Logits are multiplied by ``scale``; a ``softcap`` of 0 is none. ``class_dim`` counts from 0. ``normalizer``
    is None, a float or an array of whatever library. ``parameters`` and ``flags`` are in the order of the loss. ``lse``
    and ``accuracy`` say that they are returned too, in a :class:`RowResult`; ``inplace`` that the gradient may be
    written over the first operand.
    """

    operands: tuple[Any, Any]
    weight: Any
    mask: Any
    normalizer: Any
    loss: RowLoss
    kind: str
    class_dim: int
    ignore_index: int
    reduction: str
    out_dtype: str | None
    parameters: tuple[float, ...]
    flags: tuple[int, ...]
    scale: float
    softcap: float
    lse: bool
    accuracy: bool
    inplace: bool
    check: str

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that are operands, by name."""
        found = dict(zip([x.name for x in self.loss.operands], self.operands, strict=True))
        if self.weight is not None:
            found[str(self.loss.weights)] = self.weight
        return found if self.mask is None else found | {"mask": self.mask}

    def with_arrays(self, arrays: dict[str, Any]) -> RowCall:
        """The same call of other arrays."""
        first, second = (arrays[x.name] for x in self.loss.operands)
        weight = arrays.get(str(self.loss.weights))
        return self._replace(operands=(first, second), weight=weight, mask=arrays.get("mask"))

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of the rows: that of the first operand without its class dimension."""
        shape = tuple(self.operands[0].shape)
        return shape[: self.class_dim] + shape[self.class_dim + 1 :]

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return int(self.operands[0].shape[self.class_dim])

    @property
    def weighs_mean(self) -> bool:
        """Whether a mean divides by the sum of the weights of the labels."""
        return self.kind == "indices" and self.loss.mean_of_weights and self.weight is not None

    @property
    def divisor(self) -> float | None:
        """What the sum of the rows is divided by; None if that depends on labels, weights, mask or normalizer."""
        if self.reduction in ("none", "sum"):
            return 1.0
        if self.normalizer is not None:
            return self.normalizer if isinstance(self.normalizer, float) else None
        rows = self.row_shape
        if self.reduction == "batchmean":
            return float(rows[0]) if rows else 1.0
        return None if self.kind == "indices" or self.mask is not None else float(prod(rows))
